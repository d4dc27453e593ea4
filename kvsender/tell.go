package kvsender

import (
	"errors"
	"time"

	"go.uber.org/zap"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/internal/control"
	"github.com/nixlkv/nixlkv/internal/wire"
	"github.com/nixlkv/nixlkv/registry"
)

// tellTimeout bounds how long a message to a decode may wait to be sent, as in SGLang
// (CommonKVManager: 30 s for sends of a prefill).
const tellTimeout = 30 * time.Second

// strangerTimeout is tellTimeout for an address that anybody may have named.
const strangerTimeout = 5 * time.Second

// tellEnd tells the decodes of a room how it ended. The caller holds r.mu; nothing of the
// room can be written any more.
//
// Success goes only to those that take it from KV_STATUS: one that drains notifications
// would finish before it has drained them, and they would spoil the next use of the room.
// Failure goes to all; a decode of 0.5.18 or 0.5.19 leaves it unread.
func (m *Manager) tellEnd(r *room) {
	s := &wire.KVStatus{Room: r.id, PrefillRank: m.rank}
	if r.failure == nil {
		s.Status = wire.PollSuccess
	} else {
		s.Status, s.Reason = wire.PollFailed, r.failure.Error()
	}
	for _, d := range r.dests {
		if d.meta.Dummy || d.gaveUp {
			continue
		}
		if s.Status == wire.PollSuccess && (d.lease == nil || d.lease.Peer().Dialect != registry.Status) {
			continue
		}
		m.tellStatus(d.meta.From, s, r.stranger(d.meta.From))
	}
	if s.Status == wire.PollFailed && r.askerUntold() {
		m.tellStatus(r.asker.at, s, r.stranger(r.asker.at))
	}
}

// registered says whether a decode is known to listen at an endpoint, one that was not refused:
// anybody can have that.
func (m *Manager) registered(e wire.Endpoint) bool {
	return m.peers.anyAt(e.String(), func(_ string, phase registry.Phase) bool { return phase != registry.Refused })
}

// stranger says whether anybody may have named an endpoint as one of the room's: nobody has
// opened it, and no decode is known there. One that was forgotten has become a stranger: it is gone,
// and to try to reach it for long would keep a connection to nobody.
func (r *room) stranger(e wire.Endpoint) bool {
	return r.sender == nil && !r.m.registered(e) || len(r.m.peers.ByAddr(e.String())) == 0
}

// tellFailure tells a decode that is none of a room's that it will get nothing.
func (m *Manager) tellFailure(to wire.Endpoint, id nixlkv.Room, reason error) {
	m.tellStatus(to, &wire.KVStatus{Room: id, Status: wire.PollFailed, PrefillRank: m.rank, Reason: reason.Error()}, !m.registered(to))
}

func (m *Manager) tellStatus(to wire.Endpoint, s *wire.KVStatus, stranger bool) {
	var enc wire.Encoder // let go with the frames, which stay queued
	frames, err := enc.KVStatus(s)
	if err != nil {
		m.log.Error("encoding a status", zap.Error(err), zap.Uint64("room", uint64(s.Room)))
		return
	}
	m.send(to, s.Room, frames, tellTimeout, stranger)
}

func (m *Manager) tellAck(id nixlkv.Room, a ackTarget, timeout time.Duration, stranger bool) {
	var enc wire.Encoder
	frames, err := enc.AbortAck(&wire.AbortAck{Room: id, PrefillRank: m.rank, Generation: a.generation, HasGeneration: a.hasGeneration})
	if err != nil {
		m.log.Error("encoding an acknowledgement", zap.Error(err), zap.Uint64("room", uint64(id)))
		return
	}
	m.stats.acks.Add(1)
	m.send(a.to, id, frames, timeout, stranger)
}

// send queues a message to a decode. It never blocks; a message that cannot be sent in time
// is counted and logged, for the decode is then gone or stuck and finds out by itself. What
// goes to strangers waits less, and takes no place that decodes need.
func (m *Manager) send(to wire.Endpoint, id nixlkv.Room, frames [][]byte, timeout time.Duration, stranger bool) {
	if stranger {
		timeout = min(timeout, strangerTimeout)
	}
	failed := func(err error) {
		m.stats.untold.Add(1)
		m.warn.Warn("could not tell a decode", zap.Stringer("decode", to), zap.Uint64("room", uint64(id)), zap.Error(err))
	}
	e, err := control.NewEndpoint(to.IP, to.Port)
	if err != nil {
		failed(err)
		return
	}
	msg := control.Message{To: e, Frames: frames, Deadline: time.Now().Add(timeout), Stranger: stranger}
	var try func()
	try = func() {
		err := m.ctl.SendAsync(msg, func(_ uint64, err error) {
			switch {
			case err == nil:
			case errors.Is(err, nixlkv.ErrPeerLost) && m.registered(to) && m.ctx.Err() == nil && time.Until(msg.Deadline) > resendPause:
				time.AfterFunc(resendPause, func() { // the connection broke
					if m.registered(to) {
						try()
					} else {
						failed(err) // the decode has gone meanwhile; to try would connect to nobody
					}
				})
			default:
				failed(err)
			}
		})
		if err != nil {
			failed(err)
		}
	}
	try()
}

// resendPause is how long a message waits that was lost with its connection.
const resendPause = 200 * time.Millisecond
