package kvreceiver

import (
	"errors"
	"net/netip"

	"go.uber.org/zap"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/internal/trust"
	"github.com/nixlkv/nixlkv/internal/wire"
)

// receive takes one message of the control socket. Nothing that anybody sends may end the loop
// that calls it: what cannot be read is counted and dropped. The source is where its connection
// comes from.
func (m *Manager) receive(source netip.Addr, frames [][]byte) {
	<-m.listening // the socket receives before it is ours
	msg, err := wire.ParseAtDecode(frames, wire.Limits{FrameSize: m.cfg.limits.FrameBytes})
	if err != nil {
		if errors.Is(err, wire.ErrStaging) {
			m.stats.dropped.Add(1)
			return
		}
		m.stats.refused.Add(1)
		m.warn.Warn("refused a control message", zap.Stringer("source", source), zap.Error(err))
		return
	}
	if m.cfg.taking != nil {
		m.cfg.taking(msg)
	}
	switch msg := msg.(type) {
	case *wire.KVStatus:
		m.stats.statuses.Add(1)
		m.status(source, msg)
	case *wire.AbortAck:
		m.stats.acks.Add(1)
		m.ack(source, msg)
	}
}

// status takes what a prefill rank tells of a room: of the earliest use of the number that may
// be meant, for what a rank tells comes in order.
func (m *Manager) status(source netip.Addr, s *wire.KVStatus) {
	for _, r := range m.roomsOf(s.Room) {
		if r.takeStatus(source, s) {
			return
		}
	}
	m.stats.unknown.Add(1)
}

// takeStatus takes a status if this use of the number may be meant. It takes mu.
func (r *room) takeStatus(source netip.Addr, s *wire.KVStatus) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	t := r.speaker(source, s.PrefillRank)
	switch {
	case t == nil || t.answered || r.track != nil && r.track.rank(s.PrefillRank).spoke():
		return false // no rank of this room, or one that is done with this use of the number
	case r.open && (s.Status == wire.PollSuccess || s.Status == wire.PollFailed):
		r.verdict(r.track.status(s.PrefillRank, s.Status == wire.PollSuccess, s.Reason))
		return true
	case !r.asked || r.published || r.status.Ended():
		return false
	case s.Status == wire.PollWaitingForInput && r.status == nixlkv.Bootstrapping:
		r.startWaiting() // for the pages: the caller may take its time, but not for ever
		r.advance(nixlkv.WaitingForInput)
		return true
	case s.Status == wire.PollFailed:
		r.note(s.PrefillRank, nixlkv.RankFailed, s.Reason)
		r.fail(&rankError{s.PrefillRank, s.Reason})
		return true
	}
	return false
}

// ack takes a rank's answer to an abort. One without a generation (0.5.19 to 0.5.21) is for the
// earliest use of the number that waits for it.
func (m *Manager) ack(source netip.Addr, a *wire.AbortAck) {
	for _, r := range m.roomsOf(a.Room) {
		if r.ack(source, a) {
			return
		}
	}
	m.stats.unknown.Add(1)
}

// speaker gives the rank that a message from source may speak for, nil if it is none of the
// room's. The caller holds mu.
func (r *room) speaker(source netip.Addr, rank int) *roomTarget {
	t := r.target(rank)
	if t == nil || !r.m.cfg.trust.MatchSource || trust.Canonical(source) == trust.Canonical(t.to.AddrPort().Addr()) {
		return t
	}
	r.m.stats.untrusted.Add(1)
	r.m.warn.Warn("refused a control message", zap.Stringer("source", source), zap.Uint64("room", uint64(r.id)),
		zap.Int("rank", rank), zap.Stringer("at", t.to))
	return nil
}
