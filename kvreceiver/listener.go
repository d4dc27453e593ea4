package kvreceiver

import (
	"errors"

	"go.uber.org/zap"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/internal/wire"
)

// receive takes one message of the control socket. Nothing that anybody sends may end the loop
// that calls it: what cannot be read is counted and dropped.
func (m *Manager) receive(frames [][]byte) {
	<-m.listening // the socket receives before it is ours
	msg, err := wire.ParseAtDecode(frames, wire.Limits{})
	if err != nil {
		if errors.Is(err, wire.ErrStaging) {
			m.stats.dropped.Add(1)
			return
		}
		m.stats.refused.Add(1)
		m.warn.Warn("refused a control message", zap.Error(err))
		return
	}
	switch msg := msg.(type) {
	case *wire.KVStatus:
		m.stats.statuses.Add(1)
		m.status(msg)
	case *wire.AbortAck:
		m.stats.acks.Add(1)
		m.ack(msg)
	}
}

// status takes what a prefill rank tells of a room: of the earliest use of the number that may
// be meant, for what a rank tells comes in order.
func (m *Manager) status(s *wire.KVStatus) {
	for _, r := range m.roomsOf(s.Room) {
		if r.takeStatus(s) {
			return
		}
	}
	m.stats.unknown.Add(1)
}

// takeStatus takes a status if this use of the number may be meant. It takes mu.
func (r *room) takeStatus(s *wire.KVStatus) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	t := r.target(s.PrefillRank)
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
func (m *Manager) ack(a *wire.AbortAck) {
	for _, r := range m.roomsOf(a.Room) {
		if r.ack(a) {
			return
		}
	}
	m.stats.unknown.Add(1)
}
