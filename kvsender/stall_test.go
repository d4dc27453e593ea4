package kvsender

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/internal/faultengine"
	"github.com/nixlkv/nixlkv/internal/wire"
	"github.com/nixlkv/nixlkv/nixl"
)

// stalling is an engine whose writes, while it stalls, settle only when they are let go: what a
// peer that does not read looks like.
type stalling struct {
	*faultengine.Engine
	writes *faultengine.Fault // posted since stall
}

func (s *stalling) stall() {
	s.letGo()
	s.writes = s.Add(faultengine.Rule{On: faultengine.Writes, Do: faultengine.Late})
}

func (s *stalling) letGo() { s.Clear() }

func newStalled(t *testing.T, frames int, opts ...Option) (*stalling, *pairUp) {
	t.Helper()
	s, e := stallingEngine(t)
	p := newPair(t, e, frames, opts...)
	p.connect(t, 1)
	s.stall()
	t.Cleanup(s.letGo)
	return s, p
}

func (p *pairUp) transfer(t *testing.T, id nixlkv.Room) {
	t.Helper()
	s := p.begin(t, id)
	ok(t, s.Wait(within(t)))
	ok(t, s.Close())
}

func (p *pairUp) begin(t *testing.T, id nixlkv.Room) *Sender {
	t.Helper()
	s := open(t, p.m, id)
	p.d.tell(id, []int32{3}, 1)
	ok(t, s.Begin(Plan{Pages: 1, Aux: Aux(2)}))
	ok(t, s.Finish([]int32{4}, nil))
	return s
}

func (s *stalling) waitForWrites(t *testing.T, n int) {
	t.Helper()
	ok(t, s.writes.Wait(within(t), n))
}

// No acknowledgement while a write may land, whatever has become of the room: closed, its
// number in use again.
func TestAckWaitsForEarlierUsesOfTheRoom(t *testing.T) {
	st, p := newStalled(t, 25)
	s := p.begin(t, 7)
	st.waitForWrites(t, 2)
	ok(t, s.Close())
	abort := func(id nixlkv.Room) {
		p.d.send(new(wire.Encoder).Abort(&wire.Abort{Room: id, From: p.d.endpoint(), Generation: 5, HasGeneration: true}))
	}
	again := open(t, p.m, 7)
	abort(7)
	abort(8) // unknown: acknowledged after the one before was looked at
	p.d.ack(8)
	if len(p.d.acks) != 0 {
		t.Fatalf("acknowledged with a write in flight: %+v", p.d.acks)
	}
	wantFailure(t, again, nil, nixlkv.ErrAborted, abortedByDecode)
	if len(p.d.acks) != 0 {
		t.Fatalf("acknowledged with a write in flight: %+v", p.d.acks)
	}
	st.letGo()
	p.d.ack(7)
	abort(9)
	p.d.ack(9)
	if len(p.d.acks) != 0 || len(p.d.statuses) != 0 {
		t.Errorf("acknowledged twice, or told what it knows: %+v, %+v", p.d.acks, p.d.statuses)
	}
}

// Nor for an abort that comes again, or is one too many: what is owed already covers it, and what
// is not owed is never sent.
func TestRepeatedAbortsWait(t *testing.T) {
	for _, generations := range []bool{true, false} {
		st, p := newStalled(t, 25, WithLimits(Limits{AbortAcks: 2}))
		s := p.begin(t, 7)
		st.waitForWrites(t, 2)
		abort := func(id nixlkv.Room, generation uint64) {
			p.d.send(new(wire.Encoder).Abort(&wire.Abort{Room: id, From: p.d.endpoint(), Generation: generation, HasGeneration: generations}))
		}
		abort(7, 5)
		ok(t, s.Close())
		again := open(t, p.m, 7) // the abort that comes again is for both
		abort(7, 5)
		abort(7, 5)
		wantFailure(t, again, nil, nixlkv.ErrAborted, abortedByDecode)
		if generations {
			abort(7, 6)
			abort(7, 7) // no place for it
		}
		abort(8, 1)
		p.d.ack(8)
		if len(p.d.acks) != 0 {
			t.Fatalf("generations %t: acknowledged with a write in flight: %+v", generations, p.d.acks)
		}
		st.letGo()
		if p.d.ack(7); generations {
			p.d.ack(7)
		}
		abort(9, 1)
		p.d.ack(9)
		if len(p.d.acks) != 0 {
			t.Errorf("generations %t: acknowledged too often: %+v", generations, p.d.acks)
		}
	}
}

