package kvsender

import (
	"fmt"
	"slices"

	"github.com/nixlkv/nixlkv"
)

// chunkPages are the pages of one chunk and where they go. The lists belong to the room or to
// the worker and are only read.
type chunkPages struct {
	src []int32 // pages of this rank
	// dst are pages of the decode: the one that each of src goes to or, where tokens are dealt
	// out, all that the decode has for the room.
	dst []int32
	at  tokenSpan // of the chunk, where tokens are dealt out
}

// tokenSpan is where the tokens of a chunk stand in the sequence.
type tokenSpan struct {
	prefix uint64 // tokens that the decode has already
	first  uint64 // of the chunk, counted from behind the prefix
	n      uint64
}

// destinations gives each page of a chunk the decode's page: the k-th page that is sent in a
// room goes to entry k of the decode's list. Pages and list both begin after the prefix that
// the decode has, so a full hit is an empty list and a chunk without pages. A shorter list is
// an error; SGLang drops the pages that are over and reports success (transfer_worker in
// nixl/conn.py). scratch is used where the pages do not stand side by side, and returned.
func (c *chunk) destinations(list, scratch []int32) (dst, used []int32, err error) {
	n := len(c.pages)
	if c.positions == nil {
		if c.offset < 0 || c.offset > len(list) || n > len(list)-c.offset {
			return nil, scratch, fmt.Errorf("%w: insufficient destination pages: %d from position %d on, the decode has %d",
				nixlkv.ErrPageCount, n, c.offset, len(list))
		}
		return list[c.offset : c.offset+n], scratch, nil
	}
	scratch = scratch[:0]
	for _, k := range c.positions {
		if k < 0 || int(k) >= len(list) {
			return nil, scratch, fmt.Errorf("%w: insufficient destination pages: one at position %d, the decode has %d", nixlkv.ErrPageCount, k, len(list))
		}
		scratch = append(scratch, list[k])
	}
	return scratch, scratch, nil
}

// tokens gives where the tokens of a chunk stand, of a room that holds so many in pages of so
// many: all but its last page are full.
func (c *chunk) tokens(prefix, total, pageTokens int) tokenSpan {
	first, most := uint64(c.offset)*uint64(pageTokens), uint64(len(c.pages))*uint64(pageTokens)
	s := tokenSpan{prefix: uint64(prefix), first: first}
	if uint64(total) > first {
		s.n = min(uint64(total)-first, most)
	}
	return s
}

// checkPages checks the page numbers of a chunk against a plan, before descriptors are made
// of them. That no destination is named twice is the room's to check, once, with
// checkDistinct: the chunks of a room are pieces of one list. A source page may go to
// several destinations.
func checkPages(plan *peerPlan, c chunkPages) error {
	if len(c.src) == 0 && (len(c.dst) == 0 || plan.dealsTokens()) {
		return nil
	}
	if err := plan.hasRegions(len(c.src)); err != nil {
		return err
	}
	if !plan.dealsTokens() && len(c.src) != len(c.dst) {
		return fmt.Errorf("%w: %d source pages, %d destination pages", nixlkv.ErrPageCount, len(c.src), len(c.dst))
	}
	to := c.dst
	for i := range plan.segments {
		d := plan.segments[i].deal
		if d.whole() {
			continue
		}
		if err := d.check(c); err != nil {
			return err
		}
		to = d.entries(c)
	}
	src, dst := plan.limits()
	if err := checkRange("source", c.src, src); err != nil {
		return err
	}
	return checkRange("destination", to, dst)
}

// checkRoom checks what a decode has told of a room, before anything of it is posted: its page
// list, and how much of the sequence it has already.
func (p *peerPlan) checkRoom(room Plan, pageTokens, prefix int, list []int32) error {
	if room.Pages == 0 {
		return nil
	}
	if err := p.hasRegions(room.Pages); err != nil {
		return err
	}
	if err := p.checkList(room, pageTokens, prefix, len(list)); err != nil {
		return err
	}
	_, limit := p.limits()
	return checkRange("destination", list, limit)
}

// checkList checks how many pages a decode has told.
func (p *peerPlan) checkList(room Plan, pageTokens, prefix, pages int) error {
	if !p.dealsTokens() {
		if pages < room.Pages {
			return fmt.Errorf("%w: insufficient destination pages: %d for %d pages", nixlkv.ErrPageCount, pages, room.Pages)
		}
		return nil
	}
	switch {
	case room.Tokens == 0:
		return fmt.Errorf("%w: PD DCP transfer requires num_kv_tokens: Plan.Tokens is not told", nixlkv.ErrPageCount)
	case (room.Tokens-1)/pageTokens >= room.Pages:
		return fmt.Errorf("%w: %d tokens in %d pages of %d", nixlkv.ErrPageCount, room.Tokens, room.Pages, pageTokens)
	case prefix < 0:
		return fmt.Errorf("%w: a prefix of %d tokens", nixlkv.ErrPageCount, prefix)
	}
	for i := range p.segments {
		if err := p.segments[i].deal.checkRoom(uint64(prefix), uint64(room.Tokens), pages); err != nil {
			return err
		}
	}
	return nil
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
	n = min(n, 1<<31) // of which every page that is not negative has a number
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

// run is n units, pages or tokens, that follow each other on both sides.
type run struct{ src, dst, n uint64 }

// appendRuns merges the pages of a chunk, in their order, as group_concurrent_contiguous in
// SGLang's common/utils.py does. The pages have been checked.
func appendRuns(runs []run, c chunkPages) []run {
	n := len(c.src)
	if n == 0 {
		return runs
	}
	src, dst := c.src, c.dst[:n]
	from := 0 // of the run
	for i := 1; i <= n; i++ {
		if i < n && src[i] == src[i-1]+1 && dst[i] == dst[i-1]+1 {
			continue
		}
		runs = append(runs, run{uint64(src[from]), uint64(dst[from]), uint64(i - from)})
		from = i
	}
	return runs
}

// appendRuns merges the units of a chunk that the segment carries.
func (s *segment) appendRuns(runs []run, c chunkPages) []run {
	if s.deal.whole() {
		return appendRuns(runs, c)
	}
	return s.deal.appendRuns(runs, c)
}
