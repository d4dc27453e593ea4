package kvsender

import (
	"fmt"
	"slices"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/nixl"
	"github.com/nixlkv/nixlkv/registry"
)

// checkStateSource checks the slots that a room's caller gives, before any decode is asked:
// lists for components that there are, and slots that every tensor has.
func checkStateSource(l *registry.Layout, src [][]int32) error {
	for i, slots := range src {
		if len(slots) == 0 {
			continue
		}
		if i >= len(l.State) {
			return fmt.Errorf("%w: slots for component %d, this rank has %d", nixlkv.ErrState, i, len(l.State))
		}
		c := &l.State[i]
		limit := uint64(allSlots)
		for _, t := range c.Tensors {
			if !t.Absent() {
				limit = min(limit, t.Slots())
			}
		}
		if err := checkSlots("prefill", c.Type, slots, limit); err != nil {
			return inComponent(i, c.Type, err)
		}
	}
	return nil
}

// checkSlots checks the numbers that one side gives for a component.
func checkSlots(side string, kind registry.StateType, slots []int32, limit uint64) error {
	switch kind {
	case registry.StateDSATail:
		r, err := parseRing(side, slots)
		if err == nil && r.row >= limit {
			err = fmt.Errorf("%w: %s row %d, there are %d", nixlkv.ErrState, side, r.row, limit)
		}
		return err
	case registry.StateMamba:
		if len(slots) != 1 {
			return fmt.Errorf("%w: Mamba should have single state index, the %s gives %d", nixlkv.ErrState, side, len(slots))
		}
	default:
	}
	for k, x := range slots {
		if uint64(uint32(x)) >= limit { // a negative one is 2^31 or more
			return fmt.Errorf("%w: %s slot %d at position %d, there are %d", nixlkv.ErrState, side, x, k, limit)
		}
	}
	return nil
}

func inComponent(i int, kind registry.StateType, err error) error {
	return fmt.Errorf("state component %d, %s: %w", i, kind, err)
}

// checkDestination checks what a decode tells of a room's state, which is known before the
// first page is sent. No slot but 0 may be named twice, and a rank without any state has none
// to give. It sorts in scratch and returns it to be used again.
func (p *statePlan) checkDestination(dst [][]int32, scratch []int32) ([]int32, error) {
	if len(p.components) == 0 && slices.ContainsFunc(dst, func(l []int32) bool { return len(l) > 0 }) {
		return scratch, fmt.Errorf("%w: the decode asks for state of %d components, this rank has none", nixlkv.ErrState, len(dst))
	}
	for i := range min(len(dst), len(p.components)) {
		c := &p.components[i]
		if len(dst[i]) == 0 {
			continue
		}
		if c.fault != nil {
			return scratch, c.fault
		}
		err := checkSlots("decode", c.kind, dst[i], c.slots.dstPages)
		switch {
		case err != nil:
		case c.kind == registry.StateDSATail:
			r, _ := parseRing("decode", dst[i])
			err = c.checkRow(&r)
		default:
			scratch, err = checkOnce(dst[i], scratch)
		}
		if err != nil {
			return scratch, inComponent(i, c.kind, err)
		}
	}
	return scratch, nil
}

// checkOnce refuses lists that name a slot twice. Slot 0 may be: SGLang's pools hold nothing
// in it, and a decode that still restores a cached prefix names it for rows that have no
// place yet (suffix_page_indices of 0.5.23 spares dsa that; other types, and dsa before,
// list the whole sequence).
func checkOnce(slots, scratch []int32) ([]int32, error) {
	ascend := true
	for k := 1; k < len(slots) && ascend; k++ {
		ascend = slots[k-1] < slots[k]
	}
	if ascend {
		return scratch, nil
	}
	scratch = append(scratch[:0], slots...)
	slices.Sort(scratch)
	for k := 1; k < len(scratch); k++ {
		if scratch[k-1] == scratch[k] && scratch[k] != 0 {
			return scratch, fmt.Errorf("%w: decode slot %d is given twice, in a list of %d", nixlkv.ErrState, scratch[k], len(slots))
		}
	}
	return scratch, nil
}

// check checks a room's state against a decode's, before any of it is posted; what the decode
// tells has been through checkDestination. Both sides give as many slots, and every component
// that one brings the other does. What the decode alone has, after this rank's components, is
// a draft's, and stays as it is.
func (p *statePlan) check(src, dst [][]int32) error {
	for i := range p.components {
		c := &p.components[i]
		from, to := listAt(src, i), listAt(dst, i)
		if len(from) == 0 && len(to) == 0 {
			continue
		}
		if c.fault != nil {
			return c.fault
		}
		if len(from) != len(to) {
			return inComponent(i, c.kind, fmt.Errorf("%w: state index length mismatch: prefill=%d, decode=%d", nixlkv.ErrState, len(from), len(to)))
		}
		if err := c.check(from, to); err != nil {
			return inComponent(i, c.kind, err)
		}
	}
	return nil
}

func (c *stateComponent) check(src, dst []int32) error {
	if err := checkSlots("prefill", c.kind, src, c.slots.srcPages); err != nil {
		return err
	}
	if err := checkSlots("decode", c.kind, dst, c.slots.dstPages); err != nil {
		return err
	}
	if c.kind != registry.StateDSATail {
		return nil
	}
	a, err := parseRing("prefill", src)
	if err != nil {
		return err
	}
	b, err := parseRing("decode", dst)
	if err != nil {
		return err
	}
	return c.checkRings(&a, &b)
}

// writes says whether slots that were checked have anything to write.
func (c *stateComponent) writes(src []int32) bool {
	if len(src) == 0 {
		return false
	}
	if c.kind == registry.StateDSATail {
		r, _ := parseRing("prefill", src)
		return len(c.rings) > 0 && r.n > 0
	}
	return len(c.slots.pairs) > 0
}

// listAt gives list i; none if there are fewer.
func listAt(lists [][]int32, i int) []int32 {
	if i < len(lists) {
		return lists[i]
	}
	return nil
}

// appendDescs appends the descriptors of a component, source and destination, equally many
// and of equal lengths pairwise, neighbouring slots merged where they lie side by side on
// both sides. The slots were checked. It uses runs as scratch and returns it.
func (p *statePlan) appendDescs(from, to []nixl.Desc, runs []run, component int, src, dst []int32) ([]nixl.Desc, []nixl.Desc, []run) {
	c := &p.components[component]
	if len(src) == 0 {
		return from, to, runs
	}
	if c.kind == registry.StateDSATail {
		a, _ := parseRing("prefill", src)
		b, _ := parseRing("decode", dst)
		from, to = c.appendRings(from, to, &a, &b)
		return from, to, runs
	}
	runs = appendRuns(runs, chunkPages{src: src, dst: dst})
	from, to = c.slots.appendDescs(from, to, runs)
	return from, to, runs
}
