package kvsender

import (
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/bootstrap"
	"github.com/nixlkv/nixlkv/internal/wire"
	"github.com/nixlkv/nixlkv/nixl"
)

// ghost tells what no decode that is known has told.
func (d *decode) ghost(id nixlkv.Room, agent string, ranks int) {
	d.t.Helper()
	d.tell(id, []int32{1}, 0, func(m *wire.Metadata) {
		m.Agent, m.Destinations, m.From = agent, ranks, wire.Endpoint{IP: "127.0.0.1", Port: 9}
	})
}

// TestUnregisteredDoNotSpoilRooms: metadata of agents that have not registered, before a room is
// opened and after, neither fill it nor contradict what its decode tells.
func TestUnregisteredDoNotSpoilRooms(t *testing.T) {
	eachDialect(t, func(t *testing.T, e *nixl.Engine, frames int) {
		p := newPair(t, e, frames, WithLimits(Limits{Rooms: 3}))
		p.d.register(p.d.registration())
		haunt := func(id nixlkv.Room) {
			p.d.ghost(id, "ghost", 1)
			p.d.ghost(id, "ghost", 2)
			p.d.ghost(id, "another ghost", 1000)
		}
		for id := nixlkv.Room(1); id < 3; id++ {
			haunt(id)
			for range 20 { // many more rooms than the table has places
				p.d.ghost(nixlkv.Room(1000+rand.Uint64N(1<<40)), "ghost", 1)
			}
			s := open(t, p.m, id)
			haunt(id)
			p.d.tell(id, []int32{3}, 1)
			ok(t, s.Begin(Plan{Pages: 1, Aux: Aux(1)}))
			ok(t, s.Finish([]int32{2}, nil))
			ok(t, s.Wait(within(t)))
			ok(t, s.Close())
			p.d.compare(p.src, []int32{2}, []int32{3}, 1, 1)
		}
		if n := p.m.Stats().Rooms; n != 0 {
			t.Errorf("%d rooms are left", n)
		}
	})
}

// TestUnregisteredDecode: a decode that registered with an earlier process of the prefill's. The
// room does not wait as long as for one that may still come, whichever side is first.
func TestUnregisteredDecode(t *testing.T) {
	eachDialect(t, func(t *testing.T, e *nixl.Engine, frames int) {
		p := newPair(t, e, frames, WithBootstrapTimeout(200*time.Millisecond))
		s := open(t, p.m, 70)
		p.d.tell(70, []int32{1}, 0)
		wantFailure(t, s, p.d, nixlkv.ErrNotRegistered, "not registered")
		p.d.tell(71, []int32{1}, 0)
		p.d.status(71)
		wantFailure(t, open(t, p.m, 71), nil, nixlkv.ErrNotRegistered, "not registered")
	})
}

func TestRecentIsBounded(t *testing.T) {
	var s recent[error]
	for round := range 3 {
		for i := range nixlkv.Room(2 * maxRecent) {
			s.note(i, nixlkv.ErrNotRegistered)
			if round == 1 && i%3 == 0 && s.take(i) == nil {
				t.Fatalf("room %d is not remembered", i)
			}
		}
	}
	if len(s.rooms) > maxRecent || len(s.oldest) != maxRecent {
		t.Errorf("%d rooms in the map, %d in the ring", len(s.rooms), len(s.oldest))
	}
	if s.take(2*maxRecent-1) == nil || s.take(2*maxRecent-1) != nil {
		t.Error("the last room is not remembered once")
	}
	if s.take(0) != nil {
		t.Error("the oldest is still remembered")
	}
}

// TestTruncatedMetadataSpoilNoRoom: what is left of a message that names a room, up to its agent,
// could be anybody's.
func TestTruncatedMetadataSpoilNoRoom(t *testing.T) {
	eachDialect(t, func(t *testing.T, e *nixl.Engine, frames int) {
		p := newPair(t, e, frames)
		p.d.register(p.d.registration())
		s := open(t, p.m, 80)
		whole := [][]byte{[]byte("NixlMsgGuard"), []byte("80"), []byte("127.0.0.1"), []byte("9"), []byte("ghost"), {1, 2, 3}, []byte("x"), []byte("-1")}
		for n := 2; n <= len(whole); n++ {
			p.d.sendRaw(whole[:n])
		}
		p.d.tell(80, []int32{3}, 1)
		ok(t, s.Begin(Plan{Pages: 1, Aux: Aux(1)}))
		ok(t, s.Finish([]int32{2}, nil))
		ok(t, s.Wait(within(t)))
		ok(t, s.Close())
	})
}

// TestMetadataFromAnotherAddress: a decode's name does not let others have its pages written.
func TestMetadataFromAnotherAddress(t *testing.T) {
	eachDialect(t, func(t *testing.T, e *nixl.Engine, frames int) {
		p := newPair(t, e, frames)
		p.d.register(p.d.registration())
		other := newDecode(t, e, p.m, p.d.mem, frames)
		defer other.close()
		s := open(t, p.m, 81)
		other.tell(81, []int32{9}, 0, func(m *wire.Metadata) { m.Agent = p.d.agent.Name() })
		if st := other.status(81); st.Status != wire.PollFailed || !strings.Contains(st.Reason, "registered at") {
			t.Errorf("told %+v", st)
		}
		p.d.tell(81, []int32{3}, 1)
		ok(t, s.Begin(Plan{Pages: 1, Aux: Aux(1)}))
		ok(t, s.Finish([]int32{2}, nil))
		ok(t, s.Wait(within(t)))
		ok(t, s.Close())
		p.d.compare(p.src, []int32{2}, []int32{3}, 1, 1)
	})
}

// TestQuestionsOfStrangersMakeNoRooms: under prefill_complete.
func TestQuestionsOfStrangersMakeNoRooms(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *nixl.Engine) {
		p := newPair(t, e, 25, WithAllocationPolicy(bootstrap.PrefillCompleteAllocation))
		for id := range nixlkv.Room(20) {
			p.d.ask(id)
		}
		if st := p.d.status(19); st.Status != wire.PollFailed || !strings.Contains(st.Reason, "not registered") {
			t.Errorf("told %+v", st)
		}
		if n := p.m.Stats().Rooms; n != 0 {
			t.Errorf("%d rooms", n)
		}
	})
}
