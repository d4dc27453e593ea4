package kvsender

import (
	"fmt"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/registry"
)

// A pipeline stage among all layers of a decode that does not tell layer ids: where its
// regions are follows from the layers of the stage.

// pairBySpan pairs a stage of plain MLA with its layers in a decode that has more regions,
// one a layer in ascending order. A draft's regions lie behind all layers: those of the last
// stage follow its own, those of another are the decode's last ones (get_mla_kv_ptrs_with_pp
// in common/conn.py, 0.5.22).
func pairBySpan(l *registry.Layout, p *registry.Peer) (pairing, error) {
	layers, start, draft := len(l.KV)-l.DraftRegions, l.StartLayer, len(p.KV)-l.DraftRegions
	if lastStage(l) {
		draft = start + layers
	}
	if start < 0 || start > len(p.KV) || start+layers > draft || draft+l.DraftRegions > len(p.KV) {
		return pairing{}, fmt.Errorf("%w: model layers %d to %d, and %d draft regions, are not all among the decode's %d regions",
			nixlkv.ErrRegions, start, start+layers, l.DraftRegions, len(p.KV))
	}
	at := make([]int, 0, len(l.KV))
	at = appendRange(at, start, layers)
	at = appendRange(at, draft, l.DraftRegions)
	return pairing{at: at, exact: true}, nil
}

// pairCompressedStage pairs a stage of compressed MLA with its layers in a decode that has
// all: regions are grouped by kind of buffer, and each group by layer: the KV of layers of
// ratio 4, their indexer's, the KV of layers of ratio 128, the draft's. SGLang's NIXL backend
// refuses it; the groups are those of _mla_slice_ptrs_for_pp (common/conn.py, 0.5.22).
func pairCompressedStage(l *registry.Layout, p *registry.Peer) (pairing, error) {
	first, end, ratios := l.StartLayer, l.EndLayer, l.CompressionRatios
	if first < 0 || end <= first || end > len(ratios) {
		return pairing{}, fmt.Errorf("%w: compressed MLA needs layer ids, or the stage's layers: %d to %d of %d", nixlkv.ErrRegions, first, end, len(ratios))
	}
	all, before, stage := compressedGroups(ratios), compressedGroups(ratios[:first]), compressedGroups(ratios[first:end])
	if n, m := len(l.KV)-l.DraftRegions, len(p.KV)-l.DraftRegions; n != stage.onePool() || m != all.onePool() {
		return pairing{}, fmt.Errorf("%w: unexpected compressed-MLA pointer count: %d at the prefill, %d at the decode; layers %d to %d have %d, all have %d",
			nixlkv.ErrRegions, n, m, first, end, stage.onePool(), all.onePool())
	}
	at := make([]int, 0, len(l.KV))
	at = appendRange(at, before.c4, stage.c4)
	at = appendRange(at, all.c4+before.c4, stage.c4)
	at = appendRange(at, 2*all.c4+before.c128, stage.c128)
	at = appendRange(at, all.onePool(), l.DraftRegions)
	return pairing{at: at, exact: true}, nil
}

// pairHeadStage pairs the K and the V of a stage's layers with those among the decode's, whose
// K of all layers come before the V. Where the V begin is clear if the decode has no draft.
// With one they begin earlier, and to find them SGLang takes for granted that all stages have
// as many layers, which is wrong for uneven ones (get_mha_kv_ptrs_with_pp in common/conn.py).
// Here the last stage goes by how many layers there are, which it knows; another is refused
// where both may be meant, rather than write V of one layer over another's.
func pairHeadStage(l *registry.Layout, p *registry.Peer) (pairing, error) {
	if len(l.KV)%2 != 0 || len(p.KV)%2 != 0 {
		return pairing{}, fmt.Errorf("%w: K and V of %d regions at the prefill and %d at the decode", nixlkv.ErrRegions, len(l.KV), len(p.KV))
	}
	n, start, layers := len(l.KV)/2, l.StartLayer, len(p.KV)/2
	even := n * ranks(l.Ranks.PP)
	switch {
	case start < 0 || start > layers-n:
		return pairing{}, fmt.Errorf("%w: model layers %d to %d are not all among the decode's %d", nixlkv.ErrRegions, start, start+n, layers)
	case lastStage(l):
		layers = start + n
	case start == n*l.Ranks.PPRank && even < layers:
		return pairing{}, fmt.Errorf("%w: whether the decode has %d layers, or %d and a draft of %d, takes layer ids on both sides to tell", nixlkv.ErrRegions, layers, even, layers-even)
	}
	at := make([]int, 0, len(l.KV))
	at = appendRange(at, start, n)
	at = appendRange(at, layers+start, n)
	return pairing{at: at}, nil
}

func lastStage(l *registry.Layout) bool { return l.Ranks.PPRank == ranks(l.Ranks.PP)-1 }

// appendRange appends n numbers from first on.
func appendRange(out []int, first, n int) []int {
	for i := range n {
		out = append(out, first+i)
	}
	return out
}
