package kvsender

import (
	"encoding/binary"
	"errors"
	"math"
	"slices"
	"testing"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/nixl"
	"github.com/nixlkv/nixlkv/registry"
)

// fuzzInput hands out numbers from fuzzed bytes, zeros at their end.
type fuzzInput []byte

func (f *fuzzInput) byte() uint64 {
	if len(*f) == 0 {
		return 0
	}
	b := (*f)[0]
	*f = (*f)[1:]
	return uint64(b)
}

func (f *fuzzInput) word() uint64 {
	var w [8]byte
	*f = (*f)[copy(w[:], *f):]
	return binary.LittleEndian.Uint64(w[:])
}

// number is small, or near what overflows, or anything.
func (f *fuzzInput) number() uint64 {
	switch k := f.byte(); k % 8 {
	case 7:
		return f.word()
	case 6:
		return math.MaxUint64 - f.byte()
	case 5:
		return 1<<(k/4) + f.byte()
	default:
		return k / 4 * f.byte()
	}
}

func (f *fuzzInput) regions() []registry.Region {
	var out []registry.Region
	shape := f.byte()
	base := f.number()
	for range shape % 8 {
		r := registry.Region{Base: base, ItemLen: f.byte(), LayerID: registry.NoLayer, Kind: registry.VRAM}
		r.Len = r.ItemLen * f.byte()
		switch shape / 8 % 4 {
		case 1: // anything
			r.Base, r.Len, r.ItemLen = f.number(), f.number(), f.number()
			r.Kind = registry.Kind(f.byte() % 5)
			r.LayerID = int(int8(f.byte()))
		case 2:
			r.LayerID = int(f.byte() % 8)
		}
		base += r.Len + shape/32
		out = append(out, r)
	}
	return out
}

func (f *fuzzInput) ranks() registry.Ranks {
	small := func() int { return int(int8(f.byte()) % 4) }
	return registry.Ranks{EngineRank: small(), TP: small(), TPRank: small(), PP: small(), PPRank: small(), DCP: small(), DCPRank: small()}
}

// pages gives page numbers, most of them possible.
func (f *fuzzInput) pages(n int, limit uint64) []int32 {
	out := make([]int32, n)
	for i := range out {
		x := f.number()
		if limit > 0 && x%16 != 15 {
			x %= limit
		}
		out[i] = int32(x)
	}
	return out
}

// fuzzSides makes a layout and a peer of anything.
func fuzzSides(f *fuzzInput) (*registry.Layout, *registry.Peer) {
	l := &registry.Layout{KV: f.regions(), GPU: f.byte(), PageSize: 1, KVHeads: 1}
	p := &registry.Peer{Agent: "peer", KV: f.regions(), GPU: f.byte()}
	if flags := f.byte(); flags%8 != 0 {
		l.MLA, l.HybridMLA = flags&1 != 0, flags&2 != 0
		l.Ranks, p.Ranks = f.ranks(), f.ranks()
		l.StartLayer, l.DraftRegions = int(int64(f.number())), int(int8(f.byte()))
		for range flags / 64 {
			l.CompressionRatios = append(l.CompressionRatios, []int{0, 4, 128, -1}[f.byte()%4])
		}
		l.PageSize, l.TotalKVHeads, l.EndLayer = int(int64(f.number())), int(int64(f.number())), int(int8(f.byte()))
		l.ShardKV = f.byte()%8 == 7
	}
	return l, p
}

