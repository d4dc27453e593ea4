package kvsender

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/nixl"
)

// flight is a transfer of a room. Flights are reused, so that posting allocates nothing.
type flight struct {
	t    *nixl.Transfer
	room *room
	dest *dest
	what string // for errors: "KV", "aux", "state"
	made time.Time
	late bool // its room was failed for it
}

// landing waits for everything that was posted: one loop asks for the status of all in one
// native call, and pauses longer the longer nothing changes.
type landing struct {
	m    *Manager
	mu   sync.Mutex
	more []*flight // posted since the loop looked last
	wake chan struct{}
	stop chan struct{}
}

// The pause between two looks at what is in flight.
const (
	minLandingPause = 10 * time.Microsecond
	maxLandingPause = time.Millisecond
)

func newLanding(m *Manager) *landing {
	return &landing{m: m, wake: make(chan struct{}, 1), stop: make(chan struct{})}
}

// add hands a posted flight over.
func (l *landing) add(f *flight) {
	l.mu.Lock()
	l.more = append(l.more, f)
	l.mu.Unlock()
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// run is the completion loop. It ends when stopped and nothing is in flight, or when the
// agent was closed under it, which then settles what is left.
func (l *landing) run() {
	var (
		flights   []*flight
		transfers []*nixl.Transfer
		statuses  []nixl.Status
		pause     = minLandingPause
		timer     = time.NewTimer(time.Hour)
		overdue   = time.Now()
		stopping  bool
	)
	defer timer.Stop()
	for {
		l.mu.Lock()
		for i, f := range l.more {
			flights = append(flights, f)
			transfers = append(transfers, f.t)
			l.more[i] = nil
		}
		l.more = l.more[:0]
		l.mu.Unlock()
		if len(flights) == 0 {
			if stopping {
				return
			}
			select {
			case <-l.wake:
			case <-l.stop:
				stopping = true
			}
			pause = minLandingPause
			continue
		}
		if cap(statuses) < len(transfers) {
			statuses = make([]nixl.Status, len(transfers), 2*len(transfers))
		}
		statuses = statuses[:len(transfers)]
		if err := l.m.agent.Poll(transfers, statuses); err != nil {
			// Somebody closed the engine under the manager. The agent waits for what is in flight
			// before it ends, and so does this loop.
			if e := l.m.agent.Shutdown(context.Background()); e != nil {
				err = errors.Join(err, e)
			}
			for _, f := range flights {
				l.m.settledElsewhere(f, err)
			}
			flights, transfers = flights[:0], transfers[:0]
			continue
		}
		kept := 0
		for i, f := range flights {
			if statuses[i] != nixl.InProgress {
				l.m.landed(f)
				continue
			}
			flights[kept], transfers[kept] = f, f.t
			kept++
		}
		if kept < len(flights) {
			pause = minLandingPause
		}
		clear(flights[kept:])
		clear(transfers[kept:])
		flights, transfers = flights[:kept], transfers[:kept]
		if kept == 0 {
			continue
		}
		if now := time.Now(); now.After(overdue) {
			l.overdue(flights, now)
			overdue = now.Add(l.m.cfg.transferTimeout / overdueLooks)
		}
		timer.Reset(pause)
		select {
		case <-timer.C:
			pause = min(pause*2, maxLandingPause)
		case <-l.wake:
			pause = minLandingPause
		}
	}
}

// overdueLooks is how often within the transfer timeout it is looked for writes beyond it.
const overdueLooks = 16

// overdue fails the rooms whose writes have not settled in time, and has their decodes looked at.
// The writes stay in flight, and the room holds its decodes' memory until they settle.
func (l *landing) overdue(flights []*flight, now time.Time) {
	timeout := l.m.cfg.transferTimeout
	for _, f := range flights {
		if f.late || now.Sub(f.made) < timeout {
			continue
		}
		f.late = true
		d := f.dest
		f.room.mu.Lock()
		f.room.fail(d.failed(f.what, fmt.Errorf("%w: not settled after %v", nixlkv.ErrTimeout, timeout)))
		f.room.mu.Unlock()
		l.m.peers.look(d.meta.Agent, d.meta.From.String())
	}
}

// flight gives a flight to use, new or used before.
func (m *Manager) flight(r *room, d *dest, what string) *flight {
	f, _ := m.flights.Get().(*flight)
	if f == nil {
		f = &flight{t: m.agent.NewTransfer()}
	}
	f.room, f.dest, f.what, f.made, f.late = r, d, what, time.Now(), false
	return f
}

func (m *Manager) reuse(f *flight) {
	f.room, f.dest = nil, nil
	m.flights.Put(f)
}

// landed takes a flight whose transfer has settled.
func (m *Manager) landed(f *flight) {
	r, d, err := f.room, f.dest, f.t.Err()
	what := f.what
	if e := f.t.Release(); e != nil && err == nil {
		err = e
	}
	if !f.t.Held() {
		m.reuse(f)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.inFlight--
	if err != nil {
		m.peerFailed(d, err)
		r.fail(d.failed(what, err))
	}
	r.schedule()
	r.advance()
}

// settledElsewhere takes a flight that has settled with the end of its agent; how, nobody
// knows.
func (m *Manager) settledElsewhere(f *flight, err error) {
	f.room.mu.Lock()
	defer f.room.mu.Unlock()
	f.room.inFlight--
	f.room.fail(f.dest.failed(f.what, err))
	f.room.advance()
}
