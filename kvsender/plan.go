package kvsender

import (
	"fmt"
	"math"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/registry"
)

// A transfer is planned in two steps. When a decode registers, a peerPlan says once how the
// pages of this rank's regions lie in the decode's: that is where topologies differ, and
// where refusals come from. For every chunk, page numbers are then put into it.
//
// A page is a number of a source and of a destination slot, nothing more: a plan whose
// strides are those of a token or of a state slot carries tokens or slots the same way.

// pair is one piece of every page and where it goes: page s of the source begins at
// src + s·srcStride, page d of the destination at dst + d·dstStride. Within a page, rows
// pieces of len bytes are copied, srcRow and dstRow bytes apart; rows fill the page, so that
// piece r of page p is piece p·rows + r of the region. A whole page is one row, and the row
// strides of one row mean nothing.
type pair struct {
	src, srcStride uint64
	dst, dstStride uint64
	len            uint64
	rows           uint64
	srcRow, dstRow uint64
}

// whole says whether pages that follow each other are one piece of memory on both sides.
func (p *pair) whole() bool { return p.rows == 1 && p.len == p.srcStride && p.len == p.dstStride }

// srcStep and dstStep are the bytes between descriptors of a prepared list.
func (p *pair) srcStep() uint64 {
	if p.rows == 1 {
		return p.srcStride
	}
	return p.srcRow
}

func (p *pair) dstStep() uint64 {
	if p.rows == 1 {
		return p.dstStride
	}
	return p.dstRow
}

// segment is a set of pairs that one transfer can carry: all sources of one memory kind,
// all destinations of one. A peer whose regions are of several kinds has several, and each
// is told as part of the chunk.
type segment struct {
	pairs              []pair
	srcKind, dstKind   registry.Kind
	srcDev, dstDev     uint64 // NIXL's device ids, 0 for DRAM
	srcPages, dstPages uint64 // pages that every pair has, the fewest of its regions
}

// peerPlan is how KV pages get to one decode rank. It has no segments when this rank has no
// KV regions: aux and state are all that goes then.
type peerPlan struct {
	segments []segment
}

// limits gives the pages that can be named on either side.
func (p *peerPlan) limits() (src, dst uint64) {
	src, dst = math.MaxInt32, math.MaxInt32
	for i := range p.segments {
		src, dst = min(src, p.segments[i].srcPages), min(dst, p.segments[i].dstPages)
	}
	return src, dst
}

// planPeer plans the KV pages from this rank to one decode rank; both come as they were
// validated, but nothing is trusted. The plan holds no references to either. An error names
// both geometries and wraps one of nixlkv's: ErrRegions, ErrStride, ErrMemoryKinds,
// ErrMissingMemoryKind, ErrTopology, ErrUnsupported, or ErrLimit for more descriptors than
// NIXL can count.
func planPeer(l *registry.Layout, p *registry.Peer) (*peerPlan, error) {
	segments, err := planKV(l, p)
	plan := &peerPlan{segments}
	if err == nil {
		err = validatePlan(plan, l, p)
	}
	if err != nil {
		return nil, fmt.Errorf("decode %q: %w (prefill: %s; decode: %s)", p.Agent, err, prefillGeometry(l), decodeGeometry(p))
	}
	return plan, nil
}

