package embedded

import (
	"fmt"
	"sync"

	"github.com/nixlkv/nixlkv/internal/engine"
)

const (
	// shareBytes is what a worker takes of a request at once: several workers can be at
	// one request, and no request holds up the others for longer.
	shareBytes = 4 << 20
	// pieceBytes is what is copied without looking up: whether the peer is lost, or wants
	// its memory back. The Go scheduler cannot interrupt such a copy either.
	pieceBytes = 256 << 10
)

// pool copies memory. Its workers never wait for a peer. A request is queued once at
// most, so the queue is bounded by the requests there are.
type pool struct {
	mu         sync.Mutex
	wake       sync.Cond
	head, tail *request
	stopped    bool
	workers    sync.WaitGroup
}

func newPool(workers int) *pool {
	q := &pool{}
	q.wake.L = &q.mu
	for range workers {
		q.workers.Go(q.work)
	}
	return q
}

func (q *pool) stop() {
	q.mu.Lock()
	q.stopped = true
	q.wake.Broadcast()
	q.mu.Unlock()
	q.workers.Wait()
}

func (q *pool) push(r *request) {
	q.mu.Lock()
	defer q.mu.Unlock()
	r.next = nil
	if q.tail == nil {
		q.head = r
	} else {
		q.tail.next = r
	}
	q.tail = r
	q.wake.Signal()
}

// pop gives nil when the pool is stopped.
func (q *pool) pop() *request {
	q.mu.Lock()
	defer q.mu.Unlock()
	for q.head == nil {
		if q.stopped {
			return nil
		}
		q.wake.Wait()
	}
	r := q.head
	if q.head = r.next; q.head == nil {
		q.tail = nil
	}
	return r
}

func (q *pool) work() {
	for {
		r := q.pop()
		if r == nil {
			return
		}
		from := r.at
		to := from.after(r.plan.items, shareBytes)
		if to.i < len(r.plan.items) && r.failed() == nil {
			// The rest is behind the other requests now, and for any worker.
			r.at = to
			r.shares.Add(1)
			q.push(r)
		}
		r.copy(from, to)
		if r.shares.Add(-1) == 0 {
			r.copied()
		}
	}
}

// launch copies what can be copied: in place if it is little and the caller may, else on
// the pool.
func (r *request) launch(inline bool) {
	end := cursor{i: len(r.plan.items)}
	switch {
	case r.failed() != nil || !r.anyRegion(routeMapped):
		// What is not mapped goes through the connection, for good.
		r.copy(cursor{}, end)
		r.copied()
	case inline && r.plan.bytes <= r.a.settings.inlineBytes:
		r.copy(cursor{}, end)
		r.copied()
	default:
		r.a.pool.push(r)
	}
}

func (r *request) anyRegion(w route) bool {
	for _, pos := range r.plan.remotes {
		if r.regions[pos].way() == w {
			return true
		}
	}
	return false
}

// copy copies the items in mapped memory between two positions, until it fails.
func (r *request) copy(at, end cursor) {
	var held *mapping
	var pos uint32
	err := guardFaults(func() {
		for r.failed() == nil {
			part, ok := at.next(r.plan.items, end, pieceBytes)
			if !ok {
				return
			}
			reg := r.regions[part.pos]
			if held == nil || part.pos != pos || held.isRevoked() {
				if held != nil {
					held.release()
				}
				held, pos = reg.mapping.Load(), part.pos
				if held == nil && reg.way() == routeSocket {
					continue
				}
				if held == nil || !held.acquire() {
					held = nil
					r.failWith(withdrawn(r.peer, reg))
					return
				}
			}
			local, remote := memoryAt(part.local, part.n), memoryAt(held.data+part.remote-reg.addr, part.n)
			if r.op == engine.Write {
				copy(remote, local)
			} else {
				copy(local, remote)
			}
		}
	})
	if held != nil {
		held.release()
	}
	if err != nil {
		r.failWith(fmt.Errorf("copy to or from peer %q: %w: %w", r.peer.name, err, engine.ErrBackend))
	}
}

// copied moves a request on when nothing is left to copy.
func (r *request) copied() {
	if err := r.failed(); err != nil {
		r.settle(err)
		return
	}
	socket := r.anyRegion(routeSocket)
	switch {
	case socket && r.op == engine.Read:
		r.at = cursor{}
		r.peer.queueRead(r)
	case socket || r.hasNotif:
		r.peer.queueSend(r)
	default:
		r.settle(nil)
	}
}

// readEnded moves a request on whose bytes came through the connection.
func (r *request) readEnded() {
	err := r.failed()
	if err == nil && r.hasNotif {
		r.peer.queueSend(r)
		return
	}
	r.settle(err)
}

// nextSocket gives the next part, of at most limit bytes, that goes through the
// connection.
func (r *request) nextSocket(at *cursor, limit uint64) (item, bool) {
	items := r.plan.items
	for at.i < len(items) {
		if r.regions[items[at.i].pos].way() != routeSocket {
			*at = cursor{i: at.i + 1}
			continue
		}
		if part, ok := at.next(items, cursor{i: at.i + 1}, limit); ok {
			return part, true
		}
	}
	return item{}, false
}
