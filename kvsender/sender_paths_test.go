package kvsender

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/internal/wire"
	"github.com/nixlkv/nixlkv/nixl"
	"github.com/nixlkv/nixlkv/registry"
)

// The ways to send that are not whole pages of one kind, over both engines and in both
// dialects: what arrives, and what the decode is told of it.

// kvTags gives the notifications of chunks that have come of a room, in the order of chunks and
// parts, as text without the room.
func (d *decode) kvTags(id nixlkv.Room) []string {
	var out []string
	for _, g := range d.tags {
		last := 0
		if g.Last {
			last = 1
		}
		switch {
		case g.Room != id:
		case g.Kind == wire.TagKV:
			out = append(out, fmt.Sprintf("kv_%d_%d_%d", g.Chunk, last, g.Source))
		case g.Kind == wire.TagKVPart:
			out = append(out, fmt.Sprintf("kv_%d_%d_%d_part_%d_%d", g.Chunk, last, g.Source, g.Part, g.Parts))
		}
	}
	slices.Sort(out)
	return out
}

// finish waits until the decode has been told that a room is complete, and checks how: by
// these notifications and the one of the aux slot, or by status.
func (p *pairUp) finish(t *testing.T, s *Sender, want ...string) {
	t.Helper()
	ok(t, s.Wait(within(t)))
	if p.d.frames == 25 {
		if st := p.d.status(s.Room()); st.Status != wire.PollSuccess {
			t.Errorf("status %+v", st)
		}
	} else {
		aux := func(g wire.Tag) bool {
			return g.Room == s.Room() && (g.Kind == wire.TagAux || g.Kind == wire.TagAuxNoKV)
		}
		p.d.until("notifications", func() bool {
			return len(p.d.kvTags(s.Room())) >= len(want) && slices.ContainsFunc(p.d.tags, aux)
		})
		if got := p.d.kvTags(s.Room()); !slices.Equal(got, want) {
			t.Errorf("room %d: told %q, expected %q", s.Room(), got, want)
		}
	}
	ok(t, s.Close())
}

// start opens a room and sends pages in chunks.
func (p *pairUp) start(t *testing.T, id nixlkv.Room, plan Plan, to []int32, chunks ...[]int32) *Sender {
	t.Helper()
	s := open(t, p.m, id)
	p.d.tell(id, to, 2)
	plan.Aux = Aux(5)
	for _, c := range chunks {
		plan.Pages += len(c)
	}
	ok(t, s.Begin(plan))
	for i, c := range chunks {
		if i < len(chunks)-1 {
			ok(t, s.Send(c))
		} else {
			ok(t, s.Finish(c, nil))
		}
	}
	return s
}

// wantKV checks the decode's KV memory: what is in want, and zeros.
func (d *decode) wantKV(want map[int][]byte) {
	d.t.Helper()
	mem := make([]byte, len(d.mem.kv.Bytes()))
	for at, b := range want {
		copy(mem[at:], b)
	}
	if !bytes.Equal(d.mem.kv.Bytes(), mem) {
		d.t.Error("the decode's memory is not what it ought to be")
	}
}

// at is where a page of a region lies in the decode's memory, pages being n bytes.
func at(region int, page int32, n int) int { return region*kitPages*kitPage + int(page)*n }

func TestSeveralKinds(t *testing.T) {
	eachDialect(t, func(t *testing.T, e *nixl.Engine, frames int) {
		kinds := []wire.Kind{wire.VRAM, wire.DRAM, wire.DRAM, wire.VRAM}
		p := newPair(t, e, frames, WithHostVRAM())
		p.d.close()
		p.d = &decode{t: t, mem: p.d.mem, frames: frames, came: make(chan struct{}, 1)}
		p.d.startKinds(e, p.m, kinds)
		g := p.d.registration()
		g.Kinds = kinds
		// Pages of the host pool are longer, and it has fewer.
		g.ItemLens, g.Slots = []uint64{kitPage, kitPage + 64, 2 * kitPage, kitPage}, kitPages/2
		p.d.register(g)
		s := p.start(t, 3, Plan{}, []int32{3, 4, 30, 10, 11}, []int32{1, 2, 3}, []int32{8, 9})
		p.finish(t, s, "kv_0_0_0_part_0_3", "kv_0_0_0_part_1_3", "kv_0_0_0_part_2_3", "kv_1_1_0_part_0_3", "kv_1_1_0_part_1_3", "kv_1_1_0_part_2_3")
		want := map[int][]byte{}
		for r, n := range g.ItemLens {
			for i, page := range []int32{3, 4, 30, 10, 11} {
				want[at(r, page, int(n))] = p.src.page(r, []int32{1, 2, 3, 8, 9}[i])
			}
		}
		p.d.wantKV(want)
		if m := s.Metrics(); m.Pages != 5*4 || m.Transfers != 7 || m.Bytes != 5*4*kitPage+kitAux {
			t.Errorf("metrics %+v", m)
		}
	})
}

