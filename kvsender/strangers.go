package kvsender

import (
	"fmt"
	"sync"
	"time"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/internal/wire"
)

// strangerGrace is how long a room still waits for its decode after one that has not registered
// has announced itself there. A decode registers before it announces rooms, on the same
// connection: either this prefill is another process than the one that it registered with, and
// nothing more will come, or somebody else sends such messages, and the decode is still to come.
const strangerGrace = 5 * time.Second

// maxStrangers bounds the rooms of which that is remembered until they are opened.
const maxStrangers = 4096

// strangers remembers the last rooms that decodes announced without having registered. They get no
// place in the table of rooms, which anybody could fill then.
type strangers struct {
	mu     sync.Mutex
	rooms  map[nixlkv.Room]error
	oldest []nixlkv.Room // a ring, once it is full
	next   int
}

// note remembers why a room cannot be served.
func (s *strangers) note(id nixlkv.Room, reason error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, known := s.rooms[id]; known {
		return
	}
	if s.rooms == nil {
		s.rooms = map[nixlkv.Room]error{}
	}
	if len(s.oldest) < maxStrangers {
		s.oldest = append(s.oldest, id)
	} else {
		delete(s.rooms, s.oldest[s.next])
		s.oldest[s.next] = id
		s.next = (s.next + 1) % maxStrangers
	}
	s.rooms[id] = reason
}

// take gives what is remembered of a room, once.
func (s *strangers) take(id nixlkv.Room) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	reason := s.rooms[id]
	delete(s.rooms, id) // its place in the ring ages
	return reason
}

// stranger takes the metadata of an agent that has not registered: the room goes on without it.
func (m *Manager) stranger(meta *wire.Metadata) {
	m.stats.dropped.Add(1)
	reason := &destError{meta.Agent, meta.From, fmt.Errorf("%w: %.256q", nixlkv.ErrNotRegistered, meta.Agent)}
	m.tellFailure(meta.From, meta.Room, reason)
	r := m.lookup(meta.Room)
	if r == nil {
		m.strangers.note(meta.Room, reason)
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.noteStranger(reason)
}

// noteStranger shortens the wait for the decodes.
func (r *room) noteStranger(reason error) {
	if r.stranger == nil && r.timer != nil && !r.bootstrapped() && r.failure == nil {
		r.stranger = reason
		r.timer.Reset(min(strangerGrace, r.m.cfg.bootstrapTimeout))
	}
}
