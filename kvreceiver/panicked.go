package kvreceiver

import (
	"fmt"
	"net/netip"

	"go.uber.org/zap"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/internal/wire"
)

// panicked takes a message whose handling has panicked, which nobody will take up again: the rooms
// that it may have been for fail, and with them at the prefill, so that neither side waits for the
// rest of it. Locks are free again, for the message's handling gives them back as it unwinds.
// Package control has counted and logged the panic.
func (m *Manager) panicked(source netip.Addr, frames [][]byte, value any) {
	msg, err := wire.ParseAtDecode(frames, wire.Limits{FrameSize: m.cfg.limits.FrameBytes})
	if err != nil {
		return
	}
	cause := fmt.Errorf("%w: panic while taking a control message: %v", nixlkv.ErrInternal, value)
	var id nixlkv.Room
	var rank int
	switch msg := msg.(type) {
	case *wire.KVStatus:
		id, rank = msg.Room, msg.PrefillRank
	case *wire.AbortAck:
		id, rank = msg.Room, msg.PrefillRank
	}
	m.warn.Warn("a control message was not taken", zap.Stringer("source", source), zap.Uint64("room", uint64(id)), zap.Error(cause))
	for _, r := range m.roomsOf(id) {
		r.failFor(source, rank, cause)
	}
}

// failFor fails a room that a rank may speak for. It takes mu.
func (r *room) failFor(source netip.Addr, rank int, cause error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.speaker(source, rank) != nil {
		r.fail(cause)
	}
}
