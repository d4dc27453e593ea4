package kvsender

import (
	"fmt"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/registry"
)

// pairing gives, for each region of this rank, the index of the decode's region that takes
// its pages.
type pairing struct {
	at []int
	// exact: nothing but the number of regions told which belong together, so pages of another
	// length mean that the two sides do not mean the same layers.
	exact bool
}

// pairRegions pairs the regions where each goes as a whole, or token by token; the decode has
// no fewer. The rules are those of SGLang's _build_transfer_dst_indices and
// build_transfer_entry_pairs (0.5.21 and later; earlier releases refuse what they map by
// span). They are the same for a decode of any release, since it does not know which region a
// page came from.
func pairRegions(l *registry.Layout, p *registry.Peer) (pairing, error) {
	srcIDs, dstIDs, err := layerIDs(l, p)
	if err != nil {
		return pairing{}, err
	}
	pp := ranks(l.Ranks.PP)
	switch {
	case srcIDs && dstIDs:
		return pairByLayer(l.KV, p.KV)
	case pp > 1 && srcIDs != dstIDs:
		return pairing{}, fmt.Errorf("%w: layer metadata from one peer only, with prefill PP %d: prefill %t, decode %t", nixlkv.ErrRegions, pp, srcIDs, dstIDs)
	case len(l.KV) == len(p.KV):
		return pairInOrder(len(l.KV)), nil
	case pp == 1:
		return pairLeading(l, p)
	case l.MLA && !l.HybridMLA && len(l.CompressionRatios) == 0:
		return pairBySpan(l, p)
	case l.MLA && !l.HybridMLA:
		return pairCompressedStage(l, p)
	}
	return pairing{}, needsLayerIDs(l, p)
}

// pairEqualCounts pairs as many regions on either side, as SGLang does where the decode's are
// of several memory kinds: by position. Layer ids on both sides may say better.
func pairEqualCounts(l *registry.Layout, p *registry.Peer) (pairing, error) {
	srcIDs, dstIDs, err := layerIDs(l, p)
	switch {
	case err != nil:
		return pairing{}, err
	case srcIDs && dstIDs:
		return pairByLayer(l.KV, p.KV)
	case len(l.KV) == len(p.KV):
		return pairInOrder(len(l.KV)), nil
	}
	return pairing{}, needsLayerIDs(l, p)
}

// pairHeads pairs K with K and V with V where heads are dealt out between different TP sizes.
// SGLang goes by position and by the stage's layers alone (get_mha_kv_ptrs_with_pp in
// common/conn.py); where both sides tell layer ids they are right as well where that is not.
func pairHeads(l *registry.Layout, p *registry.Peer) (pairing, error) {
	srcIDs, dstIDs, err := layerIDs(l, p)
	switch {
	case err != nil:
		return pairing{}, err
	case srcIDs && dstIDs:
		return pairByLayer(l.KV, p.KV)
	case len(l.KV) == len(p.KV):
		return pairInOrder(len(l.KV)), nil
	case ranks(l.Ranks.PP) == 1:
		return pairLeading(l, p)
	case l.DraftRegions == 0:
		return pairHeadStage(l, p)
	}
	return pairing{}, needsLayerIDs(l, p)
}

// layerIDs says which sides tell layer ids, each for all of its regions or for none.
func layerIDs(l *registry.Layout, p *registry.Peer) (src, dst bool, err error) {
	if l.DraftRegions < 0 || l.DraftRegions > len(l.KV) {
		return false, false, fmt.Errorf("%w: %d of %d regions are a draft's", nixlkv.ErrRegions, l.DraftRegions, len(l.KV))
	}
	if src, err = haveLayers("prefill", l.KV); err == nil {
		dst, err = haveLayers("decode", p.KV)
	}
	if err == nil && l.SplitLayers && len(l.KV) > 0 && !(src && dst) {
		err = splitNeedsLayerIDs(src, dst)
	}
	return src, dst, err
}

// splitNeedsLayerIDs refuses a rank with some of the layers, where nothing tells which.
func splitNeedsLayerIDs(src, dst bool) error {
	return fmt.Errorf("%w: layers split over CP ranks need layer ids on both sides: prefill %t, decode %t", nixlkv.ErrRegions, src, dst)
}

