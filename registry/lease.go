package registry

import (
	"context"
	"fmt"
	"sync/atomic"
)

// Lease is a room's hold on a peer and its plan: while it lasts the peer is not evicted and
// the plan not dropped, whatever becomes of the peer.
type Lease[P any] struct {
	t        *Table[P]
	e        *entry[P]
	a        *attached[P]
	released atomic.Bool
}

// Acquire takes a lease on a live peer, at once. The error wraps [ErrPreparing] if the peer's
// plan is being made, nixlkv.ErrNotRegistered if it is not known, nixlkv.ErrPeerStale and the
// reason if it is stale, the reason if it was refused, or nixlkv.ErrClosed.
func (t *Table[P]) Acquire(agent string) (*Lease[P], error) {
	l, _, err := t.acquire(agent)
	return l, err
}

// AcquireWait is Acquire, and waits for a plan that is being made, until ctx ends, which
// should have a deadline: making a plan waits for the peer. The error then wraps
// [ErrPreparing] and ctx's cause.
func (t *Table[P]) AcquireWait(ctx context.Context, agent string) (*Lease[P], error) {
	for {
		l, settled, err := t.acquire(agent)
		if settled == nil {
			return l, err
		}
		select {
		case <-settled:
		case <-ctx.Done():
			return nil, fmt.Errorf("%w: %w", err, context.Cause(ctx))
		}
	}
}

// acquire gives, for a peer that is being prepared, also what is closed when it no longer is.
func (t *Table[P]) acquire(agent string) (*Lease[P], <-chan struct{}, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.find(agent)
	if e == nil {
		return nil, nil, t.unknown(agent)
	}
	e.seen = t.now()
	switch e.phase {
	case Live:
		e.rooms++
		e.plan.rooms++
		return &Lease[P]{t: t, e: e, a: e.plan}, nil, nil
	case Preparing:
		return nil, e.settled, e.err()
	default:
		return nil, nil, e.err()
	}
}

// Peer gives the peer that the plan was made for.
func (l *Lease[P]) Peer() *Peer { return l.a.peer }

// Plan gives the plan. It must not be used after Release.
func (l *Lease[P]) Plan() P { return l.a.plan }

// Generation gives the plan's number, see [Preparation.Generation].
func (l *Lease[P]) Generation() uint64 { return l.a.gen }

// Err gives nil while the plan is the peer's plan, and afterwards why it was given up: an
// error that wraps nixlkv.ErrPeerStale and the reason. A room that has more to send asks
// before it does.
func (l *Lease[P]) Err() error {
	l.t.mu.Lock()
	defer l.t.mu.Unlock()
	if l.a.reason == nil {
		return nil
	}
	return staleError(l.a.peer.Agent, l.a.reason)
}

// MarkStale is [Table.MarkStale] for this plan: if the peer has another by now, or none,
// nothing changes.
func (l *Lease[P]) MarkStale(reason error) bool {
	var d dropping[P]
	defer l.t.dropAll(&d)
	l.t.mu.Lock()
	defer l.t.mu.Unlock()
	if l.e.plan != l.a {
		return false
	}
	l.t.makeStale(l.e, reason, &d)
	return true
}

// Release ends the lease. The last one on a plan that was given up drops it. A second call
// does nothing.
func (l *Lease[P]) Release() {
	if l.released.Swap(true) {
		return
	}
	var d dropping[P]
	defer l.t.dropAll(&d)
	l.t.mu.Lock()
	defer l.t.mu.Unlock()
	l.e.rooms--
	l.a.rooms--
	l.e.seen = l.t.now()
	if l.a.rooms == 0 && l.a.reason != nil {
		d = append(d, l.a)
	}
}
