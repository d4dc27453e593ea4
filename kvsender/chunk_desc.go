package kvsender

import (
	"slices"

	"github.com/nixlkv/nixlkv/nixl"
)

// appendDescs appends the descriptors of a chunk, source and destination, equally many and
// of equal lengths pairwise. A run is one descriptor where units lie side by side in both
// regions. The runs are those of checked pages.
func (s *segment) appendDescs(src, dst []nixl.Desc, runs []run) ([]nixl.Desc, []nixl.Desc) {
	n := s.descriptors(unitsIn(runs), len(runs))
	src, dst = slices.Grow(src, n), slices.Grow(dst, n)
	for i := range s.pairs {
		if p := &s.pairs[i]; p.whole() {
			src, dst = s.appendWhole(src, dst, p, runs)
		} else {
			src, dst = s.appendPieces(src, dst, p, runs)
		}
	}
	return src, dst
}

// appendWhole appends one descriptor a run.
func (s *segment) appendWhole(src, dst []nixl.Desc, p *pair, runs []run) ([]nixl.Desc, []nixl.Desc) {
	k, m := len(src), len(dst)
	src, dst = src[:k+len(runs)], dst[:m+len(runs)]
	a, b := src[k:], dst[m:]
	for i, r := range runs {
		n := p.len * r.n
		a[i] = nixl.Desc{Addr: p.src + p.len*r.src, Len: n, Dev: s.srcDev}
		b[i] = nixl.Desc{Addr: p.dst + p.len*r.dst, Len: n, Dev: s.dstDev}
	}
	return src, dst
}

// appendPieces appends unit by unit and row by row.
func (s *segment) appendPieces(src, dst []nixl.Desc, p *pair, runs []run) ([]nixl.Desc, []nixl.Desc) {
	for _, r := range runs {
		srcUnit, dstUnit := p.src+p.srcStride*r.src, p.dst+p.dstStride*r.dst
		for range r.n {
			from, to := srcUnit, dstUnit
			for range p.rows {
				src = append(src, nixl.Desc{Addr: from, Len: p.len, Dev: s.srcDev})
				dst = append(dst, nixl.Desc{Addr: to, Len: p.len, Dev: s.dstDev})
				from, to = from+p.srcRow, to+p.dstRow
			}
			srcUnit, dstUnit = srcUnit+p.srcStride, dstUnit+p.dstStride
		}
	}
	return src, dst
}

// descriptors counts what appendDescs appends for so many units in so many runs.
func (s *segment) descriptors(units, runs int) int {
	n := 0
	for i := range s.pairs {
		if p := &s.pairs[i]; p.whole() {
			n += runs
		} else {
			n += units * int(p.rows)
		}
	}
	return n
}

// unitsIn counts the units of runs.
func unitsIn(runs []run) int {
	n := 0
	for _, r := range runs {
		n += int(r.n)
	}
	return n
}
