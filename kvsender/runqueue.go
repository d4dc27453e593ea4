package kvsender

import "sync"

// runQueue holds the rooms for which a worker can do something, first come first served. A
// room is in it once at most, so it is bounded by the number of rooms.
type runQueue struct {
	mu     sync.Mutex
	ready  sync.Cond
	rooms  []*room
	closed bool
}

func newRunQueue() *runQueue {
	q := &runQueue{}
	q.ready.L = &q.mu
	return q
}

func (q *runQueue) put(r *room) {
	q.mu.Lock()
	q.rooms = append(q.rooms, r)
	q.mu.Unlock()
	q.ready.Signal()
}

// get waits for a room; nil when the queue is closed.
func (q *runQueue) get() *room {
	q.mu.Lock()
	defer q.mu.Unlock()
	for len(q.rooms) == 0 && !q.closed {
		q.ready.Wait()
	}
	if len(q.rooms) == 0 {
		return nil
	}
	r := q.rooms[0]
	q.rooms[0] = nil
	q.rooms = q.rooms[1:]
	return r
}

// close lets the workers end once the queue is empty.
func (q *runQueue) close() {
	q.mu.Lock()
	q.closed = true
	q.mu.Unlock()
	q.ready.Broadcast()
}
