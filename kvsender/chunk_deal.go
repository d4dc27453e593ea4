package kvsender

import (
	"fmt"
	"math"
	"math/bits"

	"github.com/nixlkv/nixlkv"
)

// appendRuns appends the tokens of a chunk that the rank keeps, merged where they follow each
// other on both sides, as build_dcp_token_transfer_plan and group_concurrent_contiguous in
// SGLang's common/utils.py do. A chunk may hold none. The pages have been checked.
func (d deal) appendRuns(runs []run, c chunkPages) []run {
	first, count := d.owned(c.at.prefix+c.at.first, c.at.n)
	var last run
	for k := range count {
		offset := first + k*d.ranks
		local := (c.at.first + offset) / d.ranks
		src := uint64(c.src[offset/d.srcTokens])*d.srcTokens + offset%d.srcTokens
		dst := uint64(c.dst[local/d.dstTokens])*d.dstTokens + local%d.dstTokens
		if last.n > 0 && src == last.src+last.n && dst == last.dst+last.n {
			last.n++
			continue
		}
		if last.n > 0 {
			runs = append(runs, last)
		}
		last = run{src, dst, 1}
	}
	if last.n > 0 {
		runs = append(runs, last)
	}
	return runs
}

// virtual is the tokens of the sequence that one entry of the decode's list takes of: a page
// of every rank, and a page of a draft, which each rank has whole.
func (d deal) virtual() uint64 { return d.dstTokens * d.ranks }

// entries gives the part of the decode's list that the tokens of a chunk go to, whoever of
// the ranks keeps them. The chunk has passed check.
func (d deal) entries(c chunkPages) []int32 {
	first, end := c.at.first/d.virtual(), (c.at.first+c.at.n+d.virtual()-1)/d.virtual()
	end = min(end, uint64(len(c.dst)))
	return c.dst[min(first, end):end]
}

// check refuses a chunk whose tokens are more than its pages hold, or than the decode's pages
// take. Every chunk of a room whose list checkRoom has found long enough passes.
func (d deal) check(c chunkPages) error {
	if held := uint64(len(c.src)) * d.srcTokens; c.at.n > held {
		return fmt.Errorf("%w: %d tokens in %d pages of %d", nixlkv.ErrPageCount, c.at.n, len(c.src), d.srcTokens)
	}
	end, over := bits.Add64(c.at.first, c.at.n, 0)
	if over != 0 || end > math.MaxInt64 {
		return fmt.Errorf("%w: %d tokens from token %d on", nixlkv.ErrPageCount, c.at.n, c.at.first)
	}
	return d.checkRoom(c.at.prefix, end, len(c.dst))
}

// checkRoom checks what a decode has told of a room against how many tokens it gets behind
// its prefix: they are dealt out from the prefix on, so that it has to end where every rank's
// page does.
func (d deal) checkRoom(prefix, tokens uint64, pages int) error {
	if virtual := d.virtual(); prefix%virtual != 0 {
		return fmt.Errorf("%w: PD DCP transfer requires decode_prefix_len to align to the virtual DCP page size (%d), got %d", nixlkv.ErrTopology, virtual, prefix)
	}
	if need := d.pages(prefix, tokens); need > uint64(pages) {
		return fmt.Errorf("%w: Insufficient destination DCP pages: required=%d, provided=%d, for %d tokens behind a prefix of %d, DCP rank %d of %d",
			nixlkv.ErrPageCount, need, pages, tokens, prefix, d.rank, d.ranks)
	}
	return nil
}
