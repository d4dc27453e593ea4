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

// dealSides is an MLA prefill of three layers, and rank 1 of a decode of DCP 2: pages of 4
// tokens of 64 bytes.
func dealSides() (*registry.Layout, *registry.Peer) {
	l, p := sides(3, 3)
	l.MLA, l.PageSize = true, 4
	p.Ranks.TP, p.Ranks.EngineRank, p.Ranks.DCP, p.Ranks.DCPRank = 2, 1, 2, 1
	return l, p
}

func TestPlanDeal(t *testing.T) {
	dealt := deal{srcTokens: 4, dstTokens: 4, ranks: 2, rank: 1}
	all := deal{srcTokens: 4, dstTokens: 8, ranks: 1}
	for _, c := range []struct {
		name  string
		edit  func(*registry.Layout, *registry.Peer)
		deals []deal // of the segments
		pairs []int  // of each
	}{
		{"no draft", nil, []deal{dealt}, []int{3}},
		{"hybrid MLA", func(l *registry.Layout, _ *registry.Peer) { l.MLA, l.HybridMLA = false, true }, []deal{dealt}, []int{3}},
		{"draft of 0.5.18", func(l *registry.Layout, _ *registry.Peer) { l.DraftRegions = 1 }, []deal{dealt}, []int{3}},
		{"draft of 0.5.20", func(l *registry.Layout, p *registry.Peer) {
			l.DraftRegions, p.KV[2].ItemLen = 1, 512
		}, []deal{dealt, all}, []int{2, 1}},
		{"several kinds", func(_ *registry.Layout, p *registry.Peer) { p.KV[0].Kind = registry.DRAM }, []deal{dealt, dealt}, []int{1, 2}},
		{"a draft more at the decode", func(_ *registry.Layout, p *registry.Peer) { p.KV = regions(4, 1<<40) }, []deal{dealt}, []int{3}},
		{"ids on one side", func(l *registry.Layout, _ *registry.Peer) { withLayers(l.KV, 0, 1, 2) }, []deal{dealt}, []int{3}},
	} {
		t.Run(c.name, func(t *testing.T) {
			l, p := dealSides()
			if c.edit != nil {
				c.edit(l, p)
			}
			plan := mustPlan(t, l, p)
			var deals []deal
			var pairs []int
			for i := range plan.segments {
				s := &plan.segments[i]
				deals, pairs = append(deals, s.deal), append(pairs, len(s.pairs))
				if q := s.pairs[0]; q.len != 64 || !q.whole() || s.preparable() {
					t.Errorf("pair %+v, preparable %t", q, s.preparable())
				}
			}
			if !slices.Equal(deals, c.deals) || !slices.Equal(pairs, c.pairs) || !plan.dealsTokens() {
				t.Errorf("%+v of %v pairs, expected %+v of %v", deals, pairs, c.deals, c.pairs)
			}
			if src, dst := plan.limits(); src != 64 || dst > 64 {
				t.Errorf("%d pages and %d", src, dst)
			}
		})
	}
}

func TestPlanDealRefuses(t *testing.T) {
	for _, c := range []struct {
		name string
		edit func(*registry.Layout, *registry.Peer)
		want error
		text string
	}{
		{"shards", func(l *registry.Layout, _ *registry.Peer) { l.ShardKV = true }, nixlkv.ErrTopology, "shards its KV cache"},
		{"no page size", func(l *registry.Layout, _ *registry.Peer) { l.PageSize = 0 }, nixlkv.ErrRegions, "pages of 0 tokens"},
		{"no such rank", func(_ *registry.Layout, p *registry.Peer) { p.Ranks.DCPRank = 2 }, nixlkv.ErrTopology, "DCP rank 2 of 2"},
		{"a page of no tokens", func(l *registry.Layout, _ *registry.Peer) { l.PageSize = 3 }, nixlkv.ErrStride, "256 bytes and 3 tokens at the prefill"},
		{"longer pages", func(_ *registry.Layout, p *registry.Peer) { p.KV[1].ItemLen = 512 },
			nixlkv.ErrStride, "PD DCP source/destination KV geometry differs"},
		{"a draft of other pages", func(l *registry.Layout, p *registry.Peer) { l.DraftRegions, p.KV[2].ItemLen = 1, 768 },
			nixlkv.ErrStride, "768 bytes and 8 tokens at the decode"},
		{"fewer regions", func(_ *registry.Layout, p *registry.Peer) { p.KV = p.KV[:2] }, nixlkv.ErrRegions, "fewer KV regions"},
		{"an MHA pool", func(l *registry.Layout, _ *registry.Peer) { l.MLA = false }, nixlkv.ErrTopology, "unsupported DCP topology"},
	} {
		t.Run(c.name, func(t *testing.T) {
			l, p := dealSides()
			c.edit(l, p)
			plan, err := planPeer(l, p)
			if plan != nil || !errors.Is(err, c.want) {
				t.Fatalf("%+v, %v, expected %v", plan, err, c.want)
			}
			mustName(t, err, l, p, c.text)
		})
	}
}

