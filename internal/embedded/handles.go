package embedded

import (
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/nixlkv/nixlkv/internal/engine"
)

// Handles hold a generation above 32 bits of index.
const _ = uintptr(1) << 63 // a 64-bit machine is needed

const (
	chunkBits = 6
	chunkSize = 1 << chunkBits
)

// table keeps objects of one kind in slots that are used again, and names them by words.
// A word holds the slot's index and its generation, which is odd while the slot is taken
// and grows with every use, so that a word never means a later object. Looking up takes
// no lock: slots never move.
type table[T any] struct {
	chunks atomic.Pointer[[]*chunk[T]]

	mu   sync.Mutex
	free []uint32
	next uint32 // slots ever used
	live int
}

type chunk[T any] [chunkSize]slot[T]

type slot[T any] struct {
	gen atomic.Uint32
	v   T
}

// alloc takes a slot. The object in it is as its last user left it.
func (t *table[T]) alloc() (uintptr, *T, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	var i uint32
	switch {
	case len(t.free) > 0:
		i = t.free[len(t.free)-1]
		t.free = t.free[:len(t.free)-1]
	case t.next < maxHandles:
		i = t.next
		t.next++
		if i%chunkSize == 0 {
			t.grow()
		}
	default:
		return 0, nil, fmt.Errorf("embedded: %d handles of one kind are in use: %w", maxHandles, engine.ErrBackend)
	}
	s := t.at(i)
	t.live++
	return uintptr(s.gen.Add(1))<<32 | uintptr(i), &s.v, nil
}

func (t *table[T]) grow() {
	var chunks []*chunk[T]
	if old := t.chunks.Load(); old != nil {
		chunks = append(chunks, *old...)
	}
	chunks = append(chunks, new(chunk[T]))
	t.chunks.Store(&chunks)
}

func (t *table[T]) at(i uint32) *slot[T] {
	chunks := t.chunks.Load()
	if chunks == nil || int(i>>chunkBits) >= len(*chunks) {
		return nil
	}
	return &(*chunks)[i>>chunkBits][i%chunkSize]
}

// get gives the object that a word names, or nil.
func (t *table[T]) get(word uintptr) *T {
	s, gen := t.at(uint32(word)), uint32(word>>32)
	if s == nil || gen%2 == 0 || s.gen.Load() != gen {
		return nil
	}
	return &s.v
}

// release gives a slot back and says whether the word named one. The caller has put the
// object into the state in which the next alloc may find it.
func (t *table[T]) release(word uintptr) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	s, gen := t.at(uint32(word)), uint32(word>>32)
	if s == nil || gen%2 == 0 || !s.gen.CompareAndSwap(gen, gen+1) {
		return false
	}
	t.live--
	// A slot whose generations are used up is not used again.
	if gen+1 != 0 {
		t.free = append(t.free, uint32(word))
	}
	return true
}

// count says how many slots are taken.
func (t *table[T]) count() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.live
}
