package kvreceiver

import (
	"errors"
	"testing"

	"github.com/nixlkv/nixlkv/hostmem"
	"github.com/nixlkv/nixlkv/nixl"
)

// Buffers that the manager was told of cannot be freed under it; the kit frees them afterwards.
func TestMemoryPinned(t *testing.T) {
	mem := newKitMemory(t)
	m, err := NewManager(t.Context(), mem.layout(), append(quick(openEngine(t, nixl.Embedded)), WithMemory(mem.kv, mem.aux))...)
	ok(t, err)
	for _, b := range []*hostmem.Buffer{mem.kv, mem.aux} {
		if err := b.Free(); !errors.Is(err, hostmem.ErrInUse) {
			t.Errorf("got %v", err)
		}
	}
	ok(t, m.Close())
}
