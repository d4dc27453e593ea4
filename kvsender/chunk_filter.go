package kvsender

import (
	"math"

	"github.com/nixlkv/nixlkv/registry"
)

// share says which of a room's pages this rank sends.
type share struct {
	by         shareBy
	size, rank int
}

type shareBy uint8

const (
	allPages   shareBy = iota
	noPages            // another CP rank sends them
	pageRanges         // the pages of a room are cut into one piece a rank
	pageShards         // every size-th page lies with this rank, under a number of its own
)

// shareOf gives the share of a rank, in the order of questions of SGLang's
// _prepare_send_indices (common/conn.py): a shard of the KV cache, which lies across the CP
// ranks or, without CP, across the TP ranks of MLA (get_kv_shard_group in
// mem_cache/page_interleave.py, 0.5.23); all pages, if each CP rank has other layers; a piece of
// the pages, if all CP ranks send, as those of hybrid MLA always do; else CP rank 0 sends all.
func shareOf(l *registry.Layout, allCPRanks bool) share {
	r := l.Ranks.Normalized()
	switch {
	case l.ShardKV && r.CP > 1:
		return share{pageShards, r.CP, r.CPRank}
	case l.ShardKV && l.MLA && r.TP > 1:
		return share{pageShards, r.TP, r.TPRank}
	case l.SplitLayers:
	case r.CP > 1 && (allCPRanks || l.HybridMLA):
		return share{pageRanges, r.CP, r.CPRank}
	case r.CPRank > 0:
		return share{noPages, r.CP, r.CPRank}
	}
	return share{allPages, 1, 0}
}

// pages gives how many pages the caller can name, of so many that this rank has.
func (s share) pages(local uint64) uint64 {
	if s.by == pageShards {
		return min(local, math.MaxInt32) * uint64(s.size)
	}
	return local
}

// of gives what this rank sends of the pages of a chunk, which begin at position offset of a
// room's total: the pages, by the numbers that they have here, and their positions, nil if
// they stand side by side from position at on. Only chunks that keep pages are numbered. What
// it gives is not the caller's slice.
func (s share) of(pages []int32, offset, total int) (kept, positions []int32, at int) {
	switch s.by {
	case pageShards:
		kept, positions = filterShard(pages, offset, s.size, s.rank)
		return kept, positions, offset
	case pageRanges:
		pages, offset = filterCP(pages, offset, total, s.size, s.rank)
	}
	return append([]int32(nil), pages...), nil, offset
}

// filterCP gives the pages of a chunk that a CP rank sends when all ranks of it do, and the
// position in the room where they begin. The pages of a room, total in number, are cut into
// one piece a rank, the first ones a page longer; a chunk begins at position offset.
// (filter_kv_indices_for_cp_rank in SGLang's utils.py, the same in 0.5.18 to 0.5.23.)
func filterCP(pages []int32, offset, total, size, rank int) ([]int32, int) {
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

// filterShard gives the pages of a chunk that a shard has, under its own numbers, and their
// positions in the room: page p lies with shard p mod size, as page p / size
// (filter_kv_indices_for_shard_rank in SGLang's utils.py, 0.5.23). Pages are not negative.
func filterShard(pages []int32, offset, size, rank int) (local, positions []int32) {
	n := int32(size)
	for i, p := range pages {
		if p%n == int32(rank) {
			local, positions = append(local, p/n), append(positions, int32(offset+i))
		}
	}
	return local, positions
}
