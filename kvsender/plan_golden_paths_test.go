package kvsender

import (
	"errors"
	"maps"
	"slices"
	"testing"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/nixl"
	"github.com/nixlkv/nixlkv/registry"
)

// goldenHeads is a transfer between TP sizes: of 4 layers, divided into stages, and Draft
// layers more at the decode.
type goldenHeads struct {
	c        goldenHeadCase
	outcomes []goldenOutcome[goldenSlice]
}

type goldenHeadCase struct {
	Heads, P, D, Page, PP, Stage, Draft int
	Head                                uint64
	PRank                               int `json:"p_rank"`
	DRank                               int `json:"d_rank"`
}

// goldenSlice says which region takes each of the prefill's, and which bytes of a token go
// where.
type goldenSlice struct {
	at          []int
	src, dst, n uint64
}

// goldenDCP is a chunk dealt out among DCP ranks.
type goldenDCP struct {
	c        goldenDCPCase
	outcomes []goldenOutcome[goldenTokens]
}

type goldenDCPCase struct {
	Page, N, Rank, Prefix, Offset, Tokens, Regions, Draft int
	Scale                                                 uint64
	Src, Dst                                              []int32
}

type goldenTokens struct {
	parts  []goldenRuns
	notifs []string // nil in 0.5.23
}

// goldenRuns is one transfer: the same runs of tokens in each of so many regions.
type goldenRuns struct {
	first, regions int
	runs           [][3]uint64
}

type goldenStage struct {
	ratios            []int
	first, end, draft int
	at                []int
}

func (g *goldenHeads) UnmarshalJSON(b []byte) error { return readRow(b, &g.c, &g.outcomes) }
func (s *goldenSlice) UnmarshalJSON(b []byte) error { return readRow(b, &s.at, &s.src, &s.dst, &s.n) }
func (g *goldenDCP) UnmarshalJSON(b []byte) error   { return readRow(b, &g.c, &g.outcomes) }
func (p *goldenTokens) UnmarshalJSON(b []byte) error {
	return readRow(b, &p.parts, &p.notifs)
}
func (r *goldenRuns) UnmarshalJSON(b []byte) error {
	return readRow(b, &r.first, &r.regions, &r.runs)
}
func (s *goldenStage) UnmarshalJSON(b []byte) error {
	return readRow(b, &s.ratios, &s.first, &s.end, &s.draft, &s.at)
}

// goldenRegions gives regions of pages of one length, where golden.py has them.
func goldenRegions(side uint64, n int, itemLen, pages uint64) []registry.Region {
	out := make([]registry.Region, n)
	for i := range out {
		out[i] = registry.Region{Base: side<<40 + uint64(i)<<20, Len: itemLen * pages, ItemLen: itemLen, LayerID: registry.NoLayer, Kind: registry.VRAM}
	}
	return out
}

func (c *goldenHeadCase) sides() (*registry.Layout, *registry.Peer) {
	each := 4 / c.PP
	l := &registry.Layout{
		KV: goldenRegions(1, 2*each, uint64(c.Page*max(1, c.Heads/c.P))*c.Head, 6), GPU: 1,
		PageSize: c.Page, TotalKVHeads: c.Heads, StartLayer: c.Stage * each,
		Ranks: registry.Ranks{TP: c.P, TPRank: c.PRank, PP: c.PP, PPRank: c.Stage},
	}
	p := &registry.Peer{
		Agent: "peer", KV: goldenRegions(2, 2*(4+c.Draft), uint64(c.Page*max(1, c.Heads/c.D))*c.Head, 5), GPU: 3,
		Ranks: registry.Ranks{TP: c.D, EngineRank: c.DRank},
	}
	return l, p
}

// expected gives SGLang's slice, and what this library does otherwise.
func (g *goldenHeads) expected() (s *goldenSlice, what string) {
	s = g.outcomes[0].result
	switch {
	case s == nil:
		return nil, "more ranks than heads on both sides"
	case g.c.PP == 1 || g.c.Draft == 0:
		return s, ""
	case g.c.Stage == 0:
		return s, "a draft, or uneven stages"
	case g.c.Draft == 2:
		// SGLang takes V as if the draft's layers were the model's.
		return &goldenSlice{[]int{2, 3, 6, 7}, s.src, s.dst, s.n}, "a draft as deep as a stage"
	}
	return s, ""
}

// Heads go where SGLang's releases put them, wherever they can and are right.
func TestHeadsGolden(t *testing.T) {
	tally := map[string]int{}
	for _, g := range readGolden(t).Heads {
		if len(g.outcomes) != 1 || !slices.Equal(g.outcomes[0].releases, []int{18, 19, 20, 21, 22, 23}) {
			t.Fatalf("%+v: releases differ", g)
		}
		l, p := g.c.sides()
		want, what := g.expected()
		tally[what]++
		plan, err := planPeer(l, p)
		if what == "a draft, or uneven stages" {
			if !errors.Is(err, nixlkv.ErrRegions) {
				t.Errorf("%+v: %v, expected %v", g.c, err, nixlkv.ErrRegions)
			}
			continue
		}
		if err != nil {
			t.Errorf("%+v: %v", g.c, err)
			continue
		}
		if want == nil { // every rank has the head, so the page goes as it is
			want = &goldenSlice{numbersOf(len(l.KV)), 0, 0, g.c.Head}
		}
		c := chunkPages{src: []int32{2, 0, 5}, dst: []int32{1, 4, 0}}
		got, bytes := map[uint64]uint64{}, map[uint64]uint64{}
		for i := range plan.segments {
			s := &plan.segments[i]
			from, to := s.appendDescs(nil, nil, appendRuns(nil, c))
			addBytes(got, from, to)
		}
		for i, j := range want.at {
			a, b := l.KV[i], p.KV[j]
			for k := range c.src {
				for token := range uint64(g.c.Page) {
					from := a.Base + uint64(c.src[k])*a.ItemLen + token*a.ItemLen/uint64(g.c.Page) + want.src
					to := b.Base + uint64(c.dst[k])*b.ItemLen + token*b.ItemLen/uint64(g.c.Page) + want.dst
					for x := range want.n {
						bytes[to+x] = from + x
					}
				}
			}
		}
		if !maps.Equal(got, bytes) {
			t.Errorf("%+v: %d bytes, expected %d of %+v", g.c, len(got), len(bytes), want)
		}
	}
	t.Logf("%v", tally)
	if len(tally) != 4 {
		t.Error("cases are missing")
	}
}

