package embedded

import (
	"fmt"
	"math/bits"
	"slices"

	"github.com/nixlkv/nixlkv/internal/engine"
)

// place is a descriptor that was found inside of a region; pos is the region's position
// in the list it was looked up in.
type place struct {
	addr, n uint64
	pos     uint32
}

// item is one contiguous copy. It holds no pointers: a request of 65,536 items costs the
// garbage collector nothing.
type item struct {
	local, remote uint64 // addresses
	n             uint64
	pos           uint32 // of the remote region
}

// plan is what a transfer copies: its items, and which regions they touch.
type plan struct {
	items []item
	bytes uint64

	// Positions of the regions used, each once, in the order met.
	locals, remotes []uint32

	seenLocal, seenRemote []uint64 // bitmaps over positions
	lastLocal             uint32   // region of the last item
	apart                 bool     // do not merge
}

// reset empties the plan for count pairs in regions at positions below nLocal and
// nRemote. It keeps the memory.
func (p *plan) reset(count, nLocal, nRemote int, apart bool) {
	p.items, p.bytes = p.items[:0], 0
	if apart {
		p.items = slices.Grow(p.items, count)
	}
	p.locals, p.remotes = p.locals[:0], p.remotes[:0]
	p.seenLocal = zeroed(p.seenLocal, nLocal)
	p.seenRemote = zeroed(p.seenRemote, nRemote)
	p.apart = apart
}

// zeroed gives a bitmap of n bits.
func zeroed(b []uint64, n int) []uint64 {
	words := (n + 63) / 64
	if cap(b) < words {
		return make([]uint64, words)
	}
	b = b[:words]
	clear(b)
	return b
}

func mark(seen []uint64, used []uint32, pos uint32) []uint32 {
	word, bit := &seen[pos/64], uint64(1)<<(pos%64)
	if *word&bit != 0 {
		return used
	}
	*word |= bit
	return append(used, pos)
}

// add appends the copy between two places; i names the pair in errors. It merges with the
// last one if both sides go on where that ended, in the same regions.
func (p *plan) add(i int, l, r place) error {
	if l.n != r.n {
		return fmt.Errorf("descriptor %d: %d bytes here, %d at the peer: %w", i, l.n, r.n, engine.ErrInvalidParam)
	}
	sum, carry := bits.Add64(p.bytes, l.n, 0)
	if carry != 0 {
		return fmt.Errorf("descriptor %d: more than 2^64 bytes in all: %w", i, engine.ErrInvalidParam)
	}
	p.bytes = sum
	if n := len(p.items); n > 0 && !p.apart {
		last := &p.items[n-1]
		// Both ends lie inside of their regions, so neither sum wraps.
		if last.pos == r.pos && p.lastLocal == l.pos && last.local+last.n == l.addr && last.remote+last.n == r.addr {
			last.n += l.n
			return nil
		}
	}
	p.items = append(p.items, item{local: l.addr, remote: r.addr, n: l.n, pos: r.pos})
	p.lastLocal = l.pos
	p.locals = mark(p.seenLocal, p.locals, l.pos)
	p.remotes = mark(p.seenRemote, p.remotes, r.pos)
	return nil
}

// trim drops memory that only an unusually large plan needs.
func (p *plan) trim() {
	const keep = 1 << 16
	if cap(p.items) > keep {
		p.items = nil
	}
	if cap(p.seenLocal) > keep/64 {
		p.seenLocal = nil
	}
	if cap(p.seenRemote) > keep/64 {
		p.seenRemote = nil
	}
}

// cursor is a position in a plan's items.
type cursor struct {
	i   int    // item
	off uint64 // bytes of it that are done
}

func (c cursor) before(end cursor) bool {
	return c.i < end.i || c.i == end.i && c.off < end.off
}

// next gives the part of an item at the cursor, of at most limit bytes and not beyond end,
// and moves on. Empty items are passed over. ok is false at the end.
func (c *cursor) next(items []item, end cursor, limit uint64) (part item, ok bool) {
	for c.before(end) {
		it := items[c.i]
		stop := it.n
		if c.i == end.i {
			stop = end.off
		}
		n := min(stop-c.off, limit)
		part = item{local: it.local + c.off, remote: it.remote + c.off, n: n, pos: it.pos}
		c.off += n
		if c.off == it.n {
			c.i, c.off = c.i+1, 0
		}
		if n > 0 {
			return part, true
		}
	}
	return item{}, false
}

// after gives the cursor that is budget bytes further on, or at the end of the items.
func (c cursor) after(items []item, budget uint64) cursor {
	for c.i < len(items) {
		left := items[c.i].n - c.off
		if left > budget {
			c.off += budget
			return c
		}
		budget -= left
		c.i, c.off = c.i+1, 0
		if budget == 0 {
			break
		}
	}
	return c
}
