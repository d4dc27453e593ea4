package kvsender

import (
	"errors"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/nixl"
	"pgregory.net/rapid"
)

func TestDestinations(t *testing.T) {
	list := []int32{40, 41, 50, 7}
	for _, c := range []struct {
		name      string
		pages     []int32
		offset    int
		positions []int32
		want      []int32
	}{
		{"first", []int32{1, 2}, 0, nil, []int32{40, 41}},
		{"last", []int32{1, 2}, 2, nil, []int32{50, 7}},
		{"all", []int32{1, 2, 3, 4}, 0, nil, list},
		{"none at the end", nil, 4, nil, []int32{}},
		{"one too many", []int32{1, 2}, 3, nil, nil},
		{"behind the end", nil, 5, nil, nil},
		{"negative offset", []int32{1}, -1, nil, nil},
		{"far offset", []int32{1}, math.MaxInt, nil, nil},
		{"apart", []int32{1, 2, 3}, 1, []int32{0, 2, 3}, []int32{40, 50, 7}},
		{"apart, one too many", []int32{1, 2}, 0, []int32{1, 4}, nil},
		{"apart, a negative one", []int32{1}, 0, []int32{-1}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			chunk := chunk{pages: c.pages, offset: c.offset, positions: c.positions}
			got, _, err := chunk.destinations(list, []int32{9})
			if c.want == nil {
				if !errors.Is(err, nixlkv.ErrPageCount) || !strings.Contains(err.Error(), "the decode has 4") {
					t.Fatal(err)
				}
				return
			}
			if err != nil || !slices.Equal(got, c.want) {
				t.Errorf("%v, %v, expected %v", got, err, c.want)
			}
		})
	}
}

func TestChunkTokens(t *testing.T) {
	for _, c := range []struct {
		offset, pages, total int
		want                 tokenSpan
	}{
		{0, 2, 8, tokenSpan{first: 0, n: 8}},
		{0, 2, 20, tokenSpan{first: 0, n: 8}},
		{2, 3, 18, tokenSpan{first: 8, n: 10}},
		{5, 1, 20, tokenSpan{first: 20, n: 0}},
		{6, 1, 20, tokenSpan{first: 24, n: 0}},
		{0, 0, 0, tokenSpan{}},
	} {
		chunk := chunk{pages: make([]int32, c.pages), offset: c.offset}
		c.want.prefix = 12
		if got := chunk.tokens(12, c.total, 4); got != c.want {
			t.Errorf("%+v: %+v", c, got)
		}
	}
}

// A full prefix hit has no destinations and no pages; nothing is described.
func TestChunkFullHit(t *testing.T) {
	plan := planOf(t, 2)
	dst, _, err := new(chunk).destinations(nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	c := chunkPages{dst: dst}
	if err := checkPages(plan, c); err != nil {
		t.Error(err)
	}
	s := &plan.segments[0]
	src, dst := s.appendIndices(nil, nil, c)
	from, to := s.appendDescs(nil, nil, appendRuns(nil, c))
	if n := len(src) + len(dst) + len(from) + len(to); n != 0 {
		t.Errorf("%d descriptors of no pages", n)
	}
}

func TestCheckPages(t *testing.T) {
	l, p := sides(2, 2) // 64 pages on either side
	p.KV[1].Len = 256 * 40
	plan := mustPlan(t, l, p)
	for _, c := range []struct {
		name     string
		src, dst []int32
		want     error
		text     string
	}{
		{"good", []int32{0, 63, 5}, []int32{39, 0, 1}, nil, ""},
		{"a source page twice", []int32{3, 3}, []int32{1, 2}, nil, ""},
		{"none", nil, nil, nil, ""},
		{"unequal", []int32{1}, nil, nixlkv.ErrPageCount, "1 source pages, 0 destination pages"},
		{"source past the end", []int32{1, 64}, []int32{1, 2}, nixlkv.ErrPageRange, "source page 64 at position 1, there are 64"},
		{"destination past the shortest region", []int32{1}, []int32{40}, nixlkv.ErrPageRange, "destination page 40 at position 0, there are 40"},
		{"negative source", []int32{-1}, []int32{0}, nixlkv.ErrPageRange, "source page -1"},
		{"most negative destination", []int32{0}, []int32{math.MinInt32}, nixlkv.ErrPageRange, "destination page -2147483648"},
		{"largest", []int32{math.MaxInt32}, []int32{0}, nixlkv.ErrPageRange, "source page 2147483647"},
	} {
		t.Run(c.name, func(t *testing.T) {
			err := checkPages(plan, chunkPages{src: c.src, dst: c.dst})
			if !errors.Is(err, c.want) || (err == nil) != (c.want == nil) {
				t.Fatalf("%v, expected %v", err, c.want)
			}
			if err != nil && !strings.Contains(err.Error(), c.text) {
				t.Errorf("%v\ndoes not say %q", err, c.text)
			}
		})
	}
}

func TestCheckDistinct(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		pages := rapid.SliceOfN(rapid.Int32Range(0, 40), 0, 12).Draw(t, "pages")
		if rapid.Bool().Draw(t, "ascending") {
			slices.Sort(pages)
		}
		before := slices.Clone(pages)
		seen := map[int32]bool{}
		for _, p := range pages {
			seen[p] = true
		}
		_, err := checkDistinct(pages, []int32{9, 9, 9})
		if twice := len(seen) < len(pages); twice != errors.Is(err, nixlkv.ErrPageRange) || twice != (err != nil) {
			t.Fatalf("%v: %v", pages, err)
		}
		if !slices.Equal(pages, before) {
			t.Fatalf("%v became %v", before, pages)
		}
	})
}

