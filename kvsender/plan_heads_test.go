package kvsender

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/registry"
)

// headSides is a K and a V region on both sides: pages of 4 tokens, heads of 8 bytes.
func headSides(heads, srcTP, srcRank, dstTP, dstRank int) (*registry.Layout, *registry.Peer) {
	l, p := sides(2, 2)
	l.PageSize, l.TotalKVHeads = 4, heads
	l.Ranks.TP, l.Ranks.TPRank, l.Ranks.EngineRank = srcTP, srcRank, srcRank
	p.Ranks.TP, p.Ranks.EngineRank = dstTP, dstRank
	for i := range l.KV {
		l.KV[i] = region(l.KV[i].Base, uint64(32*max(1, heads/srcTP)), registry.NoLayer, registry.VRAM)
		p.KV[i] = region(p.KV[i].Base, uint64(32*max(1, heads/dstTP)), registry.NoLayer, registry.VRAM)
	}
	return l, p
}

func TestPlanHeads(t *testing.T) {
	for _, c := range []struct {
		name                                 string
		heads, srcTP, srcRank, dstTP, dstRnk int
		edit                                 func(*registry.Layout, *registry.Peer)
		want                                 pair // of the first regions, both at address 0
	}{
		{"two ranks to one", 2, 2, 1, 1, 0, nil, pair{src: 0, srcStride: 32, srcRow: 8, dst: 8, dstStride: 64, dstRow: 16, len: 8, rows: 4}},
		{"one rank to two", 2, 1, 0, 2, 1, nil, pair{src: 8, srcStride: 64, srcRow: 16, dst: 0, dstStride: 32, dstRow: 8, len: 8, rows: 4}},
		{"four heads of eight", 8, 2, 1, 1, 0, nil, pair{src: 0, srcStride: 128, srcRow: 32, dst: 32, dstStride: 256, dstRow: 64, len: 32, rows: 4}},
		{"ranks with the same head to one", 2, 4, 3, 1, 0, nil, pair{src: 0, srcStride: 32, srcRow: 8, dst: 8, dstStride: 64, dstRow: 16, len: 8, rows: 4}},
		{"one rank to ranks with the same head", 2, 1, 0, 4, 3, nil, pair{src: 8, srcStride: 64, srcRow: 16, dst: 0, dstStride: 32, dstRow: 8, len: 8, rows: 4}},
		{"the same head on either side", 2, 4, 3, 2, 1, nil, pair{srcStride: 32, dstStride: 32, len: 32, rows: 1}},
		{"one head, two ranks to four", 1, 2, 1, 4, 3, nil, pair{srcStride: 32, dstStride: 32, len: 32, rows: 1}},
		{"a later DP group", 2, 1, 0, 2, 3, nil, pair{src: 8, srcStride: 64, srcRow: 16, dst: 0, dstStride: 32, dstRow: 8, len: 8, rows: 4}},
		{"pages of a token", 2, 2, 1, 1, 0, func(l *registry.Layout, p *registry.Peer) {
			l.PageSize = 1
			for i := range l.KV {
				l.KV[i].ItemLen, p.KV[i].ItemLen = 8, 16
			}
		}, pair{src: 0, srcStride: 8, dst: 8, dstStride: 16, len: 8, rows: 1}},
		{"heads of the model not told", 2, 2, 1, 1, 0, func(l *registry.Layout, _ *registry.Peer) { l.TotalKVHeads, l.KVHeads = 0, 1 },
			pair{src: 0, srcStride: 32, srcRow: 8, dst: 8, dstStride: 64, dstRow: 16, len: 8, rows: 4}},
		{"longer pages in host memory", 2, 2, 1, 1, 0, func(_ *registry.Layout, p *registry.Peer) {
			withKind(p.KV, registry.DRAM)
			p.KV[0].ItemLen, p.KV[1].ItemLen = 70, 128
		}, pair{src: 0, srcStride: 32, srcRow: 8, dst: 8, dstStride: 70, dstRow: 16, len: 8, rows: 4}},
		{"the same head into longer pages", 1, 1, 0, 2, 1, func(_ *registry.Layout, p *registry.Peer) {
			withKind(p.KV, registry.DRAM)
			p.KV[0].ItemLen, p.KV[1].ItemLen = 40, 40
		}, pair{srcStride: 32, dstStride: 40, len: 32, rows: 1}},
	} {
		t.Run(c.name, func(t *testing.T) {
			l, p := headSides(c.heads, c.srcTP, c.srcRank, c.dstTP, c.dstRnk)
			if c.edit != nil {
				c.edit(l, p)
			}
			plan := mustPlan(t, l, p)
			got := plan.segments[0].pairs[0]
			got.src, got.dst = got.src-l.KV[0].Base, got.dst-p.KV[0].Base
			if len(plan.segments) != 1 || len(plan.segments[0].pairs) != 2 || got != c.want {
				t.Errorf("%+v\nexpected %+v", got, c.want)
			}
		})
	}
}

