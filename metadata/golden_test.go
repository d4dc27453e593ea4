package metadata

import (
	"encoding/hex"
	"encoding/json"
	"errors"
	"math"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/nixlkv/nixlkv"
)

// What testdata/gen_metadatabuffers.py wrote down of SGLang's own MetadataBuffers.

type goldenFile struct {
	Release string
	Sets    []goldenSet
}

type goldenSet struct {
	Name    string
	Options struct {
		HiddenSize   int    `json:"hidden_size"`
		HiddenDType  string `json:"hidden_dtype"`
		SamplingMask int    `json:"sampling_mask"`
		DSATopK      int    `json:"dsa_topk"`
		Checksums    bool
	}
	Buffers [][4]any
	Empty   []string
	Used    []string
	Cleared []string
	Rooms   []struct {
		Written      bool
		Holds, Asked uint64
		Aborted      string
	}
	Cases []goldenCase
}

type goldenCase struct {
	Name    string
	Record  goldenRecord
	Want    goldenWant
	Slot    []string
	Defined []int
	Get     []json.RawMessage
	Commit  goldenRecord
	Refused string
	// Checksum is digest and signature, as get_kv_checksum gives them.
	Checksum *[2]uint64
}

type goldenWant struct {
	Logprob bool
	Top     int
	Mask    string
	Draft   bool
	TopK    int
}

type goldenRecord struct {
	Room     uint64
	OutputID int32 `json:"output_id"`
	Cached   [7]int32
	Logprob  *[2]int64
	Top      [][2]int64
	Mask     *struct {
		Absent   bool
		Tokens   []int32
		Logprobs []uint32
	}
	Draft *struct {
		TopK   [][2]int64
		Hidden string
		DSA    []int32
	}
	Checksum *[2]uint64
}

func (g *goldenRecord) record(t *testing.T) *Record {
	t.Helper()
	c := g.Cached
	r := &Record{Room: nixlkv.Room(g.Room), OutputID: g.OutputID, CachedTokens: CachedTokens{c[0], c[1], c[2], c[3], c[4], c[5], c[6]}}
	pair := func(p [2]int64) Logprob { return Logprob{math.Float32frombits(uint32(p[0])), int32(p[1])} }
	if g.Logprob != nil {
		r.Logprob = pair(*g.Logprob)
	}
	for _, p := range g.Top {
		r.TopLogprobs = append(r.TopLogprobs, pair(p))
	}
	if m := g.Mask; m != nil {
		r.SamplingMask = SamplingMask{Absent: m.Absent, Tokens: m.Tokens, Logprobs: float32s(m.Logprobs)}
	}
	if d := g.Draft; d != nil {
		for _, p := range d.TopK {
			r.Draft.TopK = append(r.Draft.TopK, DraftToken{math.Float32frombits(uint32(p[0])), p[1]})
		}
		r.Draft.HiddenStates = unhex(t, d.Hidden, len(d.Hidden)/2)
		r.Draft.DSATopK = d.DSA
	}
	if s := g.Checksum; s != nil {
		r.Checksum = Checksum{s[0], s[1]}
	}
	return r
}

func (w goldenWant) want() Want {
	kind := map[string]MaskLogprobs{"": NoMask, "selected": SelectedLogprob, "support": SupportLogprobs}[w.Mask]
	return Want{Logprob: w.Logprob, TopLogprobs: w.Top, SamplingMask: kind, Draft: w.Draft, TopK: w.TopK}
}

func float32s(bits []uint32) []float32 {
	var out []float32
	for _, b := range bits {
		out = append(out, math.Float32frombits(b))
	}
	return out
}

// unhex reads bytes whose trailing zeros were cut off.
func unhex(t *testing.T, s string, n int) []byte {
	t.Helper()
	b, err := hex.DecodeString(s)
	if err != nil || len(b) > n {
		t.Fatalf("%d bytes of hex for %d: %v", len(b), n, err)
	}
	return append(b, make([]byte, n-len(b))...)
}

