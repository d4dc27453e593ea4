package kvsender

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"go.uber.org/zap"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/internal/wire"
)

// panicked takes a message whose handling has panicked, which nobody will take up again: what it
// was about fails here and at the decode, so that neither waits for the rest of it. Locks are free
// again, for the message's handling gives them back as it unwinds. Package control has counted and
// logged the panic.
func (m *Manager) panicked(source netip.Addr, frames [][]byte, value any) {
	cause := fmt.Errorf("%w: panic while taking a control message: %v", nixlkv.ErrInternal, value)
	msg, err := wire.ParseAtPrefill(frames, m.cfg.limits.wire())
	if fe := (*wire.FrameError)(nil); errors.As(err, &fe) && fe.HasRoom && m.trusts(source, fe.From) {
		m.failMessage(source, fe.Room, fe.From, cause)
		return
	}
	if err != nil || !m.trusts(source, answerTo(msg)) {
		return
	}
	switch msg := msg.(type) {
	case *wire.Registration:
		m.refusePeer(msg.Agent, msg.From, cause)
	case *wire.Metadata:
		m.failMessage(source, msg.Room, msg.From, cause)
	case *wire.Abort:
		m.failMessage(source, msg.Room, msg.From, cause)
	case *wire.Bootstrap:
		m.failMessage(source, msg.Room, msg.From, cause)
	}
}

// failMessage fails the rooms that a message may have been for, and tells its sender.
func (m *Manager) failMessage(source netip.Addr, id nixlkv.Room, from wire.Endpoint, cause error) {
	m.warn.Warn("a control message was not taken", zap.Stringer("source", source), zap.Uint64("room", uint64(id)), zap.Error(cause))
	told := from.IsZero()
	for _, r := range m.roomsOf(id) {
		told = m.failOne(r, source, from, cause) || told
	}
	if !told {
		m.tellFailure(from, id, cause)
	}
}

// failOne fails a room if the sender of a message has to do with it, and says whether the sender is
// one of those that are told of its end. It takes mu.
func (m *Manager) failOne(r *room, source netip.Addr, from wire.Endpoint, cause error) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.involves(source, from) {
		return false
	}
	r.fail(cause)
	return r.asker.at == from || slices.ContainsFunc(r.dests, func(d *dest) bool { return d.meta.From == from })
}
