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
// All ways to send end in the same plan: segments, each one transfer and one part of what the
// decode is told, of pairs, each a region of this rank and where it goes. A way is a file
// plan_*.go with a function that says which bytes of a region go where (planPages, planHeads,
// planDeal); it trusts validatePlan to find what it gets wrong.

// pair is one piece of every unit and where it goes: unit s of the source begins at
// src + s·srcStride, unit d of the destination at dst + d·dstStride. A unit is a page or, in a
// segment that deals tokens out, a token. Within a unit, rows pieces of len bytes are copied,
// srcRow and dstRow bytes apart. A whole unit is one row, and the row strides of one row mean
// nothing.
type pair struct {
	src, srcStride uint64
	dst, dstStride uint64
	len            uint64
	rows           uint64
	srcRow, dstRow uint64
}

// whole says whether units that follow each other are one piece of memory on both sides.
func (p *pair) whole() bool { return p.rows == 1 && p.len == p.srcStride && p.len == p.dstStride }

// segment is a set of pairs that one transfer can carry: all sources of one memory kind,
// all destinations of one, all pages dealt out alike. A peer whose regions differ in that has
// several segments, and each is told as part of the chunk.
type segment struct {
	pairs              []pair
	srcKind, dstKind   registry.Kind
	srcDev, dstDev     uint64 // NIXL's device ids, 0 for DRAM
	srcPages, dstPages uint64 // pages that every pair has, the fewest of its regions
	deal               deal   // the zero one: the units are pages
}

// peerPlan is how KV pages get to one decode rank. It has no segments when this rank has no
// KV regions: aux and state are all that goes then. Either all segments deal tokens out, or
// none does.
type peerPlan struct {
	segments []segment
}

// dealsTokens says whether what a chunk holds is told in tokens, and where it goes by the
// decode's whole page list.
func (p *peerPlan) dealsTokens() bool { return len(p.segments) > 0 && !p.segments[0].deal.whole() }

// limits gives the pages that can be named on either side.
func (p *peerPlan) limits() (src, dst uint64) {
	src, dst = math.MaxInt32, math.MaxInt32
	for i := range p.segments {
		src, dst = min(src, p.segments[i].srcPages), min(dst, p.segments[i].dstPages)
	}
	return src, dst
}

// planPeer plans the KV pages from this rank to one decode rank; both come as they were
// validated, but nothing is trusted. The plan holds no references to either. The error is a
// *GeometryError, which wraps one of nixlkv's: ErrRegions, ErrStride, ErrMemoryKinds,
// ErrMissingMemoryKind, ErrTopology or ErrUnsupported.
func planPeer(l *registry.Layout, p *registry.Peer) (*peerPlan, error) {
	segments, err := planKV(l, p)
	plan := &peerPlan{segments}
	if err == nil {
		err = validatePlan(plan, l, p)
	}
	if err != nil {
		return nil, &GeometryError{Agent: p.Agent, Prefill: prefillGeometry(l), Decode: decodeGeometry(p), Err: err}
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
	_, mixed, err := kindsOf("source", l.KV)
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
		return planDeal(l, p)
	case len(p.KV) > len(l.KV) && (mixed || dst != registry.VRAM):
		return nil, fmt.Errorf("%w: HiSparse combined with decode-only speculative decoding: the decode has %d regions more, and not all in VRAM",
			nixlkv.ErrUnsupported, len(p.KV)-len(l.KV))
	case sendsWholePages(l, p):
		return planPages(l, p, mixed)
	}
	return planHeads(l, p)
}

// sendsWholePages says whether a page of this rank is all, or a layer's share of all, that
// the decode keeps of it: MLA has no heads to deal out, and equal TP sizes deal them alike.
func sendsWholePages(l *registry.Layout, p *registry.Peer) bool {
	return hasFlatPages(l) || ranks(l.Ranks.TP) == ranks(p.Ranks.TP)
}

// hasFlatPages says whether a page is the same on every TP rank.
func hasFlatPages(l *registry.Layout) bool { return l.MLA || l.HybridMLA }

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

// planner puts pairs into segments.
type planner struct {
	l        *registry.Layout
	p        *registry.Peer
	segments []segment
}

// add appends a pair between two regions. Consecutive pairs whose destinations are of one kind
// and whose pages are dealt out alike make one segment, as in SGLang's _kv_xfer_mem_segments
// (nixl/conn.py); the decode counts on nothing but the number of parts.
func (b *planner) add(src, dst registry.Region, d deal, q pair) error {
	srcPages, dstPages := src.Pages(), dst.Pages()
	if srcPages == 0 || dstPages == 0 {
		return fmt.Errorf("%w: no pages: prefill %d of %d bytes, decode %d of %d bytes", nixlkv.ErrRegions, srcPages, src.ItemLen, dstPages, dst.ItemLen)
	}
	n := len(b.segments)
	if n == 0 || b.segments[n-1].dstKind != dst.Kind || b.segments[n-1].deal != d {
		b.segments = append(b.segments, segment{
			srcKind: src.Kind, srcDev: deviceOf(src.Kind, b.l.GPU), srcPages: srcPages,
			dstKind: dst.Kind, dstDev: deviceOf(dst.Kind, b.p.GPU), dstPages: dstPages,
			deal: d,
		})
		n++
	}
	s := &b.segments[n-1]
	s.srcPages, s.dstPages = min(s.srcPages, srcPages), min(s.dstPages, dstPages)
	s.pairs = append(s.pairs, q)
	return nil
}

// each calls plan for every region of the prefill and the decode's region at its index in at,
// and names the two in an error.
func (b *planner) each(at []int, plan func(i int, src, dst registry.Region) error) error {
	for i, j := range at {
		if err := plan(i, b.l.KV[i], b.p.KV[j]); err != nil {
			return fmt.Errorf("prefill region %d to decode region %d: %w", i, j, err)
		}
	}
	return nil
}
