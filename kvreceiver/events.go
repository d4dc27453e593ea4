package kvreceiver

import "github.com/nixlkv/nixlkv"

// Event says that a room's status has changed.
type Event struct {
	Room     nixlkv.Room
	Receiver *Receiver
	Status   nixlkv.Status
	Err      error // of a failed room
}

// noteChanged puts a room in the list that Poll fetches. The caller holds r.mu.
func (m *Manager) noteChanged(r *room) { r.changed = r.changed || m.changed.Add(r) }

// Poll appends an event for every room whose status has changed since it was polled last, with
// the status that it has now. It never blocks: it is for a scheduler's tick. A server that uses
// Wait or Done instead need not call it; the list is bounded, more tightly before the first call,
// and complete says whether rooms were left out since the last call because it was full.
func (m *Manager) Poll(dst []Event) (events []Event, complete bool) {
	complete = m.changed.Drain(func(r *room) {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.changed = false
		e := Event{Room: r.id, Receiver: r.receiver, Status: r.status}
		if r.failure != nil {
			e.Err = r.failure
		}
		dst = append(dst, e)
	})
	return dst, complete
}
