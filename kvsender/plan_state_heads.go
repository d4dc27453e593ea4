package kvsender

import (
	"fmt"
	"math"

	"github.com/nixlkv/nixlkv"
)

// headShare is what one rank has of the KV heads that another keeps: n heads, from the src-th
// of this rank's perRank[0] to the dst-th of the decode's perRank[1].
type headShare struct {
	src, dst, n      uint64
	srcEach, dstEach uint64 // heads of a rank
}

// addHeadSlices plans SWA pages between different TP sizes, without MLA: of every token the
// heads that both ranks keep (_get_mha_head_slice_blocks in common/conn.py, from SGLang
// 0.5.22 on; earlier releases refuse). A page is [token, head, element], whatever layout the
// full-attention pool has.
func (c *stateComponent) addHeadSlices(s *stateSides) error {
	l := s.l
	if pp := ranks(l.Ranks.PP); pp > 1 {
		return fmt.Errorf("%w: state type not supported for this topology: TP %d and %d with prefill PP %d", nixlkv.ErrTopology, ranks(l.Ranks.TP), ranks(s.p.Ranks.TP), pp)
	}
	if l.SWALayout != "nhd" {
		return fmt.Errorf("%w: Head-sliced PD transfer needs the NHD KV cache layout, got %.40q", nixlkv.ErrTopology, l.SWALayout)
	}
	if err := s.checkServes(); err != nil {
		return err
	}
	h, err := s.heads()
	if err != nil {
		return err
	}
	at, err := s.pairKV()
	if err != nil {
		return err
	}
	if l.PageSize < 1 || l.PageSize > math.MaxInt32 {
		return fmt.Errorf("%w: pages of %d tokens", nixlkv.ErrRegions, l.PageSize)
	}
	tokens := uint64(l.PageSize)
	for _, ij := range at {
		src, dst := &s.src[ij[0]], &s.dst[ij[1]]
		if src.Absent() || dst.absent() {
			continue
		}
		head := src.ItemLen / tokens / h.srcEach
		if head*h.srcEach*tokens != src.ItemLen || dst.itemLen%(h.dstEach*tokens) != 0 || dst.itemLen/(h.dstEach*tokens) != head {
			return fmt.Errorf("%w: KV item lengths (prefill tensor %d: %d bytes, decode tensor %d: %d) do not split into %d and %d heads with pages of %d tokens",
				nixlkv.ErrStride, ij[0], src.ItemLen, ij[1], dst.itemLen, h.srcEach, h.dstEach, tokens)
		}
		q := pair{
			src: src.Base + h.src*head, srcStride: src.ItemLen, srcRow: h.srcEach * head,
			dst: dst.base + h.dst*head, dstStride: dst.itemLen, dstRow: h.dstEach * head,
			len: h.n * head, rows: tokens,
		}
		if q.len == q.srcRow && q.len == q.dstRow {
			q.len, q.rows = src.ItemLen, 1 // all heads of every token: the page in one piece
		}
		if err := c.add(s, ij, q); err != nil {
			return err
		}
	}
	return nil
}

// pairKV pairs K with K and V with V.
func (s *stateSides) pairKV() ([][2]int, error) {
	if at, done, err := s.pairLayers(false); done {
		return at, err
	}
	if len(s.src)%2 != 0 || len(s.dst) < len(s.src) {
		return nil, fmt.Errorf("%w: Head-sliced PD transfer needs matching per-layer K/V buffers: prefill has %d entries, decode has %d", nixlkv.ErrRegions, len(s.src), len(s.dst))
	}
	return s.pairHalves()
}

// heads finds the heads that this rank and the decode both keep. Where there are more ranks
// than heads, neighbours keep the same one (compute_head_slice_params and
// resolve_total_kv_heads in common/staging_buffer.py). TP sizes differ and one divides the
// other.
func (s *stateSides) heads() (headShare, error) {
	p, d := uint64(ranks(s.l.Ranks.TP)), uint64(ranks(s.p.Ranks.TP))
	total := uint64(max(s.l.TotalKVHeads, 0))
	if total == 0 {
		total = uint64(max(s.l.KVHeads, 0)) * p
	}
	if total == 0 || total > math.MaxInt32 || max(total, p)%min(total, p) != 0 || max(total, d)%min(total, d) != 0 {
		return headShare{}, fmt.Errorf("%w: %d KV heads on TP %d and %d ranks", nixlkv.ErrTopology, total, p, d)
	}
	from, to := uint64(s.l.Ranks.EngineRank)%p, uint64(s.p.Ranks.EngineRank)%d
	h := headShare{srcEach: max(total/p, 1), dstEach: max(total/d, 1)}
	h.n = min(h.srcEach, h.dstEach)
	if p > d {
		h.dst = from / max(p/total, 1) * h.srcEach % h.dstEach
	} else {
		h.src = to / max(d/total, 1) * h.dstEach % h.srcEach
	}
	return h, nil
}
