package kvsender

import (
	"slices"

	"github.com/nixlkv/nixlkv/nixl"
)

// A segment of whole pages can be sent by index: all its pieces, on either side, are
// descriptors of a prepared list, one pair's after the other's, in each pair page by page, in
// each page row by row. Where a page is longer than its rows, the list goes on into the rest
// of it in steps of a row, so that it stays one progression; no index names what lies there.
// The source list depends on the layout and the shape of the plan alone: decodes whose source
// runs are equal, and of the same kind, share one.

// maxPrepared bounds the descriptors of a prepared list: each takes some 32 bytes, at NIXL, for
// as long as the peer is known, and there is a list a peer. Rows of tokens are many: 64
// regions of 262,144 tokens are this many.
const maxPrepared = 1 << 24

// srcSlots and dstSlots count the descriptors of a page in a prepared list, a progression in
// steps of a row; 0 if a page is not a number of rows.
func (p *pair) srcSlots() uint64 { return p.slots(p.srcStride, p.srcRow) }
func (p *pair) dstSlots() uint64 { return p.slots(p.dstStride, p.dstRow) }

func (p *pair) slots(stride, row uint64) uint64 {
	switch {
	case p.rows == 1:
		return 1
	case stride%row != 0:
		return 0
	}
	return stride / row
}

// srcStep and dstStep are the bytes between descriptors of a prepared list.
func (p *pair) srcStep() uint64 { return p.srcStride / p.srcSlots() }
func (p *pair) dstStep() uint64 { return p.dstStride / p.dstSlots() }

// preparable says whether the segment can be sent by index. Tokens that are dealt out are not:
// each chunk names few of the many that there are.
func (s *segment) preparable() bool {
	if !s.deal.whole() {
		return false
	}
	var src, dst uint64
	for i := range s.pairs {
		a, b := s.pairs[i].srcSlots(), s.pairs[i].dstSlots()
		if a == 0 || b == 0 || a > maxPrepared/s.srcPages || b > maxPrepared/s.dstPages {
			return false
		}
		src, dst = src+a*s.srcPages, dst+b*s.dstPages
		if max(src, dst) > maxPrepared {
			return false
		}
	}
	return true
}

// appendSourceRuns appends the runs of the source list, one a pair.
func (s *segment) appendSourceRuns(runs []nixl.Run) []nixl.Run {
	runs = slices.Grow(runs, len(s.pairs))
	for i := range s.pairs {
		p := &s.pairs[i]
		runs = append(runs, nixl.Run{Addr: p.src, Len: p.len, Dev: s.srcDev, Stride: p.srcStep(), Count: s.srcPages * p.srcSlots()})
	}
	return runs
}

// appendDestinationRuns appends the runs of the destination list, one a pair.
func (s *segment) appendDestinationRuns(runs []nixl.Run) []nixl.Run {
	runs = slices.Grow(runs, len(s.pairs))
	for i := range s.pairs {
		p := &s.pairs[i]
		runs = append(runs, nixl.Run{Addr: p.dst, Len: p.len, Dev: s.dstDev, Stride: p.dstStep(), Count: s.dstPages * p.dstSlots()})
	}
	return runs
}

// appendIndices appends the indices of a chunk into the two prepared lists, equally many.
// With rows of one the index is position of the pair × pages + page. The pages have been
// checked, and the bound of a list sees to it that no index passes 2^31 - 1. Neighbours are
// left to NIXL to merge.
func (s *segment) appendIndices(src, dst []int32, c chunkPages) ([]int32, []int32) {
	n := len(c.src) * s.rows()
	src, dst = slices.Grow(src, n), slices.Grow(dst, n)
	var srcBase, dstBase uint64
	for i := range s.pairs {
		p := &s.pairs[i]
		a, b := p.srcSlots(), p.dstSlots()
		if p.rows == 1 {
			src = appendShifted(src, c.src, int32(srcBase))
			dst = appendShifted(dst, c.dst, int32(dstBase))
		} else {
			src = appendRows(src, c.src, int32(srcBase), int32(a), int(p.rows))
			dst = appendRows(dst, c.dst, int32(dstBase), int32(b), int(p.rows))
		}
		srcBase += s.srcPages * a
		dstBase += s.dstPages * b
	}
	return src, dst
}

// appendShifted appends the indices of pages in a region that begins at base. It is not
// inlined, where the loop's variables would not stay in registers.
//
//go:noinline
func appendShifted(out, pages []int32, base int32) []int32 {
	n := len(out)
	out = out[:n+len(pages)]
	tail := out[n:][:len(pages)]
	for i, p := range pages {
		tail[i] = base + p
	}
	return out
}

// appendRows appends the indices of the first rows of pages, of so many slots each, in a
// region that begins at base.
func appendRows(out, pages []int32, base, slots int32, rows int) []int32 {
	n := len(out)
	out = out[:n+len(pages)*rows]
	tail := out[n:]
	for _, p := range pages {
		first := base + p*slots
		row := tail[:rows]
		for r := range row {
			row[r] = first + int32(r)
		}
		tail = tail[rows:]
	}
	return out
}

// rows counts the pieces of a unit in all pairs.
func (s *segment) rows() int {
	n := uint64(0)
	for i := range s.pairs {
		n += s.pairs[i].rows
	}
	return int(n)
}
