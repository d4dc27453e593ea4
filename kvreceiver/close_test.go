package kvreceiver

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/internal/control"
	"github.com/nixlkv/nixlkv/internal/wire"
	"github.com/nixlkv/nixlkv/nixl"
)

// Close fails rooms at every stage, tells their prefills and waits for their answers.
func TestCloseWithOpenRooms(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *nixl.Engine) {
		q := newPair(t, e, shape{tp: 2})
		half := q.another(shape{tp: 2, later: 1})
		opened := q.open(1)
		connected := q.open(2)
		ok(t, connected.Connect(within(t)))
		published, _ := q.published(3)
		lingering, _ := q.published(4)
		ok(t, lingering.Close())
		done, told := q.published(5)
		for i, p := range q.p.ranks {
			p.serve(told[i], byStatus, work{src: []int32{1, 2}})
		}
		ok(t, done.Wait(within(t)))
		connecting := half.open(6)
		came := make(chan error, 1)
		go func() { came <- connecting.Connect(within(t)) }()
		half.p.untilAsked("GET /route", 1)

		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				if err := q.m.Close(); err != nil {
					t.Error(err)
				}
			})
		}
		checkError(t, connecting, <-came, nixlkv.ErrClosed, "shutting down")
		for _, r := range []*Receiver{opened, connected, published, connecting} {
			checkFailed(t, r, nixlkv.ErrClosed, "shutting down")
		}
		checkFailed(t, lingering, nixlkv.ErrAborted, "the receiver was closed")
		ok(t, done.Err())
		if isReleased(published) || isReleased(lingering) {
			t.Error("released without an answer")
		}
		for _, p := range q.p.ranks {
			p.aborted(2)
			p.ack(p.aborted(3))
			p.ack(p.aborted(4))
		}
		wg.Wait()
		checkEmpty(t, q.m)
		ok(t, published.Released(within(t)))
		ok(t, lingering.Released(within(t)))
		for _, r := range []*Receiver{opened, connected, published, lingering, done, connecting} {
			ok(t, r.Close())
		}
		if _, err := q.m.Open(9, q.p.addr); !errors.Is(err, nixlkv.ErrClosed) {
			t.Errorf("open after Close: %v", err)
		}
		if events, complete := q.m.Poll(nil); len(events) != 6 || !complete {
			t.Errorf("%d events", len(events))
		}
		ok(t, q.m.Close())
		ok(t, q.m.Shutdown(within(t)))
	})
}

// A prefill that does not answer is waited for, at most the release timeout; then the caller
// is told that its memory may be written to.
func TestCloseUnconfirmed(t *testing.T) {
	e := openEngine(t, nixl.Embedded)
	mem := newKitMemory(t)
	mem.fill()
	p := newSite(t, e, mem, shape{})
	m, err := NewManager(t.Context(), newKitMemory(t).layout(), append(quick(e), WithReleaseTimeout(300*time.Millisecond))...)
	ok(t, err)
	for id := range nixlkv.Room(2) {
		r, err := m.Open(id, p.addr)
		ok(t, err)
		ok(t, r.Connect(within(t)))
		ok(t, r.Publish(Destination{Aux: Aux(0)}))
		p.ranks[0].metadata(id)
	}
	ctx, cancel := contextOf(20)
	defer cancel()
	if err := m.Shutdown(ctx); !errors.Is(err, nixlkv.ErrReleaseUnconfirmed) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("within 20 ms: %v", err)
	}
	for range 2 {
		if err := m.Close(); !errors.Is(err, nixlkv.ErrReleaseUnconfirmed) || errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("after the release timeout: %v", err)
		}
	}
	checkEmpty(t, m)
}

// What waits for a registration was told to nobody: Close does not wait for answers to it.
func TestCloseWithMetadataHeld(t *testing.T) {
	q := newPair(t, openEngine(t, nixl.Embedded), shape{tp: 2})
	r := q.open(1)
	ok(t, r.Connect(within(t)))
	for _, p := range q.p.ranks {
		p.die()
	}
	q.losses(2)
	ok(t, r.Publish(Destination{Pages: []int32{1}, Aux: Aux(0)}))
	ok(t, q.m.Close())
	checkFailed(t, r, nixlkv.ErrClosed, "shutting down")
	ok(t, r.Released(within(t)))
}

