package metadata

import (
	"fmt"

	"github.com/nixlkv/nixlkv"
)

// Fit is a set of options that a list of item lengths can come from, with all releases in
// which it can.
type Fit struct {
	// Options; hidden states are given as Raw bytes, since their type leaves no trace.
	Options Options
	// Releases, oldest first. Those of one Fit have the same layout. They fill it alike,
	// but for a mask length of -1 (up to 0.5.20) and the signature beside a checksum (0.5.23).
	Releases []Release
}

// Detect finds what a list of aux item lengths can be: every set of options, and for each
// every release, whose layout has exactly these lengths. More than one Fit means that the
// options are ambiguous, more than one release in a Fit that the release is.
//
// Options are ambiguous only where lengths coincide: one buffer of 64 bytes more than usual
// is a DSA top-k of 16 before the room, or a checksum after it. The release shows with
// sampling masks (their logprobs are M wide from 0.5.21 on; not if M is 16) and with
// checksums (0.5.21 on), else not at all.
//
// Without any fit the error wraps nixlkv.ErrMismatch, as a *LayoutError if one of the buffers
// that all layouts start with differs.
func Detect(itemLens []uint64) ([]Fit, error) {
	var fits []Fit
	for _, masks := range [...]bool{false, true} {
		for _, dsa := range [...]bool{false, true} {
			for _, sums := range [...]bool{false, true} {
				o, ok := guess(itemLens, masks, dsa, sums)
				if !ok {
					continue
				}
				f := Fit{Options: o}
				for _, r := range Releases() {
					if l, err := NewLayout(r, o); err == nil && l.Validate(itemLens) == nil {
						f.Releases = append(f.Releases, r)
					}
				}
				if len(f.Releases) > 0 {
					fits = append(fits, f)
				}
			}
		}
	}
	if len(fits) == 0 {
		return nil, noFit(itemLens)
	}
	return fits, nil
}

// guess takes the variable lengths from where they are if these optional buffers are there. It
// refuses only other numbers of buffers: lengths that are no such thing make options that
// NewLayout refuses, or a layout with other lengths.
func guess(lens []uint64, masks, dsa, sums bool) (Options, bool) {
	n, hidden := fixedBuffers, int(fieldHiddenStates)-maskBuffers
	if masks {
		n, hidden = n+maskBuffers, hidden+maskBuffers
	}
	if dsa {
		n++
	}
	if sums {
		n++
	}
	if len(lens) != n {
		return Options{}, false
	}
	o := Options{HiddenSize: int(lens[hidden]), HiddenDType: Raw, Checksums: sums}
	if masks {
		o.SamplingMaskTokens = int(lens[fieldMaskIdx]) / Int32.Size()
	}
	if dsa {
		o.DSATopK = int(lens[hidden+1]) / Int32.Size()
	}
	return o, true
}

func noFit(itemLens []uint64) error {
	for f := range fieldMaskLen { // these every layout has
		t, width := (&Layout{}).shape(f)
		e := LayoutError{Index: int(f), Buffer: f.String(), Want: uint64(width * t.Size()), Count: len(itemLens)}
		if int(f) < len(itemLens) {
			e.Got = itemLens[f]
		}
		if e.Got != e.Want {
			return &e
		}
	}
	return fmt.Errorf("metadata: no release has buffers with these item lengths (%d buffers, want %d to %d): %w",
		len(itemLens), fixedBuffers, fixedBuffers+optionalBuffers, nixlkv.ErrMismatch)
}

// LayoutFor gives the layout that a server of a known release has, from its aux item lengths.
// Its hidden states are Raw. Errors wrap nixlkv.ErrMismatch if none fits, ErrAmbiguous if more
// than one does, nixlkv.ErrUnsupported for an unknown release.
func LayoutFor(r Release, itemLens []uint64) (*Layout, error) {
	if !r.known() {
		return nil, fmt.Errorf("metadata: %w: SGLang release %v", nixlkv.ErrUnsupported, r)
	}
	fits, err := Detect(itemLens)
	if err != nil {
		return nil, err
	}
	var found []Options
	for _, f := range fits {
		for _, have := range f.Releases {
			if have == r {
				found = append(found, f.Options)
			}
		}
	}
	switch len(found) {
	case 0:
		return nil, fmt.Errorf("metadata: SGLang %v has no buffers with these item lengths, %v has: %w",
			r, fits[0].Releases[0], nixlkv.ErrMismatch)
	case 1:
		return NewLayout(r, found[0])
	}
	return nil, fmt.Errorf("%w: SGLang %v with %+v or %+v", ErrAmbiguous, r, found[0], found[1])
}