// startKinds starts a decode whose regions are of several kinds.
func (d *decode) startKinds(e *nixl.Engine, m *Manager, kinds []wire.Kind) {
	d.t.Helper()
	d.regions = nil
	for i, k := range kinds {
		r := nixl.HostRange(d.mem.kv, i*kitPages*kitPage, kitPages*kitPage)
		if k == wire.VRAM {
			r = r.As(nixl.VRAM, 0)
		}
		d.regions = append(d.regions, r)
	}
	d.start(e, m, nixl.WithHostVRAM())
}

// A decode of another TP size takes its heads, here into host memory: half of every token.
func TestHeadsToAnotherTP(t *testing.T) {
	eachDialect(t, func(t *testing.T, e *nixl.Engine, frames int) {
		p := newPairOf(t, e, frames, func(l *registry.Layout) { l.KVHeads, l.TotalKVHeads = 2, 2 })
		g := p.d.registration()
		g.TPSize, g.EngineRank = 2, 1
		g.ItemLens, g.Slots = []uint64{kitPage / 2, kitPage / 2, 200, 144}, kitPages
		p.d.register(g)
		src, dst := []int32{1, 2, 3, 4, 9}, []int32{3, 4, 5, 40, 10}
		s := p.start(t, 3, Plan{}, dst, src[:4], src[4:])
		p.finish(t, s, "kv_0_0_0", "kv_1_1_0")
		const tokens, head = 16, kitPage / 16 / 2
		want := map[int][]byte{}
		for r, n := range g.ItemLens {
			for i := range src {
				for k := range tokens {
					want[at(r, dst[i], int(n))+k*head] = p.src.page(r, src[i])[(2*k+1)*head:][:head]
				}
			}
		}
		p.d.wantKV(want)
		if m := s.Metrics(); m.Pages != 5*4 || m.Transfers != 3 || m.Descriptors != 5*4*tokens+1 || m.Bytes != 5*4*kitPage/2+kitAux {
			t.Errorf("metrics %+v", m)
		}
	})
}

// Heads that cannot be dealt out: the decode is refused, its rooms fail on both sides with
// both geometries, and another decode is served.
func TestUnevenHeads(t *testing.T) {
	eachDialect(t, func(t *testing.T, e *nixl.Engine, frames int) {
		p := newPairOf(t, e, frames, func(l *registry.Layout) { l.KVHeads, l.TotalKVHeads = 4, 4 })
		g := p.d.registration()
		g.TPSize, g.EngineRank = 3, 1
		p.d.register(g)
		other := newDecode(t, e, p.m, newKitMemory(t, 4), frames)
		defer other.mem.free(t)
		defer other.close()
		other.register(other.registration())
		s := open(t, p.m, 3)
		p.d.tell(3, []int32{1}, 0)
		ok(t, s.Begin(Plan{Pages: 1, Aux: Aux(0)}))
		ok(t, s.Finish([]int32{1}, nil))
		err := s.Wait(within(t))
		var ge *GeometryError
		if !errors.As(err, &ge) || ge.Agent != p.d.agent.Name() || !strings.Contains(ge.Prefill, "MHA of 4 KV heads, TP rank 0 of 1") || !strings.Contains(ge.Decode, "engine rank 1, TP 3") {
			t.Errorf("%v", err)
		}
		wantFailure(t, s, p.d, nixlkv.ErrTopology, "4 KV heads are not dealt out evenly to the decode's TP 3")
		q := &pairUp{m: p.m, src: p.src, d: other}
		q.finish(t, q.start(t, 4, Plan{}, []int32{9}, []int32{2}), "kv_0_1_0")
		other.compare(p.src, []int32{2}, []int32{9}, 5, 2)
	})
}