func (s *goldenSet) row(t *testing.T, l *Layout, hexes []string) [][]byte {
	t.Helper()
	if len(hexes) != len(l.buffers) {
		t.Fatalf("%d buffers, layout has %d", len(hexes), len(l.buffers))
	}
	var row [][]byte
	for i, h := range hexes {
		row = append(row, unhex(t, h, int(l.buffers[i].ItemLen)))
	}
	return row
}

func (s *goldenSet) layout(t *testing.T, r Release) *Layout {
	t.Helper()
	o := Options{
		HiddenSize: s.Options.HiddenSize, SamplingMaskTokens: s.Options.SamplingMask,
		DSATopK: s.Options.DSATopK, Checksums: s.Options.Checksums,
	}
	for d := Int32; d <= Raw; d++ {
		if d.String() == s.Options.HiddenDType {
			o.HiddenDType = d
		}
	}
	l, err := NewLayout(r, o)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// eachGolden runs f for every release and set of options.
func eachGolden(t *testing.T, f func(t *testing.T, l *Layout, s *goldenSet)) {
	for _, r := range Releases() {
		t.Run(r.String(), func(t *testing.T) {
			text, err := os.ReadFile("testdata/metadatabuffers-" + r.String() + ".json")
			if err != nil {
				t.Fatal(err)
			}
			var g goldenFile
			if err := json.Unmarshal(text, &g); err != nil {
				t.Fatal(err)
			}
			if g.Release != r.String() || len(g.Sets) == 0 {
				t.Fatalf("file of release %q with %d sets", g.Release, len(g.Sets))
			}
			for i := range g.Sets {
				s := &g.Sets[i]
				t.Run(s.Name, func(t *testing.T) { f(t, s.layout(t, r), s) })
			}
		})
	}
}

func TestGoldenLayout(t *testing.T) {
	eachGolden(t, func(t *testing.T, l *Layout, s *goldenSet) {
		bufs := l.Buffers()
		if len(bufs) != len(s.Buffers) {
			t.Fatalf("%d buffers, SGLang has %d", len(bufs), len(s.Buffers))
		}
		for i, want := range s.Buffers {
			b := bufs[i]
			got := [4]any{b.Name, b.DType.String(), float64(b.Width), float64(b.ItemLen)}
			if got != want {
				t.Errorf("buffer %d is %v, in SGLang %v", i, got, want)
			}
		}
		fits, err := Detect(l.ItemLens())
		if err != nil {
			t.Fatal(err)
		}
		found := slices.ContainsFunc(fits, func(f Fit) bool {
			return f.Options.SamplingMaskTokens == s.Options.SamplingMask && f.Options.DSATopK == s.Options.DSATopK &&
				f.Options.Checksums == s.Options.Checksums && slices.Contains(f.Releases, l.Release())
		})
		if !found {
			t.Errorf("Detect finds %+v", fits)
		}
	})
}

// What Encode writes is what set_buf writes on an untouched slot, whatever was in the slot.
func TestGoldenEncode(t *testing.T) {
	eachGolden(t, func(t *testing.T, l *Layout, s *goldenSet) {
		for _, c := range s.Cases {
			t.Run(c.Name, func(t *testing.T) {
				rec := c.Record.record(t)
				if c.Refused != "" {
					row := newRow(l, 0xa5)
					if err := l.Encode(row, rec); !errors.Is(err, ErrValue) {
						t.Errorf("SGLang raises %s, here %v", c.Refused, err)
					}
					diffRows(t, l, row, newRow(l, 0xa5))
					return
				}
				want := s.row(t, l, c.Slot)
				for _, row := range [][][]byte{s.row(t, l, s.Empty), newRow(l, 0xa5), s.row(t, l, s.Used)} {
					if err := l.Encode(row, rec); err != nil {
						t.Fatal(err)
					}
					diffRows(t, l, row, want)
				}
			})
		}
	})
}

// What DecodeInto reads is what SGLang's decode takes, of a slot that SGLang wrote: also of one
// that was used before, where SGLang leaves the earlier request's bytes.
func TestGoldenDecode(t *testing.T) {
	eachGolden(t, func(t *testing.T, l *Layout, s *goldenSet) {
		for _, c := range s.Cases {
			if c.Refused != "" {
				continue
			}
			t.Run(c.Name, func(t *testing.T) {
				want := c.Commit.record(t)
				if c.Checksum != nil {
					want.Checksum = Checksum{c.Checksum[0], c.Checksum[1]}
				}
				slot := s.row(t, l, c.Slot)
				reused := s.row(t, l, s.Used)
				for i, n := range c.Defined {
					copy(reused[i][:n], slot[i])
				}
				if brought := c.Record.record(t).Checksum; want.Checksum != brought {
					t.Errorf("get_kv_checksum gives %v, the request brought %v", want.Checksum, brought)
				}
				for name, row := range map[string][][]byte{"untouched": slot, "reused": reused} {
					got := fullRecord(l, testRand()) // nothing of it may stay
					if err := l.DecodeInto(got, row, want.Room, c.Want.want()); err != nil {
						t.Fatal(name, err)
					}
					if name == "reused" && c.Record.Checksum == nil {
						got.Checksum = want.Checksum // an earlier request's: set_kv_checksum was not called
					}
					sameRecord(t, got, want)
				}
			})
		}
	})
}

// The whole rows that get_buf gives, against the widest that can be read here.
func TestGoldenGetBuf(t *testing.T) {
	eachGolden(t, func(t *testing.T, l *Layout, s *goldenSet) {
		for _, c := range s.Cases {
			if c.Refused != "" {
				continue
			}
			t.Run(c.Name, func(t *testing.T) {
				if len(c.Get) != int(fieldChecksum) {
					t.Fatalf("get_buf gives %d tensors", len(c.Get))
				}
				wide := Want{Logprob: true, TopLogprobs: MaxTopLogprobs, Draft: true, TopK: MaxTopK}
				if l.options.SamplingMaskTokens > 0 {
					wide.SamplingMask = c.Want.want().SamplingMask
				}
				var rec Record
				if err := l.DecodeInto(&rec, s.row(t, l, c.Slot), nixlkv.Room(c.Record.Room), wide); err != nil {
					t.Fatal(err)
				}
				for f, have := range rec.columns() {
					got := getTensor(t, c.Get[f], l, field(f))
					if got == nil || have == nil {
						if (got == nil) != (l.index[f] < 0) {
							t.Errorf("%v: get_buf gives %v", field(f), got)
						}
						continue
					}
					if !slices.Equal(have, got[:len(have)]) {
						t.Errorf("%v: get_buf gives %v, here %v", field(f), got, have)
					}
				}
			})
		}
	})
}

// columns gives a record's values by buffer, floats as their bits, hidden states as bytes; nil
// where the record does not have the row itself.
func (r *Record) columns() [fieldChecksum][]int64 {
	bits := func(f float32) int64 { return int64(math.Float32bits(f)) }
	c := r.CachedTokens
	out := [fieldChecksum][]int64{
		fieldOutputIDs: {int64(r.OutputID)},
		fieldCachedTokens: {
			int64(c.Cached), int64(c.Device), int64(c.Host), int64(c.Storage),
			int64(c.Image), int64(c.Audio), int64(c.Video), 0, 0, 0, 0, 0, 0, 0, 0, 0,
		},
		fieldLogprobVal: {bits(r.Logprob.Value)},
		fieldLogprobIdx: {int64(r.Logprob.Token)},
		fieldRoom:       {int64(r.Room), 0, 0, 0, 0, 0, 0, 0},
	}
	for _, t := range r.TopLogprobs {
		out[fieldTopLogprobsVal] = append(out[fieldTopLogprobsVal], bits(t.Value))
		out[fieldTopLogprobsIdx] = append(out[fieldTopLogprobsIdx], int64(t.Token))
	}
	switch m := &r.SamplingMask; {
	case m.Absent:
		out[fieldMaskLen] = []int64{-1}
	case len(m.Tokens) > 0:
		out[fieldMaskLen] = []int64{int64(len(m.Tokens))}
	}
	for _, t := range r.SamplingMask.Tokens {
		out[fieldMaskIdx] = append(out[fieldMaskIdx], int64(t))
	}
	for _, v := range r.SamplingMask.Logprobs {
		out[fieldMaskLogprobs] = append(out[fieldMaskLogprobs], bits(v))
	}
	for _, t := range r.Draft.TopK {
		out[fieldTopKP] = append(out[fieldTopKP], bits(t.P))
		out[fieldTopKIndex] = append(out[fieldTopKIndex], t.Token)
	}
	for _, b := range r.Draft.HiddenStates {
		out[fieldHiddenStates] = append(out[fieldHiddenStates], int64(b))
	}
	for _, p := range r.Draft.DSATopK {
		out[fieldDSATopK] = append(out[fieldDSATopK], int64(p))
	}
	return out
}

// getTensor reads one tensor of get_buf, trailing zeros put back; nil if SGLang gives None.
func getTensor(t *testing.T, raw json.RawMessage, l *Layout, f field) []int64 {
	t.Helper()
	if strings.TrimSpace(string(raw)) == "null" {
		return nil
	}
	var dtype string
	var n int
	var values json.RawMessage
	if err := json.Unmarshal(raw, &[]any{&dtype, &n, &values}); err != nil {
		t.Fatal(err)
	}
	b := l.buffers[l.index[f]]
	if dtype != b.DType.String() || n != b.Width {
		t.Errorf("%v is %s of %d elements, here %+v", f, dtype, n, b)
	}
	var out []int64
	if values[0] == '"' {
		var h string
		if err := json.Unmarshal(values, &h); err != nil {
			t.Fatal(err)
		}
		for _, v := range unhex(t, h, int(b.ItemLen)) {
			out = append(out, int64(v))
		}
		return out
	}
	if err := json.Unmarshal(values, &out); err != nil {
		t.Fatal(err)
	}
	out = append(out, make([]int64, n-len(out))...)
	if f != fieldHiddenStates {
		return out
	}
	// float32 hidden states come as bits, a record has them as bytes.
	var raws []int64
	for _, v := range out {
		raws = append(raws, v&0xff, v>>8&0xff, v>>16&0xff, v>>24&0xff)
	}
	return raws
}

// The decode's verdict on the room, and what clear_slot leaves.
func TestGoldenRooms(t *testing.T) {
	eachGolden(t, func(t *testing.T, l *Layout, s *goldenSet) {
		for _, c := range s.Rooms {
			row := s.row(t, l, s.Empty)
			if c.Written {
				if err := l.Encode(row, &Record{Room: nixlkv.Room(c.Holds)}); err != nil {
					t.Fatal(err)
				}
			}
			var rec Record
			err := l.DecodeInto(&rec, row, nixlkv.Room(c.Asked), Want{})
			if gate := l.CheckRoom(row, nixlkv.Room(c.Asked)); (gate == nil) != (err == nil) {
				t.Errorf("CheckRoom says %v, DecodeInto %v", gate, err)
			}
			var room *RoomError
			switch {
			case c.Aborted == "" && err == nil:
			case strings.HasPrefix(c.Aborted, "Metadata unexpectedly not ready") && errors.Is(err, ErrNotWritten):
			case strings.HasPrefix(c.Aborted, "Metadata corruption detected") && errors.As(err, &room):
				if room.Want != nixlkv.Room(c.Asked) || room.Got != c.Holds || !errors.Is(err, nixlkv.ErrCorruptMetadata) {
					t.Error(err)
				}
			default:
				t.Errorf("SGLang says %q, here %v", c.Aborted, err)
			}
		}
		if s.Cleared != nil {
			row := s.row(t, l, s.Used)
			b, err := NewBuffers(l, 1, row)
			if err != nil {
				t.Fatal(err)
			}
			if err := b.Clear(0); err != nil {
				t.Fatal(err)
			}
			diffRows(t, l, row, s.row(t, l, s.Cleared))
		}
	})
}
