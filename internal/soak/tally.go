package main

import (
	"sync"
	"sync/atomic"
	"time"
)

// tally counts what rooms came to on one side.
type tally struct {
	arrived, aborted, failed atomic.Uint64
	lost, unmet              atomic.Uint64 // that failed, or never began, because their decode was killed
	begun                    atomic.Int64  // streams that have had their first room
	latency                  histogram     // of rooms that arrived, from opening to their end

	mu    sync.Mutex
	first string // the first unexpected failure
}

// add takes a room that was meant to have this fate.
func (t *tally) add(f fate, took time.Duration, err error) {
	switch {
	case err == nil && f == arrives:
		t.arrived.Add(1)
		t.latency.add(took)
	case err == nil:
		t.aborted.Add(1)
	default:
		t.fail(err)
	}
}

// fail takes what must not happen.
func (t *tally) fail(err error) {
	t.failed.Add(1)
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.first == "" {
		t.first = err.Error()
	}
}

func (t *tally) report(r *report) {
	r.Arrived, r.Aborted, r.Failed = t.arrived.Load(), t.aborted.Load(), t.failed.Load()
	r.Lost, r.Unmet = t.lost.Load(), t.unmet.Load()
	r.Begun = int(t.begun.Load())
	t.mu.Lock()
	r.FirstFailure = t.first
	t.mu.Unlock()
}
