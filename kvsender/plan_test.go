package kvsender

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/registry"
)

// sides is a prefill of n regions and a decode of m, equal otherwise.
func sides(n, m int) (*registry.Layout, *registry.Peer) {
	return &registry.Layout{KV: regions(n, 1<<32), GPU: 1}, &registry.Peer{Agent: "agent-7", KV: regions(m, 1<<40), GPU: 5}
}

// withLayers sets the layer ids.
func withLayers(r []registry.Region, ids ...int) {
	for i := range r {
		r[i].LayerID = ids[i]
	}
}

// withKind sets the memory kind of all regions.
func withKind(r []registry.Region, k registry.Kind) {
	for i := range r {
		r[i].Kind = k
	}
}

func TestPlanPairs(t *testing.T) {
	for _, c := range []struct {
		name string
		n, m int
		edit func(*registry.Layout, *registry.Peer)
		want []int // the decode's region of each of the prefill's
	}{
		{"by position", 4, 4, nil, []int{0, 1, 2, 3}},
		{"decode has a draft more", 4, 6, nil, []int{0, 1, 2, 3}},
		{"by layer, K and V", 4, 8, func(l *registry.Layout, p *registry.Peer) {
			withLayers(l.KV, 2, 3, 2, 3)
			withLayers(p.KV, 0, 1, 2, 3, 0, 1, 2, 3)
			l.Ranks.PP, l.Ranks.PPRank = 2, 1
		}, []int{2, 3, 6, 7}},
		{"by layer, in another order", 3, 3, func(l *registry.Layout, p *registry.Peer) {
			withLayers(l.KV, 7, 0, 7)
			withLayers(p.KV, 0, 7, 7)
		}, []int{1, 0, 2}},
		{"ids on one side only, without PP", 2, 4, func(l *registry.Layout, _ *registry.Peer) {
			withLayers(l.KV, 5, 6)
		}, []int{0, 1}},
		{"ids at the decode only, without PP", 2, 2, func(_ *registry.Layout, p *registry.Peer) {
			withLayers(p.KV, 1, 0)
		}, []int{0, 1}},
		{"same stage on both sides", 2, 2, func(l *registry.Layout, _ *registry.Peer) {
			l.Ranks.PP, l.Ranks.PPRank, l.StartLayer = 2, 1, 2
		}, []int{0, 1}},
		{"MLA stage by span", 2, 6, func(l *registry.Layout, _ *registry.Peer) {
			l.MLA, l.Ranks.PP, l.Ranks.PPRank, l.StartLayer = true, 3, 1, 3
		}, []int{3, 4}},
		{"MLA last stage with its draft", 3, 5, func(l *registry.Layout, _ *registry.Peer) {
			l.MLA, l.Ranks.PP, l.Ranks.PPRank, l.StartLayer, l.DraftRegions = true, 2, 1, 2, 1
		}, []int{2, 3, 4}},
		{"MLA first stage with a draft", 3, 5, func(l *registry.Layout, _ *registry.Peer) {
			l.MLA, l.Ranks.PP, l.DraftRegions = true, 2, 1
		}, []int{0, 1, 4}},
		{"MLA, other TP", 2, 2, func(l *registry.Layout, p *registry.Peer) {
			l.MLA, l.Ranks.TP, l.Ranks.TPRank, p.Ranks.TP, p.Ranks.EngineRank = true, 4, 3, 2, 1
		}, []int{0, 1}},
		{"hybrid MLA, other TP", 2, 2, func(l *registry.Layout, p *registry.Peer) {
			l.HybridMLA, l.Ranks.TP, l.Ranks.TPRank, p.Ranks.TP = true, 2, 1, 4
		}, []int{0, 1}},
		{"equal TP, a later DP group", 2, 2, func(l *registry.Layout, p *registry.Peer) {
			l.Ranks.TP, l.Ranks.TPRank, p.Ranks.TP, p.Ranks.EngineRank = 2, 1, 2, 5
		}, []int{0, 1}},
		{"equal DCP", 2, 2, func(l *registry.Layout, p *registry.Peer) {
			l.MLA, l.Ranks.DCP, l.Ranks.DCPRank, p.Ranks.DCP, p.Ranks.DCPRank = true, 2, 1, 2, 1
		}, []int{0, 1}},
		{"compressed MLA", 5, 5, func(l *registry.Layout, _ *registry.Peer) {
			l.MLA, l.CompressionRatios = true, []int{0, 4, 128, 4}
		}, []int{0, 1, 2, 3, 4}},
		{"compressed MLA, decode has a draft more", 5, 6, func(l *registry.Layout, _ *registry.Peer) {
			l.MLA, l.CompressionRatios = true, []int{0, 4, 128, 4}
		}, []int{0, 1, 2, 3, 4}},
		{"compressed MLA of two pools", 8, 9, func(l *registry.Layout, _ *registry.Peer) {
			l.MLA, l.CompressionRatios = true, []int{0, 4, 128, 4}
		}, []int{0, 1, 2, 3, 4, 5, 6, 7}},
		{"all host memory", 2, 2, func(l *registry.Layout, p *registry.Peer) {
			withKind(l.KV, registry.DRAM)
			withKind(p.KV, registry.DRAM)
		}, []int{0, 1}},
		{"wider pages", 2, 2, func(_ *registry.Layout, p *registry.Peer) {
			p.KV[1].ItemLen = 512
		}, []int{0, 1}},
	} {
		t.Run(c.name, func(t *testing.T) {
			l, p := sides(c.n, c.m)
			if c.edit != nil {
				c.edit(l, p)
			}
			plan := mustPlan(t, l, p)
			if len(plan.segments) != 1 || len(plan.segments[0].pairs) != c.n {
				t.Fatalf("plan %+v, expected one segment of %d pairs", plan, c.n)
			}
			s := &plan.segments[0]
			for i, q := range s.pairs {
				from, to := l.KV[i], p.KV[c.want[i]]
				want := pair{src: from.Base, srcStride: from.ItemLen, dst: to.Base, dstStride: to.ItemLen, len: from.ItemLen, rows: 1}
				if q != want {
					t.Errorf("pair %d: %+v, expected %+v", i, q, want)
				}
			}
			if s.srcKind != l.KV[0].Kind || s.dstKind != p.KV[0].Kind || s.srcDev != deviceOf(s.srcKind, 1) || s.dstDev != deviceOf(s.dstKind, 5) {
				t.Errorf("kinds %d and %d, devices %d and %d", s.srcKind, s.dstKind, s.srcDev, s.dstDev)
			}
		})
	}
}

