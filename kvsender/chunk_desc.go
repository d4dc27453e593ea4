package kvsender

import (
	"slices"

	"github.com/nixlkv/nixlkv/nixl"
)

// appendDescs appends the descriptors of a chunk, source and destination, equally many and
// of equal lengths pairwise. A run is one descriptor where pages lie side by side in both
// regions. The runs are those of checked pages.
func (s *segment) appendDescs(src, dst []nixl.Desc, runs []pageRun) ([]nixl.Desc, []nixl.Desc) {
	n := s.descriptors(pagesOf(runs), len(runs))
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
func (s *segment) appendWhole(src, dst []nixl.Desc, p *pair, runs []pageRun) ([]nixl.Desc, []nixl.Desc) {
	k, m := len(src), len(dst)
	src, dst = src[:k+len(runs)], dst[:m+len(runs)]
	a, b := src[k:], dst[m:]
	for i, r := range runs {
		n := p.len * uint64(r.n)
		a[i] = nixl.Desc{Addr: p.src + p.len*uint64(r.src), Len: n, Dev: s.srcDev}
		b[i] = nixl.Desc{Addr: p.dst + p.len*uint64(r.dst), Len: n, Dev: s.dstDev}
	}
	return src, dst
}

// appendPieces appends page by page and row by row. Rows fill their page, so that all pieces
// of a run are equally far apart.
func (s *segment) appendPieces(src, dst []nixl.Desc, p *pair, runs []pageRun) ([]nixl.Desc, []nixl.Desc) {
	srcStep, dstStep := p.srcStep(), p.dstStep()
	for _, r := range runs {
		from, to := p.src+p.srcStride*uint64(r.src), p.dst+p.dstStride*uint64(r.dst)
		for range uint64(r.n) * p.rows {
			src = append(src, nixl.Desc{Addr: from, Len: p.len, Dev: s.srcDev})
			dst = append(dst, nixl.Desc{Addr: to, Len: p.len, Dev: s.dstDev})
			from, to = from+srcStep, to+dstStep
		}
	}
	return src, dst
}

// descriptors counts what appendDescs appends for so many pages in so many runs.
func (s *segment) descriptors(pages, runs int) int {
	n := 0
	for i := range s.pairs {
		if p := &s.pairs[i]; p.whole() {
			n += runs
		} else {
			n += pages * int(p.rows)
		}
	}
	return n
}

// pagesOf counts the pages of runs.
func pagesOf(runs []pageRun) int {
	n := 0
	for _, r := range runs {
		n += int(r.n)
	}
	return n
}
