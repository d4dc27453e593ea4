package kvsender

import (
	"fmt"
	"math/bits"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/registry"
)

// headSlice says which KV heads go from one prefill rank to one decode rank: n heads, from
// head src of the prefill rank's srcHeads to head dst of the decode rank's dstHeads.
type headSlice struct {
	srcHeads, dstHeads uint64
	src, dst, n        uint64
}

// sliceHeads deals total KV heads out between TP sizes. With more ranks than heads on a side,
// ranks that follow each other have the same head: on the decode's side each gets it, on the
// prefill's each sends it, as each is waited for. It is compute_head_slice_params in SGLang's
// common/staging_buffer.py, which takes for granted what is refused here: sizes that do not
// divide, heads that do not, and a decode rank that asks another prefill rank for them.
func sliceHeads(total, srcTP, srcRank, dstTP, dstRank int) (headSlice, error) {
	switch {
	case total < 1:
		return headSlice{}, fmt.Errorf("%w: the number of KV heads is not known", nixlkv.ErrTopology)
	case !evenly(srcTP, dstTP):
		return headSlice{}, fmt.Errorf("%w: TP sizes %d and %d: neither is a multiple of the other", nixlkv.ErrTopology, srcTP, dstTP)
	case !evenly(total, srcTP):
		return headSlice{}, fmt.Errorf("%w: %d KV heads are not dealt out evenly to the prefill's TP %d", nixlkv.ErrTopology, total, srcTP)
	case !evenly(total, dstTP):
		return headSlice{}, fmt.Errorf("%w: %d KV heads are not dealt out evenly to the decode's TP %d", nixlkv.ErrTopology, total, dstTP)
	case srcRank < 0 || srcRank >= srcTP || dstRank < 0:
		return headSlice{}, fmt.Errorf("%w: prefill TP rank %d of %d, decode TP rank %d of %d", nixlkv.ErrTopology, srcRank, srcTP, dstRank, dstTP)
	}
	dstRank %= dstTP
	if wide := max(srcTP, dstTP); srcRank/(wide/dstTP) != dstRank/(wide/srcTP) {
		return headSlice{}, fmt.Errorf("%w: decode TP rank %d of %d does not take its heads from prefill TP rank %d of %d", nixlkv.ErrTopology, dstRank, dstTP, srcRank, srcTP)
	}
	s := headSlice{srcHeads: uint64(max(1, total/srcTP)), dstHeads: uint64(max(1, total/dstTP))}
	// The first head of either rank among all.
	src := uint64(srcRank/max(1, srcTP/total)) * s.srcHeads
	dst := uint64(dstRank/max(1, dstTP/total)) * s.dstHeads
	s.src, s.dst, s.n = dst%s.srcHeads, src%s.dstHeads, min(s.srcHeads, s.dstHeads)
	return s, nil
}

// evenly says whether one of two numbers, both positive, is a multiple of the other.
func evenly(a, b int) bool { return a%b == 0 || b%a == 0 }

// planHeads plans the heads that a decode rank of another TP size takes from this rank: of
// every token of a page a row, K and V alike (_init_hetero_tp_prep_handle in SGLang's
// nixl/conn.py, which takes one page length for all regions; here each pair of regions has its
// own). A page is tokens, heads, head bytes (NHD) on both sides.
//
// A decode's pages may lie in host memory, of all regions or of some, which SGLang refuses as
// not implemented safely. It is safe here because nothing is taken over from one memory kind
// to another:
//
//   - The regions of a kind are segments of their own. Each is one transfer with its own
//     descriptors and device ids (0 for host memory), and one part of the notification, so
//     that the decode does not go on before every kind has arrived.
//   - Where a page and a token lie follows, region by region, from the item length that was
//     registered for that region and from the number of heads, never from the first region.
//     Lengths that do not say the same heads on both sides are refused.
//   - A host pool's page may be longer than its heads, as it may be longer than a whole page;
//     they lie at its beginning.
//   - validatePlan checks every row against the registered memory of its kind, and against
//     every other row.
func planHeads(l *registry.Layout, p *registry.Peer) ([]segment, error) {
	h, err := sliceHeads(totalHeads(l), ranks(l.Ranks.TP), l.Ranks.TPRank, ranks(p.Ranks.TP), p.Ranks.EngineRank)
	if err != nil {
		return nil, err
	}
	if err := checkPageSize(l); err != nil {
		return nil, err
	}
	pairing, err := pairHeads(l, p)
	if err != nil {
		return nil, err
	}
	b := planner{l: l, p: p}
	err = b.each(pairing.at, func(_ int, src, dst registry.Region) error {
		q, err := h.rows(src, dst, uint64(l.PageSize))
		if err != nil {
			return err
		}
		return b.add(src, dst, deal{}, q)
	})
	return b.segments, err
}

// totalHeads gives the KV heads of the model, 0 if they are not told.
func totalHeads(l *registry.Layout) int {
	if l.TotalKVHeads > 0 {
		return l.TotalKVHeads
	}
	return l.KVHeads * ranks(l.Ranks.TP)
}

// rows copies the heads of every token of a page.
func (h headSlice) rows(src, dst registry.Region, tokens uint64) (pair, error) {
	head := src.ItemLen / tokens / h.srcHeads
	srcRow := h.srcHeads * head
	over, dstRow := bits.Mul64(h.dstHeads, head)
	switch {
	case head == 0 || srcRow*tokens != src.ItemLen:
		return pair{}, fmt.Errorf("%w: a page of %d bytes at the prefill is not %d tokens of %d KV heads", nixlkv.ErrStride, src.ItemLen, tokens, h.srcHeads)
	case over != 0 || dst.ItemLen/tokens < dstRow || dst.Kind != registry.DRAM && dstRow*tokens != dst.ItemLen:
		return pair{}, fmt.Errorf("%w: a page of %d bytes at the decode is not %d tokens of %d KV heads of %d bytes", nixlkv.ErrStride, dst.ItemLen, tokens, h.dstHeads, head)
	}
	q := pair{
		src: src.Base + h.src*head, srcStride: src.ItemLen,
		dst: dst.Base + h.dst*head, dstStride: dst.ItemLen,
		len: h.n * head, rows: tokens, srcRow: srcRow, dstRow: dstRow,
	}
	if q.len == srcRow && q.len == dstRow {
		return wholePages(src, dst), nil // both have the same heads
	}
	if tokens == 1 {
		q.srcRow, q.dstRow = 0, 0
	}
	return q, nil
}
