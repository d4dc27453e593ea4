package kvsender

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"testing"

	"github.com/nixlkv/nixlkv/registry"
)

// goldenFile is what testdata/golden.py wrote: which page goes where by the code of SGLang's
// releases. Rows are arrays; each UnmarshalJSON below reads one kind.
type goldenFile struct {
	Pairs  []goldenPairs
	Heads  []goldenHeads
	DCP    []goldenDCP
	Stages []goldenStage
	Aux    []goldenAux
	CP     []goldenCP
	Shard  []goldenShard
}

type goldenPairs struct {
	prefill, decode goldenSide
	outcomes        []goldenOutcome[[]goldenPart]
}

type goldenSide struct {
	Attention string
	PP        int
	PPRank    int `json:"pp_rank"`
	Start     int
	Draft     int
	Ratios    []int
	N         int
	Lens      [2]uint64
	Layers    []int
	Kinds     goldenKinds
}

type goldenKinds []string

// goldenOutcome is what some releases make of a case; nil if they refuse it.
type goldenOutcome[T any] struct {
	releases []int
	result   *T
}

// goldenPart is one transfer: regions of the prefill from first on, and where each goes.
type goldenPart struct {
	first int
	at    []int
}

type goldenAux struct {
	lens     []uint64
	buffers  int
	outcomes []goldenOutcome[[][2]uint64]
}

type goldenCP struct{ total, offset, n, size, rank, kept, position int }

type goldenShard struct {
	pages              []int32
	offset, size, rank int
	local, positions   []int32
}

func (k *goldenKinds) UnmarshalJSON(b []byte) error {
	var one string
	if json.Unmarshal(b, &one) == nil {
		*k = goldenKinds{one}
		return nil
	}
	return json.Unmarshal(b, (*[]string)(k))
}

func (g *goldenPairs) UnmarshalJSON(b []byte) error {
	return readRow(b, &g.prefill, &g.decode, &g.outcomes)
}
func (o *goldenOutcome[T]) UnmarshalJSON(b []byte) error { return readRow(b, &o.releases, &o.result) }
func (p *goldenPart) UnmarshalJSON(b []byte) error       { return readRow(b, &p.first, &p.at) }
func (a *goldenAux) UnmarshalJSON(b []byte) error {
	return readRow(b, &a.lens, &a.buffers, &a.outcomes)
}
func (c *goldenCP) UnmarshalJSON(b []byte) error {
	return readRow(b, &c.total, &c.offset, &c.n, &c.size, &c.rank, &c.kept, &c.position)
}
func (s *goldenShard) UnmarshalJSON(b []byte) error {
	return readRow(b, &s.pages, &s.offset, &s.size, &s.rank, &s.local, &s.positions)
}

func readRow(b []byte, fields ...any) error {
	n := len(fields)
	if err := json.Unmarshal(b, &fields); err != nil {
		return err
	}
	if len(fields) != n {
		return fmt.Errorf("%d fields, expected %d", len(fields), n)
	}
	return nil
}

func readGolden(t *testing.T) *goldenFile {
	t.Helper()
	b, err := os.ReadFile("testdata/golden.json")
	if err != nil {
		t.Fatal(err)
	}
	var g goldenFile
	if err := json.Unmarshal(b, &g); err != nil {
		t.Fatal(err)
	}
	return &g
}

// regions lays a side out as golden.py does.
func (s *goldenSide) regions(side, pages uint64) []registry.Region {
	var out []registry.Region
	for i := range s.N {
		r := registry.Region{Base: side<<40 + uint64(i)<<20, Len: s.Lens[i%2] * pages, ItemLen: s.Lens[i%2], LayerID: registry.NoLayer, Kind: registry.VRAM}
		if s.Layers != nil {
			r.LayerID = s.Layers[i]
		}
		if s.Kinds[i%len(s.Kinds)] == "DRAM" {
			r.Kind = registry.DRAM
		}
		out = append(out, r)
	}
	return out
}

