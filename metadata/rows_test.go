package metadata

import (
	"bytes"
	"math"
	"math/rand/v2"
	"reflect"
	"testing"

	"github.com/nixlkv/nixlkv"
)

// newRow gives a row of a layout's buffers, filled with one byte.
func newRow(l *Layout, fill byte) [][]byte {
	var row [][]byte
	for _, n := range l.ItemLens() {
		row = append(row, bytes.Repeat([]byte{fill}, int(n)))
	}
	return row
}

func cloneRow(row [][]byte) [][]byte {
	out := make([][]byte, len(row))
	for i := range row {
		out[i] = bytes.Clone(row[i])
	}
	return out
}

func equalRows(a, b [][]byte) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if !bytes.Equal(a[i], b[i]) {
			return false
		}
	}
	return true
}

// diffRows says in which buffers two rows differ.
func diffRows(t *testing.T, l *Layout, got, want [][]byte) {
	t.Helper()
	for i, b := range l.buffers {
		if !bytes.Equal(got[i], want[i]) {
			t.Errorf("%s:\n got %x\nwant %x", b.Name, got[i], want[i])
		}
	}
}

// plain is a record with its floats as bits and without the difference of nil and empty, so
// that two of them can be compared.
type plain struct {
	room              uint64
	output            int32
	cached            CachedTokens
	logprob           [2]uint32
	top               [][2]uint32
	absent            bool
	tokens            []int32
	logprobs          []uint32
	topk              [][2]uint64
	hidden            string
	dsa               []int32
	digest, signature uint64
}

func plainOf(r *Record) plain {
	pair := func(l Logprob) [2]uint32 { return [2]uint32{math.Float32bits(l.Value), uint32(l.Token)} }
	p := plain{
		room: uint64(r.Room), output: r.OutputID, cached: r.CachedTokens, logprob: pair(r.Logprob),
		absent: r.SamplingMask.Absent, tokens: append([]int32{}, r.SamplingMask.Tokens...),
		hidden: string(r.Draft.HiddenStates), dsa: append([]int32{}, r.Draft.DSATopK...),
		digest: r.Checksum.Digest, signature: r.Checksum.Signature,
	}
	for _, l := range r.TopLogprobs {
		p.top = append(p.top, pair(l))
	}
	for _, v := range r.SamplingMask.Logprobs {
		p.logprobs = append(p.logprobs, math.Float32bits(v))
	}
	for _, d := range r.Draft.TopK {
		p.topk = append(p.topk, [2]uint64{uint64(math.Float32bits(d.P)), uint64(d.Token)})
	}
	return p
}

func sameRecord(t interface {
	Helper()
	Errorf(string, ...any)
}, got, want *Record) {
	t.Helper()
	if g, w := plainOf(got), plainOf(want); !reflect.DeepEqual(g, w) {
		t.Errorf("record:\n got %+v\nwant %+v", g, w)
	}
}

// wantOf is what a decode knows of the request that a record is about.
func wantOf(r *Record) Want {
	w := Want{
		Logprob: r.Logprob != Logprob{} || len(r.TopLogprobs) > 0, TopLogprobs: len(r.TopLogprobs),
		Draft: len(r.Draft.HiddenStates) > 0, TopK: len(r.Draft.TopK),
	}
	switch m := &r.SamplingMask; {
	case len(m.Logprobs) > 1:
		w.SamplingMask = SupportLogprobs
	case m.Absent || len(m.Logprobs) == 1:
		w.SamplingMask = SelectedLogprob
	}
	return w
}

// fullRecord brings everything that the layout has place for.
func fullRecord(l *Layout, rng *rand.Rand) *Record {
	r := &Record{
		Room: nixlkv.Room(1 + rng.Int64N(1<<62)), OutputID: rng.Int32(),
		CachedTokens: CachedTokens{1, 2, 3, 4, 5, 6, 7},
		Logprob:      Logprob{-rng.Float32(), rng.Int32()},
	}
	for range MaxTopLogprobs {
		r.TopLogprobs = append(r.TopLogprobs, Logprob{-rng.Float32(), rng.Int32()})
	}
	if m := l.options.SamplingMaskTokens; m > 0 {
		for range m {
			r.SamplingMask.Tokens = append(r.SamplingMask.Tokens, rng.Int32())
			r.SamplingMask.Logprobs = append(r.SamplingMask.Logprobs, -rng.Float32())
		}
		if !l.release.supportLogprobs() {
			r.SamplingMask.Logprobs = r.SamplingMask.Logprobs[:1]
		}
	}
	for range MaxTopK {
		r.Draft.TopK = append(r.Draft.TopK, DraftToken{rng.Float32(), rng.Int64()})
	}
	r.Draft.HiddenStates = make([]byte, l.buffers[l.index[fieldHiddenStates]].ItemLen)
	for i := range r.Draft.HiddenStates {
		r.Draft.HiddenStates[i] = byte(rng.Uint32())
	}
	for range l.options.DSATopK {
		r.Draft.DSATopK = append(r.Draft.DSATopK, rng.Int32())
	}
	if l.options.Checksums {
		r.Checksum.Digest = rng.Uint64()
		if l.release.signatures() {
			r.Checksum.Signature = rng.Uint64()
		}
	}
	return r
}

// testRand gives the same numbers every time.
func testRand() *rand.Rand { return rand.New(rand.NewPCG(1, 2)) }
