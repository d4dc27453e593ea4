package kvsender

import "github.com/nixlkv/nixlkv"

// Event says that a room's status has changed.
type Event struct {
	Room   nixlkv.Room
	Sender *Sender
	Status nixlkv.Status
	Err    error // of a failed room
}

// unpolledRooms bounds the list until Poll is called for the first time: a server that never
// calls it keeps no more rooms for it.
const unpolledRooms = 256

// noteChanged puts a room in the list that Poll fetches. The caller holds r.mu.
func (m *Manager) noteChanged(r *room) {
	if r.changed {
		return
	}
	m.changedMu.Lock()
	defer m.changedMu.Unlock()
	limit := m.cfg.limits.DoneRooms
	if !m.polled {
		limit = min(limit, unpolledRooms)
	}
	if len(m.changedRooms) >= limit {
		m.changedLost = true
		return
	}
	r.changed = true
	m.changedRooms = append(m.changedRooms, r)
}

// Poll appends an event for every room whose status has changed since it was polled last,
// with the status that it has now. It never blocks: it is for a scheduler's tick. A server
// that uses Wait or Done instead need not call it; the list is bounded, more tightly before the
// first call, and complete says whether rooms were left out since the last call because it was
// full.
func (m *Manager) Poll(dst []Event) (events []Event, complete bool) {
	m.changedMu.Lock()
	rooms := m.changedRooms
	m.changedRooms, m.changedSpare = m.changedSpare[:0], nil
	m.polled = true
	complete = !m.changedLost
	m.changedLost = false
	m.changedMu.Unlock()
	for i, r := range rooms {
		rooms[i] = nil
		r.mu.Lock()
		r.changed = false
		e := Event{Room: r.id, Sender: r.sender, Status: r.status}
		if r.status == nixlkv.Failed {
			e.Err = r.transferError()
		}
		r.mu.Unlock()
		dst = append(dst, e)
	}
	m.changedMu.Lock()
	m.changedSpare = rooms[:0]
	m.changedMu.Unlock()
	return dst, complete
}
