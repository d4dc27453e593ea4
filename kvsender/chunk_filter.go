package kvsender

import "slices"

// filterCP gives the pages of a chunk that a CP rank sends when all ranks of it do, and the
// position in the room where they begin. The pages of a room, total in number, are cut into
// one piece a rank, the first ones a page longer; a chunk begins at position offset. Only
// chunks that keep pages are numbered. (filter_kv_indices_for_cp_rank in SGLang's utils.py,
// the same in 0.5.18 to 0.5.23; a size of 0 or 1 keeps all.)
func filterCP(pages []int32, offset, total, size, rank int) ([]int32, int) {
	if size <= 1 {
		return pages, offset
	}
	each, longer := total/size, total%size
	first := rank*each + min(rank, longer)
	end := first + each
	if rank < longer {
		end++
	}
	lo, hi := max(first, offset)-offset, min(end, offset+len(pages))-offset
	if hi <= lo {
		return pages[:0], offset
	}
	return pages[lo:hi], offset + lo
}

// filterShard appends to src and dst the pages of a chunk that a shard owns, under their
// local numbers, and their destinations: page p lies with shard p mod size, as page p / size
// (filter_kv_indices_for_shard_rank in SGLang's utils.py, 0.5.23). Pages are not negative.
func filterShard(src, dst []int32, c chunkPages, size, rank int) chunkPages {
	src, dst = slices.Grow(src, len(c.src)), slices.Grow(dst, len(c.src))
	n := int32(max(size, 1))
	for i, p := range c.src {
		if p%n == int32(rank) {
			src, dst = append(src, p/n), append(dst, c.dst[i])
		}
	}
	return chunkPages{src, dst}
}
