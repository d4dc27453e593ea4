package kvsender

import (
	"fmt"
	"math"
	"slices"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/nixl"
	"github.com/nixlkv/nixlkv/registry"
)

// auxPlan is how a metadata slot gets to one decode rank: slot s of buffer i is len bytes at
// src + s·len here, and at dst + s·len there. How many slots the decode has is not on the
// wire; NIXL refuses what lies outside of its registered memory.
type auxPlan struct {
	buffers []auxPair
	slots   uint64 // of this rank, the fewest of its buffers
	unequal bool   // the two sides have different numbers of buffers
}

type auxPair struct{ src, dst, len uint64 }

// planAux pairs metadata buffers by position, with the prefill's item lengths. When one side
// has more, the ones that both have are copied, as by send_aux of SGLang 0.5.23 (earlier
// releases fail if the decode has more): right as long as what is missing is at the end,
// like the checksums. unequal is set then, for the log. A side without any buffer fits only
// another one.
func planAux(l *registry.Layout, p *registry.Peer) (*auxPlan, error) {
	n := min(len(l.Aux), len(p.Aux))
	if n == 0 && len(l.Aux) != len(p.Aux) {
		return nil, fmt.Errorf("%w: metadata buffers: %d at the prefill, %d at the decode", nixlkv.ErrMismatch, len(l.Aux), len(p.Aux))
	}
	a := &auxPlan{slots: math.MaxInt32, unequal: len(l.Aux) != len(p.Aux)}
	for i, b := range l.Aux[:n] {
		if b.ItemLen == 0 {
			continue // nothing to copy
		}
		slots := b.Len / b.ItemLen
		if b.Base == 0 || p.Aux[i] == 0 || slots == 0 || b.Base+b.Len-1 < b.Base {
			return nil, fmt.Errorf("%w: metadata buffer %d: %d slots of %d bytes at %#x at the prefill, at %#x at the decode",
				nixlkv.ErrRegions, i, slots, b.ItemLen, b.Base, p.Aux[i])
		}
		a.slots = min(a.slots, slots)
		a.buffers = append(a.buffers, auxPair{b.Base, p.Aux[i], b.ItemLen})
	}
	return a, nil
}

// noSlot stands for an aux slot that was not told.
const noSlot = -1

// appendDescs appends the descriptors that copy slot src of this rank to slot dst of the
// decode. They are DRAM on both sides. Errors wrap nixlkv.ErrAuxIndex, and nothing is
// appended then.
func (a *auxPlan) appendDescs(from, to []nixl.Desc, src, dst int) ([]nixl.Desc, []nixl.Desc, error) {
	switch {
	case src == noSlot:
		return from, to, fmt.Errorf("%w: Missing aux index for last chunk", nixlkv.ErrAuxIndex)
	case src < 0 || uint64(src) >= a.slots:
		return from, to, fmt.Errorf("%w: aux index out of range: slot %d of the prefill's %d", nixlkv.ErrAuxIndex, src, a.slots)
	case dst < 0:
		return from, to, fmt.Errorf("%w: aux index out of range: slot %d of the decode", nixlkv.ErrAuxIndex, dst)
	}
	for _, b := range a.buffers {
		if _, ok := lastByte(b.dst, b.len, uint64(dst)+1, b.len); !ok {
			return from, to, fmt.Errorf("%w: aux index out of range: slot %d of the decode's %d bytes a slot at %#x", nixlkv.ErrAuxIndex, dst, b.len, b.dst)
		}
	}
	from, to = slices.Grow(from, len(a.buffers)), slices.Grow(to, len(a.buffers))
	for _, b := range a.buffers {
		from = append(from, nixl.Desc{Addr: b.src + b.len*uint64(src), Len: b.len})
		to = append(to, nixl.Desc{Addr: b.dst + b.len*uint64(dst), Len: b.len})
	}
	return from, to, nil
}
