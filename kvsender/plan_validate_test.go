package kvsender

import (
	"errors"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/registry"
)

// Whatever makes a plan, what is wrong with it is found. Each case breaks a good one.
func TestValidatePlan(t *testing.T) {
	for _, c := range []struct {
		name string
		edit func(s *segment)
		want error
		text string
	}{
		{"good", func(*segment) {}, nil, ""},
		{"rows", func(s *segment) {
			p := &s.pairs[0]
			p.rows, p.len, p.srcRow, p.dstRow = 4, 64, 64, 64
		}, nil, ""},
		{"no pairs", func(s *segment) { s.pairs = nil }, nixlkv.ErrRegions, "0 pairs"},
		{"no source pages", func(s *segment) { s.srcPages = 0 }, nixlkv.ErrRegions, "2 pairs, 0 source pages"},
		{"no destination pages", func(s *segment) { s.dstPages = 0 }, nixlkv.ErrRegions, "2 pairs, 64 source pages, 0 destination pages"},
		{"source kind", func(s *segment) { s.srcKind = registry.Unset }, nixlkv.ErrMemoryKinds, "kind 0"},
		{"destination kind", func(s *segment) { s.dstKind = 7 }, nixlkv.ErrMemoryKinds, "kind 7"},
		{"source device", func(s *segment) { s.srcDev = 5 }, nixlkv.ErrRegions, "devices 5 and 5, expected 1 and 5"},
		{"destination device", func(s *segment) { s.dstDev = 0 }, nixlkv.ErrRegions, "devices 1 and 0, expected 1 and 5"},
		{"device of host memory", func(s *segment) { s.srcKind = registry.DRAM }, nixlkv.ErrRegions, "expected 0 and 5"},
		{"region of another kind", func(s *segment) { s.dstKind, s.dstDev = registry.DRAM, 0 }, nixlkv.ErrRegions, "lie in no region"},
		{"no bytes", func(s *segment) { s.pairs[1].len = 0 }, nixlkv.ErrRegions, "no bytes"},
		{"no rows", func(s *segment) { s.pairs[1].rows = 0 }, nixlkv.ErrRegions, "0 rows"},
		{"rows past counting", func(s *segment) { s.pairs[1].rows = math.MaxUint64 }, nixlkv.ErrRegions, "rows"},
		{"many rows", func(s *segment) {
			p := &s.pairs[1]
			p.rows, p.len, p.srcRow, p.dstRow = 1<<30, 1, 1, 1
		}, nixlkv.ErrStride, "do not fit a source page"},
		{"pages past counting", func(s *segment) { s.dstPages = math.MaxUint64 }, nixlkv.ErrRegions, "lie in no region"},
		{"one source page too many", func(s *segment) { s.srcPages++ }, nixlkv.ErrRegions, "65 source units"},
		{"one destination page too many", func(s *segment) { s.dstPages++ }, nixlkv.ErrRegions, "65 destination units"},
		{"longer than a source page", func(s *segment) { s.pairs[0].len++ }, nixlkv.ErrStride, "257 bytes, source 256"},
		{"longer than a destination page", func(s *segment) { s.pairs[0].dstStride-- }, nixlkv.ErrStride, "256 bytes, destination 255"},
		{"longer than a row", func(s *segment) {
			p := &s.pairs[0]
			p.rows, p.len, p.srcRow, p.dstRow = 4, 65, 64, 64
		}, nixlkv.ErrStride, "65 bytes, source 64"},
		{"rows short of a page", func(s *segment) {
			p := &s.pairs[0]
			p.rows, p.len, p.srcRow, p.dstRow = 4, 60, 64, 60
		}, nil, ""},
		{"rows longer than a page", func(s *segment) {
			p := &s.pairs[0]
			p.rows, p.len, p.srcRow, p.dstRow = 4, 64, 64, 65
		}, nixlkv.ErrStride, "do not fit a destination page"},
		{"row stride overflows", func(s *segment) {
			p := &s.pairs[0]
			p.rows, p.len, p.srcRow, p.dstRow = 4, 64, 1<<62+64, 64
		}, nixlkv.ErrStride, "do not fit a source page"},
		{"rows of two pairs between each other", func(s *segment) {
			for i := range s.pairs {
				s.pairs[i].rows, s.pairs[i].len, s.pairs[i].srcRow, s.pairs[i].dstRow = 4, 32, 64, 64
			}
			s.pairs[1].dst, s.dstPages = s.pairs[0].dst+32, 63
		}, nil, ""},
		{"rows of two pairs in the same page", func(s *segment) {
			for i := range s.pairs {
				s.pairs[i].rows, s.pairs[i].len, s.pairs[i].srcRow, s.pairs[i].dstRow = 4, 32, 64, 60
			}
			s.pairs[1].dst, s.dstPages = s.pairs[0].dst+64, 63
		}, nixlkv.ErrRegions, "overlap"},
		{"tokens", func(s *segment) { tokens(s, 4) }, nil, ""},
		{"tokens past the pages", func(s *segment) { tokens(s, 4); s.dstPages++ }, nixlkv.ErrRegions, "260 destination units"},
		{"tokens past counting", func(s *segment) { tokens(s, 4); s.deal.dstTokens = math.MaxUint64 }, nixlkv.ErrRegions, "lie in no region"},
		{"tokens of rows", func(s *segment) { tokens(s, 4); s.pairs[0].rows = 2 }, nixlkv.ErrRegions, "2 rows"},
		{"no tokens", func(s *segment) { tokens(s, 4); s.deal.srcTokens = 0 }, nixlkv.ErrRegions, "pages of 0 and 4 tokens"},
		{"tokens of a rank that is not there", func(s *segment) { tokens(s, 4); s.deal.rank = 2 }, nixlkv.ErrRegions, "rank 2 of 2"},
		{"before its region", func(s *segment) { s.pairs[0].src-- }, nixlkv.ErrRegions, "lie in no region"},
		{"behind its region", func(s *segment) { s.pairs[1].dst++ }, nixlkv.ErrRegions, "lie in no region"},
		{"address 0", func(s *segment) { s.pairs[0].src = 0 }, nixlkv.ErrRegions, "lie in no region"},
		{"strides overflow", func(s *segment) { s.pairs[0].dstStride = 1 << 60 }, nixlkv.ErrRegions, "lie in no region"},
		{"same destination twice", func(s *segment) { s.pairs[1].dst = s.pairs[0].dst }, nixlkv.ErrRegions, "overlap"},
		{"halves of one destination", func(s *segment) {
			s.pairs[0].len, s.pairs[1].len, s.dstPages = 128, 128, 63
			s.pairs[1].dst = s.pairs[0].dst + 128
		}, nil, ""},
		{"halves that meet a page on", func(s *segment) {
			s.pairs[0].len, s.pairs[1].len, s.dstPages = 128, 128, 62
			s.pairs[1].dst = s.pairs[0].dst + 256 + 127
		}, nixlkv.ErrRegions, "overlap"},
	} {
		t.Run(c.name, func(t *testing.T) {
			l, p := sides(2, 2)
			plan := mustPlan(t, l, p)
			c.edit(&plan.segments[0])
			err := validatePlan(plan, l, p)
			if !errors.Is(err, c.want) || (err == nil) != (c.want == nil) {
				t.Fatalf("%v, expected %v", err, c.want)
			}
			if err != nil && !strings.Contains(err.Error(), c.text) {
				t.Errorf("%v\ndoes not say %q", err, c.text)
			}
		})
	}
}

