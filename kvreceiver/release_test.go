package kvreceiver

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/internal/wire"
	"github.com/nixlkv/nixlkv/nixl"
	"github.com/nixlkv/nixlkv/registry"
)

func mla(l *registry.Layout) { l.MLA = true }

// states lists what a failed room says of its ranks.
func states(e *KVTransferError) (states []nixlkv.RankState) {
	for _, r := range e.Ranks {
		states = append(states, r.State)
	}
	return states
}

// published opens a room at a prefill of several ranks and gives what each was told.
func (q *pair) published(id nixlkv.Room) (*Receiver, []*wire.Metadata) {
	q.t.Helper()
	r := q.publish(id, Destination{Pages: []int32{1, 2}, Aux: Aux(0)})
	var told []*wire.Metadata
	for _, p := range q.p.ranks {
		told = append(told, p.metadata(id))
	}
	return r, told
}

// A room whose pages do not come fails after the waiting timeout. Every rank is told, the
// dummy as well, and the pages are free only when all have answered.
func TestWaitingTimeout(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *nixl.Engine) {
		q := newPairOf(t, e, shape{tp: 3}, mla, nil, WithWaitingTimeout(150*time.Millisecond))
		r, _ := q.published(1<<62 + 1)
		te := checkFailed(t, r, nixlkv.ErrTimeout, "Request 4611686018427387905 timed out after 0.15s in KVPoll.WaitingForInput")
		if got := states(te); !slices.Equal(got, make([]nixlkv.RankState, 3)) {
			t.Errorf("ranks %v", got)
		}
		var aborts []*wire.Abort
		for _, p := range q.p.ranks {
			aborts = append(aborts, p.aborted(r.Room()))
		}
		for i, p := range q.p.ranks {
			if isReleased(r) {
				t.Fatalf("released when %d of 3 ranks had answered", i)
			}
			if i == 1 {
				p.plainAck(aborts[i]) // as 0.5.21 does
			} else {
				p.ack(aborts[i])
			}
			eventually(t, "the answer", func() bool { return q.m.Stats().AbortAcks == uint64(i+1) })
		}
		ok(t, r.Released(within(t)))
		if r.Metrics().Released.Before(r.Metrics().Ended) {
			t.Errorf("metrics %+v", r.Metrics())
		}
		ok(t, r.Close())
		eventually(t, "the number to be free", func() bool { return q.m.Stats().Waiting == 0 })
		if s := q.m.Stats(); s.Aborts != 3 || s.AbortAcks != 3 || s.Unknown != 0 || s.Unconfirmed != 0 || s.Waiting != 0 {
			t.Errorf("stats %+v", s)
		}
	})
}

// Answers count once a rank, with the generation of the abort or with none.
func TestAcksThatDoNotCount(t *testing.T) {
	q := newPair(t, openEngine(t, nixl.Embedded), shape{tp: 2})
	a, b := q.p.ranks[0], q.p.ranks[1]
	r, _ := q.published(1)
	early := &wire.Abort{Room: 1, From: q.m.self, Generation: 1}
	a.ack(early) // nobody has aborted
	b.plainAck(early)
	eventually(t, "two answers", func() bool { return q.m.Stats().AbortAcks == 2 })
	r.Abort("enough")
	x, y := a.aborted(1), b.aborted(1)
	if !x.HasGeneration || x.Generation == y.Generation {
		t.Errorf("aborts %+v and %+v: the answers cannot be told apart", x, y)
	}
	wrong := *x
	wrong.Generation += 100
	a.ack(&wrong)
	wrong.Generation, wrong.Room = x.Generation, 2
	a.ack(&wrong)
	for range 3 {
		a.ack(x)
	}
	a.plainAck(x)
	eventually(t, "eight answers", func() bool { return q.m.Stats().AbortAcks == 8 })
	if isReleased(r) {
		t.Fatal("released without the second rank")
	}
	if s := q.m.Stats(); s.Unknown != 7 {
		t.Errorf("stats %+v", s)
	}
	b.ack(y)
	ok(t, r.Released(within(t)))
	checkFailed(t, r, nixlkv.ErrAborted, "enough")
	ok(t, r.Close())
}

