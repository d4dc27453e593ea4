package kvsender

import (
	"math"
	"slices"
	"testing"

	"github.com/nixlkv/nixlkv/registry"
	"pgregory.net/rapid"
)

// Pages that SGLang's filters keep, in every release.
func TestFilterGolden(t *testing.T) {
	g := readGolden(t)
	if len(g.CP) == 0 || len(g.Shard) == 0 {
		t.Fatalf("%d and %d cases", len(g.CP), len(g.Shard))
	}
	for _, c := range g.CP {
		pages := make([]int32, c.n)
		for i := range pages {
			pages[i] = int32(100 + c.offset + i)
		}
		kept, at := filterCP(pages, c.offset, c.total, c.size, c.rank)
		if len(kept) != c.kept || at != c.position {
			t.Errorf("%+v: %d kept at %d", c, len(kept), at)
		}
		for i, p := range kept {
			if int(p) != 100+at+i {
				t.Errorf("%+v: page %d at position %d", c, p, at+i)
			}
		}
	}
	for _, c := range g.Shard {
		local, positions := filterShard(c.pages, c.offset, c.size, c.rank)
		if !slices.Equal(local, c.local) || !slices.Equal(positions, c.positions) {
			t.Errorf("%+v: pages %v at %v", c, local, positions)
		}
	}
}

// Over ranks and chunks, every page of a room goes exactly once, to its own place, however the
// pages are shared out.
func TestShareProperty(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		total := rapid.IntRange(0, 40).Draw(t, "pages")
		size := rapid.IntRange(1, 6).Draw(t, "ranks")
		by := rapid.SampledFrom([]shareBy{allPages, pageRanges, pageShards}).Draw(t, "share")
		room := rapid.Permutation(numbers(total)).Draw(t, "room")
		dst := rapid.Permutation(numbers(total)).Draw(t, "destinations")
		if by == allPages {
			size = 1
		}
		got := map[int32]int32{}
		for at := 0; at < total; {
			n := rapid.IntRange(1, total-at).Draw(t, "chunk")
			for rank := range size {
				s := share{by, size, rank}
				var c chunk
				c.pages, c.positions, c.offset = s.of(room[at:at+n], at, total)
				to, _, err := c.destinations(dst, nil)
				if err != nil {
					t.Fatal(err)
				}
				for i, p := range c.pages {
					if _, twice := got[to[i]]; twice {
						t.Fatalf("destination %d twice", to[i])
					}
					if uint64(p) >= s.pages(uint64(total)) {
						t.Fatalf("page %d", p)
					}
					if by == pageShards {
						p = p*int32(size) + int32(rank)
					}
					got[to[i]] = p
				}
			}
			at += n
		}
		for i, d := range dst {
			if s, ok := got[d]; !ok || s != room[i] {
				t.Fatalf("page %d to %d, expected %d", s, d, room[i])
			}
		}
	})
}

func numbers(n int) []int32 {
	out := make([]int32, n)
	for i := range out {
		out[i] = int32(i)
	}
	return out
}

// Which pages a rank sends follows from its place, in SGLang's order of questions.
func TestShareOf(t *testing.T) {
	for _, c := range []struct {
		name string
		l    registry.Layout
		all  bool
		want share
	}{
		{"alone", registry.Layout{}, true, share{allPages, 1, 0}},
		{"CP rank 0", registry.Layout{Ranks: registry.Ranks{CP: 3}}, false, share{allPages, 1, 0}},
		{"CP rank 2", registry.Layout{Ranks: registry.Ranks{CP: 3, CPRank: 2}}, false, share{noPages, 3, 2}},
		{"all CP ranks", registry.Layout{Ranks: registry.Ranks{CP: 3, CPRank: 2}}, true, share{pageRanges, 3, 2}},
		{"hybrid MLA, rank 0", registry.Layout{HybridMLA: true, Ranks: registry.Ranks{CP: 2}}, false, share{pageRanges, 2, 0}},
		{"hybrid MLA", registry.Layout{HybridMLA: true, Ranks: registry.Ranks{CP: 2, CPRank: 1}}, false, share{pageRanges, 2, 1}},
		{"hybrid MLA without CP", registry.Layout{HybridMLA: true, Ranks: registry.Ranks{TP: 2}}, false, share{allPages, 1, 0}},
		{"shards over TP", registry.Layout{ShardKV: true, MLA: true, Ranks: registry.Ranks{TP: 4, TPRank: 3}}, false, share{pageShards, 4, 3}},
		{"shards over CP", registry.Layout{ShardKV: true, MLA: true, Ranks: registry.Ranks{TP: 4, TPRank: 3, CP: 2, CPRank: 1}}, false, share{pageShards, 2, 1}},
		{"shards over CP, all ranks asked for", registry.Layout{ShardKV: true, Ranks: registry.Ranks{CP: 2}}, true, share{pageShards, 2, 0}},
		{"no shards of heads", registry.Layout{ShardKV: true, Ranks: registry.Ranks{TP: 4, TPRank: 3}}, false, share{allPages, 1, 0}},
		{"layers over CP", registry.Layout{SplitLayers: true, Ranks: registry.Ranks{CP: 2, CPRank: 1}}, false, share{allPages, 1, 0}},
		{"layers over CP, hybrid MLA, all ranks asked for", registry.Layout{SplitLayers: true, HybridMLA: true, Ranks: registry.Ranks{CP: 2, CPRank: 1}}, true, share{allPages, 1, 0}},
		{"one shard", registry.Layout{ShardKV: true, MLA: true}, false, share{allPages, 1, 0}},
	} {
		if got := shareOf(&c.l, c.all); got != c.want {
			t.Errorf("%s: %+v, expected %+v", c.name, got, c.want)
		}
	}
}

// The caller names pages of all shards, and keeps its slice.
func TestSharePages(t *testing.T) {
	if n := (share{pageShards, 4, 1}).pages(10); n != 40 {
		t.Errorf("%d pages of 4 shards", n)
	}
	if n := (share{pageShards, 1 << 16, 0}).pages(math.MaxUint64); n < 1<<31 {
		t.Errorf("%d pages", n)
	}
	if n := (share{pageRanges, 4, 1}).pages(10); n != 10 {
		t.Errorf("%d pages of 4 ranks", n)
	}
	pages := []int32{4, 5}
	for _, s := range []share{{allPages, 1, 0}, {pageRanges, 1, 0}, {pageShards, 1, 0}} {
		kept, _, at := s.of(pages, 7, 9)
		if !slices.Equal(kept, pages) && s.by != pageRanges || at != 7 && s.by != pageRanges {
			t.Errorf("%+v: %v at %d", s, kept, at)
		}
		if len(kept) > 0 && &kept[0] == &pages[0] {
			t.Errorf("%+v keeps the caller's slice", s)
		}
	}
}
