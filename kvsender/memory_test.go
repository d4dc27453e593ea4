package kvsender

import (
	"errors"
	"testing"

	"github.com/nixlkv/nixlkv/hostmem"
	"github.com/nixlkv/nixlkv/nixl"
)

// Buffers that the manager was told of cannot be freed under it.
func TestMemoryPinned(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *nixl.Engine) {
		mem := newKitMemory(t, 2)
		m := newManager(t, e, mem, WithMemory(mem.kv, mem.aux))
		for _, b := range []*hostmem.Buffer{mem.kv, mem.aux} {
			if err := b.Free(); !errors.Is(err, hostmem.ErrInUse) {
				t.Errorf("got %v", err)
			}
		}
		closeManager(t, m)
		mem.free(t)
	})
}
