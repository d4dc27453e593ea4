package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/nixlkv/nixlkv"
)

// flat is a pool on the Go heap.
type flat struct {
	shape shape
	pages int
	b     []byte
}

func newFlat(s shape, pages int) *flat {
	return &flat{s, pages, make([]byte, s.bytes(pages))}
}

func (f *flat) page(region int, page int32) []byte {
	n := f.shape.pageBytes()
	return f.b[(region*f.pages+int(page))*n:][:n:n]
}

func TestPickPages(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		requests := rapid.IntRange(1, 20).Draw(t, "requests")
		pages := rapid.IntRange(1, 50).Draw(t, "pages")
		pool := requests*pages + rapid.IntRange(1, 100).Draw(t, "spare")
		seed := rapid.Uint64().Draw(t, "seed")
		lists := pickPages(random(seed, streamDecode), pool, requests, pages)
		if len(lists) != requests {
			t.Fatalf("%d lists, want %d", len(lists), requests)
		}
		if err := checkPages(lists, pool, pages); err != nil {
			t.Fatal(err)
		}
		again := pickPages(random(seed, streamDecode), pool, requests, pages)
		if !slices.EqualFunc(lists, again, slices.Equal) {
			t.Fatal("the same seed gives other pages")
		}
		for by := range 3 {
			shifted := shiftPages(lists, pool, by)
			if err := checkPages(shifted, pool, pages); err != nil {
				t.Fatalf("shifted by %d: %v", by, err)
			}
			for i := range lists {
				for k := range lists[i] {
					if same := shifted[i][k] == lists[i][k]; same != (by%(pool-1) == 0) {
						t.Fatalf("shifted by %d, page %d becomes %d", by, lists[i][k], shifted[i][k])
					}
				}
			}
		}
	})
}

// A worn free list has neighbours, but not only.
func TestPickPagesRuns(t *testing.T) {
	neighbours, pairs := 0, 0
	for _, list := range pickPages(random(1, streamPrefill), 641, 8, 64) {
		for i := range len(list) - 1 {
			pairs++
			if list[i+1] == list[i]+1 {
				neighbours++
			}
		}
	}
	if neighbours < pairs/2 || neighbours > pairs*9/10 {
		t.Errorf("%d of %d pages are followed by their neighbour", neighbours, pairs)
	}
}

func TestPickRooms(t *testing.T) {
	rooms := pickRooms(random(1, streamRooms), 1000)
	seen := map[nixlkv.Room]bool{}
	for _, r := range rooms {
		if r == 0 || r>>63 != 0 || seen[r] {
			t.Fatalf("room %d is zero, of 64 bits or given twice", r)
		}
		seen[r] = true
	}
	if len(rooms) != 1000 {
		t.Errorf("%d rooms", len(rooms))
	}
}

// checkPages says whether lists of pages can be what pickPages gives: every list of the
// same length, every page in the pool, none twice.
func checkPages(lists [][]int32, pool, pages int) error {
	seen := make([]bool, pool)
	for i, list := range lists {
		if len(list) != pages {
			return fmt.Errorf("request %d has %d pages, want %d", i, len(list), pages)
		}
		for _, p := range list {
			if p < 1 || int(p) >= pool {
				return fmt.Errorf("request %d: page %d is not one of 1 to %d", i, p, pool-1)
			}
			if seen[p] {
				return fmt.Errorf("request %d: page %d is given twice", i, p)
			}
			seen[p] = true
		}
	}
	return nil
}

// sent gives the pool of a decode to which requests were sent without a fault, over some
// rounds, and what is expected there.
func sent(s shape, pool, requests, pages, rounds int, seed uint64) (*flat, []origin) {
	src, dst := newFlat(s, pool), newFlat(s, pool)
	for region := range s.regions() {
		for page := range int32(pool) {
			fillPage(src.page(region, page), pattern(seed, region, page))
		}
	}
	rooms := pickRooms(random(seed, streamRooms), requests*rounds)
	sources := pickPages(random(seed, streamPrefill), pool, requests, pages)
	targets := pickPages(random(seed, streamDecode), pool, requests, pages)
	want := make([]origin, pool)
	for round := range rounds {
		from := shiftPages(sources, pool, round)
		for i := range requests {
			for k := range pages {
				for region := range s.regions() {
					copy(dst.page(region, targets[i][k]), src.page(region, from[i][k]))
				}
			}
		}
		for i := range requests {
			arrive(want, request{room: rooms[round*requests+i], sources: from[i], targets: targets[i]})
		}
	}
	return dst, want
}