// dcpPair is an MLA prefill, its last region a draft's, and rank 1 of a decode of DCP 2 that
// has all of the draft: a token is 16 bytes.
func dcpPair(t *testing.T, e *nixl.Engine, frames int) *pairUp {
	t.Helper()
	p := newPairOf(t, e, frames, func(l *registry.Layout) { l.MLA, l.DraftRegions = true, 1 })
	g := p.d.registration()
	g.TPSize, g.EngineRank, g.DCPSize, g.DCPRank = 2, 1, 2, 1
	g.ItemLens[3], g.Slots = 2*kitPage, kitPages/2
	p.d.register(g)
	return p
}

func TestTokensToDCP(t *testing.T) {
	eachDialect(t, func(t *testing.T, e *nixl.Engine, frames int) {
		p := dcpPair(t, e, frames)
		// 16 tokens a page: two full pages and 3 tokens, in three chunks.
		src, dst := []int32{5, 6, 9}, []int32{7, 2}
		s := p.start(t, 3, Plan{Tokens: 35}, dst, src[:1], src[1:2], src[2:])
		p.finish(t, s, "kv_0_0_0_part_0_2", "kv_0_0_0_part_1_2", "kv_1_0_0_part_0_2", "kv_1_0_0_part_1_2", "kv_2_1_0_part_0_2", "kv_2_1_0_part_1_2")
		want := map[int][]byte{}
		token := func(region, q int) []byte { return p.src.page(region, src[q/16])[q%16*16:][:16] }
		for q := range 35 {
			if q%2 == 1 {
				for r := range 3 {
					want[at(r, dst[q/32], kitPage)+q/2%16*16] = token(r, q)
				}
			}
			want[at(3, dst[q/32], 2*kitPage)+q%32*16] = token(3, q)
		}
		p.d.wantKV(want)
	})
}

// A rank that gets no token of a chunk is told of it nevertheless; a draft alone is one part.
func TestNoTokenForARank(t *testing.T) {
	eachDialect(t, func(t *testing.T, e *nixl.Engine, frames int) {
		p := dcpPair(t, e, frames)
		s := p.start(t, 3, Plan{Tokens: 17}, []int32{7}, []int32{5}, []int32{6})
		p.finish(t, s, "kv_0_0_0_part_0_2", "kv_0_0_0_part_1_2", "kv_1_1_0")
		p = newPairOf(t, e, frames, func(l *registry.Layout) { l.MLA = true })
		g := p.d.registration()
		g.TPSize, g.EngineRank, g.DCPSize, g.DCPRank = 2, 1, 2, 1
		p.d.register(g)
		s = p.start(t, 4, Plan{Tokens: 1}, []int32{7}, []int32{5})
		p.finish(t, s, "kv_0_1_0")
		p.d.wantKV(nil)
		if m := s.Metrics(); m.Transfers != 1 || m.Bytes != kitAux {
			t.Errorf("metrics %+v", m)
		}
	})
}

// What a room lacks for DCP is found before anything of it is written.
func TestDCPRoomRefused(t *testing.T) {
	eachDialect(t, func(t *testing.T, e *nixl.Engine, frames int) {
		p := dcpPair(t, e, frames)
		for i, c := range []struct {
			tokens, prefix int
			to             []int32
			want           error
			text           string
		}{
			{0, 0, []int32{1}, nixlkv.ErrPageCount, "requires num_kv_tokens"},
			{33, 0, []int32{1, 2}, nixlkv.ErrPageCount, "33 tokens in 2 pages of 16"},
			{32, 16, []int32{1}, nixlkv.ErrTopology, "virtual DCP page size (32), got 16"},
			{32, 0, nil, nixlkv.ErrPageCount, "Insufficient destination DCP pages: required=1, provided=0"},
			{32, 0, []int32{32}, nixlkv.ErrPageRange, "destination page 32"},
			{32, 0, []int32{3, 3}, nixlkv.ErrPageRange, "twice"},
		} {
			id := nixlkv.Room(10 + i)
			s := open(t, p.m, id)
			p.d.tell(id, c.to, 2, func(m *wire.Metadata) { m.Prefix = c.prefix })
			if err := s.Begin(Plan{Pages: 2, Tokens: c.tokens, Aux: Aux(5)}); err != nil {
				wantFailure(t, s, p.d, c.want, c.text)
				continue
			}
			ok(t, s.Send([]int32{1}))
			if err := s.Finish([]int32{2}, nil); err != nil && !errors.As(err, new(*KVTransferError)) {
				t.Error(err)
			}
			wantFailure(t, s, p.d, c.want, c.text)
		}
		p.d.wantKV(nil)
	})
}