// Every refusal wraps the sentinel that callers branch on, names both sides, and tells what
// was found.
func TestPlanRefuses(t *testing.T) {
	for _, c := range []struct {
		name string
		n, m int
		edit func(*registry.Layout, *registry.Peer)
		want error
		text string
	}{
		{"fewer regions", 4, 3, nil, nixlkv.ErrRegions, "decode registered fewer KV regions (3) than prefill (4)"},
		{"source kind unset", 2, 2, func(l *registry.Layout, _ *registry.Peer) { l.KV[1].Kind = registry.Unset },
			nixlkv.ErrMissingMemoryKind, "Missing NIXL source KV memory kind"},
		{"destination kind unset", 2, 2, func(_ *registry.Layout, p *registry.Peer) { p.KV[1].Kind = registry.Unset },
			nixlkv.ErrMissingMemoryKind, "Missing NIXL destination KV memory kind"},
		{"destination kind unknown", 2, 2, func(_ *registry.Layout, p *registry.Peer) { p.KV[0].Kind = 9 },
			nixlkv.ErrMemoryKinds, "unsupported destination kind 9"},
		{"mixed source kinds", 2, 2, func(l *registry.Layout, _ *registry.Peer) { l.KV[1].Kind = registry.DRAM },
			nixlkv.ErrMemoryKinds, "source regions of several kinds"},
		{"mixed kinds and a draft", 2, 3, func(_ *registry.Layout, p *registry.Peer) { p.KV[2].Kind = registry.DRAM },
			nixlkv.ErrUnsupported, "HiSparse combined with decode-only speculative decoding"},
		{"host memory and a draft", 2, 3, func(_ *registry.Layout, p *registry.Peer) { withKind(p.KV, registry.DRAM) },
			nixlkv.ErrUnsupported, "HiSparse combined with decode-only speculative decoding"},
		{"narrower pages", 2, 2, func(_ *registry.Layout, p *registry.Peer) { p.KV[1].ItemLen = 255 },
			nixlkv.ErrStride, "a page has 256 bytes at the prefill, 255 at the decode"},
		{"no page size", 2, 2, func(_ *registry.Layout, p *registry.Peer) { p.KV[0].ItemLen = 0 }, nixlkv.ErrStride, "0 at the decode"},
		{"no pages", 2, 2, func(_ *registry.Layout, p *registry.Peer) { p.KV[0].Len = 0 }, nixlkv.ErrRegions, "no pages"},
		{"no pages at the prefill", 2, 2, func(l *registry.Layout, _ *registry.Peer) { l.KV[1].ItemLen = 0 }, nixlkv.ErrRegions, "no pages"},
		{"equal TP, another rank", 2, 2, func(l *registry.Layout, p *registry.Peer) {
			l.Ranks.TP, l.Ranks.TPRank, p.Ranks.TP, p.Ranks.EngineRank = 2, 1, 2, 2
		}, nixlkv.ErrTopology, "they keep different heads"},
		{"decode DCP without MLA", 2, 2, func(_ *registry.Layout, p *registry.Peer) { p.Ranks.DCP = 2 },
			nixlkv.ErrTopology, "unsupported DCP topology"},
		{"prefill DCP", 2, 2, func(l *registry.Layout, _ *registry.Peer) { l.MLA, l.Ranks.DCP = true, 2 },
			nixlkv.ErrTopology, "unsupported DCP topology"},
		{"equal DCP, another rank", 2, 2, func(l *registry.Layout, p *registry.Peer) {
			l.MLA, l.Ranks.DCP, p.Ranks.DCP, p.Ranks.DCPRank = true, 2, 2, 1
		}, nixlkv.ErrTopology, "matching DCP ranks"},
		{"ids on one side with PP", 2, 2, func(l *registry.Layout, _ *registry.Peer) {
			withLayers(l.KV, 0, 1)
			l.Ranks.PP = 2
		}, nixlkv.ErrRegions, "layer metadata from one peer only"},
		{"ids for some regions", 2, 2, func(_ *registry.Layout, p *registry.Peer) { p.KV[1].LayerID = 3 },
			nixlkv.ErrRegions, "decode: layer ids for 1 of 2 regions"},
		{"ids for some regions of the prefill", 2, 2, func(l *registry.Layout, _ *registry.Peer) { l.KV[0].LayerID = 0 },
			nixlkv.ErrRegions, "prefill: layer ids for 1 of 2 regions"},
		{"a layer missing at the decode", 2, 2, func(l *registry.Layout, p *registry.Peer) {
			withLayers(l.KV, 0, 0)
			withLayers(p.KV, 0, 1)
		}, nixlkv.ErrRegions, "prefill region 1 of model layer 0"},
		{"a stage without ids", 2, 4, func(l *registry.Layout, _ *registry.Peer) { l.Ranks.PP = 2 },
			nixlkv.ErrRegions, "prefill PP 2 needs layer ids on both sides"},
		{"layers split over CP ranks without ids", 2, 4, func(l *registry.Layout, _ *registry.Peer) { l.MLA, l.SplitLayers, l.Ranks.CP = true, true, 2 },
			nixlkv.ErrRegions, "layers split over CP ranks need layer ids"},
		{"layers split over CP ranks, as many regions on either side", 2, 2, func(l *registry.Layout, _ *registry.Peer) { l.SplitLayers, l.Ranks.CP = true, 2 },
			nixlkv.ErrRegions, "layers split over CP ranks need layer ids"},
		{"a stage of hybrid MLA without ids", 2, 4, func(l *registry.Layout, _ *registry.Peer) { l.MLA, l.HybridMLA, l.Ranks.PP = true, true, 2 },
			nixlkv.ErrRegions, "needs layer ids"},
		{"a stage of compressed MLA without ids", 2, 4, func(l *registry.Layout, _ *registry.Peer) {
			l.MLA, l.Ranks.PP, l.CompressionRatios = true, 2, []int{4, 4}
		}, nixlkv.ErrRegions, "needs layer ids"},
		{"a stage of compressed MLA past its layers", 2, 4, func(l *registry.Layout, _ *registry.Peer) {
			l.MLA, l.Ranks.PP, l.CompressionRatios, l.StartLayer, l.EndLayer = true, 2, []int{4, 4}, 1, 3
		}, nixlkv.ErrRegions, "1 to 3 of 2"},
		{"a stage of compressed MLA of two pools", 3, 6, func(l *registry.Layout, _ *registry.Peer) {
			l.MLA, l.Ranks.PP, l.CompressionRatios, l.EndLayer = true, 2, []int{4, 4}, 1
		}, nixlkv.ErrRegions, "unexpected compressed-MLA pointer count"},
		{"a stage of compressed MLA of wider pages", 2, 4, func(l *registry.Layout, p *registry.Peer) {
			l.MLA, l.Ranks.PP, l.CompressionRatios, l.EndLayer = true, 2, []int{4, 4}, 1
			p.KV[2].ItemLen = 512
		}, nixlkv.ErrRegions, "decode KV cell geometry differs"},
		{"MLA span past the decode's regions", 2, 3, func(l *registry.Layout, _ *registry.Peer) {
			l.MLA, l.Ranks.PP, l.Ranks.PPRank, l.StartLayer = true, 2, 1, 2
		}, nixlkv.ErrRegions, "model layers 2 to 4"},
		{"MLA span from a negative layer", 2, 3, func(l *registry.Layout, _ *registry.Peer) { l.MLA, l.Ranks.PP, l.StartLayer = true, 2, -1 },
			nixlkv.ErrRegions, "model layers -1 to 1"},
		{"MLA span from far away", 2, 3, func(l *registry.Layout, _ *registry.Peer) {
			l.MLA, l.Ranks.PP, l.StartLayer = true, 2, math.MaxInt
		}, nixlkv.ErrRegions, "not all among the decode's 3 regions"},
		{"MLA span into the draft", 2, 3, func(l *registry.Layout, _ *registry.Peer) {
			l.MLA, l.Ranks.PP, l.StartLayer, l.DraftRegions = true, 2, 2, 1
		}, nixlkv.ErrRegions, "1 draft regions"},
		{"MLA span of wider pages", 2, 4, func(l *registry.Layout, p *registry.Peer) {
			l.MLA, l.Ranks.PP, l.StartLayer, p.KV[1].ItemLen = true, 2, 1, 512
		}, nixlkv.ErrRegions, "decode KV cell geometry differs"},
		{"more draft regions than regions", 2, 2, func(l *registry.Layout, _ *registry.Peer) { l.DraftRegions = 3 },
			nixlkv.ErrRegions, "3 of 2 regions are a draft's"},
		{"drafts of different depth", 4, 6, func(l *registry.Layout, _ *registry.Peer) { l.DraftRegions = 2 },
			nixlkv.ErrRegions, "the draft's K and V cannot be told apart"},
		{"compressed MLA, one pool and two", 5, 8, func(l *registry.Layout, _ *registry.Peer) {
			l.MLA, l.CompressionRatios = true, []int{0, 4, 128, 4}
		}, nixlkv.ErrRegions, "disagree on the compressed-MLA KV layout"},
		{"compressed MLA of another count", 4, 5, func(l *registry.Layout, _ *registry.Peer) {
			l.MLA, l.CompressionRatios = true, []int{0, 4, 128, 4}
		}, nixlkv.ErrRegions, "unexpected compressed-MLA pointer count"},
		{"decode regions overlap", 2, 2, func(_ *registry.Layout, p *registry.Peer) { p.KV[1].Base = p.KV[0].Base + 255 },
			nixlkv.ErrRegions, "overlap"},
		{"decode regions overlap, of different strides", 2, 2, func(_ *registry.Layout, p *registry.Peer) {
			p.KV[1].Base, p.KV[1].ItemLen = p.KV[0].Base+1024, 512
		}, nixlkv.ErrRegions, "overlap"},
		{"decode region at the end of memory", 1, 1, func(_ *registry.Layout, p *registry.Peer) { p.KV[0].Base = math.MaxUint64 - 256 },
			nixlkv.ErrRegions, "lie in no region"},
		{"decode region at address 0", 1, 1, func(_ *registry.Layout, p *registry.Peer) { p.KV[0].Base = 0 },
			nixlkv.ErrRegions, "lie in no region"},
	} {
		t.Run(c.name, func(t *testing.T) {
			l, p := sides(c.n, c.m)
			if c.edit != nil {
				c.edit(l, p)
			}
			plan, err := planPeer(l, p)
			if plan != nil || !errors.Is(err, c.want) {
				t.Fatalf("%+v, %v, expected %v", plan, err, c.want)
			}
			mustName(t, err, l, p, c.text)
		})
	}
}