// One that answers late is waited for by the next call.
func TestShutdownGoesOn(t *testing.T) {
	q := newPair(t, openEngine(t, nixl.Embedded), shape{})
	r, _ := q.published(1)
	for range 2 {
		ctx, cancel := contextOf(10)
		if err := q.m.Shutdown(ctx); !errors.Is(err, nixlkv.ErrReleaseUnconfirmed) {
			t.Errorf("got %v", err)
		}
		cancel()
	}
	if s := q.m.Stats(); s.Rooms != 0 || s.Waiting != 1 || s.Agent.Registrations != 1 {
		t.Errorf("stats %+v", s)
	}
	q.p.ranks[0].ack(q.p.ranks[0].aborted(1))
	ok(t, q.m.Close())
	ok(t, r.Released(within(t)))
}

// What still comes after Close finds nothing, and does no harm.
func TestCallbacksAfterClose(t *testing.T) {
	q := newPair(t, openEngine(t, nixl.Embedded), shape{}, WithLossGrace(0))
	r, told := q.published(1)
	l := r.r.targets[0].link
	generation := l.generation
	q.p.ranks[0].serve(told[0], byStatus, work{src: []int32{1, 2}})
	ok(t, r.Wait(within(t)))
	ok(t, q.m.Close())
	before := q.m.Stats()
	frames, err := new(wire.Encoder).KVStatus(&wire.KVStatus{Room: 1, Status: wire.PollFailed})
	ok(t, err)
	q.m.receive(netip.Addr{}, frames)
	frames, err = new(wire.Encoder).AbortAck(&wire.AbortAck{Room: 1})
	ok(t, err)
	q.m.receive(netip.Addr{}, frames)
	q.m.notified([]byte("somebody"), wire.AppendAux(nil, 1))
	for _, k := range []control.EventKind{control.Connected, control.Disconnected, control.Released} {
		q.m.observe(control.Event{Endpoint: l.to, Kind: k, Generation: generation})
	}
	l.registered(0, nixlkv.ErrClosed)
	r.r.sent(r.r.targets[0], 0, nixlkv.ErrClosed)
	r.r.rankLost(l, generation)
	r.r.expire(1)
	r.r.unconfirmed()
	r.Abort("")
	q.m.beat()
	ran := make(chan struct{})
	q.m.afterDrain(func() { close(ran) })
	select {
	case <-ran:
	case <-time.After(patience):
		t.Error("what is to run behind a drain never ran")
	}
	ok(t, r.Err())
	ok(t, r.Released(within(t)))
	after := q.m.Stats()
	if after.Unknown != before.Unknown+3 || after.Failed != 0 || after.Losses != before.Losses {
		t.Errorf("stats %+v, before %+v", after, before)
	}
	checkEmpty(t, q.m)
}

// Abort, Close and the rest may be called by many at once, in any order.
func TestReceiverFromManyGoroutines(t *testing.T) {
	q := newPair(t, openEngine(t, nixl.Embedded), shape{tp: 2})
	p := q.p.ranks
	for id := range nixlkv.Room(20) {
		r, told := q.published(id)
		var wg sync.WaitGroup
		for i, f := range []func(){
			func() { r.Abort("") },
			func() { ok(t, r.Close()) },
			func() { r.FailedElsewhere(nil) },
			func() { r.Status(); r.Metrics(); q.m.Stats() },
			func() { q.m.Poll(nil) },
			func() { p[0].serve(told[0], byStatus, work{src: []int32{1, 2}}) },
			func() { p[1].serve(told[1], byStatus, work{src: []int32{1, 2}}) },
			func() { _ = r.Wait(within(t)); <-r.Ready() },
		} {
			_ = i
			wg.Go(f)
		}
		wg.Wait()
		// Both ranks have told their end, so whatever came first the pages are free.
		ok(t, r.Released(within(t)))
		ok(t, r.Close())
		if s := r.Status(); (s == nixlkv.Success) != (r.Err() == nil) || !slices.Contains([]nixlkv.Status{nixlkv.Success, nixlkv.Failed}, s) {
			t.Errorf("%v, %v", s, r.Err())
		}
	}
	eventually(t, "the numbers to be free", func() bool { return q.m.Stats().Waiting == 0 })
	if s := q.m.Stats(); s.Rooms != 0 || s.Succeeded+s.Failed != 20 {
		t.Errorf("stats %+v", s)
	}
}
