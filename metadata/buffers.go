package metadata

import (
	"fmt"
	"slices"

	"github.com/nixlkv/nixlkv"
)

// maxSlots keeps slots times MaxItemLen far from overflowing. SGLang has at most a few times
// as many slots as running requests.
const maxSlots = 1 << 30

// Buffers is memory for a number of slots: SGLang's MetadataBuffers over memory that is the
// caller's, and stays so. The memory must outlive it, and be zero before its slots are first
// used, so that none seems to hold a room.
//
// Methods for different slots may be called concurrently; a slot is used by one at a time,
// NIXL included.
type Buffers struct {
	layout  *Layout
	buffers [][]byte
	slots   int
}

// NewBuffers takes memory for a number of slots: one slice a buffer, each at least
// slots times its item length. Errors wrap ErrBuffer.
func NewBuffers(l *Layout, slots int, memory [][]byte) (*Buffers, error) {
	if l == nil || slots <= 0 || slots > maxSlots {
		return nil, fmt.Errorf("%w: %d slots (1 to %d), or no layout", ErrBuffer, slots, maxSlots)
	}
	if len(memory) != len(l.buffers) {
		return nil, fmt.Errorf("%w: %d buffers, want %d", ErrBuffer, len(memory), len(l.buffers))
	}
	for i, m := range memory {
		n := uint64(slots) * l.buffers[i].ItemLen
		if uint64(len(m)) < n {
			return nil, &BufferError{Index: i, Buffer: l.buffers[i].Name, Want: n, Got: uint64(len(m))}
		}
	}
	return &Buffers{layout: l, slots: slots, buffers: slices.Clone(memory)}, nil
}

// Layout gives the layout of the slots.
func (b *Buffers) Layout() *Layout { return b.layout }

// Slots gives the number of slots.
func (b *Buffers) Slots() int { return b.slots }

// Encode is Layout.Encode for a slot by its index.
func (b *Buffers) Encode(index int, rec *Record) error {
	s, err := b.slot(index)
	if err != nil {
		return err
	}
	return s.encode(rec)
}

// DecodeInto is Layout.DecodeInto for a slot by its index.
func (b *Buffers) DecodeInto(rec *Record, index int, room nixlkv.Room, want Want) error {
	s, err := b.slot(index)
	if err != nil {
		return err
	}
	return s.decode(rec, room, want)
}

// CheckRoom is Layout.CheckRoom for a slot by its index.
func (b *Buffers) CheckRoom(index int, room nixlkv.Room) error {
	s, err := b.slot(index)
	if err != nil {
		return err
	}
	return s.checkRoom(room)
}

// Clear makes a slot hold no room and no checksum, before a decode gives it to the next
// request: that one must not take the last one's metadata for its own. It is
// MetadataBuffers.clear_slot of 0.5.23, for all releases; earlier ones reset the room only
// (DecodeTransferQueue.pop_transferred).
func (b *Buffers) Clear(index int) error {
	s, err := b.slot(index)
	if err != nil {
		return err
	}
	clear(s.of(fieldRoom))
	clear(s.of(fieldChecksum))
	return nil
}

// AppendRow appends a slot's rows to dst, one slice a buffer, as Layout.Encode and
// Layout.DecodeInto take them. They are the memory itself.
func (b *Buffers) AppendRow(dst [][]byte, index int) ([][]byte, error) {
	s, err := b.slot(index)
	if err != nil {
		return dst, err
	}
	for i := range b.layout.buffers {
		dst = append(dst, s.of(b.layout.buffers[i].field))
	}
	return dst, nil
}

func (b *Buffers) slot(index int) (slot, error) {
	if index < 0 || index >= b.slots {
		return slot{}, fmt.Errorf("metadata: %w: slot %d of %d", nixlkv.ErrAuxIndex, index, b.slots)
	}
	return slot{l: b.layout, buffers: b.buffers, index: index}, nil
}
