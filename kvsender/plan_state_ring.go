package kvsender

import (
	"fmt"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/nixl"
)

// The tail of compressed DSA keys (dsa_tail) is a ring for every request: a row of a tensor,
// of as many tokens as the room says. Of a row only the tokens go that are in use, in up to
// two pieces on either side, and the two rings may be of different length.

// ringPair is a tensor of rows and where its tokens go.
type ringPair struct {
	src, srcRow, srcRows uint64
	dst, dstRow, dstRows uint64
}

// ringIndices are how many numbers a room tells of a ring: its row, offset and length of two
// pieces, and the tokens of the ring.
const ringIndices = 6

// ring is a row of rings, as a room names it. Pieces of no tokens are left out.
type ring struct {
	row, tokens uint64
	pieces      [2]ringPiece
	n           int
}

type ringPiece struct{ first, n uint64 }

// addRings plans rows. Both sides have to tell how long theirs are.
func (c *stateComponent) addRings(s *stateSides, at [][2]int) error {
	for _, ij := range at {
		src, dst := &s.src[ij[0]], &s.dst[ij[1]]
		if src.Absent() && dst.absent() {
			continue
		}
		if src.Absent() || dst.absent() || !dst.told {
			return fmt.Errorf("%w: rows of %d bytes in prefill tensor %d, of %d in decode tensor %d", nixlkv.ErrRegions, src.ItemLen, ij[0], dst.itemLen, ij[1])
		}
		r := ringPair{src.Base, src.ItemLen, min(slotsAt(src.Base, src.ItemLen), src.Slots()), dst.base, dst.itemLen, slotsAt(dst.base, dst.itemLen)}
		if dst.bounded {
			r.dstRows = min(r.dstRows, dst.len/r.dstRow)
		}
		if r.srcRows == 0 || r.dstRows == 0 {
			return s.noSlot(ij, r.srcRow, r.dstRow)
		}
		c.slots.srcPages, c.slots.dstPages = min(c.slots.srcPages, r.srcRows), min(c.slots.dstPages, r.dstRows)
		c.rings = append(c.rings, r)
	}
	return nil
}

// parseRing reads what a room tells of a ring (build_dsa_tail_transfer_blocks in SGLang's
// disaggregation/utils.py). The two pieces may not overlap.
func parseRing(side string, indices []int32) (ring, error) {
	if len(indices) != ringIndices {
		return ring{}, fmt.Errorf("%w: %s ring: DSA tail slot indices must be 6-tuples, got %d", nixlkv.ErrState, side, len(indices))
	}
	for _, x := range indices {
		if x < 0 {
			return ring{}, fmt.Errorf("%w: %s ring %v: a negative number", nixlkv.ErrState, side, indices)
		}
	}
	r := ring{row: uint64(indices[0]), tokens: uint64(indices[5])}
	for k := 1; k < 5; k += 2 {
		p := ringPiece{uint64(indices[k]), uint64(indices[k+1])}
		if p.first+p.n > r.tokens {
			return ring{}, fmt.Errorf("%w: %s ring %v: %d tokens from %d on, of %d", nixlkv.ErrState, side, indices, p.n, p.first, r.tokens)
		}
		if p.n > 0 {
			r.pieces[r.n] = p
			r.n++
		}
	}
	if a, b := r.pieces[0], r.pieces[1]; r.n == 2 && a.first < b.first+b.n && b.first < a.first+a.n {
		return ring{}, fmt.Errorf("%w: %s ring %v: its pieces overlap", nixlkv.ErrState, side, indices)
	}
	if r.tokens == 0 {
		return ring{}, fmt.Errorf("%w: %s ring of no tokens", nixlkv.ErrState, side)
	}
	return r, nil
}

// used counts the tokens in use.
func (r *ring) used() uint64 { return r.pieces[0].n + r.pieces[1].n }

// checkRow checks the length of the decode's ring against its rows.
func (c *stateComponent) checkRow(dst *ring) error {
	for i := range c.rings {
		if n := c.rings[i].dstRow; n%dst.tokens != 0 {
			return fmt.Errorf("%w: %w: decode rows of %d bytes do not divide into %d tokens", nixlkv.ErrState, nixlkv.ErrStride, n, dst.tokens)
		}
	}
	return nil
}

// checkRings checks that the tokens of two rings fit each other.
func (c *stateComponent) checkRings(src, dst *ring) error {
	if src.used() != dst.used() {
		return fmt.Errorf("%w: DSA tail live-token count mismatch: prefill %d, decode %d", nixlkv.ErrState, src.used(), dst.used())
	}
	for i := range c.rings {
		a, b := c.rings[i].srcRow, c.rings[i].dstRow
		if a%src.tokens != 0 || b%dst.tokens != 0 || a/src.tokens != b/dst.tokens {
			return fmt.Errorf("%w: %w: rows of %d bytes for %d tokens at the prefill, of %d for %d at the decode", nixlkv.ErrState, nixlkv.ErrStride, a, src.tokens, b, dst.tokens)
		}
	}
	return nil
}

// appendRings appends the descriptors that copy the tokens in use. The rings were checked.
func (c *stateComponent) appendRings(from, to []nixl.Desc, src, dst *ring) ([]nixl.Desc, []nixl.Desc) {
	for i := range c.rings {
		p := &c.rings[i]
		token := p.srcRow / src.tokens
		a, b := p.src+p.srcRow*src.row, p.dst+p.dstRow*dst.row
		s, d := src.pieces, dst.pieces
		for k, m := 0, 0; k < src.n && m < dst.n; {
			n := min(s[k].n, d[m].n)
			from = append(from, nixl.Desc{Addr: a + s[k].first*token, Len: n * token, Dev: c.slots.srcDev})
			to = append(to, nixl.Desc{Addr: b + d[m].first*token, Len: n * token, Dev: c.slots.dstDev})
			s[k].first, s[k].n = s[k].first+n, s[k].n-n
			d[m].first, d[m].n = d[m].first+n, d[m].n-n
			k, m = k+one(s[k].n == 0), m+one(d[m].n == 0)
		}
	}
	return from, to
}