// tokens makes the units of a segment tokens, so many a page, dealt out to two ranks.
func tokens(s *segment, n uint64) {
	s.deal = deal{srcTokens: n, dstTokens: n, ranks: 2, rank: 1}
	for i := range s.pairs {
		p := &s.pairs[i]
		p.len /= n
		p.srcStride, p.dstStride = p.len, p.len
	}
}

// Pairs of different segments are compared as well, and all deal tokens out or none does.
func TestValidateSegments(t *testing.T) {
	l, p := sides(2, 2)
	plan := mustPlan(t, l, p)
	plan.segments = append(plan.segments, plan.segments[0])
	if err := validatePlan(plan, l, p); !errors.Is(err, nixlkv.ErrRegions) {
		t.Fatalf("two segments of the same pairs: %v", err)
	}
	whole := plan.segments[0]
	plan.segments[0].pairs, plan.segments[1].pairs = whole.pairs[:1], whole.pairs[1:]
	if err := validatePlan(plan, l, p); err != nil {
		t.Fatal(err)
	}
	plan.segments[1].pairs = slices.Clone(plan.segments[1].pairs)
	tokens(&plan.segments[1], 4)
	if err := validatePlan(plan, l, p); !errors.Is(err, nixlkv.ErrRegions) {
		t.Fatalf("a segment of pages and one of tokens: %v", err)
	}
}

