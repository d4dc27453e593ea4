package embedded

import (
	"cmp"
	"slices"
)

// span is a range of addresses [addr, end).
type span struct{ addr, end uint64 }

// covers says whether n bytes from addr lie inside of the span.
func (s span) covers(addr, n uint64) bool {
	return addr >= s.addr && addr <= s.end && n <= s.end-addr
}

// spanIndex finds the region that covers a descriptor. It never changes once made.
//
// Regions may overlap, as in NIXL. One that lies inside of another answers no question
// that the other cannot, so it is left out; what remains ascends in both bounds, and only
// the last span that starts at or before an address can cover it.
type spanIndex[R any] struct {
	spans []span
	regs  []R // regs[i] is the region of spans[i]
}

func newSpanIndex[R any](regs []R, bounds func(R) span) *spanIndex[R] {
	type entry struct {
		span
		reg R
	}
	all := make([]entry, len(regs))
	for i, r := range regs {
		all[i] = entry{bounds(r), r}
	}
	slices.SortStableFunc(all, func(a, b entry) int {
		return cmp.Or(cmp.Compare(a.addr, b.addr), cmp.Compare(b.end, a.end))
	})
	x := &spanIndex[R]{}
	for _, e := range all {
		if n := len(x.spans); n > 0 && e.end <= x.spans[n-1].end {
			continue
		}
		x.spans = append(x.spans, e.span)
		x.regs = append(x.regs, e.reg)
	}
	return x
}

// find gives the position of a span that covers n bytes from addr, or -1. It tries hint,
// the position of the last hit, first.
func (x *spanIndex[R]) find(addr, n uint64, hint int) int {
	if uint(hint) < uint(len(x.spans)) && x.spans[hint].covers(addr, n) {
		return hint
	}
	i, found := slices.BinarySearchFunc(x.spans, addr, func(s span, addr uint64) int {
		return cmp.Compare(s.addr, addr)
	})
	if !found {
		i--
	}
	if i < 0 || !x.spans[i].covers(addr, n) {
		return -1
	}
	return i
}
