package kvreceiver

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/internal/wire"
	"github.com/nixlkv/nixlkv/nixl"
)

// another gives the pair's decode another prefill.
func (q *pair) another(s shape) *pair {
	q.t.Helper()
	return &pair{q.t, q.m, q.mem, newSite(q.t, q.p.engine, q.prefills, s), q.prefills}
}

// losses waits until so many connections are seen to be gone.
func (q *pair) losses(n uint64) {
	q.t.Helper()
	eventually(q.t, "the loss", func() bool { return q.m.Stats().Losses == n })
}

// waitsForDrain waits until something is to run behind a drain.
func (q *pair) waitsForDrain() {
	q.t.Helper()
	eventually(q.t, "something to wait for a drain", func() bool {
		q.m.drain.mu.Lock()
		defer q.m.drain.mu.Unlock()
		return len(q.m.drain.after) > 0
	})
}

// A prefill whose connection is lost fails its rooms fast, and only its own.
func TestPrefillLost(t *testing.T) {
	eachWay(t, func(t *testing.T, e *nixl.Engine, d dialect) {
		q := newPair(t, e, shape{tp: 2}, WithReleaseTimeout(200*time.Millisecond))
		other := q.another(shape{})
		a, b := q.p.ranks[0], q.p.ranks[1]
		lost, told := q.published(1)
		finished, hers := q.published(2)
		lives, theirs := other.published(3)
		unpublished := q.open(4)
		ok(t, unpublished.Connect(within(t)))
		for i, p := range q.p.ranks {
			p.serve(hers[i], d, work{src: []int32{1, 2}})
		}
		ok(t, finished.Wait(within(t)))
		b.serve(told[1], d, work{src: []int32{1, 2}})
		if d == byStatus {
			eventually(t, "the status", func() bool { return q.m.Stats().Statuses == 3 })
		}
		a.die()
		b.die()
		te := checkFailed(t, lost, nixlkv.ErrPeerLost, "Lost connection with prefill instance (bootstrap_addr: "+q.p.addr)
		got := states(te)
		if d == byStatus && !slices.Equal(got, []nixlkv.RankState{nixlkv.RankLost, nixlkv.RankDone}) || !slices.Contains(got, nixlkv.RankLost) {
			t.Errorf("ranks %v", got)
		}
		if ended(lives) || ended(unpublished) {
			t.Errorf("ended: %v, %v", lives.Err(), unpublished.Err())
		}
		ok(t, finished.Err())
		other.p.ranks[0].serve(theirs[0], d, work{src: []int32{1, 2}})
		ok(t, lives.Wait(within(t)))
		// Nobody can say that the lost rank writes nothing any more.
		if err := lost.Released(within(t)); !errors.Is(err, nixlkv.ErrReleaseUnconfirmed) {
			t.Errorf("got %v", err)
		}
		for _, r := range []*Receiver{lost, finished, lives, unpublished} {
			ok(t, r.Close())
		}
		q.losses(2)
	})
}

// A dummy writes nothing: its loss fails no room, and its answer to an abort is not waited
// for.
func TestDummyLost(t *testing.T) {
	q := newPairOf(t, openEngine(t, nixl.Embedded), shape{tp: 2}, mla, nil)
	a, dummy := q.p.ranks[0], q.p.ranks[1]
	served, told := q.published(1)
	failing, more := q.published(2)
	dummy.die()
	eventually(t, "both rooms to note the loss", func() bool {
		return dummyLost(served) && dummyLost(failing)
	})
	if ended(served) || ended(failing) {
		t.Fatalf("ended: %v, %v", served.Err(), failing.Err())
	}
	a.serve(told[0], byStatus, work{src: []int32{1, 2}})
	ok(t, served.Wait(within(t)))
	a.tell(more[0].From, 2, wire.PollFailed, "no")
	te := checkFailed(t, failing, nixlkv.ErrPeerFailed, "no")
	if got := states(te); !slices.Equal(got, []nixlkv.RankState{nixlkv.RankFailed, nixlkv.RankLost}) {
		t.Errorf("ranks %v", got)
	}
	ok(t, failing.Released(within(t)))
	ok(t, served.Close())
	ok(t, failing.Close())
}

func dummyLost(r *Receiver) bool {
	r.r.mu.Lock()
	defer r.r.mu.Unlock()
	return r.r.track.ranks[1].state == nixlkv.RankLost
}