func TestReleaseUnconfirmed(t *testing.T) {
	q := newPair(t, openEngine(t, nixl.Embedded), shape{tp: 2}, WithReleaseTimeout(100*time.Millisecond))
	r, _ := q.published(1)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := r.Released(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("an open room: %v", err)
	}
	r.Abort("")
	q.p.ranks[0].ack(q.p.ranks[0].aborted(1))
	for range 2 {
		err := r.Released(within(t))
		if !errors.Is(err, nixlkv.ErrReleaseUnconfirmed) || !errors.Is(err, nixlkv.ErrAborted) || !strings.Contains(err.Error(), "1 of 2 prefill ranks have not answered") {
			t.Errorf("got %v", err)
		}
	}
	checkFailed(t, r, nixlkv.ErrAborted, "Aborted by AbortReq.")
	// An answer that comes later does not make it free: it was given up.
	q.p.ranks[1].ack(q.p.ranks[1].aborted(1))
	eventually(t, "the second answer", func() bool { return q.m.Stats().AbortAcks == 2 })
	if err := r.Released(within(t)); !errors.Is(err, nixlkv.ErrReleaseUnconfirmed) {
		t.Errorf("got %v", err)
	}
	ok(t, r.Close())
	eventually(t, "the number to be free", func() bool { return q.m.Stats().Waiting == 0 })
	if s := q.m.Stats(); s.Unconfirmed != 1 || s.Rooms != 0 || s.Waiting != 0 {
		t.Errorf("stats %+v", s)
	}
}

// A rank that has told its end writes nothing any more, whether it told Success or Failed,
// and before or after the room failed.
func TestRanksThatToldTheirEndAreQuiet(t *testing.T) {
	for _, tc := range []struct {
		name          string
		before, after []wire.KVPoll // what ranks 0, 1, … tell
		abort         bool
		want          error
		states        []nixlkv.RankState
	}{
		{"one failed, one succeeds later", []wire.KVPoll{wire.PollFailed}, []wire.KVPoll{wire.PollSuccess}, false, nixlkv.ErrPeerFailed, []nixlkv.RankState{nixlkv.RankFailed, nixlkv.RankSilent}},
		{"one failed, one fails later", []wire.KVPoll{wire.PollFailed}, []wire.KVPoll{wire.PollFailed}, false, nixlkv.ErrPeerFailed, []nixlkv.RankState{nixlkv.RankFailed, nixlkv.RankSilent}},
		{"one succeeded, one fails", []wire.KVPoll{wire.PollSuccess, wire.PollFailed}, nil, false, nixlkv.ErrPeerFailed, []nixlkv.RankState{nixlkv.RankDone, nixlkv.RankFailed}},
		{"aborted, then both succeed", nil, []wire.KVPoll{wire.PollSuccess, wire.PollSuccess}, true, nixlkv.ErrAborted, make([]nixlkv.RankState, 2)},
		{"aborted between two successes", []wire.KVPoll{wire.PollSuccess}, []wire.KVPoll{wire.PollSuccess}, true, nixlkv.ErrAborted, []nixlkv.RankState{nixlkv.RankDone, nixlkv.RankSilent}},
		{"aborted, then both fail", nil, []wire.KVPoll{wire.PollFailed, wire.PollFailed}, true, nixlkv.ErrAborted, make([]nixlkv.RankState, 2)},
	} {
		t.Run(tc.name, func(t *testing.T) {
			q := newPair(t, openEngine(t, nixl.Embedded), shape{tp: 2})
			r, told := q.published(3)
			for i, s := range tc.before {
				q.p.ranks[i].tell(told[i].From, 3, s, "out of memory")
				eventually(t, "the status", func() bool { return q.m.Stats().Statuses == uint64(i+1) })
			}
			if tc.abort {
				r.Abort("")
			}
			te := checkFailed(t, r, tc.want, "")
			if !slices.Equal(states(te), tc.states) {
				t.Errorf("ranks %v, want %v", states(te), tc.states)
			}
			for i, s := range tc.after {
				if isReleased(r) {
					t.Fatal("released too early")
				}
				k := len(tc.before) + i
				q.p.ranks[k].tell(told[k].From, 3, s, "out of memory")
				eventually(t, "the status", func() bool { return q.m.Stats().Statuses == uint64(k+1) })
			}
			ok(t, r.Released(within(t)))
			checkFailed(t, r, tc.want, "")
			for _, p := range q.p.ranks[len(tc.before):] {
				p.aborted(3)
			}
			ok(t, r.Close())
			if n := q.m.Stats().Aborts; n != uint64(len(q.p.ranks)-len(tc.before)) {
				t.Errorf("%d aborts: a rank that has told its end may use the number again", n)
			}
			events, complete := q.m.Poll(nil)
			if len(events) != 1 || !complete || events[0].Status != nixlkv.Failed || !errors.Is(events[0].Err, tc.want) {
				t.Errorf("events %+v", events)
			}
			if s := q.m.Stats(); s.Failed != 1 || s.Succeeded != 0 {
				t.Errorf("stats %+v", s)
			}
		})
	}
}

