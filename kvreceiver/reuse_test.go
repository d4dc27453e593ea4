package kvreceiver

import (
	"errors"
	"testing"
	"time"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/internal/wire"
	"github.com/nixlkv/nixlkv/nixl"
)

// oneRoom serves a room of the pair's one rank and checks what came.
func (q *pair) oneRoom(id nixlkv.Room, d dialect, src, dst int32) {
	q.t.Helper()
	r := q.publish(id, Destination{Pages: []int32{dst}, Aux: Aux(1)})
	q.p.ranks[0].serve(q.p.ranks[0].metadata(id), d, work{src: []int32{src}, slot: 2})
	ok(q.t, r.Wait(within(q.t)))
	q.mem.compare(q.prefills, placed{src: []int32{src}, dst: []int32{dst}, srcSlot: 2, dstSlot: 1})
	q.mem.clear()
	ok(q.t, r.Close())
}

// A number is used again as soon as its room was closed: after success at once, after a
// failure once its ranks have answered.
func TestReuse(t *testing.T) {
	eachWay(t, func(t *testing.T, e *nixl.Engine, d dialect) {
		q := newPair(t, e, shape{})
		p := q.p.ranks[0]
		for i := range int32(3) {
			q.oneRoom(8, d, i, 63-i)
		}
		r, err := q.m.Open(8, q.p.addr)
		ok(t, err)
		if _, err := q.m.Open(8, q.p.addr); !errors.Is(err, nixlkv.ErrRoomInUse) {
			t.Errorf("open twice: %v", err)
		}
		ok(t, r.Connect(within(t)))
		ok(t, r.Publish(Destination{Pages: []int32{5}, Aux: Aux(0)}))
		p.metadata(8)
		r.Abort("")
		p.ack(p.aborted(8))
		ok(t, r.Released(within(t)))
		if _, err := q.m.Open(8, q.p.addr); !errors.Is(err, nixlkv.ErrRoomInUse) {
			t.Errorf("open before Close: %v", err)
		}
		ok(t, r.Close())
		q.oneRoom(8, d, 7, 7)
		q.drained()
		if s := q.m.Stats(); s.Rooms != 0 || s.Waiting != 0 || s.Unknown != 0 {
			t.Errorf("stats %+v", s)
		}
	})
}

// lingering leaves a room closed with its pages not released.
func (q *pair) lingering(id nixlkv.Room) *Receiver {
	q.t.Helper()
	r, _ := q.published(id)
	ok(q.t, r.Close())
	if s := q.m.Stats(); s.Rooms != 0 || s.Waiting != 1 || isReleased(r) {
		q.t.Fatalf("stats %+v", s)
	}
	return r
}

// held checks that a published room has not told its ranks anything.
func (q *pair) held(r *Receiver) {
	q.t.Helper()
	r.r.mu.Lock()
	defer r.r.mu.Unlock()
	if r.r.open || r.r.held == nil || !r.r.metrics.Published.IsZero() {
		q.t.Fatalf("room %d went out while an earlier use was not released", r.r.id)
	}
}

// A number whose earlier use is not released is held back, and goes on with the answer.
func TestReuseIsHeldBack(t *testing.T) {
	eachDialect(t, func(t *testing.T, d dialect) {
		q := newPair(t, openEngine(t, nixl.Embedded), shape{})
		p := q.p.ranks[0]
		first := q.lingering(8)
		abort := p.aborted(8)
		pages := []int32{9}
		second := q.publish(8, Destination{Pages: pages, Aux: Aux(3)})
		pages[0] = 10 // it was copied
		q.held(second)
		// What the first use still causes is not the second's.
		p.aux(&wire.Metadata{Room: 8, From: q.m.self, Agent: q.m.Agent(), AuxIndex: 4}, byNotifications, 0, true)
		eventually(t, "the notification", func() bool { return q.m.Stats().Notifications == 1 })
		p.plainAck(abort)
		ok(t, first.Released(within(t)))
		q.mem.clear()
		p.serve(p.metadata(8), d, work{src: []int32{4}, slot: 1})
		ok(t, second.Wait(within(t)))
		q.mem.compare(q.prefills, placed{src: []int32{4}, dst: []int32{9}, srcSlot: 1, dstSlot: 3})
		ok(t, second.Close())
		q.drained()
		if s := q.m.Stats(); s.Waiting != 0 || s.Unknown != 1 {
			t.Errorf("stats %+v", s)
		}
	})
}

// Nor is it held back for ever: it goes on when the earlier use's release is given up.
func TestReuseGoesOnAfterTheRelease(t *testing.T) {
	q := newPair(t, openEngine(t, nixl.Embedded), shape{tp: 2}, WithReleaseTimeout(300*time.Millisecond))
	a, b := q.p.ranks[0], q.p.ranks[1]
	first, told := q.published(8)
	a.tell(told[0].From, 8, wire.PollSuccess, "")
	eventually(t, "the status", func() bool { return q.m.Stats().Statuses == 1 })
	ok(t, first.Close())
	b.aborted(8)
	second := q.publish(8, Destination{Pages: []int32{9}, Aux: Aux(3)})
	q.held(second)
	m, n := a.metadata(8), b.metadata(8)
	if err := first.Released(within(t)); !errors.Is(err, nixlkv.ErrReleaseUnconfirmed) {
		t.Errorf("the first use's pages: %v", err)
	}
	a.serve(m, byStatus, work{src: []int32{4}, slot: 1})
	b.tell(n.From, 8, wire.PollSuccess, "")
	ok(t, second.Wait(within(t)))
	ok(t, second.Close())
	q.drained()
	if s := q.m.Stats(); s.Waiting != 0 || s.Unknown+s.Ignored != 0 {
		t.Errorf("stats %+v", s)
	}
}

