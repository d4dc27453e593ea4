package kvreceiver

import (
	"errors"
	"sync"
	"testing"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/internal/changes"
	"github.com/nixlkv/nixlkv/nixl"
)

// Poll gives each room that has changed, once, with the status that it has by then.
func TestPoll(t *testing.T) {
	q := newPair(t, openEngine(t, nixl.Embedded), shape{})
	poll := func(want map[nixlkv.Room]nixlkv.Status) {
		t.Helper()
		events, complete := q.m.Poll(nil)
		if !complete || len(events) != len(want) {
			t.Fatalf("%d events, complete %v, want %v", len(events), complete, want)
		}
		for _, e := range events {
			if s, ok := want[e.Room]; !ok || e.Status != s || e.Receiver.Room() != e.Room || (e.Err != nil) != (s == nixlkv.Failed) {
				t.Errorf("event %+v, want %v", e, want)
			}
		}
	}
	poll(nil)
	a, b, c := q.open(1), q.open(2), q.open(3)
	poll(nil)
	ok(t, a.Connect(within(t)))
	ok(t, b.Connect(within(t)))
	poll(map[nixlkv.Room]nixlkv.Status{1: nixlkv.WaitingForInput, 2: nixlkv.WaitingForInput})
	poll(nil)
	ok(t, a.Publish(Destination{Pages: []int32{1}, Aux: Aux(0)}))
	poll(nil)
	q.p.ranks[0].serve(q.p.ranks[0].metadata(1), byStatus, work{src: []int32{1}})
	ok(t, a.Wait(within(t)))
	b.Abort("")
	poll(map[nixlkv.Room]nixlkv.Status{1: nixlkv.Success, 2: nixlkv.Failed})
	// What happened twice is told once, with what it came to.
	ok(t, c.Connect(within(t)))
	ok(t, c.Close())
	poll(map[nixlkv.Room]nixlkv.Status{3: nixlkv.Failed})
	ok(t, a.Close())
	ok(t, b.Close())
	poll(nil)
	dst := make([]Event, 1, 4)
	if events, _ := q.m.Poll(dst); len(events) != 1 {
		t.Errorf("%d events", len(events))
	}
}

// The list is bounded; what did not fit is told of by complete.
func TestPollIsBounded(t *testing.T) {
	q := newPair(t, openEngine(t, nixl.Embedded), shape{}, WithLimits(Limits{DoneRooms: 3}))
	for id := range nixlkv.Room(5) {
		ok(t, q.open(id).Close())
	}
	events, complete := q.m.Poll(nil)
	if len(events) != 3 || complete {
		t.Errorf("%d events, complete %v", len(events), complete)
	}
	for i, e := range events {
		if e.Room != nixlkv.Room(i) || !errors.Is(e.Err, nixlkv.ErrAborted) {
			t.Errorf("event %+v", e)
		}
	}
	if events, complete = q.m.Poll(events[:0]); len(events) != 0 || !complete {
		t.Errorf("%d events, complete %v", len(events), complete)
	}
}

// No event is lost or told twice where several goroutines poll.
func TestPollFromManyGoroutines(t *testing.T) {
	q := newPair(t, openEngine(t, nixl.Embedded), shape{})
	const n = 300
	var mu sync.Mutex
	seen := map[nixlkv.Room]int{}
	take := func() {
		events, complete := q.m.Poll(nil)
		mu.Lock()
		defer mu.Unlock()
		for _, e := range events {
			seen[e.Room]++
		}
		if !complete {
			t.Error("not complete")
		}
	}
	var wg sync.WaitGroup
	for g := range 3 {
		wg.Go(func() {
			for i := range n {
				r, err := q.m.Open(nixlkv.Room(g*n+i), q.p.addr)
				if err != nil {
					t.Error(err)
					return
				}
				if err := r.Close(); err != nil {
					t.Error(err)
				}
				take()
			}
		})
	}
	wg.Wait()
	take()
	for id := range nixlkv.Room(3 * n) {
		if seen[id] != 1 {
			t.Errorf("room %d: %d events", id, seen[id])
		}
	}
}

// A manager that nobody polls keeps few of the rooms that have ended.
func TestNobodyPolls(t *testing.T) {
	q := newPair(t, openEngine(t, nixl.Embedded), shape{})
	const n = changes.Unpolled + 10
	for id := range nixlkv.Room(n) {
		ok(t, q.open(id).Close())
	}
	if events, complete := q.m.Poll(nil); len(events) != changes.Unpolled || complete {
		t.Errorf("%d events, complete %v", len(events), complete)
	}
	for id := range nixlkv.Room(n) {
		ok(t, q.open(id).Close())
	}
	if events, complete := q.m.Poll(nil); len(events) != n || !complete {
		t.Errorf("%d events after the first call, complete %v", len(events), complete)
	}
}