// A shard sends the pages that lie with it, under its own numbers, to their places among all,
// and numbers only the chunks that have some.
func TestShard(t *testing.T) {
	eachDialect(t, func(t *testing.T, e *nixl.Engine, frames int) {
		p := newPairOf(t, e, frames, func(l *registry.Layout) {
			l.MLA, l.ShardKV, l.Ranks.TP, l.Ranks.TPRank, l.Ranks.EngineRank = true, true, 2, 1, 1
		})
		g := p.d.registration()
		g.TPSize = 2
		p.d.register(g)
		to := []int32{3, 4, 9, 10, 11, 20, 30}
		s := p.start(t, 3, Plan{}, to, []int32{1, 2, 127}, []int32{8}, []int32{5, 6}, []int32{4})
		p.finish(t, s, "kv_0_0_1", "kv_1_0_1")
		if frames == 24 {
			i := slices.IndexFunc(p.d.tags, func(g wire.Tag) bool { return g.Kind == wire.TagAuxNoKV })
			if i < 0 || p.d.tags[i].Chunks != 2 || p.d.tags[i].Source != 1 {
				t.Errorf("tags %+v", p.d.tags)
			}
		}
		want := map[int][]byte{}
		for r := range 4 {
			want[at(r, 3, kitPage)], want[at(r, 9, kitPage)], want[at(r, 11, kitPage)] = p.src.page(r, 0), p.src.page(r, 63), p.src.page(r, 2)
		}
		p.d.wantKV(want)
		s = open(t, p.m, 4)
		p.d.tell(4, []int32{1}, 0)
		ok(t, s.Begin(Plan{Pages: 1, Aux: Aux(0)}))
		if err := s.Finish([]int32{2 * kitPages}, nil); !errors.Is(err, nixlkv.ErrPageRange) {
			t.Errorf("a page that no shard has: %v", err)
		}
		wantFailure(t, s, p.d, nixlkv.ErrPageRange, "source page 128")
	})
}

// Heads and segments cost no allocations a chunk: what a worker builds lists in is its own.
func TestPathsAllocateNothing(t *testing.T) {
	heads, hp := headSides(8, 1, 0, 4, 3)
	tokens, tp := dealSides()
	tokens.DraftRegions, tp.KV[2].ItemLen = 1, 512
	kinds, kp := sides(4, 4)
	kp.KV[1].Kind = registry.DRAM
	for _, c := range []struct {
		name string
		plan *peerPlan
		c    chunkPages
	}{
		{"heads", mustPlan(t, heads, hp), chunkPages{src: numbers(32), dst: numbers(32)}},
		{"tokens", mustPlan(t, tokens, tp), chunkPages{src: numbers(32), dst: numbers(16), at: tokenSpan{n: 128}}},
		{"kinds", mustPlan(t, kinds, kp), chunkPages{src: numbers(32), dst: numbers(32)}},
	} {
		var w worker
		if got := testing.AllocsPerRun(10, func() {
			if err := checkPages(c.plan, c.c); err != nil {
				t.Fatal(err)
			}
			w.divide(c.plan, c.c)
			for _, x := range w.parts {
				s := &c.plan.segments[x.segment]
				w.from, w.to = s.appendDescs(w.from[:0], w.to[:0], w.runs[x.from:x.to])
				if s.preparable() {
					w.fromIdx, w.toIdx = s.appendIndices(w.fromIdx[:0], w.toIdx[:0], c.c)
				}
			}
		}); got != 0 {
			t.Errorf("%s: %v allocations a chunk", c.name, got)
		}
	}
	chunk := chunk{pages: numbers(8), positions: numbers(8)}
	var w worker
	if got := testing.AllocsPerRun(10, func() {
		var err error
		if _, w.pages, err = chunk.destinations(numbers8, w.pages); err != nil {
			t.Fatal(err)
		}
	}); got != 0 {
		t.Errorf("shards: %v allocations a chunk", got)
	}
}

var numbers8 = numbers(8)