// Each memory kind of a decode is a segment of its own, with its own device and its own
// strides, in the order of the regions.
func TestPlanHeadsIntoKinds(t *testing.T) {
	l, p := sides(4, 4)
	l.PageSize, l.TotalKVHeads, p.Ranks.TP = 4, 2, 2
	for i := range p.KV {
		p.KV[i].ItemLen = 128
	}
	p.KV[1].Kind, p.KV[2].Kind = registry.DRAM, registry.DRAM
	p.KV[1].ItemLen, p.KV[2].ItemLen = 160, 144
	plan := mustPlan(t, l, p)
	var kinds []registry.Kind
	var devices, strides []uint64
	for _, s := range plan.segments {
		kinds, devices = append(kinds, s.dstKind), append(devices, s.dstDev)
		for _, q := range s.pairs {
			strides = append(strides, q.dstStride)
		}
	}
	if !slices.Equal(kinds, []registry.Kind{registry.VRAM, registry.DRAM, registry.VRAM}) || !slices.Equal(devices, []uint64{5, 0, 5}) ||
		!slices.Equal(strides, []uint64{128, 160, 144, 128}) {
		t.Errorf("kinds %v, devices %v, strides %v", kinds, devices, strides)
	}
}

// What a page that is longer than its rows has in a prepared list.
func TestIndexLongerPages(t *testing.T) {
	l, p := headSides(2, 1, 0, 2, 1)
	withKind(p.KV, registry.DRAM)
	p.KV[0].ItemLen, p.KV[1].ItemLen = 40, 48 // five and six rows of 8 bytes, of which four are used
	s := &mustPlan(t, l, p).segments[0]
	src, dst := s.appendIndices(nil, nil, chunkPages{src: []int32{3}, dst: []int32{2}})
	if want := []int32{12, 13, 14, 15, 4*64 + 12, 4*64 + 13, 4*64 + 14, 4*64 + 15}; !slices.Equal(src, want) {
		t.Errorf("source %v, expected %v", src, want)
	}
	first := int32(5 * s.dstPages) // of the second region
	if want := []int32{10, 11, 12, 13, first + 12, first + 13, first + 14, first + 15}; !slices.Equal(dst, want) {
		t.Errorf("destination %v, expected %v", dst, want)
	}
	p.KV[1].ItemLen = 47
	s = &mustPlan(t, l, p).segments[0]
	if s.preparable() {
		t.Error("a page of no whole number of rows is in a prepared list")
	}
}