func TestAppendRuns(t *testing.T) {
	for _, c := range []struct {
		name     string
		src, dst []int32
		want     []run
	}{
		{"none", nil, nil, nil},
		{"one", []int32{4}, []int32{9}, []run{{4, 9, 1}}},
		{"all", []int32{4, 5, 6}, []int32{1, 2, 3}, []run{{4, 1, 3}}},
		{"source breaks", []int32{4, 5, 7}, []int32{1, 2, 3}, []run{{4, 1, 2}, {7, 3, 1}}},
		{"destination breaks", []int32{4, 5, 6}, []int32{1, 5, 6}, []run{{4, 1, 1}, {5, 5, 2}}},
		{"backwards", []int32{3, 2, 1}, []int32{3, 2, 1}, []run{{3, 3, 1}, {2, 2, 1}, {1, 1, 1}}},
		{"a page again", []int32{3, 3}, []int32{0, 1}, []run{{3, 0, 1}, {3, 1, 1}}},
		{"two runs that meet", []int32{0, 1, 0, 1}, []int32{0, 1, 2, 3}, []run{{0, 0, 2}, {0, 2, 2}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := appendRuns(nil, chunkPages{src: c.src, dst: c.dst})
			if !slices.Equal(got, c.want) || unitsIn(got) != len(c.src) {
				t.Errorf("%v, expected %v", got, c.want)
			}
		})
	}
}

// The descriptors of a run, where pages lie side by side and where they do not.
func TestAppendDescs(t *testing.T) {
	l, p := sides(2, 2)
	p.KV[1].ItemLen = 512 // its pages are apart
	s := &mustPlan(t, l, p).segments[0]
	c := chunkPages{src: []int32{2, 3, 9}, dst: []int32{30, 31, 0}}
	from, to := s.appendDescs(nil, nil, appendRuns(nil, c))
	a, b, x, y := l.KV[0].Base, l.KV[1].Base, p.KV[0].Base, p.KV[1].Base
	if want := []nixl.Desc{{Addr: a + 512, Len: 512, Dev: 1}, {Addr: a + 9*256, Len: 256, Dev: 1},
		{Addr: b + 512, Len: 256, Dev: 1}, {Addr: b + 768, Len: 256, Dev: 1}, {Addr: b + 9*256, Len: 256, Dev: 1}}; !slices.Equal(from, want) {
		t.Errorf("source %+v\nexpected %+v", from, want)
	}
	if want := []nixl.Desc{{Addr: x + 30*256, Len: 512, Dev: 5}, {Addr: x, Len: 256, Dev: 5},
		{Addr: y + 30*512, Len: 256, Dev: 5}, {Addr: y + 31*512, Len: 256, Dev: 5}, {Addr: y, Len: 256, Dev: 5}}; !slices.Equal(to, want) {
		t.Errorf("destination %+v\nexpected %+v", to, want)
	}
	src, dst := s.appendIndices(nil, nil, c)
	if want := []int32{2, 3, 9, 66, 67, 73}; !slices.Equal(src, want) {
		t.Errorf("source indices %v, expected %v", src, want)
	}
	if want := []int32{30, 31, 0, 62, 63, 32}; !slices.Equal(dst, want) { // the second region has 32 pages
		t.Errorf("destination indices %v, expected %v", dst, want)
	}
}