// Every single byte that is wrong is found, and named.
func TestVerify(t *testing.T) {
	s := shape{layers: 2, kvHeads: 1, headDim: 2, elemBytes: 2, pageTokens: 4}
	rapid.Check(t, func(t *rapid.T) {
		requests, pages := rapid.IntRange(1, 4).Draw(t, "requests"), rapid.IntRange(1, 5).Draw(t, "pages")
		pool := requests*pages + rapid.IntRange(1, 6).Draw(t, "spare")
		seed := rapid.Uint64().Draw(t, "seed")
		m, want := sent(s, pool, requests, pages, rapid.IntRange(1, 3).Draw(t, "rounds"), seed)
		if err := verify(context.Background(), m, s, seed, want); err != nil {
			t.Fatal(err)
		}

		region, page := rapid.IntRange(0, s.regions()-1).Draw(t, "region"), rapid.IntRange(0, pool-1).Draw(t, "page")
		off := rapid.IntRange(0, s.pageBytes()-1).Draw(t, "offset")
		flip := byte(rapid.IntRange(1, 255).Draw(t, "flip"))
		b := m.page(region, int32(page))
		was := b[off]
		b[off] ^= flip
		err := verify(context.Background(), m, s, seed, want)
		var got *mismatch
		if !errors.As(err, &got) {
			t.Fatalf("byte %d of page %d in region %d is wrong: %v", off, page, region, err)
		}
		if expect := (mismatch{want[page].room, region, s.regionName(region), page, off, was ^ flip, was}); *got != expect {
			t.Fatalf("%+v, want %+v", *got, expect)
		}
	})
}

// Pages that were swapped, sent for another region, shifted or never sent are found.
func TestVerifyMisplaced(t *testing.T) {
	s := llama3(2)
	const seed = 3
	for name, spoil := range map[string]func(m *flat, a, b int32){
		"swapped": func(m *flat, a, b int32) {
			x := bytes.Clone(m.page(1, a))
			copy(m.page(1, a), m.page(1, b))
			copy(m.page(1, b), x)
		},
		"another region": func(m *flat, a, _ int32) { copy(m.page(1, a), m.page(2, a)) },
		"shifted":        func(m *flat, a, _ int32) { copy(m.page(1, a)[8:], bytes.Clone(m.page(1, a))) },
		"never sent":     func(m *flat, a, _ int32) { clear(m.page(1, a)) },
		"half sent":      func(m *flat, a, _ int32) { clear(m.page(1, a)[s.pageBytes()/2:]) },
	} {
		m, want := sent(s, 12, 2, 4, 2, seed)
		var pages []int32
		for p, o := range want {
			if o.room != 0 {
				pages = append(pages, int32(p))
			}
		}
		spoil(m, pages[0], pages[1])
		var got *mismatch
		if err := verify(context.Background(), m, s, seed, want); !errors.As(err, &got) || got.region != 1 || got.page != int(pages[0]) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestVerifyStops(t *testing.T) {
	m, want := sent(llama3(1), 3, 1, 1, 1, 1)
	ctx, cancel := context.WithCancelCause(context.Background())
	why := errors.New("why")
	cancel(why)
	if err := verify(ctx, m, m.shape, 1, want); !errors.Is(err, why) {
		t.Error(err)
	}
}

func TestShape(t *testing.T) {
	s := llama3(llama3Layers)
	if s.regions() != 64 || s.pageBytes() != 32<<10 || s.bytes(64) != 128<<20 {
		t.Errorf("%d regions, pages of %d bytes, %d bytes in 64 pages", s.regions(), s.pageBytes(), s.bytes(64))
	}
	if a, b := s.regionName(31), s.regionName(32); a != "K of layer 31" || b != "V of layer 0" {
		t.Errorf("region 31 is %s, region 32 is %s", a, b)
	}
}

func BenchmarkVerify(b *testing.B) {
	m, want := sent(llama3(4), 65, 4, 16, 1, 1)
	b.SetBytes(m.shape.bytes(m.pages))
	for b.Loop() {
		if err := verify(context.Background(), m, m.shape, 1, want); err != nil {
			b.Fatal(err)
		}
	}
}