// planKV is the one place where a topology finds its plan, or is refused. The order of the
// questions is that of SGLang's _prepare_payload_xfer (nixl/conn.py).
func planKV(l *registry.Layout, p *registry.Peer) ([]segment, error) {
	if len(p.KV) < len(l.KV) {
		return nil, fmt.Errorf("%w: decode registered fewer KV regions (%d) than prefill (%d)", nixlkv.ErrRegions, len(p.KV), len(l.KV))
	}
	if len(l.KV) == 0 {
		return nil, nil
	}
	src, mixed, err := kindsOf("source", l.KV)
	if err != nil {
		return nil, err
	}
	if mixed {
		return nil, fmt.Errorf("%w: source regions of several kinds", nixlkv.ErrMemoryKinds)
	}
	dst, mixed, err := kindsOf("destination", p.KV)
	if err != nil {
		return nil, err
	}
	relayout, err := needsRelayout(l, p)
	switch {
	case err != nil:
		return nil, err
	case relayout:
		return nil, fmt.Errorf("%w: pages dealt out to a decode of DCP size %d", nixlkv.ErrUnsupported, p.Ranks.DCP)
	case !sendsWholePages(l, p):
		return nil, fmt.Errorf("%w: heads dealt out between TP sizes %d and %d", nixlkv.ErrUnsupported, ranks(l.Ranks.TP), ranks(p.Ranks.TP))
	case len(p.KV) > len(l.KV) && (mixed || dst != registry.VRAM):
		return nil, fmt.Errorf("%w: HiSparse combined with decode-only speculative decoding: the decode has %d regions more, and not all in VRAM",
			nixlkv.ErrUnsupported, len(p.KV)-len(l.KV))
	case mixed:
		return nil, fmt.Errorf("%w: destination regions of several memory kinds", nixlkv.ErrUnsupported)
	}
	if err := checkSameRank(l, p); err != nil {
		return nil, err
	}
	return planPages(l, p, src, dst)
}

// sendsWholePages says whether a page of this rank is all, or a layer's share of all, that
// the decode keeps of it: MLA has no heads to deal out, and equal TP sizes deal them alike.
func sendsWholePages(l *registry.Layout, p *registry.Peer) bool {
	return hasFlatPages(l) || ranks(l.Ranks.TP) == ranks(p.Ranks.TP)
}

// hasFlatPages says whether a page is the same on every TP rank.
func hasFlatPages(l *registry.Layout) bool { return l.MLA || l.HybridMLA }

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

// needsRelayout says whether the decode deals out tokens that lie together here, as
// requires_dcp_relayout in common/conn.py does.
func needsRelayout(l *registry.Layout, p *registry.Peer) (bool, error) {
	src, dst := ranks(l.Ranks.DCP), ranks(p.Ranks.DCP)
	switch {
	case src == dst && l.Ranks.DCPRank == p.Ranks.DCPRank:
		return false, nil
	case src == dst:
		return false, fmt.Errorf("%w: PD peers must connect matching DCP ranks: prefill %d, decode %d of %d", nixlkv.ErrTopology, l.Ranks.DCPRank, p.Ranks.DCPRank, src)
	case src == 1 && hasFlatPages(l):
		return true, nil
	}
	return false, fmt.Errorf("%w: unsupported DCP topology: prefill %d, decode %d, MLA %t", nixlkv.ErrTopology, src, dst, hasFlatPages(l))
}

// kindsOf gives the kind of the first region, and whether others have another. Every one
// must be known.
func kindsOf(side string, regions []registry.Region) (first registry.Kind, mixed bool, err error) {
	for i, r := range regions {
		switch r.Kind {
		case registry.Unset:
			return 0, false, fmt.Errorf("%w: Missing NIXL %s KV memory kind, region %d of %d", nixlkv.ErrMissingMemoryKind, side, i, len(regions))
		case registry.VRAM, registry.DRAM:
			mixed = mixed || r.Kind != regions[0].Kind
		default:
			return 0, false, fmt.Errorf("%w: unsupported %s kind %d, region %d of %d", nixlkv.ErrMemoryKinds, side, r.Kind, i, len(regions))
		}
	}
	return regions[0].Kind, mixed, nil
}

// deviceOf is NIXL's device id of memory: host memory has none.
func deviceOf(k registry.Kind, gpu uint64) uint64 {
	if k == registry.VRAM {
		return gpu
	}
	return 0
}

// ranks reads a number of ranks, where 0 means 1.
func ranks(n int) int { return max(n, 1) }
