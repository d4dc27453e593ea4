package registry

import (
	"math"

	"github.com/nixlkv/nixlkv"
)

// Known says whether the type is one that SGLang's NIXL backend sends.
func (t StateType) Known() bool {
	switch t {
	case StateMamba, StateSWA, StateSWARing, StateDSA, StateDSATail, StateC128,
		StateMinimaxIndexK, StateMinimaxDenseKV, StateQSAPending, StateQSACompressed,
		StateBlockScale, StateBlockScaleSWA, StateRequestRow:
		return true
	}
	return false
}

// validate checks component i. A component without tensors is valid: a PP stage without such
// layers has one, to keep the others in place.
func (c *StateComponent) validate(p *problems, i int) {
	if !c.Type.Known() {
		p.add(index("State", i, "Type"), nixlkv.ErrState, "expected a state type of SGLang's NIXL backend, got %.40q", string(c.Type))
	}
	list := index("State", i, "Tensors")
	for j := range c.Tensors {
		c.Tensors[j].validate(p, list, j)
	}
	validateLayerIDs(p, list, nixlkv.ErrState, len(c.Tensors), func(j int) int { return c.Tensors[j].LayerID })
}

func (t *StateTensor) validate(p *problems, list string, j int) {
	add := func(field, format string, args ...any) {
		p.add(index(list, j, field), nixlkv.ErrState, format, args...)
	}
	if !t.Absent() {
		if t.Len < t.ItemLen {
			add("Len", "expected at least a slot of %d, got %d", t.ItemLen, t.Len)
		}
		if !fits(t.Base, t.Len) {
			add("Len", "expected an end below 2^64, got %d bytes at %#x", t.Len, t.Base)
		}
		if t.ItemLen > math.MaxUint32 {
			add("ItemLen", "expected at most %d, which the wire carries, got %d", uint32(math.MaxUint32), t.ItemLen)
		}
	}
	if t.Dim < 0 || t.Dim > maxNumber {
		add("Dim", "expected 0 to %d, got %d", maxNumber, t.Dim)
		return
	}
	if t.OuterCount < 0 || t.OuterCount > maxNumber {
		add("OuterCount", "expected 0 to %d, got %d", maxNumber, t.OuterCount)
		return
	}
	for g, n := range t.ConvGroups {
		if n < 1 || n > maxNumber {
			add(index("ConvGroups", g, ""), "expected 1 to %d, got %d", maxNumber, n)
		}
	}
	if t.Dim == 0 || t.Absent() {
		return
	}
	if parts := uint64(t.Dim) * uint64(max(t.OuterCount, 1)); t.ItemLen%parts != 0 {
		add("ItemLen", "expected a multiple of Dim %d × OuterCount %d, got %d", t.Dim, max(t.OuterCount, 1), t.ItemLen)
	}
}