// What a decode tells of a room, and the caller of its tokens, is checked before anything is
// posted.
func TestCheckDealtRoom(t *testing.T) {
	l, p := dealSides()
	plan := mustPlan(t, l, p)
	l.DraftRegions, p.KV[2].ItemLen = 1, 512
	drafted := mustPlan(t, l, p)
	for _, c := range []struct {
		name   string
		plan   *peerPlan
		room   Plan
		prefix int
		list   []int32
		want   error
		text   string
	}{
		{"good", plan, Plan{Pages: 4, Tokens: 16}, 8, []int32{3, 9}, nil, ""},
		{"none", plan, Plan{}, 7, nil, nil, ""},
		{"one token of another rank", plan, Plan{Pages: 1, Tokens: 1}, 0, nil, nil, ""},
		{"the same with a draft", drafted, Plan{Pages: 1, Tokens: 1}, 0, nil, nixlkv.ErrPageCount, "required=1, provided=0"},
		{"tokens not told", plan, Plan{Pages: 1}, 0, []int32{1}, nixlkv.ErrPageCount, "PD DCP transfer requires num_kv_tokens"},
		{"more tokens than pages", plan, Plan{Pages: 2, Tokens: 9}, 0, []int32{1, 2}, nixlkv.ErrPageCount, "9 tokens in 2 pages of 4"},
		{"no end of tokens", plan, Plan{Pages: 2, Tokens: math.MaxInt}, 0, []int32{1, 2}, nixlkv.ErrPageCount, "in 2 pages of 4"},
		{"prefix of the page size alone", plan, Plan{Pages: 1, Tokens: 4}, 4, []int32{1}, nixlkv.ErrTopology, "align to the virtual DCP page size (8), got 4"},
		{"negative prefix", plan, Plan{Pages: 1, Tokens: 4}, -8, []int32{1}, nixlkv.ErrPageCount, "a prefix of -8 tokens"},
		{"too few pages", plan, Plan{Pages: 3, Tokens: 10}, 0, []int32{1}, nixlkv.ErrPageCount, "Insufficient destination DCP pages: required=2, provided=1"},
		{"the last token is another rank's", plan, Plan{Pages: 3, Tokens: 9}, 0, []int32{1}, nil, ""},
		{"which the draft needs", drafted, Plan{Pages: 3, Tokens: 9}, 0, []int32{1}, nixlkv.ErrPageCount, "required=2, provided=1"},
		{"page out of range", plan, Plan{Pages: 1, Tokens: 4}, 0, []int32{64}, nixlkv.ErrPageRange, "destination page 64"},
	} {
		t.Run(c.name, func(t *testing.T) {
			err := c.plan.checkRoom(c.room, 4, c.prefix, c.list)
			if !errors.Is(err, c.want) || (err == nil) != (c.want == nil) {
				t.Fatalf("%v, expected %v", err, c.want)
			}
			if err != nil && !strings.Contains(err.Error(), c.text) {
				t.Errorf("%v\ndoes not say %q", err, c.text)
			}
		})
	}
}

func TestDealtChunks(t *testing.T) {
	d := deal{srcTokens: 4, dstTokens: 4, ranks: 2, rank: 1}
	all := deal{srcTokens: 4, dstTokens: 8, ranks: 1}
	for _, c := range []struct {
		name string
		d    deal
		c    chunkPages
		want []run
	}{
		{"every second token", d, chunkPages{src: []int32{7, 2}, dst: []int32{9}, at: tokenSpan{0, 0, 8}}, []run{{29, 36, 1}, {31, 37, 1}, {9, 38, 1}, {11, 39, 1}}},
		{"from the middle", d, chunkPages{src: []int32{7}, dst: []int32{9, 3}, at: tokenSpan{8, 8, 3}}, []run{{29, 12, 1}}},
		{"none", d, chunkPages{src: []int32{7}, dst: []int32{9}, at: tokenSpan{0, 0, 1}}, nil},
		{"no tokens", d, chunkPages{src: []int32{7}, dst: []int32{9}, at: tokenSpan{0, 4, 0}}, nil},
		{"all, merged", all, chunkPages{src: []int32{7, 8, 2}, dst: []int32{9, 4}, at: tokenSpan{0, 0, 11}}, []run{{28, 72, 8}, {8, 32, 3}}},
	} {
		if err := c.d.check(c.c); err != nil {
			t.Errorf("%s: %v", c.name, err)
		}
		if got := c.d.appendRuns(nil, c.c); !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, expected %v", c.name, got, c.want)
		}
	}
	for _, c := range []struct {
		name string
		c    chunkPages
		want error
	}{
		{"more tokens than pages", chunkPages{src: []int32{7}, dst: []int32{9}, at: tokenSpan{0, 0, 5}}, nixlkv.ErrPageCount},
		{"too few pages", chunkPages{src: []int32{7}, dst: []int32{9}, at: tokenSpan{0, 8, 4}}, nixlkv.ErrPageCount},
		{"prefix", chunkPages{src: []int32{7}, dst: []int32{9}, at: tokenSpan{4, 0, 4}}, nixlkv.ErrTopology},
		{"past counting", chunkPages{src: []int32{7}, dst: []int32{9}, at: tokenSpan{0, math.MaxUint64 - 1, 4}}, nixlkv.ErrPageCount},
	} {
		if err := d.check(c.c); !errors.Is(err, c.want) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}