func numbersOf(n int) []int {
	out := make([]int, n)
	for i := range out {
		out[i] = i
	}
	return out
}

// addBytes notes which byte goes where.
func addBytes(m map[uint64]uint64, from, to []nixl.Desc) {
	for i := range from {
		for x := range from[i].Len {
			m[to[i].Addr+x] = from[i].Addr + x
		}
	}
}

func (c *goldenDCPCase) sides() (*registry.Layout, *registry.Peer) {
	const token = 8
	l := &registry.Layout{KV: goldenRegions(1, c.Regions, uint64(token*c.Page), 16), GPU: 1, MLA: true, PageSize: c.Page, DraftRegions: c.Draft}
	p := &registry.Peer{Agent: "peer", KV: goldenRegions(2, c.Regions, uint64(token*c.Page), 16), GPU: 3, Ranks: registry.Ranks{DCP: c.N, DCPRank: c.Rank}}
	for i := c.Regions - max(c.Draft, 1); i < c.Regions; i++ {
		p.KV[i].ItemLen *= c.Scale
		p.KV[i].Len *= c.Scale
	}
	return l, p
}

// Tokens go where SGLang's releases put them: what each can do, this library does, for a
// decode of any.
func TestDealGolden(t *testing.T) {
	tally := map[string]int{}
	for _, g := range readGolden(t).DCP {
		var want *goldenTokens
		for _, o := range g.outcomes {
			if o.result == nil {
				continue
			}
			if want != nil && !slices.EqualFunc(want.parts, o.result.parts, goldenRuns.equal) {
				t.Fatalf("%+v: releases differ", g.c)
			}
			want = o.result
		}
		l, p := g.c.sides()
		plan, err := planPeer(l, p)
		var parts []goldenRuns
		if err == nil {
			c := chunkPages{src: g.c.Src, dst: g.c.Dst, at: tokenSpan{uint64(g.c.Prefix), uint64(g.c.Offset * g.c.Page), uint64(g.c.Tokens)}}
			if err = checkPages(plan, c); err == nil {
				parts = partsOf(plan, c)
			}
		}
		if want == nil {
			tally["refused"]++
			if err == nil {
				t.Errorf("%+v: %v, expected to be refused", g.c, parts)
			}
			continue
		}
		tally["dealt out"]++
		if err != nil || !slices.EqualFunc(parts, want.parts, goldenRuns.equal) {
			t.Errorf("%+v: %v, %v, expected %v", g.c, parts, err, want.parts)
		}
		for _, o := range g.outcomes {
			if o.result != nil && o.result.notifs != nil && len(o.result.notifs) != max(1, len(parts)) {
				t.Errorf("%+v: %d parts, SGLang tells %q", g.c, len(parts), o.result.notifs)
			}
		}
	}
	t.Logf("%v", tally)
	if tally["refused"] == 0 || tally["dealt out"] == 0 {
		t.Error("cases are missing")
	}
}

func (r goldenRuns) equal(o goldenRuns) bool {
	return r.first == o.first && r.regions == o.regions && slices.Equal(r.runs, o.runs)
}

// partsOf gives what a worker would post of a chunk.
func partsOf(plan *peerPlan, c chunkPages) (parts []goldenRuns) {
	w := worker{}
	w.divide(plan, c)
	for _, x := range w.parts {
		g := goldenRuns{regions: len(plan.segments[x.segment].pairs)}
		for i := range x.segment {
			g.first += len(plan.segments[i].pairs)
		}
		for _, r := range w.runs[x.from:x.to] {
			g.runs = append(g.runs, [3]uint64{r.src, r.dst, r.n})
		}
		parts = append(parts, g)
	}
	return parts
}

// Stages of compressed MLA lie among the decode's groups of regions where SGLang's own
// arithmetic has them; its NIXL backend does not get that far.
func TestCompressedStageGolden(t *testing.T) {
	cases := readGolden(t).Stages
	for _, c := range cases {
		g := compressedGroups(c.ratios)
		l := &registry.Layout{MLA: true, CompressionRatios: c.ratios, StartLayer: c.first, EndLayer: c.end, Ranks: registry.Ranks{PP: 2}}
		l.KV = regions(len(c.at), 1<<32)
		p := &registry.Peer{KV: regions(g.onePool(), 1<<40)}
		if len(c.at) == 0 || len(c.at) == g.onePool() {
			continue // no regions, or all
		}
		got, err := pairRegions(l, p)
		if err != nil || !slices.Equal(got.at, c.at) || !got.exact {
			t.Errorf("%+v: %+v, %v", c, got, err)
		}
	}
	if len(cases) == 0 {
		t.Error("no cases")
	}
}
