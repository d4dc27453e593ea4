package kvsender

import (
	"slices"
	"testing"

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
		in := chunkPages{src: c.pages}
		for i := range c.pages {
			in.dst = append(in.dst, int32(1000+c.offset+i)) // tells the position
		}
		out := filterShard(nil, nil, in, c.size, c.rank)
		var positions []int
		for _, d := range out.dst {
			positions = append(positions, int(d)-1000)
		}
		if !slices.Equal(out.src, c.local) || !slices.Equal(positions, c.positions) {
			t.Errorf("%+v: pages %v at %v", c, out.src, positions)
		}
	}
}

// Over ranks and chunks, every page of a room goes exactly once, to its own place.
func TestFilterProperty(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		total := rapid.IntRange(0, 40).Draw(t, "pages")
		size := rapid.IntRange(1, 6).Draw(t, "ranks")
		room := rapid.Permutation(numbers(total)).Draw(t, "room")
		dst := rapid.Permutation(numbers(total)).Draw(t, "destinations")
		byCP, byShard := map[int32]int32{}, map[int32]int32{}
		put := func(m map[int32]int32, dst, src int32) {
			if _, twice := m[dst]; twice {
				t.Fatalf("destination %d twice", dst)
			}
			m[dst] = src
		}
		for at := 0; at < total; {
			n := rapid.IntRange(1, total-at).Draw(t, "chunk")
			for rank := range size {
				kept, pos := filterCP(room[at:at+n], at, total, size, rank)
				c, err := chunkAt(kept, pos, dst)
				if err != nil {
					t.Fatal(err)
				}
				for i := range c.src {
					put(byCP, c.dst[i], c.src[i])
				}
				c, err = chunkAt(room[at:at+n], at, dst)
				if err != nil {
					t.Fatal(err)
				}
				c = filterShard(nil, nil, c, size, rank)
				for i := range c.src {
					put(byShard, c.dst[i], c.src[i]*int32(size)+int32(rank))
				}
			}
			at += n
		}
		for i, d := range dst {
			if s, ok := byCP[d]; !ok || s != room[i] {
				t.Fatalf("CP: page %d to %d, expected %d", s, d, room[i])
			}
			if s, ok := byShard[d]; !ok || s != room[i] {
				t.Fatalf("shards: page %d to %d, expected %d", s, d, room[i])
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

func TestFilterAlone(t *testing.T) {
	pages := []int32{4, 5}
	for _, size := range []int{0, 1} {
		if kept, at := filterCP(pages, 7, 9, size, 0); !slices.Equal(kept, pages) || at != 7 {
			t.Errorf("CP %d: %v at %d", size, kept, at)
		}
		if c := filterShard(nil, nil, chunkPages{pages, pages}, size, 0); !slices.Equal(c.src, pages) || !slices.Equal(c.dst, pages) {
			t.Errorf("%d shards: %v", size, c)
		}
	}
}