// A room that is held back and aborted has told nobody anything.
func TestAbortWhileHeldBack(t *testing.T) {
	q := newPair(t, openEngine(t, nixl.Embedded), shape{})
	p := q.p.ranks[0]
	first := q.lingering(8)
	abort := p.aborted(8)
	second := q.publish(8, Destination{Pages: []int32{9}, Aux: Aux(3)})
	q.held(second)
	second.Abort("")
	ok(t, second.Released(within(t)))
	ok(t, second.Close())
	third := q.publish(8, Destination{Pages: []int32{9}, Aux: Aux(3)})
	q.held(third)
	p.unanswered(8) // the second's: it has nothing to wait for
	q.held(third)
	p.ack(abort)
	ok(t, first.Released(within(t)))
	p.serve(p.metadata(8), byStatus, work{src: []int32{4}})
	ok(t, third.Wait(within(t)))
	ok(t, third.Close())
	if n := has(p, func(*wire.Metadata) bool { return true }); n != 0 {
		t.Errorf("%d rooms told their pages besides", n)
	}
}

// Several uses of one number wait one for another.
func TestManyUsesOfANumber(t *testing.T) {
	q := newPair(t, openEngine(t, nixl.Embedded), shape{})
	p := q.p.ranks[0]
	first, _ := q.published(8)
	ok(t, first.Close())
	abort := p.aborted(8)
	for range 3 { // these wait, and are given up
		r := q.publish(8, Destination{Pages: []int32{9}, Aux: Aux(3)})
		q.held(r)
		ok(t, r.Close())
		ok(t, r.Released(within(t)))
	}
	last := q.publish(8, Destination{Pages: []int32{9}, Aux: Aux(3)})
	q.held(last)
	p.plainAck(abort) // without a generation, as from 0.5.21
	ok(t, first.Released(within(t)))
	p.serve(p.metadata(8), byStatus, work{src: []int32{4}})
	ok(t, last.Wait(within(t)))
	ok(t, last.Close())
	q.mem.clear()
	q.oneRoom(8, byStatus, 1, 1)
}

// What came before a number was free, and was not drained yet, is not taken for its next use.
func TestNotificationsOfAnEarlierUse(t *testing.T) {
	e, gate := openGate(t)
	q := newPair(t, e, shape{})
	p := q.p.ranks[0]
	first, told := q.published(8)
	gate.close(t, q.m)
	p.serve(told[0], byNotifications, work{src: []int32{1, 2}})
	first.Abort("")
	p.ack(p.aborted(8))
	eventually(t, "the answer", func() bool { return q.m.Stats().AbortAcks == 1 })
	ok(t, first.Close())
	second := q.publish(8, Destination{Pages: []int32{9}, Aux: Aux(3)})
	gate.open()
	ok(t, first.Released(within(t)))
	m := p.metadata(8)
	q.mem.clear()
	q.oneRoom(9, byNotifications, 3, 3) // notifications come in order
	if ended(second) {
		t.Fatal("the second use has ended with what the first was told")
	}
	p.serve(m, byNotifications, work{src: []int32{4}, slot: 1})
	ok(t, second.Wait(within(t)))
	ok(t, second.Close())
}

// Messages about rooms that are over, or never were, are dropped and leave nothing.
func TestLateMessages(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *nixl.Engine) {
		q := newPair(t, e, shape{})
		p := q.p.ranks[0]
		r, told := q.published(8)
		p.serve(told[0], byNotifications, work{src: []int32{1, 2}})
		ok(t, r.Wait(within(t)))
		ok(t, r.Close())
		p.serve(told[0], byNotifications, work{src: []int32{1, 2}})
		p.serve(told[0], byStatus, work{src: []int32{1, 2}})
		for _, id := range []nixlkv.Room{8, 12345, 0, nixlkv.MaxRoom} {
			p.tell(told[0].From, id, wire.PollFailed, "late")
			p.tell(told[0].From, id, wire.PollWaitingForInput, "")
			p.ack(&wire.Abort{Room: id, From: told[0].From, Generation: 1})
			p.plainAck(&wire.Abort{Room: id, From: told[0].From})
		}
		eventually(t, "all of them", func() bool {
			s := q.m.Stats()
			return s.Statuses == 9 && s.AbortAcks == 8 && s.Notifications == 4
		})
		s := q.m.Stats()
		if s.Unknown != 19 || s.Rooms != 0 || s.Waiting != 0 || s.Failed != 0 || s.Ignored != 0 || len(q.m.lingering) != 0 {
			t.Errorf("stats %+v", s)
		}
	})
}
