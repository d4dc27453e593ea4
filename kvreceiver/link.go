package kvreceiver

import (
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/internal/control"
)

// link is the way to the control socket of one prefill rank. What is sent over it goes behind
// this rank's registration on the same connection: a prefill that was restarted, or has lost
// the connection, knows nothing of it.
type link struct {
	m    *Manager
	to   control.Endpoint
	refs int // rooms; guarded by the manager's linksMu

	mu         sync.Mutex
	generation uint64 // of the connection that the registration went over; 0: none
	asked      bool   // a registration is on its way
	held       []*outgoing
	rooms      map[*room]struct{}
}

// outgoing is a message that waits behind the registration, or to be sent. One without frames
// is for who waits for the registration alone.
type outgoing struct {
	frames [][]byte
	done   func(generation uint64, err error) // called once, without locks
}

// send sends a message. If it gives an error the message was not taken; otherwise done tells.
func (l *link) send(o *outgoing) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.generation != 0 {
		return l.post(o)
	}
	return l.hold(o)
}

// hold keeps a message until this rank is registered, and has it registered. The caller holds
// mu.
func (l *link) hold(o *outgoing) error {
	if len(l.held) >= l.m.cfg.limits.Rooms {
		return fmt.Errorf("%w: %d messages wait for the registration at %s", nixlkv.ErrLimit, len(l.held), l.to)
	}
	if !l.asked {
		// What the callback is given stays valid: a connection that ends after this was sent over
		// it is told of after the callback.
		err := l.m.ctl.SendAsync(control.Message{To: l.to, Frames: l.m.registration, Deadline: l.m.sendDeadline()}, l.registered)
		if err != nil {
			return err
		}
		l.asked = true
	}
	l.held = append(l.held, o)
	return nil
}

// await calls done once this rank is registered; already says that it is, and then done is not
// called.
func (l *link) await(done func(error)) (already bool, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.generation != 0 {
		return true, nil
	}
	return false, l.hold(&outgoing{done: func(_ uint64, err error) { done(err) }})
}

// post hands a message to the control socket, for the connection that the registration went
// over. The caller holds mu.
func (l *link) post(o *outgoing) error {
	return l.m.ctl.SendAsync(control.Message{To: l.to, Frames: o.frames, Deadline: l.m.sendDeadline(), Generation: l.generation}, o.done)
}

func (m *Manager) sendDeadline() time.Time { return time.Now().Add(m.cfg.sendTimeout) }

// registered takes the outcome of a registration.
func (l *link) registered(generation uint64, err error) {
	l.mu.Lock()
	held := l.held
	l.held, l.asked = nil, false
	refused := make([]error, len(held))
	if err == nil {
		l.m.stats.registrations.Add(1)
		l.generation = generation
		for i, o := range held {
			if o.frames != nil {
				refused[i] = l.post(o)
			}
		}
	}
	l.mu.Unlock()
	for i, o := range held {
		switch {
		case err != nil:
			o.done(0, fmt.Errorf("registering: %w", err))
		case refused[i] != nil:
			o.done(0, refused[i])
		case o.frames == nil:
			o.done(generation, nil)
		}
	}
	if err != nil { // the last room may have left meanwhile
		l.m.linksMu.Lock()
		l.m.dropLink(l)
		l.m.linksMu.Unlock()
	}
}

// cancel takes a message back that still waits for the registration, and says whether it did:
// then done is not called.
func (l *link) cancel(o *outgoing) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	i := slices.Index(l.held, o)
	if i < 0 {
		return false
	}
	l.held = slices.Delete(l.held, i, i+1)
	return true
}

// ended notes that a connection is gone, and gives the rooms that may suffer.
func (l *link) ended(generation uint64) []*room {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.generation == generation {
		l.generation = 0
	}
	rooms := make([]*room, 0, len(l.rooms))
	for r := range l.rooms {
		rooms = append(rooms, r)
	}
	return rooms
}

// link gives the link to an endpoint for a room, which has to give it back with unlink.
func (m *Manager) link(to control.Endpoint, r *room) (*link, error) {
	m.linksMu.Lock()
	defer m.linksMu.Unlock()
	l := m.links[to]
	if l == nil {
		if len(m.links) >= m.cfg.limits.Ranks {
			return nil, fmt.Errorf("%w: connections to %d prefill ranks", nixlkv.ErrLimit, len(m.links))
		}
		l = &link{m: m, to: to, rooms: map[*room]struct{}{}}
		m.links[to] = l
	}
	l.refs++
	l.mu.Lock()
	l.rooms[r] = struct{}{}
	l.mu.Unlock()
	return l, nil
}

// unlink gives a link back. One that no room uses stays as long as it is connected.
func (m *Manager) unlink(l *link, r *room) {
	m.linksMu.Lock()
	defer m.linksMu.Unlock()
	l.mu.Lock()
	delete(l.rooms, r)
	l.mu.Unlock()
	l.refs--
	m.dropLink(l)
}

// dropLink forgets a link that is neither used nor connected. The caller holds linksMu.
func (m *Manager) dropLink(l *link) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.refs == 0 && l.generation == 0 && !l.asked && m.links[l.to] == l {
		delete(m.links, l.to)
		m.ctl.Drop(l.to) // else it would be connected again
	}
}

// observe follows the connections to prefill ranks. It is called in the order of events, and
// no message is sent over a new connection before it has returned from the loss of the last.
func (m *Manager) observe(e control.Event) {
	<-m.listening // it may call before ctl is ours
	if e.Kind == control.Connected {
		return
	}
	m.linksMu.Lock()
	l := m.links[e.Endpoint]
	m.linksMu.Unlock()
	if l == nil {
		return
	}
	rooms := l.ended(e.Generation)
	if e.Kind == control.Disconnected {
		m.stats.losses.Add(1)
		m.forgetRank(e.Endpoint)
		m.rankLost(l, e.Generation, rooms)
	}
	m.linksMu.Lock()
	m.dropLink(l)
	m.linksMu.Unlock()
}

// rankLost fails the rooms that had told a rank where their pages go, after a grace: what the
// rank told last may still be on its way.
func (m *Manager) rankLost(l *link, generation uint64, rooms []*room) {
	if len(rooms) == 0 {
		return
	}
	time.AfterFunc(m.cfg.lossGrace, func() {
		m.afterDrain(func() {
			for _, r := range rooms {
				r.rankLost(l, generation)
			}
		})
	})
}
