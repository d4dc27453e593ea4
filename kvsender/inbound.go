package kvsender

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/bootstrap"
	"github.com/nixlkv/nixlkv/internal/trust"
	"github.com/nixlkv/nixlkv/internal/wire"
)

// receive takes one message of the control socket. Nothing that a peer sends may end the
// loop that calls it: what cannot be read is counted and dropped, and fails no more than the
// rooms of the peer that sent it. The source is where its connection comes from.
func (m *Manager) receive(source netip.Addr, frames [][]byte) {
	<-m.listening // the socket receives before it is ours to answer from
	msg, err := wire.ParseAtPrefill(frames, m.cfg.limits.wire())
	if err != nil {
		m.refused(source, err)
		return
	}
	if !m.trusts(source, answerTo(msg)) {
		return
	}
	if m.cfg.taking != nil {
		m.cfg.taking(msg)
	}
	switch msg := msg.(type) {
	case *wire.Registration:
		m.stats.registrations.Add(1)
		m.register(source, msg)
	case *wire.Metadata:
		m.stats.metadata.Add(1)
		m.announced(msg)
	case *wire.Abort:
		m.stats.aborts.Add(1)
		m.abort(source, msg)
	case *wire.Bootstrap:
		if m.cfg.policy != bootstrap.PrefillCompleteAllocation {
			m.stats.dropped.Add(1)
			return
		}
		m.asked(msg)
	}
}

// answerTo gives the endpoint that a message names; zero if it names none.
func answerTo(msg wire.Message) wire.Endpoint {
	switch msg := msg.(type) {
	case *wire.Registration:
		return msg.From
	case *wire.Metadata:
		return msg.From
	case *wire.Abort:
		return msg.From
	case *wire.Bootstrap:
		return msg.From
	}
	return wire.Endpoint{}
}

// trusts says whether a message from source may name an endpoint. One that names none has
// nobody that could be answered.
func (m *Manager) trusts(source netip.Addr, named wire.Endpoint) bool {
	if named.IsZero() {
		return true
	}
	err := m.cfg.trust.Check(named.IP, source)
	if err != nil {
		m.stats.untrusted.Add(1)
		m.warn.Warn("refused a control message", zap.Stringer("source", source), zap.Error(err))
	}
	return err == nil
}

// refused counts a message that could not be read, and fails what it was about as far as
// that can be told.
func (m *Manager) refused(source netip.Addr, err error) {
	m.stats.refused.Add(1)
	m.warn.Warn("refused a control message", zap.Stringer("source", source), zap.Error(err))
	var fe *wire.FrameError
	if !errors.As(err, &fe) || !m.trusts(source, fe.From) || m.cfg.trust.MatchSource && fe.From.IsZero() {
		return
	}
	switch {
	case errors.Is(err, wire.ErrUnknown), errors.Is(err, wire.ErrStaging):
	case fe.HasRoom:
		m.failAnnounced(fe, err)
	case fe.Agent != "":
		m.refusePeer(fe.Agent, fe.From, err)
	}
}

// failAnnounced fails a room whose metadata could not be read, and tells the decode that
// sent them. A room that is under way already, or is not a registered decode's as far as can be
// told, is left alone: anybody may send such a thing.
func (m *Manager) failAnnounced(fe *wire.FrameError, err error) {
	_, _, known := m.peers.Lookup(fe.Agent)
	if r := m.lookup(fe.Room); r != nil && known {
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.bootstrapped() || r.status.Ended() {
			return
		}
		r.fail(err)
	}
	if !fe.From.IsZero() {
		m.tellFailure(fe.From, fe.Room, err)
	}
}

// announced takes the metadata of a room, which may come before the room is opened here.
func (m *Manager) announced(meta *wire.Metadata) {
	if m.ctx.Err() != nil {
		m.tellFailure(meta.From, meta.Room, nixlkv.ErrClosed)
		return
	}
	peer, _, known := m.peers.Lookup(meta.Agent)
	if !known {
		m.fromUnregistered(meta)
		return
	}
	if at := meta.From.String(); peer != nil && peer.Addr != at {
		// Or whoever speaks for one address could have another's pages written.
		m.stats.untrusted.Add(1)
		err := fmt.Errorf("%w: metadata of decode %.256q, which registered at %s, name %s", nixlkv.ErrNotAllowed, meta.Agent, peer.Addr, at)
		m.warn.Warn("refused a room", zap.Error(err))
		m.tellFailure(meta.From, meta.Room, err)
		return
	}
	if m.late(meta) {
		return
	}
	for {
		r, err := m.roomFor(meta.Room, true)
		if err != nil {
			m.warn.Warn("refused a room", zap.Error(err))
			m.tellFailure(meta.From, meta.Room, err)
			return
		}
		if m.announce(r, meta) {
			return
		}
	}
}

// announce gives metadata to a room; false if the room is of the past, and another has to
// be found.
func (m *Manager) announce(r *room, meta *wire.Metadata) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.detached {
		return false
	}
	if r.status.Ended() {
		if r.status == nixlkv.Failed && !r.knows(meta.Agent) {
			// A decode that comes late to a room that has failed meanwhile.
			m.tellFailure(meta.From, r.id, r.failure)
			return true
		}
		// The number is used again while the old room was not closed yet. The old sender keeps
		// its room; the new one begins clean.
		m.detach(r)
		if r.sender == nil {
			r.forget(nil)
		}
		return false
	}
	if r.sender == nil && r.announce == nil {
		r.announce = time.AfterFunc(m.cfg.bootstrapTimeout, r.expired)
	}
	if err := r.addMetadata(meta); errors.Is(err, errIntruder) {
		m.stats.dropped.Add(1)
		m.tellFailure(meta.From, r.id, err)
		return true
	} else if err != nil {
		r.fail(err)
		return true
	}
	if err := m.charge(r); err != nil {
		r.fail(err)
		return true
	}
	r.schedule()
	r.advance()
	return true
}