// Stripes that do not follow each other may overlap: a short one between them hides nothing.
func TestCheckDisjoint(t *testing.T) {
	long := stripe{first: 100, last: 191, step: 10, n: 2}
	short := stripe{first: 104, last: 105, step: 10, n: 2}
	for _, c := range []struct {
		name string
		w    []stripe
		want error
	}{
		{"none", nil, nil},
		{"apart", []stripe{long, short, {first: 157, last: 168, step: 10, n: 2}}, nil},
		{"behind a short one", []stripe{long, short, {first: 151, last: 162, step: 10, n: 2}}, nixlkv.ErrRegions},
		{"in any order", []stripe{{first: 151, last: 162, step: 10, n: 2}, short, long}, nixlkv.ErrRegions},
		{"round the end of a step", []stripe{long, {first: 109, last: 120, step: 10, n: 2}}, nixlkv.ErrRegions},
		{"up to the end of a step", []stripe{long, {first: 108, last: 119, step: 10, n: 2}}, nil},
		{"one byte after another", []stripe{{first: 5, last: 9, step: 5, n: 5}, {first: 10, last: 19, step: 10, n: 10}}, nil},
		{"of other steps", []stripe{long, {first: 191, last: 200, step: 5, n: 5}}, nixlkv.ErrRegions},
	} {
		t.Run(c.name, func(t *testing.T) {
			if err := checkDisjoint(c.w); !errors.Is(err, c.want) || (err == nil) != (c.want == nil) {
				t.Errorf("%v, expected %v", err, c.want)
			}
		})
	}
}

// A region that begins later may end earlier.
func TestSpansContain(t *testing.T) {
	of := func(base, n uint64) registry.Region {
		return registry.Region{Base: base, Len: n, ItemLen: 1, Kind: registry.VRAM}
	}
	s := spansByKind([]registry.Region{of(300, 10), of(100, 100), of(120, 10), of(100, 5), of(math.MaxUint64, 2), of(0, 0), of(400, 1), {}})[registry.VRAM]
	for _, c := range []struct {
		first, last uint64
		want        bool
	}{
		{100, 199, true}, {100, 200, false}, {99, 100, false}, {125, 150, true}, {199, 199, true}, {200, 200, false},
		{300, 309, true}, {305, 310, false}, {310, 310, false}, {150, 305, false}, {400, 400, true}, {400, 401, false}, {math.MaxUint64, math.MaxUint64, false},
	} {
		if got := s.contain(c.first, c.last); got != c.want {
			t.Errorf("%d to %d: %t", c.first, c.last, got)
		}
	}
	if (spans)(nil).contain(1, 1) {
		t.Error("no regions contain a byte")
	}
}
