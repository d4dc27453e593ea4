package metadata

import (
	"encoding/binary"
	"testing"

	"github.com/nixlkv/nixlkv"
)

// FuzzDecode: any bytes in a slot decode or are refused; what was decoded can be encoded, and is
// decoded the same.
func FuzzDecode(f *testing.F) {
	for _, r := range []Release{SGLang0518, SGLang0521, SGLang0523} {
		o := allOptions
		o.Checksums = r.checksums()
		l := mustLayout(f, r, o)
		row := newRow(l, 0)
		rec := fullRecord(l, testRand())
		if err := l.Encode(row, rec); err != nil {
			f.Fatal(err)
		}
		var all []byte
		for _, b := range row {
			all = append(all, b...)
		}
		w := wantOf(rec)
		f.Add(uint8(r), uint8(15), uint64(rec.Room), uint8(w.SamplingMask), w.TopLogprobs, w.TopK, all)
	}
	f.Add(uint8(SGLang0520), uint8(0), uint64(0), uint8(0), 0, 0, []byte{})
	f.Add(uint8(SGLang0520), uint8(1), uint64(1), uint8(1), 0, 0, []byte{255})
	f.Fuzz(func(t *testing.T, release, options uint8, room uint64, mask uint8, top, topK int, data []byte) {
		r := Release(release)
		var o Options
		if options&1 != 0 {
			o.SamplingMaskTokens = allOptions.SamplingMaskTokens
		}
		if options&2 != 0 {
			o.DSATopK = allOptions.DSATopK
		}
		if options&4 != 0 {
			o.HiddenSize, o.HiddenDType = allOptions.HiddenSize, allOptions.HiddenDType
		}
		o.Checksums = options&8 != 0 && r.checksums()
		l, err := NewLayout(r, o)
		if err != nil {
			if r.known() {
				t.Fatal(err)
			}
			return
		}
		row := newRow(l, 0)
		for _, b := range row {
			data = data[copy(b, data):]
		}
		want := Want{Logprob: top != 0, TopLogprobs: top, SamplingMask: MaskLogprobs(mask), Draft: topK != 0, TopK: topK}
		rec := fullRecord(l, testRand())
		if err := l.DecodeInto(rec, row, nixlkv.Room(room), want); err != nil {
			sameRecord(t, rec, fullRecord(l, testRand()))
			return
		}
		again := newRow(l, 0xa5)
		if err := l.Encode(again, rec); err != nil {
			t.Fatal(err)
		}
		var second Record
		if err := l.DecodeInto(&second, again, nixlkv.Room(room), want); err != nil {
			t.Fatal(err)
		}
		sameRecord(t, &second, rec)
	})
}

// FuzzDetect: any list of item lengths has fits or none, and all of them fit.
func FuzzDetect(f *testing.F) {
	for _, o := range []Options{{}, allOptions, {Checksums: true}, {DSATopK: 16, SamplingMaskTokens: 16}} {
		var b []byte
		for _, n := range mustLayout(f, SGLang0523, o).ItemLens() {
			b = binary.LittleEndian.AppendUint64(b, n)
		}
		f.Add(b)
	}
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		var lens []uint64
		for ; len(b) >= 8; b = b[8:] {
			lens = append(lens, binary.LittleEndian.Uint64(b))
		}
		fits, err := Detect(lens)
		if (err == nil) != (len(fits) > 0) {
			t.Fatal(fits, err)
		}
		for _, fit := range fits {
			if len(fit.Releases) == 0 {
				t.Fatal("a fit in no release")
			}
			for _, r := range fit.Releases {
				if err := mustLayout(t, r, fit.Options).Validate(lens); err != nil {
					t.Fatal(err)
				}
			}
		}
		for _, r := range Releases() {
			if l, err := LayoutFor(r, lens); err == nil && l.Validate(lens) != nil {
				t.Fatal("LayoutFor gives a layout that does not fit")
			}
		}
	})
}
