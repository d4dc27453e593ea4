package kvsender

import (
	"cmp"
	"fmt"
	"math"
	"math/bits"
	"slices"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/registry"
)

// validatePlan checks a plan, whatever made it, before any descriptor is: a write of a bad
// one cannot be taken back. With pages below limits, every piece then lies inside a region of
// the layout and a region of the peer, of its kind and on its device, no address overflows,
// and no two pieces of different units or pairs are written to the same place.
func validatePlan(plan *peerPlan, l *registry.Layout, p *registry.Peer) error {
	src, dst := spansByKind(l.KV), spansByKind(p.KV)
	var written [registry.DRAM + 1][]stripe
	for i := range plan.segments {
		s := &plan.segments[i]
		if err := s.validate(l.GPU, p.GPU); err != nil {
			return fmt.Errorf("segment %d: %w", i, err)
		}
		if s.deal.whole() == plan.dealsTokens() {
			return fmt.Errorf("%w: segment %d deals tokens out, others do not, or the other way round", nixlkv.ErrRegions, i)
		}
		for k := range s.pairs {
			q := &s.pairs[k]
			if err := q.validate(s, src[s.srcKind], dst[s.dstKind]); err != nil {
				return fmt.Errorf("segment %d, pair %d: %w", i, k, err)
			}
			written[s.dstKind] = append(written[s.dstKind], q.stripe(s))
		}
	}
	for _, w := range written {
		if err := checkDisjoint(w); err != nil {
			return err
		}
	}
	return nil
}

// validate checks what the pairs have in common.
func (s *segment) validate(srcGPU, dstGPU uint64) error {
	for _, k := range []registry.Kind{s.srcKind, s.dstKind} {
		if k != registry.VRAM && k != registry.DRAM {
			return fmt.Errorf("%w: kind %d", nixlkv.ErrMemoryKinds, k)
		}
	}
	if src, dst := deviceOf(s.srcKind, srcGPU), deviceOf(s.dstKind, dstGPU); s.srcDev != src || s.dstDev != dst {
		return fmt.Errorf("%w: devices %d and %d, expected %d and %d", nixlkv.ErrRegions, s.srcDev, s.dstDev, src, dst)
	}
	if len(s.pairs) == 0 || s.srcPages == 0 || s.dstPages == 0 {
		return fmt.Errorf("%w: %d pairs, %d source pages, %d destination pages", nixlkv.ErrRegions, len(s.pairs), s.srcPages, s.dstPages)
	}
	if d := s.deal; !d.whole() && (d.srcTokens == 0 || d.dstTokens == 0 || d.rank >= d.ranks) {
		return fmt.Errorf("%w: pages of %d and %d tokens dealt out to rank %d of %d", nixlkv.ErrRegions, d.srcTokens, d.dstTokens, d.rank, d.ranks)
	}
	for i := range s.pairs {
		if r := s.pairs[i].rows; r == 0 || r > math.MaxInt32 || r > 1 && !s.deal.whole() {
			return fmt.Errorf("%w: pair %d has %d rows", nixlkv.ErrRegions, i, r)
		}
	}
	return nil
}

// srcUnits and dstUnits count the units that every pair has.
func (s *segment) srcUnits() (n uint64, ok bool) { return unitsOf(s.srcPages, s.deal.srcTokens) }
func (s *segment) dstUnits() (n uint64, ok bool) { return unitsOf(s.dstPages, s.deal.dstTokens) }

// unitsOf counts the units of pages of so many tokens, 0 where pages go whole; false if they
// do not fit 64 bits.
func unitsOf(pages, tokens uint64) (uint64, bool) {
	over, n := bits.Mul64(pages, max(tokens, 1))
	return n, over == 0
}

// validate checks one pair of a segment.
func (p *pair) validate(s *segment, src, dst spans) error {
	if p.len == 0 {
		return fmt.Errorf("%w: pieces of no bytes", nixlkv.ErrRegions)
	}
	srcUnits, srcOK := s.srcUnits()
	dstUnits, dstOK := s.dstUnits()
	for _, side := range []struct {
		name              string
		base, stride, row uint64
		units             uint64
		ok                bool
		regions           spans
	}{
		{"source", p.src, p.srcStride, p.srcRow, srcUnits, srcOK, src},
		{"destination", p.dst, p.dstStride, p.dstRow, dstUnits, dstOK, dst},
	} {
		step := side.stride
		if p.rows > 1 {
			step = side.row
			if over, n := bits.Mul64(side.row, p.rows); over != 0 || n > side.stride {
				return fmt.Errorf("%w: %d rows, %d bytes apart, do not fit a %s page of %d bytes", nixlkv.ErrStride, p.rows, side.row, side.name, side.stride)
			}
		}
		if p.len > step {
			return fmt.Errorf("%w: %d bytes, %s %d", nixlkv.ErrStride, p.len, side.name, step)
		}
		last, ok := lastByte(side.base, side.stride, side.units, (p.rows-1)*side.row+p.len)
		if side.base == 0 || !side.ok || !ok || !side.regions.contain(side.base, last) {
			return fmt.Errorf("%w: %d %s units of %d bytes at %#x lie in no region", nixlkv.ErrRegions, side.units, side.name, side.stride, side.base)
		}
	}
	return nil
}