// What is aborted before anything was published is free at once; its ranks are told.
func TestAbortBeforePublish(t *testing.T) {
	q := newPair(t, openEngine(t, nixl.Embedded), shape{tp: 2})
	r := q.open(1)
	r.Abort("not wanted")
	ok(t, r.Released(within(t)))
	checkFailed(t, r, nixlkv.ErrAborted, "not wanted")
	checkError(t, r, r.Connect(within(t)), nixlkv.ErrAborted, "not wanted")
	checkError(t, r, r.Publish(Destination{Aux: Aux(0)}), nixlkv.ErrAborted, "not wanted")
	ok(t, r.Close())
	r = q.open(1)
	ok(t, r.Connect(within(t)))
	r.Abort("")
	ok(t, r.Released(within(t)))
	for _, p := range q.p.ranks {
		p.aborted(1)
	}
	ok(t, r.Close())
	q.drained()
	if s := q.m.Stats(); s.Aborts != 2 || s.Waiting != 0 || s.Unconfirmed != 0 {
		t.Errorf("stats %+v", s)
	}
}

// After success nothing is written any more: the pages are free, and an abort changes nothing.
func TestAbortAfterSuccess(t *testing.T) {
	q := newPair(t, openEngine(t, nixl.Embedded), shape{})
	r, told := q.published(1)
	q.p.ranks[0].serve(told[0], byStatus, work{src: []int32{1, 2}})
	ok(t, r.Wait(within(t)))
	r.Abort("late")
	r.FailedElsewhere(nil)
	ok(t, r.Wait(within(t)))
	ok(t, r.Released(within(t)))
	ok(t, r.Close())
	ok(t, r.Err())
	if s := q.m.Stats(); s.Aborts != 0 || s.Failed != 0 {
		t.Errorf("stats %+v", s)
	}
}

// Another rank of this decode failed: the room says so, and what the server knew of it.
func TestFailedElsewhere(t *testing.T) {
	q := newPair(t, openEngine(t, nixl.Embedded), shape{})
	r, _ := q.published(1)
	ranks := []nixlkv.RankReport{{Rank: 3, State: nixlkv.RankFailed, Reason: "out of memory"}, {Rank: 4, State: nixlkv.RankLost}}
	r.FailedElsewhere(ranks)
	ranks[0].Reason = "changed"
	te := checkFailed(t, r, nixlkv.ErrAnotherRank, "NIXL KVReceiver Exception")
	if !te.FromAnotherRank || len(te.Ranks) != 2 || te.Ranks[0].Reason != "out of memory" {
		t.Errorf("got %+v", te)
	}
	q.p.ranks[0].ack(q.p.ranks[0].aborted(1))
	ok(t, r.Released(within(t)))
	ok(t, r.Close())
}
