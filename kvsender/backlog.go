package kvsender

import (
	"fmt"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/internal/wire"
)

// backlog counts what decodes have announced and nobody has opened here: anybody may announce
// rooms, and they stay for the bootstrap timeout. Rooms that are opened leave it, for what is
// open is the caller's choice. It is guarded by the manager's roomsMu.
type backlog struct {
	rooms int
	bytes int
}

// charge is what a room takes of the backlog.
type charge struct {
	counted bool
	bytes   int
}

// enter counts a new room.
func (b *backlog) enter(r *room) {
	r.charged.counted = true
	b.rooms++
}

// leave takes a room out, which may not be in it.
func (b *backlog) leave(r *room) {
	b.bytes -= r.charged.bytes
	if r.charged.counted {
		b.rooms--
	}
	r.charged = charge{}
}

// destOverhead is about what a decode of a room takes beside its numbers.
const destOverhead = 512

// sizeOf gives the bytes that a room's metadata take.
func sizeOf(meta *wire.Metadata) int {
	const slice, index = 24, 4
	n := destOverhead + index*len(meta.KVIndices)
	for _, l := range meta.StateIndices {
		n += slice + index*len(l)
	}
	return n
}

// charge counts what the metadata of a room take, unless it is open. It returns an error if
// there is no room for them. The caller holds r.mu.
func (m *Manager) charge(r *room) error {
	if r.sender != nil {
		return nil
	}
	size := 0
	for _, d := range r.dests {
		size += sizeOf(d.meta)
	}
	m.roomsMu.Lock()
	defer m.roomsMu.Unlock()
	if !r.charged.counted {
		return nil
	}
	total := m.backlog.bytes - r.charged.bytes + size
	if total > m.cfg.limits.AnnouncedBytes {
		return fmt.Errorf("%w: %d bytes of rooms announced and not opened", nixlkv.ErrLimit, total)
	}
	m.backlog.bytes, r.charged.bytes = total, size
	return nil
}

// discharge gives back what the metadata of a room took: they are not held any more. The
// caller holds r.mu.
func (m *Manager) discharge(r *room) {
	m.roomsMu.Lock()
	defer m.roomsMu.Unlock()
	m.backlog.bytes -= r.charged.bytes
	r.charged.bytes = 0
}

// leaveBacklog takes a room out that is opened. The caller holds r.mu.
func (m *Manager) leaveBacklog(r *room) {
	m.roomsMu.Lock()
	defer m.roomsMu.Unlock()
	m.backlog.leave(r)
}
