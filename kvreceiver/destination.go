package kvreceiver

import (
	"fmt"
	"math"
	"slices"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/metadata"
	"github.com/nixlkv/nixlkv/registry"
)

// checkDestination checks where a room is to go, against this rank's own layout: a prefill
// would write wherever it is told to.
func (m *Manager) checkDestination(d *Destination) error {
	l := m.layout
	switch slots := l.AuxSlots(); {
	case d.Prefix < 0 || d.Prefix > math.MaxInt32:
		return fmt.Errorf("%w: a prefix of %d tokens", nixlkv.ErrPageCount, d.Prefix)
	case !d.Aux.set:
		return fmt.Errorf("%w: missing aux index", nixlkv.ErrAuxIndex)
	case d.Aux.slot < 0 || uint64(d.Aux.slot) >= max(slots, 1):
		return fmt.Errorf("%w: aux index out of range: slot %d of %d", nixlkv.ErrAuxIndex, d.Aux.slot, slots)
	case len(d.State) > len(l.State):
		return fmt.Errorf("%w: slots of %d components, the layout has %d", nixlkv.ErrState, len(d.State), len(l.State))
	}
	pages := uint64(math.MaxInt32) + 1 // without KV regions the numbers mean nothing
	if len(l.KV) > 0 {
		pages = l.Pages()
	}
	if err := checkRange("page", d.Pages, pages); err != nil {
		return fmt.Errorf("%w: %w", nixlkv.ErrPageRange, err)
	}
	if err := checkDistinct(d.Pages); err != nil {
		return err
	}
	for i, slots := range d.State {
		if err := checkState(&l.State[i], slots); err != nil {
			return fmt.Errorf("%w: component %d (%s): %w", nixlkv.ErrState, i, l.State[i].Type, err)
		}
	}
	return nil
}

// checkRange checks numbers against how many there are.
func checkRange(what string, numbers []int32, n uint64) error {
	for i, p := range numbers {
		if p < 0 || uint64(p) >= n {
			return fmt.Errorf("%s %d at position %d, there are %d", what, p, i, n)
		}
	}
	return nil
}

// checkDistinct refuses pages that are given twice: the second would overwrite the first.
func checkDistinct(pages []int32) error {
	for i := 1; i < len(pages); i++ {
		if pages[i-1] < pages[i] {
			continue
		}
		sorted := slices.Clone(pages)
		slices.Sort(sorted)
		for k := 1; k < len(sorted); k++ {
			if sorted[k-1] == sorted[k] {
				return fmt.Errorf("%w: page %d is given twice, in a list of %d", nixlkv.ErrPageRange, sorted[k], len(pages))
			}
		}
		return nil
	}
	return nil
}

// checkState checks slots of a component. Those of dsa_tail are no slots but a row with
// offsets and lengths in a ring (build_dsa_tail_transfer_blocks in SGLang's utils.py).
func checkState(c *registry.StateComponent, slots []int32) error {
	n := uint64(math.MaxInt32)
	if c.Type != registry.StateDSATail {
		for _, t := range c.Tensors {
			if !t.Absent() {
				n = min(n, t.Slots())
			}
		}
	}
	return checkRange("slot index out of range:", slots, n)
}

// checkMetadata checks that metadata buffers are those of the layout.
func checkMetadata(l *registry.Layout, b *metadata.Buffers) error {
	if b == nil {
		return nil
	}
	lens := make([]uint64, len(l.Aux))
	for i, a := range l.Aux {
		lens[i] = a.ItemLen
	}
	if err := b.Layout().Validate(lens); err != nil {
		return err
	}
	if n := l.AuxSlots(); uint64(b.Slots()) < n {
		return fmt.Errorf("%w: metadata buffers of %d slots, the layout has %d", nixlkv.ErrAuxIndex, b.Slots(), n)
	}
	return nil
}