// Pages are one piece only where they lie side by side on both sides.
func TestAppendDescsApart(t *testing.T) {
	runs := []run{{src: 2, dst: 5, n: 2}}
	for _, c := range []struct {
		name     string
		p        pair
		from, to []nixl.Desc
	}{
		{"both side by side", pair{src: 1000, srcStride: 8, dst: 2000, dstStride: 8, len: 8, rows: 1},
			[]nixl.Desc{{Addr: 1016, Len: 16}}, []nixl.Desc{{Addr: 2040, Len: 16}}},
		{"source apart", pair{src: 1000, srcStride: 10, dst: 2000, dstStride: 8, len: 8, rows: 1},
			[]nixl.Desc{{Addr: 1020, Len: 8}, {Addr: 1030, Len: 8}}, []nixl.Desc{{Addr: 2040, Len: 8}, {Addr: 2048, Len: 8}}},
		{"destination apart", pair{src: 1000, srcStride: 8, dst: 2000, dstStride: 10, len: 8, rows: 1},
			[]nixl.Desc{{Addr: 1016, Len: 8}, {Addr: 1024, Len: 8}}, []nixl.Desc{{Addr: 2050, Len: 8}, {Addr: 2060, Len: 8}}},
		{"rows", pair{src: 1000, srcStride: 8, srcRow: 4, dst: 2000, dstStride: 12, dstRow: 6, len: 4, rows: 2},
			[]nixl.Desc{{Addr: 1016, Len: 4}, {Addr: 1020, Len: 4}, {Addr: 1024, Len: 4}, {Addr: 1028, Len: 4}},
			[]nixl.Desc{{Addr: 2060, Len: 4}, {Addr: 2066, Len: 4}, {Addr: 2072, Len: 4}, {Addr: 2078, Len: 4}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := segment{pairs: []pair{c.p}, srcPages: 10, dstPages: 10}
			from, to := s.appendDescs(nil, nil, runs)
			if !slices.Equal(from, c.from) || !slices.Equal(to, c.to) {
				t.Errorf("%v to %v, expected %v to %v", from, to, c.from, c.to)
			}
		})
	}
}

// What is there already stays.
func TestAppendKeeps(t *testing.T) {
	s := &planOf(t, 2).segments[0]
	c := chunkPages{src: []int32{2, 3}, dst: []int32{30, 31}}
	src, dst := s.appendIndices([]int32{-1}, []int32{-2, -3}, c)
	if len(src) != 5 || src[0] != -1 || src[1] != 2 || len(dst) != 6 || dst[1] != -3 || dst[2] != 30 {
		t.Errorf("indices %v and %v", src, dst)
	}
	mark := nixl.Desc{Len: 1}
	from, to := s.appendDescs([]nixl.Desc{mark}, []nixl.Desc{mark, mark}, appendRuns([]run{}, c))
	if len(from) != 3 || from[0] != mark || len(to) != 4 || to[1] != mark || to[2].Len != 512 {
		t.Errorf("descriptors %v and %v", from, to)
	}
	runs := appendRuns([]run{{7, 7, 7}}, c)
	if !slices.Equal(runs, []run{{7, 7, 7}, {2, 30, 2}}) {
		t.Errorf("runs %v", runs)
	}
}

// Long runs are described, scattered pages are picked.
func TestCheaperByDesc(t *testing.T) {
	l, p := sides(4, 4)
	whole := &mustPlan(t, l, p).segments[0]
	for i := range p.KV {
		p.KV[i].ItemLen = 512
	}
	apart := &mustPlan(t, l, p).segments[0]
	for _, c := range []struct {
		s           *segment
		pages, runs int
		want        bool
	}{
		{whole, 1024, 1, true}, {whole, 1024, 128, true}, {whole, 1024, 170, false}, {whole, 1024, 1024, false},
		{whole, 1, 1, false}, {whole, 8, 1, true}, {whole, 0, 0, false}, {apart, 1024, 1, false},
	} {
		if got := c.s.cheaperByDesc(c.pages, c.runs); got != c.want {
			t.Errorf("%d pages in %d runs, whole pages %t: %t", c.pages, c.runs, c.s == whole, got)
		}
	}
}
