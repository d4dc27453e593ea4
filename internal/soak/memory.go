package main

import (
	"encoding/binary"
	"fmt"
	"sync/atomic"
	"unsafe"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/hostmem"
	"github.com/nixlkv/nixlkv/registry"
)

// stampBytes is the length of a room's number, which stands at the start of each of its pages
// and of its aux slot: so a page of another room is noticed.
const stampBytes = 8

const auxBytes = 64

// memory is the KV cache and the aux slots of a manager, for so many streams.
type memory struct {
	buf     *hostmem.Buffer
	plan    *plan
	streams int
	pages   int // of a region
}

func newMemory(p *plan, streams int) (*memory, error) {
	m := &memory{plan: p, streams: streams, pages: streams*p.Pages + p.Pool}
	var err error
	if m.buf, err = hostmem.Alloc(p.Regions*m.pages*p.PageBytes+streams*auxBytes, hostmem.Name("soak")); err != nil {
		return nil, err
	}
	return m, m.buf.Touch() // or resident memory would grow while pages are written for the first time
}

func (m *memory) layout() *registry.Layout {
	l := &registry.Layout{PageSize: 16, KVHeads: 1, TotalKVHeads: 1}
	base, size := uint64(m.buf.Addr()), m.pages*m.plan.PageBytes
	for i := range m.plan.Regions {
		l.KV = append(l.KV, registry.Region{Base: base + uint64(i*size), Len: uint64(size), ItemLen: uint64(m.plan.PageBytes),
			LayerID: registry.NoLayer, Kind: registry.DRAM})
	}
	l.Aux = []registry.AuxBuffer{{Base: base + uint64(m.plan.Regions*size), Len: uint64(m.streams * auxBytes), ItemLen: auxBytes}}
	return l
}

// pagesOf gives the pages of the k-th stream.
func (m *memory) pagesOf(k int) []int32 {
	pages := make([]int32, m.plan.Pages)
	for i := range pages {
		pages[i] = int32(k*m.plan.Pages + i)
	}
	return pages
}

// places yields the start of each page of the k-th stream, then of its aux slot.
func (m *memory) places(k int) func(yield func([]byte) bool) {
	return func(yield func([]byte) bool) {
		b := m.buf.Bytes()
		for r := range m.plan.Regions {
			for i := range m.plan.Pages {
				at := (r*m.pages + k*m.plan.Pages + i) * m.plan.PageBytes
				if !yield(b[at:][:stampBytes]) {
					return
				}
			}
		}
		yield(b[m.plan.Regions*m.pages*m.plan.PageBytes+k*auxBytes:][:stampBytes])
	}
}

// stamp writes what a prefill has computed of a room.
func (m *memory) stamp(k int, room nixlkv.Room) {
	for b := range m.places(k) {
		binary.NativeEndian.PutUint64(b, uint64(room))
	}
}

// begun says whether something of a room has arrived.
func (m *memory) begun(k int, room nixlkv.Room) bool {
	for b := range m.places(k) {
		// Another process may be writing it.
		return atomic.LoadUint64((*uint64)(unsafe.Pointer(unsafe.SliceData(b)))) == uint64(room)
	}
	return false
}

// check says whether all of a room has arrived.
func (m *memory) check(k int, room nixlkv.Room) error {
	for b := range m.places(k) {
		if got := nixlkv.Room(binary.NativeEndian.Uint64(b)); got != room {
			return fmt.Errorf("room %d succeeded, and a page or the aux slot has what is of room %d", room, got)
		}
	}
	return nil
}