// abort takes a decode's abort. It is acknowledged when nothing of the number can be written
// any more, which for a room that nobody knows is now. Besides the room in the table there
// may be earlier uses of the number that have not settled.
func (m *Manager) abort(source netip.Addr, a *wire.Abort) {
	rooms := m.roomsOf(a.Room)
	var ack *ackTarget
	if !a.From.IsZero() {
		ack = owed(rooms, &ackTarget{a.From, a.Generation, a.HasGeneration, new(atomic.Int32)})
		ack.rooms.Add(1) // this call, so that it is not sent before all rooms were asked
	}
	for _, r := range rooms {
		m.abortOne(r, source, a, ack)
	}
	if ack != nil && ack.rooms.Add(-1) == 0 {
		m.tellAck(a.Room, *ack, unknownAckTimeout, !m.registered(ack.to))
	}
}

// abortOne takes an abort for one room of the number. It takes mu.
func (m *Manager) abortOne(r *room, source netip.Addr, a *wire.Abort, ack *ackTarget) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case !r.involves(source, a.From):
		m.stats.dropped.Add(1) // somebody else's room: nothing of it goes to the one who asks
	case !r.detached || !r.quiet():
		r.aborted(a, ack)
	}
}

// owed gives the acknowledgement that rooms owe already if an abort comes again, else a new one.
func owed(rooms []*room, ack *ackTarget) *ackTarget {
	for _, r := range rooms {
		if same := r.owes(ack); same != nil {
			return same
		}
	}
	return ack
}

// owes gives the acknowledgement that a room owes already for the same abort, nil if none. It
// takes mu.
func (r *room) owes(ack *ackTarget) *ackTarget {
	r.mu.Lock()
	defer r.mu.Unlock()
	if i := slices.IndexFunc(r.acks, ack.answers); i >= 0 {
		return r.acks[i]
	}
	return nil
}

// unknownAckTimeout bounds the sending of an acknowledgement that no room owes: anybody can
// ask for one, to any address.
const unknownAckTimeout = 2 * time.Second

// roomsOf gives all rooms of a number.
func (m *Manager) roomsOf(id nixlkv.Room) []*room {
	m.roomsMu.Lock()
	defer m.roomsMu.Unlock()
	rooms := slices.Clone(m.lingering[id])
	if r := m.rooms[id]; r != nil {
		rooms = append(rooms, r)
	}
	return rooms
}

// involves says whether an endpoint is one of the room's decodes. Of a room whose decodes are
// not all known it may be any that is registered. An abort without an address (0.5.18) can only
// be told by where it comes from.
func (r *room) involves(source netip.Addr, e wire.Endpoint) bool {
	if e.IsZero() {
		return !r.m.cfg.trust.MatchSource || slices.ContainsFunc(r.dests, func(d *dest) bool {
			a, err := netip.ParseAddr(d.meta.From.IP)
			return err == nil && trust.Canonical(a) == trust.Canonical(source)
		})
	}
	if r.asker.at == e || slices.ContainsFunc(r.dests, func(d *dest) bool { return d.meta.From == e }) {
		return true
	}
	return !r.bootstrapped() && r.m.registered(e)
}

// knows says whether a decode rank has told where its pages go.
func (r *room) knows(agent string) bool {
	return slices.ContainsFunc(r.dests, func(d *dest) bool { return d.meta.Agent == agent })
}

// lookup gives the room of a number, nil if there is none.
func (m *Manager) lookup(id nixlkv.Room) *room {
	m.roomsMu.Lock()
	defer m.roomsMu.Unlock()
	return m.rooms[id]
}

// roomFor gives the room of a number, making it if there is none. One that a decode announces
// needs a place among those.
func (m *Manager) roomFor(id nixlkv.Room, announced bool) (*room, error) {
	m.roomsMu.Lock()
	defer m.roomsMu.Unlock()
	if m.closing {
		return nil, nixlkv.ErrClosed
	}
	if r := m.rooms[id]; r != nil {
		return r, nil
	}
	if len(m.rooms) >= m.cfg.limits.Rooms {
		return nil, fmt.Errorf("%w: %d rooms", nixlkv.ErrLimit, len(m.rooms))
	}
	if announced && m.backlog.rooms >= m.cfg.limits.Announced {
		return nil, fmt.Errorf("%w: %d rooms announced and not opened", nixlkv.ErrLimit, m.backlog.rooms)
	}
	r := &room{m: m, id: id}
	if announced {
		m.backlog.enter(r)
	}
	m.rooms[id] = r
	m.live[r] = struct{}{}
	return r, nil
}

// detach takes a room out of the table, so that its number can be used again. The caller
// holds r.mu.
func (m *Manager) detach(r *room) {
	m.roomsMu.Lock()
	defer m.roomsMu.Unlock()
	if m.rooms[r.id] == r {
		delete(m.rooms, r.id)
	}
	if !r.detached {
		r.detached = true
		m.lingering[r.id] = append(m.lingering[r.id], r)
	}
}

// dropRoom forgets a room. The caller holds r.mu.
func (m *Manager) dropRoom(r *room) {
	m.detach(r)
	m.roomsMu.Lock()
	defer m.roomsMu.Unlock()
	delete(m.live, r)
	m.backlog.leave(r)
	m.lingering[r.id] = slices.DeleteFunc(m.lingering[r.id], func(x *room) bool { return x == r })
	if len(m.lingering[r.id]) == 0 {
		delete(m.lingering, r.id)
	}
	if m.closing && len(m.live) == 0 {
		closeOnce(m.idle)
	}
}
