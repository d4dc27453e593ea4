package kvsender

import (
	"slices"

	"github.com/nixlkv/nixlkv/nixl"
)

// A segment can be sent by index: all its pieces, on either side, are descriptors of a
// prepared list, one pair's after the other's, in each pair page by page, in each page row by
// row. The source list depends on the layout and the shape of the plan alone: decodes whose
// source runs are equal, and of the same kind, share one.

// appendSourceRuns appends the runs of the source list, one a pair.
func (s *segment) appendSourceRuns(runs []nixl.Run) []nixl.Run {
	runs = slices.Grow(runs, len(s.pairs))
	for i := range s.pairs {
		p := &s.pairs[i]
		runs = append(runs, nixl.Run{Addr: p.src, Len: p.len, Dev: s.srcDev, Stride: p.srcStep(), Count: s.srcPages * p.rows})
	}
	return runs
}

// appendDestinationRuns appends the runs of the destination list, one a pair.
func (s *segment) appendDestinationRuns(runs []nixl.Run) []nixl.Run {
	runs = slices.Grow(runs, len(s.pairs))
	for i := range s.pairs {
		p := &s.pairs[i]
		runs = append(runs, nixl.Run{Addr: p.dst, Len: p.len, Dev: s.dstDev, Stride: p.dstStep(), Count: s.dstPages * p.rows})
	}
	return runs
}

// appendIndices appends the indices of a chunk into the two prepared lists, equally many.
// With rows of one the index is position of the pair × pages + page. The pages have been
// checked, and the plan sees to it that no index passes 2^31 - 1. Neighbours are left to NIXL
// to merge.
func (s *segment) appendIndices(src, dst []int32, c chunkPages) ([]int32, []int32) {
	n := len(c.src) * s.rows()
	src, dst = slices.Grow(src, n), slices.Grow(dst, n)
	var srcBase, dstBase uint64
	for i := range s.pairs {
		rows := s.pairs[i].rows
		src = appendShifted(src, c.src, int32(srcBase), int32(rows))
		dst = appendShifted(dst, c.dst, int32(dstBase), int32(rows))
		srcBase += s.srcPages * rows
		dstBase += s.dstPages * rows
	}
	return src, dst
}

// appendShifted appends the indices of pages of so many rows in a region that begins at base.
func appendShifted(out, pages []int32, base, rows int32) []int32 {
	n := len(out)
	out = out[:n+len(pages)*int(rows)]
	tail := out[n:]
	if rows == 1 {
		tail = tail[:len(pages)]
		for i, p := range pages {
			tail[i] = base + p
		}
		return out
	}
	i := 0
	for _, p := range pages {
		first := base + p*rows
		for r := range rows {
			tail[i] = first + r
			i++
		}
	}
	return out
}

// rows counts the pieces of a page in all pairs.
func (s *segment) rows() int {
	n := uint64(0)
	for i := range s.pairs {
		n += s.pairs[i].rows
	}
	return int(n)
}