func TestUnsettledRoom(t *testing.T) {
	st, p := newStalled(t, 25, WithSettleTimeout(50*time.Millisecond))
	for i, fail := range []func(*Sender){
		func(s *Sender) { s.Abort("enough") },
		func(s *Sender) { s.FailedElsewhere(nil) },
	} {
		id := nixlkv.Room(20 + i)
		st.stall()
		s := p.begin(t, id)
		st.waitForWrites(t, 2)
		fail(s)
		err := s.Wait(within(t))
		if !errors.Is(err, nixlkv.ErrReleaseUnconfirmed) || !errors.As(err, new(*KVTransferError)) {
			t.Errorf("got %v", err)
		}
		if len(p.d.statuses) != 0 {
			t.Errorf("the decode was told while writes were in flight: %+v", p.d.statuses)
		}
		st.letGo()
		if x := p.d.status(id); x.Status != wire.PollFailed {
			t.Errorf("told %+v", x)
		}
		ok(t, s.Close())
	}
}

// A close that timed out succeeds later, and the decode is told.
func TestCloseAgainAfterTimeout(t *testing.T) {
	st, p := newStalled(t, 25)
	s := p.begin(t, 30)
	st.waitForWrites(t, 2)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := p.m.Shutdown(ctx); !errors.Is(err, nixl.ErrStillInFlight) {
		t.Errorf("got %v", err)
	}
	if got := p.m.Stats().Agent; got.InFlight != 2 || got.Registrations == 0 {
		t.Errorf("in quarantine: %+v", got)
	}
	st.letGo()
	ok(t, p.m.Close())
	wantFailure(t, s, p.d, nixlkv.ErrClosed, "shutting down")
}

func TestIntruders(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *nixl.Engine) {
		p := newPair(t, e, 25)
		p.connect(t, 1)
		other := newDecode(t, e, p.m, newKitMemory(t, 4), 25)
		defer func() {
			other.close()
			other.mem.free(t)
		}()
		// Metadata for a room of somebody else.
		s := open(t, p.m, 40)
		p.d.tell(40, []int32{5}, 1)
		_, err := s.WaitBootstrapped(within(t))
		ok(t, err)
		other.tell(40, []int32{6}, 1)
		if x := other.status(40); x.Status != wire.PollFailed {
			t.Errorf("the intruder was told %+v", x)
		}
		// An abort of it.
		other.send(new(wire.Encoder).Abort(&wire.Abort{Room: 40, From: other.endpoint(), Generation: 1, HasGeneration: true}))
		other.ack(40)
		// Registrations under the decode's name: other geometry, garbage, and its metadata under
		// another name.
		g := p.d.registration()
		g.KVPtrs, g.ItemLens, g.Kinds = g.KVPtrs[:1], g.ItemLens[:1], g.Kinds[:1]
		other.register(g)
		frames, err := new(wire.Encoder).Registration(p.d.registration())
		ok(t, err)
		frames[10] = []byte("garbage")
		other.sendRaw(frames)
		stolen := p.d.registration()
		stolen.Agent = other.agent.Name()
		other.register(stolen)
		other.send(new(wire.Encoder).Abort(&wire.Abort{Room: 41, From: other.endpoint(), Generation: 1, HasGeneration: true}))
		other.ack(41) // all of it has been looked at
		ok(t, s.Begin(Plan{Pages: 1, Aux: Aux(2)}))
		ok(t, s.Finish([]int32{4}, nil))
		ok(t, s.Wait(within(t)))
		ok(t, s.Close())
		p.d.status(40)
		p.transfer(t, 42)
		// A room that wants more decodes than there can be.
		s = open(t, p.m, 43)
		p.d.tell(43, []int32{1}, 0, func(m *wire.Metadata) { m.Destinations = 1 << 30 })
		wantFailure(t, s, nil, nixlkv.ErrLimit, "decode ranks for one room")
	})
}

func TestDummyContextParallelRank(t *testing.T) {
	e, err := nixl.Open(nixl.Embedded)
	ok(t, err)
	mem := newKitMemory(t, 2)
	layout := mem.layout()
	layout.Ranks.CP, layout.Ranks.CPRank = 2, 1
	m, err := NewManager(t.Context(), layout, WithEngine(e))
	ok(t, err)
	s := open(t, m, 5)
	_, err = s.WaitBootstrapped(within(t))
	ok(t, err)
	ok(t, s.Begin(Plan{Pages: 2, Aux: Aux(0)}))
	ok(t, s.Send([]int32{1}))
	ok(t, s.Finish([]int32{2}, nil))
	ok(t, s.Wait(within(t)))
	ok(t, s.Close())
	closeManager(t, m)
	ok(t, e.Close())
	mem.free(t)
}
