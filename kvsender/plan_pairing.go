package kvsender

import (
	"fmt"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/registry"
)

// pairRegions gives, for each region of this rank, the index of the decode's region that
// takes its pages; the decode has no fewer regions. The rules are those of SGLang's
// _build_transfer_dst_indices and build_transfer_entry_pairs (0.5.21 and later; earlier
// releases refuse what they map by span). They are the same for a decode of any release,
// since it does not know which region a page came from.
func pairRegions(l *registry.Layout, p *registry.Peer) ([]int, error) {
	srcIDs, err := haveLayers("prefill", l.KV)
	if err != nil {
		return nil, err
	}
	dstIDs, err := haveLayers("decode", p.KV)
	if err != nil {
		return nil, err
	}
	if l.DraftRegions < 0 || l.DraftRegions > len(l.KV) {
		return nil, fmt.Errorf("%w: %d of %d regions are a draft's", nixlkv.ErrRegions, l.DraftRegions, len(l.KV))
	}
	pp := ranks(l.Ranks.PP)
	switch {
	case srcIDs && dstIDs:
		return pairByLayer(l.KV, p.KV)
	case pp > 1 && srcIDs != dstIDs:
		return nil, fmt.Errorf("%w: layer metadata from one peer only, with prefill PP %d: prefill %t, decode %t", nixlkv.ErrRegions, pp, srcIDs, dstIDs)
	case len(l.KV) == len(p.KV):
		return pairInOrder(len(l.KV)), nil
	case pp == 1:
		if err := checkExtra(l, p); err != nil {
			return nil, err
		}
		return pairInOrder(len(l.KV)), nil
	case l.MLA && !l.HybridMLA && len(l.CompressionRatios) == 0:
		return pairBySpan(l, p)
	}
	// Which of the decode's regions belong to this stage cannot be known: a draft may follow
	// its K and V.
	return nil, fmt.Errorf("%w: prefill PP %d needs layer ids on both sides: %d regions at the prefill, %d at the decode", nixlkv.ErrRegions, pp, len(l.KV), len(p.KV))
}

// haveLayers says whether the regions have layer ids: all of them, or none.
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

// pairByLayer pairs the n-th region of a layer with the n-th of that layer: K with K, V with
// V, whatever lies between.
func pairByLayer(src, dst []registry.Region) ([]int, error) {
	free := make(map[int][]int, len(dst))
	for j, r := range dst {
		free[r.LayerID] = append(free[r.LayerID], j)
	}
	at := make([]int, len(src))
	for i, r := range src {
		js := free[r.LayerID]
		if len(js) == 0 {
			return nil, fmt.Errorf("%w: the decode has no region left for prefill region %d of model layer %d", nixlkv.ErrRegions, i, r.LayerID)
		}
		at[i], free[r.LayerID] = js[0], js[1:]
	}
	return at, nil
}

// pairInOrder pairs by position.
func pairInOrder(n int) []int {
	at := make([]int, n)
	for i := range at {
		at[i] = i
	}
	return at
}

// pairBySpan pairs a stage of plain MLA with its layers in a decode that has more regions,
// one a layer in ascending order. A draft's regions lie behind all layers: those of the last
// stage follow its own, those of another are the decode's last ones (get_mla_kv_ptrs_with_pp
// in common/conn.py, 0.5.22).
func pairBySpan(l *registry.Layout, p *registry.Peer) ([]int, error) {
	layers, start, draft := len(l.KV)-l.DraftRegions, l.StartLayer, len(p.KV)-l.DraftRegions
	if l.Ranks.PPRank == l.Ranks.PP-1 {
		draft = start + layers
	}
	if start < 0 || start > len(p.KV) || start+layers > draft || draft+l.DraftRegions > len(p.KV) {
		return nil, fmt.Errorf("%w: model layers %d to %d, and %d draft regions, are not all among the decode's %d regions",
			nixlkv.ErrRegions, start, start+layers, l.DraftRegions, len(p.KV))
	}
	at := make([]int, len(l.KV))
	for i := range at {
		j := start + i
		if i >= layers {
			j = draft + i - layers
		}
		// A number of regions proves nothing; that pages are equal is what tells that the two
		// sides mean the same layers.
		if l.KV[i].ItemLen != p.KV[j].ItemLen {
			return nil, fmt.Errorf("%w: decode KV cell geometry differs: prefill region %d has pages of %d bytes, decode region %d of %d",
				nixlkv.ErrRegions, i, l.KV[i].ItemLen, j, p.KV[j].ItemLen)
		}
		at[i] = j
	}
	return at, nil
}

// checkExtra refuses a decode with more regions whose first ones are not this rank's. What
// it may have more are the layers of a draft model that only the decode runs: they follow.
func checkExtra(l *registry.Layout, p *registry.Peer) error {
	if l.DraftRegions > 0 && !hasFlatPages(l) {
		return fmt.Errorf("%w: the draft's K and V cannot be told apart without layer ids: %d regions at the prefill, %d of them the draft's, %d at the decode",
			nixlkv.ErrRegions, len(l.KV), l.DraftRegions, len(p.KV))
	}
	if len(l.CompressionRatios) == 0 {
		return nil
	}
	// Compressed MLA groups its regions by kind of buffer, so the start of a longer list is
	// this rank's only if the groups are of one size (_mla_slice_ptrs_for_pp, 0.5.22).
	var c4, c128 int
	for _, r := range l.CompressionRatios {
		switch r {
		case 4:
			c4++
		case 128:
			c128++
		}
	}
	onePool, twoPools := 2*c4+c128, 3*c4+2*c128
	n := len(l.KV) - l.DraftRegions
	if n != onePool && n != twoPools {
		return fmt.Errorf("%w: unexpected compressed-MLA pointer count: %d at the prefill, %d at the decode; %d are one pool a layer, %d are two",
			nixlkv.ErrRegions, n, len(p.KV), onePool, twoPools)
	}
	if n == onePool && len(p.KV)-l.DraftRegions == twoPools {
		return fmt.Errorf("%w: PD peers disagree on the compressed-MLA KV layout: %d regions at the prefill (one pool a layer), %d at the decode (two)",
			nixlkv.ErrRegions, len(l.KV), len(p.KV))
	}
	return nil
}