// mustName checks that an error is a *GeometryError that tells both sides, and what is wrong.
func mustName(t *testing.T, err error, l *registry.Layout, p *registry.Peer, text string) {
	t.Helper()
	var g *GeometryError
	if !errors.As(err, &g) || g.Agent != p.Agent || g.Prefill != prefillGeometry(l) || g.Decode != decodeGeometry(p) {
		t.Errorf("%+v of %v", g, err)
	}
	for _, s := range []string{text, fmt.Sprintf("decode %q", p.Agent), prefillGeometry(l), decodeGeometry(p)} {
		if !strings.Contains(err.Error(), s) {
			t.Errorf("%v\ndoes not say %q", err, s)
		}
	}
}

// The last page that has a number, and memory up to the last byte, are usable; lists are
// prepared up to their bound.
func TestPlanLimits(t *testing.T) {
	l, p := sides(1, 1)
	p.KV[0].Len = 256 * math.MaxInt32
	plan := mustPlan(t, l, p)
	c := chunkPages{src: []int32{63}, dst: []int32{math.MaxInt32 - 1}}
	if err := checkPages(plan, c); err != nil || plan.segments[0].preparable() {
		t.Fatal(err, "or a list of 2^31 - 1 descriptors is prepared")
	}
	if _, to := plan.segments[0].appendDescs(nil, nil, appendRuns(nil, c)); to[0].Addr != p.KV[0].Base+p.KV[0].Len-256 {
		t.Errorf("descriptor %+v", to[0])
	}
	l, p = sides(2, 2)
	p.KV[1].Base = 1 << 50
	for i := range p.KV {
		p.KV[i].Len = 256 * maxPrepared / 2
	}
	s := &mustPlan(t, l, p).segments[0]
	c.dst[0] = maxPrepared/2 - 1
	if _, dst := s.appendIndices(nil, nil, c); !s.preparable() || dst[1] != maxPrepared-1 {
		t.Errorf("indices %v, prepared %t", dst, s.preparable())
	}
	s.dstPages++
	if s.preparable() {
		t.Error("a longer list is prepared")
	}
	l, p = sides(1, 1)
	p.KV[0] = region(1<<64-64*256, 256, registry.NoLayer, registry.VRAM)
	s = &mustPlan(t, l, p).segments[0]
	c.dst[0] = 63
	_, to := s.appendDescs(nil, nil, appendRuns(nil, c))
	if d := to[0]; d.Addr+d.Len != 0 || d.Len != 256 || d.Dev != 5 {
		t.Errorf("descriptor %+v, expected the last 256 bytes of memory, on device 5", d)
	}
}

