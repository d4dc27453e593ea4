package main

import (
	"encoding/binary"

	"github.com/nixlkv/nixlkv/hostmem"
	"github.com/nixlkv/nixlkv/metadata"
	"github.com/nixlkv/nixlkv/registry"
)

// The KV cache of a small model: a region for the K of each layer, then one for the V of each,
// all with the same number of pages.
const (
	layers    = 2
	regions   = 2 * layers
	numPages  = 64
	pageSize  = 16                     // tokens
	pageBytes = pageSize * 4 * 128 * 2 // 4 heads of 128 numbers of 2 bytes
	auxSlots  = 8
)

// memory is what a worker has: its KV cache, and slots for what goes with it.
type memory struct {
	buf    *hostmem.Buffer
	slots  *metadata.Buffers
	layout *registry.Layout // what the library knows of it
}

func newMemory() (*memory, error) {
	meta, err := metadata.NewLayout(metadata.SGLang0523, metadata.Options{})
	if err != nil {
		return nil, err
	}
	size := regions * numPages * pageBytes
	for _, n := range meta.ItemLens() {
		size += auxSlots * int(n)
	}
	m := &memory{layout: &registry.Layout{PageSize: pageSize, KVHeads: 4, TotalKVHeads: 4}}
	if m.buf, err = hostmem.Alloc(size); err != nil {
		return nil, err
	}
	base, rest := uint64(m.buf.Addr()), m.buf.Bytes()
	take := func(n int) (addr uint64, piece []byte) {
		addr, piece, rest = base+uint64(m.buf.Len()-len(rest)), rest[:n:n], rest[n:]
		return addr, piece
	}
	for range regions {
		addr, piece := take(numPages * pageBytes)
		m.layout.KV = append(m.layout.KV, registry.Region{
			Base: addr, Len: uint64(len(piece)), ItemLen: pageBytes, LayerID: registry.NoLayer, Kind: registry.DRAM,
		})
	}
	var rows [][]byte
	for _, n := range meta.ItemLens() {
		addr, piece := take(auxSlots * int(n))
		rows = append(rows, piece)
		m.layout.Aux = append(m.layout.Aux, registry.AuxBuffer{Base: addr, Len: uint64(len(piece)), ItemLen: n})
	}
	m.slots, err = metadata.NewBuffers(meta, auxSlots, rows)
	return m, err
}

// page is one page of one region.
func (m *memory) page(region int, page int32) []byte {
	return m.buf.Bytes()[(region*numPages+int(page))*pageBytes:][:pageBytes]
}

// compute stands where a model would be. No two pages get the same content.
func (m *memory) compute(pages []int32) {
	for region := range regions {
		for _, p := range pages {
			for i, b := 0, m.page(region, p); i+8 <= len(b); i += 8 {
				binary.LittleEndian.PutUint64(b[i:], uint64(region)<<48|uint64(p)<<24|uint64(i))
			}
		}
	}
}

// freeAfter frees the memory if nothing uses it any more: closed is what its manager's Close
// gave.
func (m *memory) freeAfter(closed error) error {
	if closed != nil {
		return closed
	}
	return m.free()
}

func (m *memory) free() error { return m.buf.Free() }