// The dummy is lost after the room has failed: that is enough as well.
func TestDummyLostAfterFailure(t *testing.T) {
	q := newPairOf(t, openEngine(t, nixl.Embedded), shape{tp: 2}, mla, nil)
	r, told := q.published(1)
	q.p.ranks[0].tell(told[0].From, 1, wire.PollFailed, "no")
	checkFailed(t, r, nixlkv.ErrPeerFailed, "no")
	if isReleased(r) {
		t.Error("released without the dummy's answer")
	}
	q.p.ranks[1].die()
	ok(t, r.Released(within(t)))
	ok(t, r.Close())
}

// What a prefill told last counts, though its connection is gone: completion beats loss.
func TestCompletionBeatsLoss(t *testing.T) {
	t.Run("notifications", func(t *testing.T) {
		e, gate := openGate(t)
		q := newPair(t, e, shape{}, WithLossGrace(0))
		r, told := q.published(1)
		gate.close(t, q.m)
		q.p.ranks[0].serve(told[0], byNotifications, work{src: []int32{1, 2}})
		q.p.ranks[0].die()
		q.waitsForDrain()
		gate.open()
		ok(t, r.Wait(within(t)))
		ok(t, r.Close())
	})
	t.Run("status", func(t *testing.T) {
		q := newPair(t, openEngine(t, nixl.Embedded), shape{}, WithLossGrace(5*time.Second))
		r, told := q.published(1)
		q.p.ranks[0].serve(told[0], byStatus, work{src: []int32{1, 2}})
		q.p.ranks[0].die()
		ok(t, r.Wait(within(t)))
		ok(t, r.Close())
	})
}

// So does what came before the deadline and was not fetched yet.
func TestCompletionBeatsTimeout(t *testing.T) {
	e, gate := openGate(t)
	q := newPair(t, e, shape{}, WithWaitingTimeout(time.Second))
	r, told := q.published(1)
	gate.close(t, q.m)
	q.p.ranks[0].serve(told[0], byNotifications, work{src: []int32{1, 2}})
	q.waitsForDrain()
	gate.open()
	ok(t, r.Wait(within(t)))
	q.drained()
	ok(t, r.Err())
	ok(t, r.Close())
}

// Behind a drain that does not return nothing waits for ever.
func TestDrainThatHangs(t *testing.T) {
	e, gate := openGate(t)
	q := newPair(t, e, shape{}, WithWaitingTimeout(50*time.Millisecond))
	gate.close(t, q.m)
	r, told := q.published(1)
	checkFailed(t, r, nixlkv.ErrTimeout, "KVPoll.WaitingForInput")
	q.p.ranks[0].ack(q.p.ranks[0].aborted(told[0].Room))
	ok(t, r.Released(within(t)))
	ok(t, r.Close())
	gate.open()
}

// A prefill rank that listens again at its address is registered with again, before it is
// told of any room.
func TestReconnect(t *testing.T) {
	q := newPair(t, openEngine(t, nixl.Embedded), shape{})
	p := q.p.ranks[0]
	q.oneRoom(1, byStatus, 1, 1)
	r := q.open(2)
	ok(t, r.Connect(within(t)))
	p.die()
	q.losses(1)
	ok(t, r.Publish(Destination{Pages: []int32{2}, Aux: Aux(0)}))
	p.listen(p.info.RankPort)
	m := p.metadata(2)
	if n := has(p, func(g *wire.Registration) bool { return g.Agent == q.m.Agent() }); n != 1 {
		t.Errorf("%d registrations before the metadata", n)
	}
	p.serve(m, byStatus, work{src: []int32{1}})
	ok(t, r.Wait(within(t)))
	ok(t, r.Close())
	q.mem.clear()
	q.oneRoom(3, byNotifications, 1, 1)
	if s := q.m.Stats(); s.Registrations != 2 || s.Ranks != 1 {
		t.Errorf("stats %+v", s)
	}
}

// An abort that cannot be told at once is told when the rank can be reached again.
func TestAbortOverAReconnect(t *testing.T) {
	q := newPair(t, openEngine(t, nixl.Embedded), shape{})
	p := q.p.ranks[0]
	r, _ := q.published(1)
	p.die()
	checkFailed(t, r, nixlkv.ErrPeerLost, "Lost connection")
	p.listen(p.info.RankPort)
	p.ack(p.aborted(1))
	// The abort came over another connection than the metadata, and may have been read before
	// them: only the next answer is certain.
	again := p.aborted(1)
	if isReleased(r) {
		t.Fatal("released by an answer that may be older than the metadata")
	}
	p.ack(again)
	ok(t, r.Released(within(t)))
	ok(t, r.Close())
}

