package metadata

import (
	"math"
	"testing"

	"github.com/nixlkv/nixlkv"
	"pgregory.net/rapid"
)

func mustLayoutOf(t *rapid.T, r Release, o Options) *Layout {
	l, err := NewLayout(r, o)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func drawLayout(t *rapid.T) *Layout {
	r := rapid.SampledFrom(Releases()).Draw(t, "release")
	o := Options{
		SamplingMaskTokens: rapid.SampledFrom([]int{0, 0, 1, 15, 16, 17, 40}).Draw(t, "masks"),
		DSATopK:            rapid.SampledFrom([]int{0, 0, 1, 16, 30}).Draw(t, "dsa"),
	}
	if rapid.Bool().Draw(t, "draft") {
		o.HiddenSize = rapid.IntRange(1, 50).Draw(t, "hidden size")
		o.HiddenDType = rapid.SampledFrom([]DType{Float32, Float16, BFloat16, Raw}).Draw(t, "dtype")
	}
	if r.checksums() {
		o.Checksums = rapid.Bool().Draw(t, "checksums")
	}
	return mustLayoutOf(t, r, o)
}

// drawFloat draws any bits, NaNs of all kinds included.
func drawFloat(t *rapid.T) float32 { return math.Float32frombits(rapid.Uint32().Draw(t, "float")) }

// drawRecord draws a record that the layout can take, and what a decode knows of it.
func drawRecord(t *rapid.T, l *Layout) (*Record, Want) {
	i32 := rapid.Int32()
	r := &Record{Room: nixlkv.Room(rapid.Uint64Range(1, uint64(nixlkv.MaxRoom)).Draw(t, "room")), OutputID: i32.Draw(t, "output")}
	var w Want
	for _, p := range []*int32{
		&r.CachedTokens.Cached, &r.CachedTokens.Device, &r.CachedTokens.Host, &r.CachedTokens.Storage,
		&r.CachedTokens.Image, &r.CachedTokens.Audio, &r.CachedTokens.Video,
	} {
		*p = i32.Draw(t, "cached")
	}
	if w.Logprob = rapid.Bool().Draw(t, "logprob"); w.Logprob {
		r.Logprob = Logprob{drawFloat(t), i32.Draw(t, "token")}
		w.TopLogprobs = rapid.IntRange(0, MaxTopLogprobs).Draw(t, "top logprobs")
		for range w.TopLogprobs {
			r.TopLogprobs = append(r.TopLogprobs, Logprob{drawFloat(t), i32.Draw(t, "token")})
		}
	}
	if m := l.options.SamplingMaskTokens; m > 0 {
		w.SamplingMask = MaskLogprobs(rapid.IntRange(0, 2).Draw(t, "mask"))
		if w.SamplingMask == SupportLogprobs && !l.release.supportLogprobs() {
			w.SamplingMask = SelectedLogprob
		}
		if w.SamplingMask != NoMask && l.release.absentMasks() && rapid.Bool().Draw(t, "absent") {
			r.SamplingMask.Absent = true
		} else if w.SamplingMask != NoMask {
			r.SamplingMask.Tokens = rapid.SliceOfN(i32, 0, m).Draw(t, "mask tokens")
			n := 1
			if w.SamplingMask == SupportLogprobs {
				n = len(r.SamplingMask.Tokens)
			}
			for range n {
				r.SamplingMask.Logprobs = append(r.SamplingMask.Logprobs, drawFloat(t))
			}
		}
	}
	if w.Draft = rapid.Bool().Draw(t, "with draft"); w.Draft {
		hidden := int(l.buffers[l.index[fieldHiddenStates]].ItemLen)
		r.Draft.HiddenStates = rapid.SliceOfN(rapid.Byte(), hidden, hidden).Draw(t, "hidden states")
		w.TopK = rapid.IntRange(0, MaxTopK).Draw(t, "top k")
		for range w.TopK {
			r.Draft.TopK = append(r.Draft.TopK, DraftToken{drawFloat(t), rapid.Int64().Draw(t, "draft token")})
		}
		if d := l.options.DSATopK; d > 0 && rapid.Bool().Draw(t, "with dsa") {
			r.Draft.DSATopK = rapid.SliceOfN(rapid.Int32Min(-1), d, d).Draw(t, "dsa")
			r.Draft.DSATopK[0] = max(r.Draft.DSATopK[0], 0) // else it is none
		}
	}
	if l.options.Checksums {
		r.Checksum.Digest = rapid.Uint64().Draw(t, "digest")
		if l.release.signatures() {
			r.Checksum.Signature = rapid.Uint64().Draw(t, "signature")
		}
	}
	return r, w
}

// What was encoded, over whatever was there, is decoded again, over whatever the record held,
// and the slot's bytes depend on the record alone.
func TestRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := drawLayout(t)
		rec, want := drawRecord(t, l)
		row, other := newRow(l, rapid.Byte().Draw(t, "fill")), newRow(l, 0)
		for _, r := range [][][]byte{row, other} {
			if err := l.Encode(r, rec); err != nil {
				t.Fatal(err)
			}
		}
		if !equalRows(row, other) {
			t.Fatalf("bytes depend on what was there:\n%x\n%x", row, other)
		}
		before := cloneRow(row)
		got := fullRecord(l, testRand())
		if err := l.DecodeInto(got, row, rec.Room, want); err != nil {
			t.Fatal(err)
		}
		sameRecord(t, got, rec)
		if !equalRows(row, before) {
			t.Fatal("DecodeInto wrote into the slot")
		}
	})
}

// Slots side by side do not touch each other, nor what is after the last.
func TestSlotsAreApart(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := drawLayout(t)
		slots := rapid.IntRange(1, 5).Draw(t, "slots")
		var memory [][]byte
		for _, n := range l.ItemLens() {
			memory = append(memory, make([]byte, slots*int(n)+7))
		}
		b, err := NewBuffers(l, slots, memory)
		if err != nil {
			t.Fatal(err)
		}
		held := map[int]*Record{}
		wants := map[int]Want{}
		for range rapid.IntRange(1, 12).Draw(t, "writes") {
			i := rapid.IntRange(0, slots-1).Draw(t, "slot")
			if rapid.IntRange(0, 3).Draw(t, "clear") == 0 {
				if err := b.Clear(i); err != nil {
					t.Fatal(err)
				}
				delete(held, i)
				continue
			}
			held[i], wants[i] = drawRecord(t, l)
			if err := b.Encode(i, held[i]); err != nil {
				t.Fatal(err)
			}
		}
		for i := range slots {
			var got Record
			err := b.DecodeInto(&got, i, 1, Want{})
			if held[i] == nil {
				if err != ErrNotWritten {
					t.Fatalf("slot %d: %v", i, err)
				}
				continue
			}
			if err := b.DecodeInto(&got, i, held[i].Room, wants[i]); err != nil {
				t.Fatal(err)
			}
			sameRecord(t, &got, held[i])
		}
		for i, m := range memory {
			for _, v := range m[len(m)-7:] {
				if v != 0 {
					t.Fatalf("buffer %d written past its last slot", i)
				}
			}
		}
	})
}
