package kvsender

import (
	"bytes"
	"testing"

	"go.uber.org/zap"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/hostmem"
	"github.com/nixlkv/nixlkv/internal/embedded"
	"github.com/nixlkv/nixlkv/internal/faultengine"
	"github.com/nixlkv/nixlkv/internal/wire"
	"github.com/nixlkv/nixlkv/nixl"
	"github.com/nixlkv/nixlkv/registry"
)

// stateUp is a prefill and a decode that have state besides: components of two tensors each,
// of kitStateSlots slots of kitState bytes.
type stateUp struct {
	*pairUp
	here, there []*hostmem.Buffer // one a component
	kinds       []registry.StateType
}

const (
	kitState      = 96
	kitStateSlots = 8
	kitTensors    = 2
)

// newStatePair starts both. change may change this rank's layout and the decode's
// registration.
func newStatePair(t *testing.T, e *nixl.Engine, frames int, change func(*registry.Layout, *wire.Registration), kinds ...registry.StateType) *stateUp {
	t.Helper()
	u := &stateUp{pairUp: &pairUp{src: newKitMemory(t, 4)}, kinds: kinds}
	u.src.fill()
	l, g := u.src.layout(), &wire.Registration{}
	for i, k := range kinds {
		u.here, u.there = append(u.here, newState(t)), append(u.there, newState(t))
		for j, b := 0, u.here[i].Bytes(); j < len(b); j++ {
			b[j] = byte(j*5 + j/kitState*17 + i*31 + 1)
		}
		c := registry.StateComponent{Type: k}
		var ptrs, lens []uint64
		for x := range kitTensors {
			off := uint64(x * kitStateSlots * kitState)
			c.Tensors = append(c.Tensors, registry.StateTensor{Base: uint64(u.here[i].Addr()) + off, Len: kitStateSlots * kitState, ItemLen: kitState, LayerID: registry.NoLayer})
			ptrs, lens = append(ptrs, uint64(u.there[i].Addr())+off), append(lens, kitStateSlots*kitState)
		}
		l.State = append(l.State, c)
		g.StatePtrs, g.StateDataLens = append(g.StatePtrs, ptrs), append(g.StateDataLens, lens)
		g.StateItemLens = append(g.StateItemLens, []uint32{kitState, kitState})
		g.StateDims, g.StateLayerIDs = append(g.StateDims, nil), append(g.StateLayerIDs, nil)
	}
	if change != nil {
		change(l, g)
	}
	m, err := NewManager(t.Context(), l, WithEngine(e), WithHostVRAM())
	ok(t, err)
	u.m = m
	u.d = &decode{t: t, mem: newKitMemory(t, 4), frames: frames, came: make(chan struct{}, 1)}
	u.d.start(e, m, nixl.WithHostVRAM())
	for _, b := range u.there {
		_, err := u.d.agent.Register(nixl.Host(b).As(nixl.VRAM, 0))
		ok(t, err)
	}
	kv := u.d.registration()
	for i := range kv.Kinds {
		kv.Kinds[i] = wire.VRAM
	}
	kv.StatePtrs, kv.StateItemLens, kv.StateDims, kv.StateLayerIDs, kv.StateDataLens = g.StatePtrs, g.StateItemLens, g.StateDims, g.StateLayerIDs, g.StateDataLens
	u.d.register(kv)
	t.Cleanup(func() {
		closeManager(t, u.m)
		u.d.close()
		u.src.free(t)
		u.d.mem.free(t)
		for i := range u.here {
			ok(t, u.here[i].Free())
			ok(t, u.there[i].Free())
		}
	})
	return u
}

func newState(t *testing.T) *hostmem.Buffer {
	t.Helper()
	b, err := hostmem.Alloc(kitTensors * kitStateSlots * kitState)
	ok(t, err)
	return b
}

// begin opens a room of one page and gives it its last chunk.
func (u *stateUp) begin(t *testing.T, id nixlkv.Room, src, dst [][]int32) *Sender {
	t.Helper()
	s := open(t, u.m, id)
	u.d.tell(id, []int32{3}, 1, func(m *wire.Metadata) { m.StateIndices = dst })
	ok(t, s.Begin(Plan{Pages: 1, Aux: Aux(2)}))
	_ = s.Finish([]int32{4}, src)
	return s
}

// compareState checks that the slots arrived, and that every other byte is still zero.
func (u *stateUp) compareState(t *testing.T, src, dst [][]int32) {
	t.Helper()
	for i := range u.here {
		want := make([]byte, kitTensors*kitStateSlots*kitState)
		for x := range kitTensors {
			for k, slot := range listAt(src, i) {
				from, to := (x*kitStateSlots+int(slot))*kitState, (x*kitStateSlots+int(dst[i][k]))*kitState
				copy(want[to:to+kitState], u.here[i].Bytes()[from:])
			}
		}
		if !bytes.Equal(u.there[i].Bytes(), want) {
			t.Errorf("component %d, %s: the slots at the decode are not those of the prefill, or others changed", i, u.kinds[i])
		}
		clear(u.there[i].Bytes())
	}
}

// stallingEngine is an engine whose writes settle when they are let go.
func stallingEngine(t *testing.T) (*stalling, *nixl.Engine) {
	t.Helper()
	s := &stalling{Engine: faultengine.New(embedded.New())}
	t.Cleanup(s.letGo)
	return s, nixl.OpenOver(s, nixl.Embedded, zap.NewNop())
}