// lastByte gives the last byte of count pieces of n bytes, step bytes apart from base; false
// if it does not fit 64 bits. Neither count nor n is 0.
func lastByte(base, step, count, n uint64) (uint64, bool) {
	over, reach := bits.Mul64(step, count-1)
	first, c1 := bits.Add64(base, reach, 0)
	last, c2 := bits.Add64(first, n-1, 0)
	return last, over|c1|c2 == 0
}

// spans are regions in the order of their first bytes; last is the greatest last byte of
// all regions up to this one. Regions may overlap: a host pool can interleave layers.
type spans []span

type span struct{ first, last uint64 }

func spansByKind(regions []registry.Region) (by [registry.DRAM + 1]spans) {
	for _, r := range regions {
		last := r.Base + r.Len - 1
		if r.Len == 0 || last < r.Base || r.Kind > registry.DRAM {
			continue
		}
		by[r.Kind] = append(by[r.Kind], span{r.Base, last})
	}
	for _, s := range by {
		slices.SortFunc(s, func(a, b span) int { return cmp.Compare(a.first, b.first) })
		for i := 1; i < len(s); i++ {
			s[i].last = max(s[i].last, s[i-1].last)
		}
	}
	return by
}

// contain says whether one region holds all bytes from first to last. Of the regions that
// begin at or before first, the one that ends last decides.
func (s spans) contain(first, last uint64) bool {
	i, _ := slices.BinarySearchFunc(s, first, func(a span, f uint64) int {
		if a.first <= f {
			return -1
		}
		return 1
	})
	return i > 0 && last <= s[i-1].last
}

// stripe is what a pair can write: n bytes at every step from first, up to the byte last.
type stripe struct{ first, last, step, n uint64 }

// stripe gives what a pair can write, row by row where rows fill their page, else page by
// page, with what lies between the rows.
func (p *pair) stripe(s *segment) stripe {
	units, _ := s.dstUnits() // it was checked, and so is the last byte
	w := stripe{first: p.dst, step: p.dstStride, n: p.len}
	inner := (p.rows-1)*p.dstRow + p.len
	w.last, _ = lastByte(p.dst, p.dstStride, units, inner)
	if p.rows > 1 {
		if w.n = inner; p.rows*p.dstRow == p.dstStride {
			w.step, w.n = p.dstRow, p.len
		}
	}
	return w
}

// checkDisjoint refuses stripes that share a byte. Stripes whose ranges overlap must have
// one step, and then they are apart if they are within one step of it.
func checkDisjoint(w []stripe) error {
	slices.SortFunc(w, func(a, b stripe) int { return cmp.Compare(a.first, b.first) })
	for len(w) > 0 {
		n, last := 1, w[0].last
		for ; n < len(w) && w[n].first <= last; n++ {
			last = max(last, w[n].last)
		}
		if err := checkInterleaved(w[:n]); err != nil {
			return err
		}
		w = w[n:]
	}
	return nil
}

// checkInterleaved is checkDisjoint for stripes that hang together, in order of first bytes.
func checkInterleaved(w []stripe) error {
	base, step := w[0].first, w[0].step
	for i, s := range w {
		if s.step != step {
			return fmt.Errorf("%w: the destinations at %#x, every %d bytes, and at %#x, every %d bytes, overlap", nixlkv.ErrRegions, base, step, s.first, s.step)
		}
		w[i].first = (s.first - base) % step
	}
	slices.SortFunc(w, func(a, b stripe) int { return cmp.Compare(a.first, b.first) })
	for i, s := range w {
		next := step // of the first one, a step on
		if i+1 < len(w) {
			next = w[i+1].first
		}
		if s.n > next-s.first {
			return fmt.Errorf("%w: two destinations overlap: %d bytes, %d bytes apart, every %d bytes from %#x", nixlkv.ErrRegions, s.n, next-s.first, step, base)
		}
	}
	return nil
}