func haveLayers(side string, regions []registry.Region) (bool, error) {
	n := 0
	for _, r := range regions {
		if r.LayerID >= 0 {
			n++
		}
	}
	if n != 0 && n != len(regions) {
		return false, fmt.Errorf("%w: %s: layer ids for %d of %d regions", nixlkv.ErrRegions, side, n, len(regions))
	}
	return n != 0, nil
}

// needsLayerIDs refuses a stage of which nothing tells where its regions are among the
// decode's: a draft may follow the decode's K and V.
func needsLayerIDs(l *registry.Layout, p *registry.Peer) error {
	return fmt.Errorf("%w: prefill PP %d needs layer ids on both sides: %d regions at the prefill, %d at the decode",
		nixlkv.ErrRegions, ranks(l.Ranks.PP), len(l.KV), len(p.KV))
}

// pairByLayer pairs the n-th region of a layer with the n-th of that layer: K with K, V with
// V, whatever lies between.
func pairByLayer(src, dst []registry.Region) (pairing, error) {
	free := make(map[int][]int, len(dst))
	for j, r := range dst {
		free[r.LayerID] = append(free[r.LayerID], j)
	}
	at := make([]int, len(src))
	for i, r := range src {
		js := free[r.LayerID]
		if len(js) == 0 {
			return pairing{}, fmt.Errorf("%w: the decode has no region left for prefill region %d of model layer %d", nixlkv.ErrRegions, i, r.LayerID)
		}
		at[i], free[r.LayerID] = js[0], js[1:]
	}
	return pairing{at: at}, nil
}

// pairInOrder pairs by position.
func pairInOrder(n int) pairing {
	at := make([]int, n)
	for i := range at {
		at[i] = i
	}
	return pairing{at: at}
}

// pairLeading pairs with the first of a decode's regions, of which there are more: what it has
// more are the layers of a draft model that only the decode runs, and they follow. It refuses
// where the first ones are not this rank's.
func pairLeading(l *registry.Layout, p *registry.Peer) (pairing, error) {
	if l.DraftRegions > 0 && !hasFlatPages(l) {
		return pairing{}, fmt.Errorf("%w: the draft's K and V cannot be told apart without layer ids: %d regions at the prefill, %d of them the draft's, %d at the decode",
			nixlkv.ErrRegions, len(l.KV), l.DraftRegions, len(p.KV))
	}
	if len(l.CompressionRatios) > 0 {
		// Compressed MLA groups its regions by kind of buffer, so the start of a longer list is
		// this rank's only if the groups are of one size (_mla_slice_ptrs_for_pp, 0.5.22).
		n, g := len(l.KV)-l.DraftRegions, compressedGroups(l.CompressionRatios)
		if n != g.onePool() && n != g.twoPools() {
			return pairing{}, fmt.Errorf("%w: unexpected compressed-MLA pointer count: %d at the prefill, %d at the decode; %d are one pool a layer, %d are two",
				nixlkv.ErrRegions, n, len(p.KV), g.onePool(), g.twoPools())
		}
		if n == g.onePool() && len(p.KV)-l.DraftRegions == g.twoPools() {
			return pairing{}, fmt.Errorf("%w: PD peers disagree on the compressed-MLA KV layout: %d regions at the prefill (one pool a layer), %d at the decode (two)",
				nixlkv.ErrRegions, len(l.KV), len(p.KV))
		}
	}
	return pairInOrder(len(l.KV)), nil
}

// compressed counts the layers of a compressed-MLA model by their ratio.
type compressed struct{ c4, c128 int }

func compressedGroups(ratios []int) (g compressed) {
	for _, r := range ratios {
		switch r {
		case 4:
			g.c4++
		case 128:
			g.c128++
		}
	}
	return g
}

// onePool and twoPools count the regions of all layers. A layer of ratio 4 has its KV and an
// indexer's, one of ratio 128 its KV; with two pools each KV has a second region.
func (g compressed) onePool() int  { return 2*g.c4 + g.c128 }
func (g compressed) twoPools() int { return 3*g.c4 + 2*g.c128 }
