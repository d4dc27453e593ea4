package kvsender

import (
	"fmt"
	"slices"

	"github.com/nixlkv/nixlkv"
)

// chunkPages are the pages of one chunk: page src[i] of this rank goes to page dst[i] of the
// decode. Both belong to the room and are only read.
type chunkPages struct{ src, dst []int32 }

// chunkAt gives a chunk its destinations: the k-th page that is sent in a room goes to entry
// k of the decode's list. Pages and list both begin after the prefix that the decode has, so
// a full hit is an empty list and a chunk without pages. A shorter list is an error; SGLang
// drops the pages that are over and reports success (transfer_worker in nixl/conn.py).
func chunkAt(pages []int32, offset int, dst []int32) (chunkPages, error) {
	if offset < 0 || offset > len(dst) || len(pages) > len(dst)-offset {
		return chunkPages{}, fmt.Errorf("%w: insufficient destination pages: %d from position %d on, the decode has %d",
			nixlkv.ErrPageCount, len(pages), offset, len(dst))
	}
	return chunkPages{pages, dst[offset : offset+len(pages)]}, nil
}

// checkPages checks the page numbers of a chunk against a plan, before descriptors are made
// of them. That no destination is named twice is the room's to check, once, with
// checkDistinct: the chunks of a room are pieces of one list. A source page may go to
// several destinations.
func checkPages(plan *peerPlan, c chunkPages) error {
	if len(c.src) != len(c.dst) {
		return fmt.Errorf("%w: %d source pages, %d destination pages", nixlkv.ErrPageCount, len(c.src), len(c.dst))
	}
	if len(c.src) == 0 {
		return nil
	}
	if err := plan.hasRegions(len(c.src)); err != nil {
		return err
	}
	src, dst := plan.limits()
	if err := checkRange("source", c.src, src); err != nil {
		return err
	}
	return checkRange("destination", c.dst, dst)
}

// hasRegions refuses pages where this rank has none to send them from.
func (p *peerPlan) hasRegions(pages int) error {
	if len(p.segments) == 0 {
		return fmt.Errorf("%w: Missing NIXL source KV memory kind: this rank has no KV regions, but %d pages are sent", nixlkv.ErrMissingMemoryKind, pages)
	}
	return nil
}

// checkRange checks pages against their number, which is at most 2^31 - 1.
func checkRange(side string, pages []int32, n uint64) error {
	for i, p := range pages {
		if uint32(p) >= uint32(n) { // a negative one is 2^31 or more
			return fmt.Errorf("%w: %s page %d at position %d, there are %d", nixlkv.ErrPageRange, side, p, i, n)
		}
	}
	return nil
}

// checkDistinct refuses a destination list, of all chunks of a room, that names a page twice:
// the second would overwrite the first. It sorts a copy in scratch, unless the pages ascend,
// and returns it to be used again: what it keeps is as long as the list, whatever page
// numbers a decode may claim to have.
func checkDistinct(pages, scratch []int32) ([]int32, error) {
	ascend := true
	for i := 1; i < len(pages) && ascend; i++ {
		ascend = pages[i-1] < pages[i]
	}
	if ascend {
		return scratch, nil
	}
	scratch = append(scratch[:0], pages...)
	slices.Sort(scratch)
	for i := 1; i < len(scratch); i++ {
		if scratch[i-1] == scratch[i] {
			return scratch, fmt.Errorf("%w: destination page %d is given twice, in a list of %d", nixlkv.ErrPageRange, scratch[i], len(pages))
		}
	}
	return scratch, nil
}

// pageRun is n pages that follow each other on both sides.
type pageRun struct{ src, dst, n int32 }

// appendRuns merges the pages of a chunk, in their order, as group_concurrent_contiguous in
// SGLang's common/utils.py does. The pages have been checked.
func appendRuns(runs []pageRun, c chunkPages) []pageRun {
	n := len(c.src)
	if n == 0 {
		return runs
	}
	src, dst := c.src, c.dst[:n]
	run := pageRun{src[0], dst[0], 1}
	for i := 1; i < n; i++ {
		if src[i] == run.src+run.n && dst[i] == run.dst+run.n {
			run.n++
			continue
		}
		runs = append(runs, run)
		run = pageRun{src[i], dst[i], 1}
	}
	return append(runs, run)
}
