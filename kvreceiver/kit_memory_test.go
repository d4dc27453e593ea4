package kvreceiver

import (
	"bytes"
	"testing"

	"github.com/nixlkv/nixlkv/hostmem"
	"github.com/nixlkv/nixlkv/metadata"
	"github.com/nixlkv/nixlkv/nixl"
	"github.com/nixlkv/nixlkv/registry"
)

const (
	kitRegions  = 4
	kitPages    = 64
	kitPage     = 256 // bytes
	kitSlots    = 16
	kitAux      = 64 // bytes of a slot
	kitState    = 96 // bytes of a state slot
	kitPageSize = 16 // tokens
)

// kitMemory is the memory of either side: KV regions, aux buffers and state components, each
// kind in one buffer, one behind the other.
type kitMemory struct {
	t              *testing.T
	kv, aux, state *hostmem.Buffer
	auxItems       []uint64 // bytes of a slot of each aux buffer
	components     int
}

type memoryOption func(*kitMemory)

// withState adds state components, of one tensor each. They are VRAM, so the agents must be
// made WithHostVRAM.
func withState(n int) memoryOption { return func(k *kitMemory) { k.components = n } }

// withAux replaces the aux buffer by those of SGLang's metadata.
func withAux(l *metadata.Layout) memoryOption {
	return func(k *kitMemory) { k.auxItems = l.ItemLens() }
}

// newKitMemory makes memory that is freed with the test.
func newKitMemory(t *testing.T, opts ...memoryOption) *kitMemory {
	t.Helper()
	k := &kitMemory{t: t, auxItems: []uint64{kitAux}}
	for _, o := range opts {
		o(k)
	}
	alloc := func(n int) *hostmem.Buffer {
		b, err := hostmem.Alloc(n)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := b.Free(); err != nil {
				t.Error(err)
			}
		})
		return b
	}
	k.kv = alloc(kitRegions * kitPages * kitPage)
	k.aux = alloc(int(k.auxAt(len(k.auxItems))))
	if k.components > 0 {
		k.state = alloc(k.components * kitSlots * kitState)
	}
	return k
}

// auxAt gives where an aux buffer begins.
func (k *kitMemory) auxAt(buffer int) (at uint64) {
	for _, n := range k.auxItems[:buffer] {
		at += n * kitSlots
	}
	return at
}

func (k *kitMemory) buffers() []nixl.Region {
	regions := []nixl.Region{nixl.Host(k.kv), nixl.Host(k.aux)}
	if k.state != nil {
		regions = append(regions, nixl.Host(k.state))
	}
	return regions
}

func (k *kitMemory) layout() *registry.Layout {
	l := &registry.Layout{PageSize: kitPageSize, KVHeads: 1}
	for i := range kitRegions {
		l.KV = append(l.KV, registry.Region{
			Base: uint64(k.kv.Addr()) + uint64(i*kitPages*kitPage), Len: kitPages * kitPage, ItemLen: kitPage,
			LayerID: registry.NoLayer, Kind: registry.DRAM,
		})
	}
	for i, n := range k.auxItems {
		l.Aux = append(l.Aux, registry.AuxBuffer{Base: uint64(k.aux.Addr()) + k.auxAt(i), Len: n * kitSlots, ItemLen: n})
	}
	for i := range k.components {
		l.State = append(l.State, registry.StateComponent{Type: registry.StateSWA, Tensors: []registry.StateTensor{{
			Base: uint64(k.state.Addr()) + uint64(i*kitSlots*kitState), Len: kitSlots * kitState, ItemLen: kitState, LayerID: registry.NoLayer,
		}}})
	}
	return l
}

// metadataBuffers gives the aux buffers as SGLang's metadata.
func (k *kitMemory) metadataBuffers(l *metadata.Layout) *metadata.Buffers {
	k.t.Helper()
	var memory [][]byte
	for i, n := range k.auxItems {
		memory = append(memory, k.aux.Bytes()[k.auxAt(i):][:n*kitSlots])
	}
	b, err := metadata.NewBuffers(l, kitSlots, memory)
	if err != nil {
		k.t.Fatal(err)
	}
	return b
}

// fill gives every byte a value that is rarely that of its neighbours, and never 0.
func (k *kitMemory) fill() {
	for seed, b := range [][]byte{k.kv.Bytes(), k.aux.Bytes(), k.stateBytes()} {
		for i := range b {
			b[i] = byte(1 + (i*7+i/kitPage*13+seed*31)%255)
		}
	}
}

func (k *kitMemory) stateBytes() []byte {
	if k.state == nil {
		return nil
	}
	return k.state.Bytes()
}

func (k *kitMemory) clear() {
	clear(k.kv.Bytes())
	clear(k.aux.Bytes())
	clear(k.stateBytes())
}

// placed says what of a prefill's memory belongs where in a decode's: page src[i] is at
// dst[i], and likewise slots.
type placed struct {
	src, dst         []int32
	srcSlot, dstSlot int       // aux; negative: none
	state            [][]int32 // slots of both sides, by component
}

// compare checks that everything that was placed is there, and that no other byte has changed
// from zero.
func (k *kitMemory) compare(from *kitMemory, all ...placed) {
	k.t.Helper()
	kv, aux, state := make([]byte, k.kv.Len()), make([]byte, k.aux.Len()), make([]byte, len(k.stateBytes()))
	for _, p := range all {
		for r := range kitRegions {
			for i := range p.src {
				s, d := (r*kitPages+int(p.src[i]))*kitPage, (r*kitPages+int(p.dst[i]))*kitPage
				copy(kv[d:d+kitPage], from.kv.Bytes()[s:])
			}
		}
		if p.srcSlot >= 0 {
			for i, n := range k.auxItems {
				s, d := k.auxAt(i)+uint64(p.srcSlot)*n, k.auxAt(i)+uint64(p.dstSlot)*n
				copy(aux[d:d+n], from.aux.Bytes()[s:])
			}
		}
		for c, slots := range p.state {
			for _, s := range slots {
				at := (c*kitSlots + int(s)) * kitState
				copy(state[at:at+kitState], from.state.Bytes()[at:])
			}
		}
	}
	if !bytes.Equal(k.kv.Bytes(), kv) {
		k.t.Error("pages are not those of the prefill, or others have changed")
	}
	if !bytes.Equal(k.aux.Bytes(), aux) {
		k.t.Error("the aux slot is not that of the prefill, or others have changed")
	}
	if !bytes.Equal(k.stateBytes(), state) {
		k.t.Error("state slots are not those of the prefill, or others have changed")
	}
}