func TestPlanWithoutRegions(t *testing.T) {
	l, p := sides(0, 2)
	p.KV[0].Kind = registry.Unset // of no interest
	plan := mustPlan(t, l, p)
	if len(plan.segments) != 0 {
		t.Fatalf("plan %+v", plan)
	}
	if err := plan.checkRoom(Plan{}, 1, 0, nil); err != nil {
		t.Error(err)
	}
	if err := plan.checkRoom(Plan{Pages: 1}, 1, 0, []int32{1}); !errors.Is(err, nixlkv.ErrMissingMemoryKind) {
		t.Error(err)
	}
	if err := checkPages(plan, chunkPages{}); err != nil {
		t.Error(err)
	}
	err := checkPages(plan, chunkPages{src: []int32{1}, dst: []int32{2}})
	if !errors.Is(err, nixlkv.ErrMissingMemoryKind) || !strings.Contains(err.Error(), "Missing NIXL source KV memory kind") {
		t.Error(err)
	}
}

// Decodes whose regions differ only at their side share the source list.
func TestPlanSharesSource(t *testing.T) {
	l, p := sides(2, 4)
	q := *p
	q.KV = regions(3, 1<<50)
	q.KV[0].Len, q.KV[1].ItemLen = 256*10, 300
	a, b := mustPlan(t, l, p), mustPlan(t, l, &q)
	if x, y := a.segments[0].appendSourceRuns(nil), b.segments[0].appendSourceRuns(nil); !slices.Equal(x, y) {
		t.Errorf("source lists %v and %v", x, y)
	}
}