// A prefill that comes back at another address is found again.
func TestRestartElsewhere(t *testing.T) {
	q := newPair(t, openEngine(t, nixl.Embedded), shape{tp: 2}, WithReleaseTimeout(50*time.Millisecond))
	r, _ := q.published(1)
	for _, p := range q.p.ranks {
		p.die()
	}
	checkFailed(t, r, nixlkv.ErrPeerLost, "Lost connection")
	ok(t, r.Close())
	q.losses(2)
	q.p.routes.Forget()
	for _, p := range q.p.ranks {
		p.listen(0)
		p.register()
	}
	r, told := q.published(2)
	for i, p := range q.p.ranks {
		p.serve(told[i], byStatus, work{src: []int32{1, 2}})
	}
	ok(t, r.Wait(within(t)))
	ok(t, r.Close())
	eventually(t, "the old addresses to be given up", func() bool { s := q.m.Stats(); return s.Ranks == 2 && s.Waiting == 0 })
}

// A rank that cannot be reached fails the room in the send timeout, is forgotten, and is asked
// for anew by the next room.
func TestUnreachableRank(t *testing.T) {
	q := newPair(t, openEngine(t, nixl.Embedded), shape{}, WithSendTimeout(time.Second))
	p := q.p.ranks[0]
	p.die()
	r := q.open(1)
	err := r.Connect(within(t))
	checkError(t, r, err, nixlkv.ErrSendBlocked, "_register_kv_args to prefill")
	ok(t, r.Released(within(t)))
	ok(t, r.Close())
	eventually(t, "the link to go", func() bool { return q.m.Stats().Ranks == 0 })
	p.listen(0)
	p.register()
	q.oneRoom(2, byStatus, 3, 4)
}

// The link goes too where nobody waits for the registration any more.
func TestUnreachableRankAndAbort(t *testing.T) {
	q := newPair(t, openEngine(t, nixl.Embedded), shape{}, WithSendTimeout(300*time.Millisecond))
	q.p.ranks[0].die()
	r := q.open(1)
	came := make(chan error, 1)
	go func() { came <- r.Connect(within(t)) }()
	eventually(t, "an attempt to connect", func() bool { return q.m.Stats().Control.ConnectFailures > 0 })
	r.Abort("")
	checkError(t, r, <-came, nixlkv.ErrAborted, "Aborted by AbortReq.")
	ok(t, r.Close())
	eventually(t, "the link to go", func() bool { return q.m.Stats().Ranks == 0 })
}

// A rank that starts to listen late is waited for.
func TestRankThatListensLate(t *testing.T) {
	q := newPair(t, openEngine(t, nixl.Embedded), shape{})
	p := q.p.ranks[0]
	p.die()
	r := q.open(1)
	came := make(chan error, 1)
	go func() { came <- r.Connect(within(t)) }()
	eventually(t, "an attempt to connect", func() bool { return q.m.Stats().Control.ConnectFailures > 0 })
	p.listen(p.info.RankPort)
	ok(t, <-came)
	ok(t, r.Publish(Destination{Pages: []int32{2}, Aux: Aux(0)}))
	p.serve(p.metadata(1), byStatus, work{src: []int32{1}})
	ok(t, r.Wait(within(t)))
	ok(t, r.Close())
}

// Metadata that wait for a registration are taken back by an abort: they would arrive after
// it, and the prefill would write to pages that are somebody else's by then.
func TestAbortTakesMetadataBack(t *testing.T) {
	q := newPair(t, openEngine(t, nixl.Embedded), shape{tp: 2})
	a, b := q.p.ranks[0], q.p.ranks[1]
	r := q.open(1)
	ok(t, r.Connect(within(t)))
	a.die()
	q.losses(1)
	ok(t, r.Publish(Destination{Pages: []int32{2}, Aux: Aux(0)}))
	m := b.metadata(1)
	r.Abort("")
	if isReleased(r) {
		t.Fatal("released, and the second rank was told")
	}
	b.ack(b.aborted(1))
	ok(t, r.Released(within(t)))
	ok(t, r.Close())
	a.listen(a.info.RankPort)
	next := q.publish(2, Destination{Pages: []int32{2}, Aux: Aux(0)})
	a.serve(a.metadata(2), byStatus, work{src: []int32{1}})
	b.serve(b.metadata(2), byStatus, work{src: []int32{1}})
	ok(t, next.Wait(within(t)))
	ok(t, next.Close())
	if n := has(a, func(m *wire.Metadata) bool { return m.Room == 1 }); n != 0 || m.Room != 1 {
		t.Errorf("%d metadata came after the abort", n)
	}
}
