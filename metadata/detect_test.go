package metadata

import (
	"errors"
	"reflect"
	"slices"
	"testing"

	"github.com/nixlkv/nixlkv"
	"pgregory.net/rapid"
)

func TestDetect(t *testing.T) {
	early := []Release{SGLang0518, SGLang0519, SGLang0520}
	late := []Release{SGLang0521, SGLang0522, SGLang0523}
	raw := func(n int, o Options) Options { o.HiddenSize, o.HiddenDType = n, Raw; return o }
	tests := []struct {
		name    string
		release Release
		options Options
		want    []Fit
	}{
		{"plain: any release", SGLang0520, Options{}, []Fit{{raw(64, Options{}), Releases()}}},
		{"draft", SGLang0523, Options{HiddenSize: 7168, HiddenDType: BFloat16}, []Fit{{raw(14336, Options{}), Releases()}}},
		{"DSA", SGLang0518, Options{DSATopK: 2048}, []Fit{{raw(64, Options{DSATopK: 2048}), Releases()}}},
		{"early masks", SGLang0518, Options{SamplingMaskTokens: 4096}, []Fit{{raw(64, Options{SamplingMaskTokens: 4096}), early}}},
		{"late masks", SGLang0523, Options{SamplingMaskTokens: 4096}, []Fit{{raw(64, Options{SamplingMaskTokens: 4096}), late}}},
		{"masks of 16: any release", SGLang0523, Options{SamplingMaskTokens: 16}, []Fit{{raw(64, Options{SamplingMaskTokens: 16}), Releases()}}},
		{"checksum or DSA of 16", SGLang0523, Options{Checksums: true}, []Fit{
			{raw(64, Options{Checksums: true}), late}, {raw(64, Options{DSATopK: 16}), Releases()}}},
		{"checksum and DSA", SGLang0521, Options{DSATopK: 2048, Checksums: true}, []Fit{{raw(64, Options{DSATopK: 2048, Checksums: true}), late}}},
		{"masks and checksum", SGLang0521, Options{SamplingMaskTokens: 9, Checksums: true}, []Fit{
			{raw(64, Options{SamplingMaskTokens: 9, Checksums: true}), late}, {raw(64, Options{SamplingMaskTokens: 9, DSATopK: 16}), late}}},
	}
	for _, tt := range tests {
		got, err := Detect(mustLayout(t, tt.release, tt.options).ItemLens())
		if err != nil || !reflect.DeepEqual(got, tt.want) {
			t.Errorf("%s:\n got %+v, %v\nwant %+v", tt.name, got, err, tt.want)
		}
	}
}

func TestDetectRefuses(t *testing.T) {
	plain := mustLayout(t, SGLang0523, Options{}).ItemLens()
	with := func(i int, n uint64) []uint64 {
		out := slices.Clone(plain)
		out[i] = n
		return out
	}
	tests := []struct {
		name   string
		lens   []uint64
		buffer string // of the LayoutError, if there is one
	}{
		{"nothing", nil, "output_ids"},
		{"first", with(0, 4), "output_ids"},
		{"top logprobs", with(4, 256), "output_top_logprobs_val"},
		{"only the common ones", plain[:6], ""},
		{"too short", plain[:9], ""},
		{"too long", append(slices.Clone(plain), 64, 64, 64, 64, 64, 64), ""},
		{"top-k", with(6, 32), ""},
		{"no hidden states", with(8, 0), ""},
		{"huge hidden states", with(8, 1<<63), ""},
		{"room", with(9, 8), ""},
		{"half an int32 of DSA", slices.Insert(slices.Clone(plain), 9, 8190), ""},
	}
	for _, tt := range tests {
		fits, err := Detect(tt.lens)
		if fits != nil || !errors.Is(err, nixlkv.ErrMismatch) {
			t.Errorf("%s: got %+v, %v", tt.name, fits, err)
		}
		var le *LayoutError
		if errors.As(err, &le) != (tt.buffer != "") || le != nil && le.Buffer != tt.buffer {
			t.Errorf("%s: got %v", tt.name, err)
		}
	}
}

func TestLayoutFor(t *testing.T) {
	masks := mustLayout(t, SGLang0518, Options{SamplingMaskTokens: 32}).ItemLens()
	sums := mustLayout(t, SGLang0523, Options{Checksums: true}).ItemLens()
	tests := []struct {
		name    string
		release Release
		lens    []uint64
		want    error
	}{
		{"fits", SGLang0519, masks, nil},
		{"other release", SGLang0521, masks, nixlkv.ErrMismatch},
		{"DSA of 16, for there are no checksums yet", SGLang0520, sums, nil},
		{"checksum or DSA of 16", SGLang0521, sums, ErrAmbiguous},
		{"nothing fits", SGLang0521, masks[:3], nixlkv.ErrMismatch},
		{"unknown release", 0, masks, nixlkv.ErrUnsupported},
	}
	for _, tt := range tests {
		l, err := LayoutFor(tt.release, tt.lens)
		if !errors.Is(err, tt.want) || (err == nil) != (l != nil) {
			t.Errorf("%s: got %v, %v", tt.name, l, err)
			continue
		}
		if l != nil && (l.Release() != tt.release || l.Validate(tt.lens) != nil) {
			t.Errorf("%s: got %v %+v", tt.name, l.Release(), l.Options())
		}
	}
}

// Whatever a server has, Detect finds it, and everything that it finds fits.
func TestDetectProperty(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := drawLayout(t)
		lens := l.ItemLens()
		fits, err := Detect(lens)
		if err != nil {
			t.Fatal(err)
		}
		found := false
		for i, f := range fits {
			for _, g := range fits[:i] {
				if f.Options == g.Options {
					t.Fatalf("%+v twice", f.Options)
				}
			}
			for _, r := range f.Releases {
				if err := mustLayoutOf(t, r, f.Options).Validate(lens); err != nil {
					t.Fatal(err)
				}
			}
			o := l.Options()
			found = found || slices.Contains(f.Releases, l.Release()) && f.Options.SamplingMaskTokens == o.SamplingMaskTokens &&
				f.Options.DSATopK == o.DSATopK && f.Options.Checksums == o.Checksums
		}
		if !found {
			t.Fatalf("%v %+v not in %+v", l.Release(), l.Options(), fits)
		}
	})
}