func (g *goldenPairs) sides() (*registry.Layout, *registry.Peer) {
	l := &registry.Layout{
		KV: g.prefill.regions(1, 6), GPU: 1, StartLayer: g.prefill.Start, DraftRegions: g.prefill.Draft,
		CompressionRatios: g.prefill.Ratios, MLA: g.prefill.Attention == "mla", HybridMLA: g.prefill.Attention == "hybrid",
		Ranks: registry.Ranks{PP: g.prefill.PP, PPRank: g.prefill.PPRank},
	}
	return l, &registry.Peer{Agent: "peer", KV: g.decode.regions(2, 5), GPU: 3}
}

// expected gives where the pages have to go: as the latest releases have it, nil if they
// refuse. what names the cases that are known to be different here, empty for the others.
func (g *goldenPairs) expected() (parts []goldenPart, what string) {
	last := g.outcomes[len(g.outcomes)-1].result
	if last == nil {
		return nil, ""
	}
	parts = *last
	p := g.prefill
	switch {
	case len(parts) > 1:
		return parts, "mixed kinds"
	case p.Ratios != nil && p.Layers == nil && g.decode.N == 10:
		// One pool of 2·c4 + c128 regions into the start of two pools of 3·c4 + 2·c128.
		return nil, "compressed MLA layouts"
	case p.Attention == "mha" && p.Draft > 0 && p.N != g.decode.N && p.Layers == nil:
		return nil, "draft of another depth"
	case p.Attention == "mla" && p.Draft > 0 && p.PPRank < p.PP-1 && p.N != g.decode.N && p.Layers == nil:
		// SGLang writes the draft's pages into the layer after the stage's last one.
		at := slices.Clone(parts[0].at)
		for i := range p.Draft {
			at[p.N-p.Draft+i] = g.decode.N - p.Draft + i
		}
		return []goldenPart{{0, at}}, "draft of another stage"
	}
	return parts, ""
}

// A decode of any release gets what its own release's prefill would write, wherever that
// release can and is right.
func TestPlanGolden(t *testing.T) {
	tally := map[string]int{}
	for k, g := range readGolden(t).Pairs {
		if last := g.outcomes[len(g.outcomes)-1]; !slices.Contains(last.releases, 23) {
			t.Fatalf("case %d: no outcome of 0.5.23", k)
		}
		l, p := g.sides()
		plan, err := planPeer(l, p)
		parts, what := g.expected()
		tally[what]++
		if parts == nil {
			if err == nil {
				t.Errorf("case %d, %s, %+v to %+v: planned, expected to be refused", k, what, g.prefill, g.decode)
			}
			continue
		}
		tally["planned"]++
		if err != nil {
			t.Errorf("case %d, %+v to %+v: %v", k, g.prefill, g.decode, err)
			continue
		}
		if len(plan.segments) != len(parts) {
			t.Errorf("case %d, %+v to %+v: %d segments, expected %d", k, g.prefill, g.decode, len(plan.segments), len(parts))
			continue
		}
		for i, part := range parts {
			for x, j := range part.at {
				from, to := l.KV[part.first+x], p.KV[j]
				want := pair{src: from.Base, srcStride: from.ItemLen, dst: to.Base, dstStride: to.ItemLen, len: from.ItemLen, rows: 1}
				if got := plan.segments[i].pairs[x]; got != want {
					t.Errorf("case %d, %+v to %+v, pair %d: %+v, expected %+v", k, g.prefill, g.decode, x, got, want)
				}
			}
			if len(plan.segments[i].pairs) != len(part.at) {
				t.Errorf("case %d: %d pairs, expected %d", k, len(plan.segments[i].pairs), len(part.at))
			}
		}
		// An earlier release may refuse, but what it writes is the same.
		for _, o := range g.outcomes {
			if o.result != nil && (what == "" || what == "mixed kinds") && !equalParts(*o.result, parts) {
				t.Errorf("case %d: releases %v pair otherwise than 0.5.23", k, o.releases)
			}
		}
	}
	t.Logf("%v", tally)
	for _, what := range []string{"planned", "", "mixed kinds", "compressed MLA layouts", "draft of another depth", "draft of another stage"} {
		if tally[what] == 0 {
			t.Errorf("no case of %q", what)
		}
	}
}

func equalParts(a, b []goldenPart) bool {
	return slices.EqualFunc(a, b, func(x, y goldenPart) bool { return x.first == y.first && slices.Equal(x.at, y.at) })
}