// Whatever the two sides tell, there is a plan or an error with a sentinel, and a plan's
// descriptors lie in regions of the right kind, by index the same as by descriptor, with no
// byte written twice.
func FuzzPlan(f *testing.F) {
	f.Add([]byte{})
	plain := []byte{
		4, 64, 100, 16, 8, 16, 8, 16, 8, 16, 8, 1, // four regions of 8 pages of 16 bytes from 1600 on, GPU 1
		5, 64, 250, 16, 9, 16, 9, 16, 9, 16, 9, 16, 9, 2, // five of 9 pages from 4000 on, GPU 2
		0, 5, // five pages
		4, 0, 4, 1, 4, 2, 4, 5, 4, 7,
		4, 3, 4, 4, 4, 5, 4, 1, 4, 0,
	}
	f.Add(plain)
	wider := slices.Clone(plain)
	copy(wider[15:], []byte{20, 9, 24, 9}) // pages of the decode's first regions
	f.Add(wider)
	stage := slices.Concat([]byte{
		2, 64, 100, 16, 8, 16, 8, 1, 4, 64, 250, 16, 9, 16, 9, 16, 9, 16, 9, 2,
		1,                                        // MLA
		0, 1, 0, 2, 1, 1, 0, 0, 1, 0, 1, 0, 1, 0, // PP rank 1 of 2
		4, 2, 0, // from layer 2 on, no draft
	}, plain[27:])
	f.Add(stage)
	f.Add([]byte{18, 64, 100, 16, 8, 1, 16, 8, 2, 1, 18, 64, 250, 32, 8, 2, 32, 8, 1, 5, 0, 2, 4, 1, 4, 2, 4, 3, 4, 4}) // by layer
	// Two tokens a page, two heads; three pages.
	tail := []byte{4, 0, 0, 4, 2, 4, 2, 0, 0, 3, 4, 1, 4, 2, 4, 5, 4, 3, 4, 0, 4, 6}
	f.Add(slices.Concat([]byte{
		2, 64, 100, 32, 8, 32, 8, 1, 34, 64, 250, 16, 9, 16, 9, 2, // pages of 32 bytes to pages of 16, a byte apart
		4, 0, 1, 0, 1, 0, 1, 0, 1, 2, 0, 1, 0, 1, 0, // TP 1 to rank 1 of TP 2
	}, tail))
	f.Add(slices.Concat([]byte{
		2, 64, 100, 16, 8, 16, 8, 1, 2, 64, 250, 16, 9, 16, 9, 2,
		1, 0, 1, 0, 1, 0, 1, 0, 1, 2, 0, 1, 0, 2, 1, // MLA to rank 1 of DCP 2
	}, tail, []byte{4, 4, 4, 2, 4, 5})) // a prefix of 4, two tokens after it, five tokens
	f.Add([]byte{9, 7, 1, 2, 3, 4, 5, 6, 7, 8, 6, 1, 6, 3, 7, 255, 255, 255, 255, 255, 255, 255, 255, 1, 1, 1})
	f.Fuzz(func(t *testing.T, b []byte) {
		in := fuzzInput(b)
		l, p := fuzzSides(&in)
		plan, err := planPeer(l, p)
		if err != nil {
			if plan != nil || !hasSentinel(err) {
				t.Fatalf("%+v, %v", plan, err)
			}
			return
		}
		srcLimit, dstLimit := plan.limits()
		n := int(in.byte() % 16)
		c := chunkPages{src: in.pages(n, srcLimit), dst: in.pages(n, dstLimit)}
		if plan.dealsTokens() {
			c.at = tokenSpan{in.number(), in.number(), in.number() % (1 << 12)}
		}
		if _, err := checkDistinct(c.dst, nil); err != nil {
			return
		}
		if err := checkPages(plan, c); err != nil {
			if !hasSentinel(err) {
				t.Fatal(err)
			}
			return
		}
		var written []stripe
		for i := range plan.segments {
			s := &plan.segments[i]
			runs := s.appendRuns(nil, c)
			if s.descriptors(unitsIn(runs), len(runs)) > 1<<16 {
				return
			}
			from, to := s.appendDescs(nil, nil, runs)
			mustLieIn(t, from, l.KV, s.srcKind, l.GPU)
			mustLieIn(t, to, p.KV, s.dstKind, p.GPU)
			for k, d := range to {
				if from[k].Len != d.Len {
					t.Fatalf("descriptor %d: %d bytes to %d", k, from[k].Len, d.Len)
				}
				written = append(written, stripe{first: d.Addr, last: d.Addr + d.Len - 1})
			}
			if s.preparable() {
				mustMatchIndices(t, s, c, from, to)
			}
		}
		slices.SortFunc(written, func(a, b stripe) int {
			if a.first < b.first {
				return -1
			}
			return 1
		})
		for k := 1; k < len(written); k++ {
			if written[k].first <= written[k-1].last {
				t.Fatalf("%#x is written twice", written[k].first)
			}
		}
	})
}

func hasSentinel(err error) bool {
	return slices.ContainsFunc([]error{nixlkv.ErrRegions, nixlkv.ErrStride, nixlkv.ErrMemoryKinds, nixlkv.ErrMissingMemoryKind,
		nixlkv.ErrTopology, nixlkv.ErrUnsupported, nixlkv.ErrLimit, nixlkv.ErrPageRange, nixlkv.ErrPageCount},
		func(s error) bool { return errors.Is(err, s) })
}

func mustLieIn(t *testing.T, descs []nixl.Desc, regions []registry.Region, k registry.Kind, gpu uint64) {
	t.Helper()
	for _, d := range descs {
		inside := slices.ContainsFunc(regions, func(r registry.Region) bool {
			return r.Kind == k && d.Addr >= r.Base && d.Len > 0 && d.Len <= r.Len && d.Addr-r.Base <= r.Len-d.Len
		})
		if !inside || d.Dev != deviceOf(k, gpu) {
			t.Fatalf("%+v does not lie in a region of kind %d: %+v", d, k, regions)
		}
	}
}

// mustMatchIndices compares the indices of a chunk with its descriptors, cut into pages.
func mustMatchIndices(t *testing.T, s *segment, c chunkPages, from, to []nixl.Desc) {
	t.Helper()
	src, dst := s.appendIndices(nil, nil, c)
	srcRuns, dstRuns := s.appendSourceRuns(nil), s.appendDestinationRuns(nil)
	if len(src) != len(dst) || len(src) != len(c.src)*s.rows() {
		t.Fatalf("%d and %d indices of %d pages", len(src), len(dst), len(c.src))
	}
	var k int
	var cut uint64 // bytes of descriptor k that have been matched
	for i := range src {
		a, b := descAt(t, srcRuns, src[i]), descAt(t, dstRuns, dst[i])
		if want := (nixl.Desc{Addr: from[k].Addr + cut, Len: a.Len, Dev: from[k].Dev}); a != want {
			t.Fatalf("index %d, at position %d, is %+v, expected %+v", src[i], i, a, want)
		}
		if want := (nixl.Desc{Addr: to[k].Addr + cut, Len: b.Len, Dev: to[k].Dev}); b != want || a.Len != b.Len {
			t.Fatalf("index %d, at position %d, is %+v, expected %+v", dst[i], i, b, want)
		}
		if cut += a.Len; cut == from[k].Len {
			k, cut = k+1, 0
		}
	}
	if k != len(from) {
		t.Fatalf("%d of %d descriptors by index", k, len(from))
	}
}

// descAt gives a descriptor of the prepared list that runs make.
func descAt(t *testing.T, runs []nixl.Run, index int32) nixl.Desc {
	t.Helper()
	i := uint64(index)
	for _, r := range runs {
		if i < r.Count {
			return nixl.Desc{Addr: r.Addr + i*r.Stride, Len: r.Len, Dev: r.Dev}
		}
		i -= r.Count
	}
	t.Fatalf("no index %d", index)
	return nixl.Desc{}
}