func TestPlanHeadsRefuses(t *testing.T) {
	for _, c := range []struct {
		name                                 string
		heads, srcTP, srcRank, dstTP, dstRnk int
		edit                                 func(*registry.Layout, *registry.Peer)
		want                                 error
		text                                 string
	}{
		{"heads not told", 0, 2, 0, 1, 0, nil, nixlkv.ErrTopology, "the number of KV heads is not known"},
		{"heads do not divide here", 3, 2, 0, 1, 0, nil, nixlkv.ErrTopology, "3 KV heads are not dealt out evenly to the prefill's TP 2"},
		{"heads do not divide there", 6, 1, 0, 4, 0, nil, nixlkv.ErrTopology, "6 KV heads are not dealt out evenly to the decode's TP 4"},
		{"ranks do not divide heads", 2, 3, 0, 1, 0, nil, nixlkv.ErrTopology, "2 KV heads are not dealt out evenly to the prefill's TP 3"},
		{"sizes do not divide", 6, 3, 0, 2, 0, nil, nixlkv.ErrTopology, "TP sizes 3 and 2"},
		{"asks another rank for its heads", 4, 4, 3, 2, 0, nil, nixlkv.ErrTopology, "decode TP rank 0 of 2 does not take its heads from prefill TP rank 3 of 4"},
		{"asks another rank for its heads, the other way", 4, 2, 1, 4, 1, nil, nixlkv.ErrTopology, "decode TP rank 1 of 4 does not take its heads from prefill TP rank 1 of 2"},
		{"no engine rank", 2, 1, 0, 2, -1, nil, nixlkv.ErrTopology, "decode TP rank -1"},
		{"no page size", 2, 2, 0, 1, 0, func(l *registry.Layout, _ *registry.Peer) { l.PageSize = 0 }, nixlkv.ErrRegions, "pages of 0 tokens"},
		{"a page that is no number of heads", 2, 2, 0, 1, 0, func(l *registry.Layout, _ *registry.Peer) { l.KV[1].ItemLen = 31 },
			nixlkv.ErrStride, "a page of 31 bytes at the prefill is not 4 tokens of 1 KV heads"},
		{"other heads at the decode", 2, 2, 0, 1, 0, func(_ *registry.Layout, p *registry.Peer) { p.KV[1].ItemLen = 128 },
			nixlkv.ErrStride, "prefill region 1 to decode region 1: nixlkv: transfer length exceeds item stride: a page of 128 bytes at the decode is not 4 tokens of 2 KV heads of 8 bytes"},
		{"shorter pages in host memory", 2, 2, 0, 1, 0, func(_ *registry.Layout, p *registry.Peer) {
			withKind(p.KV, registry.DRAM)
			p.KV[0].ItemLen = 63
		}, nixlkv.ErrStride, "a page of 63 bytes at the decode"},
		{"host memory and a draft of the decode", 2, 2, 0, 1, 0, func(_ *registry.Layout, p *registry.Peer) {
			p.KV = append(p.KV, region(1<<50, 64, registry.NoLayer, registry.DRAM))
		}, nixlkv.ErrUnsupported, "HiSparse combined with decode-only speculative decoding"},
		{"a draft, or uneven stages", 2, 1, 0, 2, 0, func(l *registry.Layout, p *registry.Peer) {
			l.Ranks.PP = 2
			for i := range uint64(4) {
				p.KV = append(p.KV, region((51+i)<<40, 32, registry.NoLayer, registry.VRAM))
			}
		}, nixlkv.ErrRegions, "whether the decode has 3 layers, or 2 and a draft of 1"},
		{"a stage past the decode's layers", 2, 1, 0, 2, 0, func(l *registry.Layout, p *registry.Peer) {
			l.Ranks.PP, l.StartLayer = 2, 2
			p.KV = append(p.KV, region(51<<40, 32, registry.NoLayer, registry.VRAM), region(52<<40, 32, registry.NoLayer, registry.VRAM))
		}, nixlkv.ErrRegions, "model layers 2 to 3 are not all among the decode's 2"},
		{"a stage of no K and V", 2, 1, 0, 2, 0, func(l *registry.Layout, p *registry.Peer) {
			l.Ranks.PP = 2
			p.KV = append(p.KV, region(51<<40, 32, registry.NoLayer, registry.VRAM))
		}, nixlkv.ErrRegions, "K and V of 2 regions at the prefill and 3 at the decode"},
		{"a stage with a draft", 2, 1, 0, 2, 0, func(l *registry.Layout, p *registry.Peer) {
			l.Ranks.PP, l.DraftRegions = 2, 2
			p.KV = append(p.KV, region(51<<40, 32, registry.NoLayer, registry.VRAM), region(52<<40, 32, registry.NoLayer, registry.VRAM))
		}, nixlkv.ErrRegions, "needs layer ids on both sides"},
	} {
		t.Run(c.name, func(t *testing.T) {
			l, p := headSides(c.heads, c.srcTP, c.srcRank, c.dstTP, c.dstRnk)
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

// Uneven stages without layer ids: the last one knows how many layers there are, and one that
// is not as long as the others would have to be knows that they are uneven.
func TestPlanHeadStages(t *testing.T) {
	for _, c := range []struct {
		name                           string
		pp, stage, start, n, all, want int // layers; where the stage's V begin among the decode's regions
	}{
		{"even, first", 2, 0, 0, 2, 4, 4},
		{"even, last", 2, 1, 2, 2, 4, 6},
		{"uneven, first", 2, 0, 0, 3, 4, 4},
		{"uneven, last", 2, 1, 3, 1, 4, 7},
		{"uneven, between", 3, 1, 1, 3, 5, 6},
		{"last, and a draft as deep", 2, 1, 2, 2, 6, 6},
		{"last, and a draft", 2, 1, 2, 2, 5, 6},
	} {
		l, p := headSides(2, 1, 0, 2, 1)
		l.Ranks.PP, l.Ranks.PPRank, l.StartLayer = c.pp, c.stage, c.start
		k, v := l.KV[0], p.KV[0]
		l.KV, p.KV = nil, nil
		for i := range uint64(2 * c.n) {
			k.Base += 1 << 20 * min(i, 1)
			l.KV = append(l.KV, k)
		}
		for i := range uint64(2 * c.all) {
			v.Base += 1 << 20 * min(i, 1)
			p.KV = append(p.KV, v)
		}
		got, err := pairHeads(l, p)
		want := appendRange(appendRange(nil, c.start, c.n), c.want, c.n)
		if err != nil || !slices.Equal(got.at, want) {
			t.Errorf("%s: %v, %v, expected %v", c.name, got.at, err, want)
		}
		if _, err := planPeer(l, p); err != nil {
			t.Errorf("%s: %v", c.name, strings.SplitN(err.Error(), "(", 2)[0])
		}
	}
}
