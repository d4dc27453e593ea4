package kvsender

import (
	"errors"
	"slices"
	"testing"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/nixl"
	"github.com/nixlkv/nixlkv/registry"
)

// A fuzzed pair of sides is one that golden_state.json has, which works or is refused for a
// good reason, and then changed here and there.

// stateFields gives what can be changed.
func stateFields(l *registry.Layout, p *registry.Peer, src, dst []int32) (words []*uint64, ints []*int, slots []*int32) {
	words = append(words, &l.GPU, &p.GPU)
	ints = append(ints, &l.Ranks.TP, &l.Ranks.EngineRank, &l.Ranks.PP, &l.Ranks.PPRank, &p.Ranks.TP, &p.Ranks.EngineRank,
		&l.StartLayer, &l.EndLayer, &l.PageSize, &l.KVHeads, &l.TotalKVHeads, &l.DraftRegions)
	for i := range l.State[0].Tensors {
		t := &l.State[0].Tensors[i]
		words = append(words, &t.Base, &t.Len, &t.ItemLen)
		ints = append(ints, &t.LayerID, &t.Dim, &t.OuterCount)
		for k := range t.ConvGroups {
			ints = append(ints, &t.ConvGroups[k])
		}
	}
	s := &p.State[0]
	for _, list := range [][]uint64{s.Ptrs, s.ItemLens, s.DataLens} {
		for k := range list {
			words = append(words, &list[k])
		}
	}
	for _, list := range [][]int{s.Dims, s.LayerIDs, l.CompressionRatios} {
		for k := range list {
			ints = append(ints, &list[k])
		}
	}
	for _, list := range [][]int32{src, dst} {
		for k := range list {
			slots = append(slots, &list[k])
		}
	}
	return words, ints, slots
}

// change changes one thing: a number, the length of a list, or the type.
func (f *fuzzInput) change(l *registry.Layout, p *registry.Peer, src, dst *[]int32) {
	words, ints, slots := stateFields(l, p, *src, *dst)
	s := &p.State[0]
	switch op, at := f.byte(), int(f.byte()); op % 8 {
	case 0:
		*words[at%len(words)] = f.number()
	case 1:
		*words[at%len(words)] += f.byte() - 8
	case 2:
		*words[at%len(words)] = *words[f.byte()%uint64(len(words))]
	case 3:
		*ints[at%len(ints)] = int(int64(f.number()))
	case 4:
		*ints[at%len(ints)] += int(f.byte()) - 2
	case 5:
		if len(slots) > 0 {
			*slots[at%len(slots)] = int32(f.number())
		}
	case 6:
		l.State[0].Type = stateTypes[at%len(stateTypes)]
	case 7:
		n := int(f.byte())
		cut := func(k int) int { return n % (k + 1) }
		switch at % 8 {
		case 0:
			l.State[0].Tensors = l.State[0].Tensors[:cut(len(l.State[0].Tensors))]
		case 1:
			s.Ptrs = s.Ptrs[:cut(len(s.Ptrs))]
		case 2:
			s.ItemLens = s.ItemLens[:cut(len(s.ItemLens))]
		case 3:
			s.DataLens = nil
		case 4:
			s.LayerIDs, s.Dims = s.LayerIDs[:cut(len(s.LayerIDs))], s.Dims[:cut(len(s.Dims))]
		case 5:
			*src = append((*src)[:cut(len(*src))], int32(f.number()))
		case 6:
			*dst = append((*dst)[:cut(len(*dst))], int32(f.number()))
		case 7:
			l.MLA = !l.MLA
		}
	}
}

var stateTypes = []registry.StateType{registry.StateMamba, registry.StateSWA, registry.StateSWARing, registry.StateDSA, registry.StateDSATail,
	registry.StateC128, registry.StateMinimaxIndexK, registry.StateMinimaxDenseKV, registry.StateQSAPending, registry.StateQSACompressed,
	registry.StateBlockScale, registry.StateBlockScaleSWA, registry.StateRequestRow, "unknown"}

// Whatever the two sides tell, state is sent or there is an error with a sentinel; what is
// sent lies in tensors of the component, as far as their lengths are known, and of known
// lengths no byte is written twice, but in slot 0.
func FuzzState(f *testing.F) {
	rows := readGoldenState(f)
	for k := range rows {
		if k%16 == 0 {
			f.Add(uint16(k), []byte{})
		}
	}
	f.Add(uint16(3), []byte{7, 3, 0})
	f.Add(uint16(40), []byte{1, 5, 7, 4, 9, 1, 0, 4, 6, 1})
	f.Add(uint16(700), []byte{3, 6, 7, 255, 255, 255, 255, 255, 255, 255, 127, 0, 8, 6, 0})
	f.Fuzz(func(t *testing.T, row uint16, changes []byte) {
		g := &rows[int(row)%len(rows)]
		l, p := g.sides()
		l.CompressionRatios = slices.Clone(l.CompressionRatios)
		for i := range l.State[0].Tensors {
			l.State[0].Tensors[i].ConvGroups = slices.Clone(l.State[0].Tensors[i].ConvGroups)
		}
		src, dst := slices.Clone(g.src), slices.Clone(g.dst)
		for in, n := fuzzInput(changes), 0; len(in) > 0 && n < 16; n++ {
			in.change(l, p, &src, &dst)
		}
		from, to, err := sendState(l, p, src, dst)
		if err != nil {
			if !errors.Is(err, nixlkv.ErrState) {
				t.Fatal(err)
			}
			return
		}
		if writes := planState(l, p).components[0].writes(src); (len(from) > 0) != writes {
			t.Fatalf("%d descriptors, writes %t", len(from), writes)
		}
		mustLieInState(t, l, p, from, to)
		if len(p.State[0].DataLens) > 0 && !slices.Contains(dst, 0) {
			mustBeApart(t, to)
		}
	})
}

func mustLieInState(t *testing.T, l *registry.Layout, p *registry.Peer, from, to []nixl.Desc) {
	t.Helper()
	src, dst := l.State[0].Tensors, p.State[0]
	if len(from) != len(to) {
		t.Fatalf("%d and %d descriptors", len(from), len(to))
	}
	inside := func(d nixl.Desc, base, n uint64) bool {
		return base != 0 && d.Addr >= base && d.Len <= n && d.Addr-base <= n-d.Len
	}
	for k := range from {
		a, b := from[k], to[k]
		if a.Len != b.Len || a.Len == 0 || a.Dev != l.GPU || b.Dev != p.GPU {
			t.Fatalf("descriptor %d: %+v to %+v", k, a, b)
		}
		if !slices.ContainsFunc(src, func(x registry.StateTensor) bool { return inside(a, x.Base, x.Len) }) {
			t.Fatalf("%+v lies in no tensor of %+v", a, src)
		}
		ok := false
		for j, base := range dst.Ptrs {
			n := -base // to the end of the address space
			if len(dst.DataLens) > 0 {
				n = dst.DataLens[j]
			}
			ok = ok || inside(b, base, n)
		}
		if !ok {
			t.Fatalf("%+v lies in no tensor of %+v", b, dst)
		}
	}
}

func mustBeApart(t *testing.T, descs []nixl.Desc) {
	t.Helper()
	descs = slices.Clone(descs)
	slices.SortFunc(descs, func(a, b nixl.Desc) int {
		if a.Addr < b.Addr {
			return -1
		}
		return 1
	})
	for k := 1; k < len(descs); k++ {
		if descs[k].Addr-descs[k-1].Addr < descs[k-1].Len {
			t.Fatalf("%#x is written twice", descs[k].Addr)
		}
	}
}
