package kvreceiver

import (
	"testing"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/internal/wire"
	"github.com/nixlkv/nixlkv/nixl"
	"github.com/nixlkv/nixlkv/registry"
)

func eachWay(t *testing.T, f func(t *testing.T, e *nixl.Engine, d dialect)) {
	eachEngine(t, func(t *testing.T, e *nixl.Engine) {
		eachDialect(t, func(t *testing.T, d dialect) { f(t, e, d) })
	})
}

func TestRoom(t *testing.T) {
	eachWay(t, func(t *testing.T, e *nixl.Engine, d dialect) {
		q := newPair(t, e, shape{})
		src, dst := []int32{1, 2, 3, 8, 9}, []int32{3, 4, 9, 10, 11}
		for i, w := range []work{
			{src: src, chunks: []int{3, 2}, slot: 5},
			{src: src, chunks: []int{1, 4}, parts: 3, slot: 6},
			{src: src, slot: 7},
		} {
			id := nixlkv.Room(1<<40 + i)
			r := q.open(id)
			if r.Room() != id || r.Status() != nixlkv.Bootstrapping || r.Err() != nil {
				t.Errorf("opened: room %d, %v, %v", r.Room(), r.Status(), r.Err())
			}
			ok(t, r.Connect(within(t)))
			ok(t, r.WaitReady(within(t)))
			ok(t, r.Publish(Destination{Pages: dst, Aux: Aux(2), Prefix: 32}))
			if r.Status() != nixlkv.WaitingForInput {
				t.Errorf("published: %v", r.Status())
			}
			m := q.p.ranks[0].metadata(id)
			if m.Destinations != 1 || m.Prefix != 32 || m.AuxIndex != 2 || m.Dummy || m.Agent != q.m.Agent() {
				t.Errorf("metadata %+v", m)
			}
			q.p.ranks[0].serve(m, d, w)
			ok(t, r.Wait(within(t)))
			ok(t, r.Wait(within(t)))
			ok(t, r.Released(within(t)))
			if r.Status() != nixlkv.Success || r.Err() != nil {
				t.Errorf("done: %v, %v", r.Status(), r.Err())
			}
			q.mem.compare(q.prefills, placed{src: src, dst: dst, srcSlot: w.slot, dstSlot: 2})
			q.mem.clear()
			x := r.Metrics()
			if x.Pages != 5 || x.Slot != 2 || x.Connected.Before(x.Opened) || x.Published.Before(x.Connected) || x.Ended.Before(x.Published) {
				t.Errorf("metrics %+v", x)
			}
			ok(t, r.Close())
			ok(t, r.Close())
		}
		if n := has(q.p.ranks[0], func(*wire.Registration) bool { return true }); n != 0 {
			t.Errorf("registered %d times more", n)
		}
		s := q.m.Stats()
		if s.Rooms != 0 || s.Waiting != 0 || s.Succeeded != 3 || s.Failed != 0 || s.Registrations != 1 || s.Aborts != 0 || s.Unknown != 0 || s.Refused != 0 || s.Prefills != 1 || s.Ranks != 1 {
			t.Errorf("stats %+v", s)
		}
		if n := q.p.count("GET /route"); n != 2 {
			t.Errorf("asked the bootstrap server %d times for three rooms", n)
		}
	})
}

func TestFullPrefixHit(t *testing.T) {
	eachWay(t, func(t *testing.T, e *nixl.Engine, d dialect) {
		q := newPair(t, e, shape{})
		r := q.publish(9, Destination{Aux: Aux(3), Prefix: 64})
		m := q.p.ranks[0].metadata(9)
		if m.Dummy || m.Prefix != 64 || len(m.KVIndices) != 0 {
			t.Errorf("metadata %+v", m)
		}
		q.p.ranks[0].serve(m, d, work{slot: 4})
		ok(t, r.Wait(within(t)))
		q.mem.compare(q.prefills, placed{srcSlot: 4, dstSlot: 3})
		ok(t, r.Close())
	})
}

func TestState(t *testing.T) {
	eachWay(t, func(t *testing.T, e *nixl.Engine, d dialect) {
		q := newPairOf(t, e, shape{}, func(*registry.Layout) {}, []memoryOption{withState(3)}, WithHostVRAM())
		p := q.p.ranks[0]
		src, dst, state := []int32{7, 6}, []int32{0, 63}, [][]int32{{1, 2}, nil, {15}}
		r := q.publish(1, Destination{Pages: dst, Aux: Aux(0), State: state})
		m := p.metadata(1)
		p.kv(m, d, work{src: src})
		p.aux(m, d, 1, false)
		p.states(m, d)
		if d == byStatus {
			p.tell(m.From, 1, wire.PollSuccess, "")
		}
		ok(t, r.Wait(within(t)))
		q.mem.compare(q.prefills, placed{src: src, dst: dst, srcSlot: 1, dstSlot: 0, state: state})
		ok(t, r.Close())
		// A room without state does not wait for any.
		r = q.publish(2, Destination{Pages: dst, Aux: Aux(0), State: [][]int32{nil, {}}})
		p.serve(p.metadata(2), d, work{src: src})
		ok(t, r.Wait(within(t)))
		ok(t, r.Close())
	})
}

// Rooms end in another order than they began, each when its own pages are there.
func TestRoomsSideBySide(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *nixl.Engine) {
		q := newPair(t, e, shape{})
		p := q.p.ranks[0]
		const n = 48
		var rooms []*Receiver
		var all []placed
		for i := range n {
			rooms = append(rooms, q.publish(nixlkv.Room(i+1), Destination{Pages: []int32{int32(i)}, Aux: Aux(i % kitSlots)}))
		}
		for i := n - 1; i >= 0; i-- {
			p.serve(p.metadata(rooms[i].Room()), dialects[i%2], work{src: []int32{int32(n - i)}, slot: i % kitSlots})
			ok(t, rooms[i].Wait(within(t)))
			if i > 0 && ended(rooms[i-1]) {
				t.Errorf("room %d has ended, nothing was sent to it", i)
			}
			all = append(all, placed{src: []int32{int32(n - i)}, dst: []int32{int32(i)}, srcSlot: i % kitSlots, dstSlot: i % kitSlots})
			ok(t, rooms[i].Close())
		}
		q.mem.compare(q.prefills, all...)
		if s := q.m.Stats(); s.Rooms != 0 || s.Succeeded != n || s.Unknown != 0 || s.Registrations != 1 {
			t.Errorf("stats %+v", s)
		}
	})
}

// A prefill that tells in both ways completes a room once, and the rest is dropped.
func TestToldInBothWays(t *testing.T) {
	q := newPair(t, openEngine(t, nixl.Embedded), shape{})
	p := q.p.ranks[0]
	r := q.publish(1, Destination{Pages: []int32{1}, Aux: Aux(0)})
	m := p.metadata(1)
	p.serve(m, byNotifications, work{src: []int32{2}})
	ok(t, r.Wait(within(t)))
	p.tell(m.From, 1, wire.PollSuccess, "")
	p.tell(m.From, 1, wire.PollFailed, "too late")
	eventually(t, "both statuses", func() bool { return q.m.Stats().Statuses == 2 })
	ok(t, r.Wait(within(t)))
	ok(t, r.Close())
	if s := q.m.Stats(); s.Unknown != 2 || s.Succeeded != 1 || s.Failed != 0 {
		t.Errorf("stats %+v", s)
	}
}
