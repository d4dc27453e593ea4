package kvsender

import (
	"fmt"
	"time"

	"go.uber.org/zap"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/internal/wire"
)

// unregisteredGrace is how long a room still waits for its decode after one that has not registered
// has announced itself there. A decode registers before it announces rooms, on the same
// connection: either this prefill is another process than the one that it registered with, and
// nothing more will come, or somebody else sends such messages, and the decode is still to come.
const unregisteredGrace = 5 * time.Second

// fromUnregistered takes the metadata of an agent that has not registered: the room goes on without
// it. One that is not open gets no place in the table of rooms, which anybody could fill then.
func (m *Manager) fromUnregistered(meta *wire.Metadata) {
	m.stats.dropped.Add(1)
	reason := &destError{meta.Agent, meta.From, fmt.Errorf("%w: %.256q", nixlkv.ErrNotRegistered, meta.Agent)}
	m.warn.Warn("a decode that has not registered announced a room", zap.Error(reason))
	m.tellFailure(meta.From, meta.Room, reason)
	m.unregistered.note(meta.Room, reason) // before the look: it may be opened just now
	r := m.lookup(meta.Room)
	if r == nil {
		return
	}
	m.unregistered.take(meta.Room)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.noteUnregistered(reason)
}

// noteUnregistered shortens the wait for the decodes.
func (r *room) noteUnregistered(reason error) {
	if r.unregistered == nil && r.timer != nil && !r.bootstrapped() && r.failure == nil {
		r.unregistered = reason
		r.timer.Reset(min(unregisteredGrace, r.m.cfg.bootstrapTimeout))
	}
}
