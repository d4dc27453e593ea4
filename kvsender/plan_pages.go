package kvsender

import (
	"fmt"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/registry"
)

// planPages plans whole pages: the bytes are the source's item length, each side has its own
// stride, so that a page may lie in a longer one of a host pool (_prep_equal_tp_dlist in
// SGLang's nixl/conn.py). The decode has no fewer regions than this rank; mixed says that they
// are of several memory kinds (_init_mixed_equal_tp_prep_handles).
func planPages(l *registry.Layout, p *registry.Peer, mixed bool) ([]segment, error) {
	if err := checkSameRank(l, p); err != nil {
		return nil, err
	}
	pairRegions := pairRegions
	if mixed {
		pairRegions = pairEqualCounts
	}
	pairing, err := pairRegions(l, p)
	if err != nil {
		return nil, err
	}
	b := planner{l: l, p: p}
	err = b.each(pairing.at, func(_ int, src, dst registry.Region) error {
		if dst.ItemLen < src.ItemLen {
			return fmt.Errorf("%w: a page has %d bytes at the prefill, %d at the decode", nixlkv.ErrStride, src.ItemLen, dst.ItemLen)
		}
		if pairing.exact && dst.ItemLen != src.ItemLen {
			return fmt.Errorf("%w: decode KV cell geometry differs: a page has %d bytes at the prefill, %d at the decode", nixlkv.ErrRegions, src.ItemLen, dst.ItemLen)
		}
		return b.add(src, dst, deal{}, wholePages(src, dst))
	})
	return b.segments, err
}

// wholePages copies a page of the source to the beginning of a page of the destination.
func wholePages(src, dst registry.Region) pair {
	return pair{
		src: src.Base, srcStride: src.ItemLen,
		dst: dst.Base, dstStride: dst.ItemLen,
		len: src.ItemLen, rows: 1,
	}
}

// checkSameRank refuses a decode that keeps other heads than this rank has: with equal TP
// sizes it asks for the rank of its own number (_resolve_rank_mapping in common/conn.py).
func checkSameRank(l *registry.Layout, p *registry.Peer) error {
	tp := ranks(l.Ranks.TP)
	if hasFlatPages(l) || p.Ranks.EngineRank%tp == l.Ranks.TPRank {
		return nil
	}
	return fmt.Errorf("%w: prefill TP rank %d, decode TP rank %d (engine rank %d) of %d: they keep different heads",
		nixlkv.ErrTopology, l.Ranks.TPRank, p.Ranks.EngineRank%tp, p.Ranks.EngineRank, tp)
}
