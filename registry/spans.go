package registry

import "slices"

// Span is memory to register with NIXL.
type Span struct {
	Base, Len uint64
	Kind      Kind
	Device    uint64 // the layout's GPU for VRAM, 0 for DRAM
}

// Spans gives the memory of the layout: every KV region, aux buffer (DRAM) and state tensor
// (VRAM), as register_buffer_to_engine in SGLang's nixl/conn.py registers them; what is absent
// or empty is left out. They are in the order of their addresses, VRAM first.
//
// Buffers that overlap, as in unified pools, come as one span. Those that only touch stay
// apart: they may be allocations of their own, and no NIC registers across two of them.
//
// The layout has to be valid.
func (l *Layout) Spans() []Span {
	var spans []Span
	add := func(kind Kind, base, length uint64) {
		if base == 0 || length == 0 {
			return
		}
		s := Span{Base: base, Len: length, Kind: kind}
		if kind == VRAM {
			s.Device = l.GPU
		}
		spans = append(spans, s)
	}
	for i := range l.KV {
		add(l.KV[i].Kind, l.KV[i].Base, l.KV[i].Len)
	}
	for i := range l.Aux {
		add(DRAM, l.Aux[i].Base, l.Aux[i].Len)
	}
	for i := range l.State {
		for _, t := range l.State[i].Tensors {
			if !t.Absent() {
				add(VRAM, t.Base, t.Len)
			}
		}
	}
	return joinOverlapping(spans)
}

// joinOverlapping sorts in place.
func joinOverlapping(spans []Span) []Span {
	slices.SortFunc(spans, func(a, b Span) int {
		switch {
		case a.Kind != b.Kind:
			return int(a.Kind) - int(b.Kind)
		case a.Base < b.Base:
			return -1
		case a.Base > b.Base:
			return 1
		}
		return 0
	})
	out := spans[:0]
	for _, s := range spans {
		if n := len(out); n > 0 && out[n-1].Kind == s.Kind && s.Base-out[n-1].Base < out[n-1].Len {
			out[n-1].Len = max(out[n-1].Len, s.Base-out[n-1].Base+s.Len)
			continue
		}
		out = append(out, s)
	}
	return out
}
