package kvsender

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/internal/engine"
	"github.com/nixlkv/nixlkv/internal/faultengine"
	"github.com/nixlkv/nixlkv/internal/wire"
	"github.com/nixlkv/nixlkv/nixl"
	"github.com/nixlkv/nixlkv/registry"
)

// faulty is a pair over an engine that goes wrong as told.
type faulty struct {
	*pairUp
	faults *faultengine.Engine
}

// eachFaulty runs a test over both engines. The decode has been taken up, and told of room 1.
func eachFaulty(t *testing.T, f func(t *testing.T, p *faulty), opts ...Option) {
	for _, k := range engineKinds {
		t.Run(k.String(), func(t *testing.T) {
			p := newFaulty(t, k, opts...)
			p.connect(t, 1)
			f(t, p)
			p.quiet(t)
		})
	}
}

// newFaulty makes a pair. The decode's last pages of memory are DRAM on both sides, and so is
// everything else: a room of one page is one transfer of KV and one of aux.
func newFaulty(t *testing.T, k nixl.Kind, opts ...Option) *faulty {
	t.Helper()
	e, faults := faultengine.Open(t, k)
	p := &faulty{pairUp: newPair(t, e, 25, opts...), faults: faults}
	t.Cleanup(p.faults.Clear)
	return p
}

// quiet checks that nothing is left of any room.
func (p *faulty) quiet(t *testing.T) {
	t.Helper()
	p.faults.Clear()
	p.d.until("everything to settle", func() bool {
		s := p.m.Stats()
		return s.Rooms == 0 && s.Quarantined == 0 && s.Agent.InFlight == 0 && s.Agent.Transfers == 0 && s.RunQueue == 0
	})
}

// abort sends an abort that wants an answer.
func (p *faulty) abort(id nixlkv.Room) {
	p.d.send(new(wire.Encoder).Abort(&wire.Abort{Room: id, From: p.d.endpoint(), Generation: uint64(id), HasGeneration: true}))
}

// silent checks that the decode was told nothing of a room. An abort of another, which nobody
// knows, is answered behind what was sent before.
func (p *faulty) silent(t *testing.T, id nixlkv.Room) {
	t.Helper()
	p.abort(id + 1<<32)
	p.d.ack(id + 1<<32)
	p.d.mu.Lock()
	defer p.d.mu.Unlock()
	for _, s := range p.d.statuses {
		if s.Room == id {
			t.Errorf("told %+v", s)
		}
	}
	for _, a := range p.d.acks {
		if a.Room == id {
			t.Errorf("acknowledged %+v", a)
		}
	}
}

var (
	errMade     = fmt.Errorf("made up: %w", engine.ErrBackend)
	errMadeLost = fmt.Errorf("made up: %w: %w", engine.ErrPeerLost, engine.ErrBackend)
)

// A post that fails, at once or later, of KV or of aux, fails its room on both sides with the
// reason, and no other.
func TestFailedTransfer(t *testing.T) {
	eachFaulty(t, func(t *testing.T, p *faulty) {
		id := nixlkv.Room(100)
		for _, cause := range []error{errMade, errMadeLost} {
			for name, do := range map[string]faultengine.Do{"rejected": faultengine.Reject, "not posted": faultengine.Break, "failed": faultengine.Fail} {
				for skip, what := range []string{"KV transfer", "aux transfer"} {
					t.Run(fmt.Sprintf("%v/%s/%s", errors.Is(cause, engine.ErrPeerLost), name, what), func(t *testing.T) {
						p.d.t = t
						f := p.faults.Add(faultengine.Rule{On: faultengine.Writes, Do: do, Err: cause, Skip: skip, Times: 1})
						id++
						s := p.begin(t, id)
						wantFailure(t, s, p.d, engine.ErrBackend, what)
						if lost := errors.Is(s.Err(), nixlkv.ErrPeerLost); lost != errors.Is(cause, engine.ErrPeerLost) {
							t.Errorf("peer lost: %v, of %v", lost, cause)
						}
						if f.Taken() != 1 {
							t.Errorf("%d posts failed", f.Taken())
						}
						p.again(t, id+1000)
					})
				}
			}
		}
	})
}

// again runs a room that succeeds, as soon as the prefill may load its decode anew.
func (p *faulty) again(t *testing.T, id nixlkv.Room) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); ; id += 10_000 {
		s := p.begin(t, id)
		err := s.Wait(within(t))
		ok(t, s.Close())
		if err == nil {
			p.d.status(id)
			return
		}
		if !errors.Is(err, registry.ErrTooSoon) || time.Now().After(end) {
			t.Fatal(err)
		}
		p.d.status(id)
	}
}

// A room with a failed handle waits for those that were posted beside it. Until then nobody is
// told, and no abort is acknowledged; other rooms go on.
func TestFailureWaitsForWhatMayLand(t *testing.T) {
	eachFaulty(t, func(t *testing.T, p *faulty) {
		p.d.clear()
		stall := p.faults.Add(faultengine.Rule{On: faultengine.Writes, Do: faultengine.Stall, Times: 1})
		fail := p.faults.Add(faultengine.Rule{On: faultengine.Writes, Do: faultengine.Fail, Err: errMade, Times: 1})
		s := p.begin(t, 7)
		ok(t, fail.Wait(within(t), 1))
		p.transfer(t, 8)
		p.d.status(8)
		p.abort(7)
		p.silent(t, 7)
		if st := s.Status(); st != nixlkv.Transferring {
			t.Errorf("%v with a write that may land", st)
		}
		if got := p.m.Stats(); got.Rooms != 1 || got.Agent.InFlight != 1 || got.Quarantined != 0 || got.Unsettled != 0 {
			t.Errorf("%+v", got)
		}
		p.d.clear()
		stall.Release()
		p.d.ack(7)
		// The abort came behind the failure, which is the reason.
		wantFailure(t, s, nil, engine.ErrBackend, "aux transfer")
		p.d.compare(p.src, []int32{4}, []int32{3}, -1, 0) // it has landed, before the acknowledgement
		p.silent(t, 7)
		if got := p.m.Stats().Unsettled; got != 0 {
			t.Errorf("%d rooms did not settle in time", got)
		}
	})
}

// What does not settle in time is in quarantine: the caller knows, the decode is told nothing,
// the room is counted, others go on, and closing returns in its time. When it settles in the
// end, everything is told and nothing is left.
func TestQuarantine(t *testing.T) {
	for _, do := range []faultengine.Do{faultengine.Stall, faultengine.Late} {
		t.Run(fmt.Sprintf("landed=%v", do == faultengine.Late), func(t *testing.T) {
			eachFaulty(t, func(t *testing.T, p *faulty) {
				held := p.faults.Add(faultengine.Rule{On: faultengine.Writes, Do: do, Times: 2})
				s := p.begin(t, 7)
				ok(t, held.Wait(within(t), 2))
				s.Abort("enough")
				wantFailure(t, s, nil, nixlkv.ErrReleaseUnconfirmed, "2 transfers have not settled")
				p.abort(7)
				p.silent(t, 7)
				if got := p.m.Stats(); got.Rooms != 1 || got.Quarantined != 1 || got.Unsettled != 1 || got.Failed != 1 || got.Agent.InFlight != 2 {
					t.Errorf("in quarantine: %+v", got)
				}
				// The number is used again meanwhile, and succeeds.
				p.transfer(t, 7)
				if x := p.d.status(7); x.Status != wire.PollSuccess {
					t.Errorf("told %+v", x)
				}
				p.transfer(t, 8)
				p.d.status(8)
				p.silent(t, 7)
				held.Release()
				p.d.ack(7)
				p.silent(t, 7)
				p.quiet(t)
				if got := p.m.Stats(); got.Unsettled != 1 || got.Succeeded != 3 {
					t.Errorf("%+v", got)
				}
			}, WithSettleTimeout(50*time.Millisecond))
		})
	}
}

// A manager with something in quarantine closes in its time, and says so until it has settled.
func TestCloseWithQuarantine(t *testing.T) {
	eachFaulty(t, func(t *testing.T, p *faulty) {
		held := p.faults.Add(faultengine.Rule{On: faultengine.Writes, Do: faultengine.Stall, Times: 2})
		s := p.begin(t, 7)
		ok(t, held.Wait(within(t), 2))
		for range 2 {
			ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
			if err := p.m.Shutdown(ctx); !errors.Is(err, nixl.ErrStillInFlight) {
				t.Errorf("got %v", err)
			}
			cancel()
		}
		wantFailure(t, s, nil, nixlkv.ErrReleaseUnconfirmed, "shutting down")
		if got := p.m.Stats(); got.Quarantined != 1 || got.Agent.InFlight != 2 || got.Agent.Registrations == 0 {
			t.Errorf("in quarantine: %+v", got)
		}
		held.Release()
		ok(t, p.m.Close())
		if x := p.d.status(7); x.Status != wire.PollFailed {
			t.Errorf("told %+v", x)
		}
	}, WithSettleTimeout(50*time.Millisecond))
}

// Success is told when the last completion is.
func TestLateCompletion(t *testing.T) {
	eachFaulty(t, func(t *testing.T, p *faulty) {
		p.d.clear()
		late := p.faults.Add(faultengine.Rule{On: faultengine.Writes, Do: faultengine.Late, Times: 1})
		s := p.begin(t, 7)
		ok(t, late.Wait(within(t), 1))
		p.d.until("the bytes", func() bool { return p.d.mem.slot(1)[0] != 0 })
		p.silent(t, 7)
		late.Release()
		ok(t, s.Wait(within(t)))
		if x := p.d.status(7); x.Status != wire.PollSuccess {
			t.Errorf("told %+v", x)
		}
		p.d.compare(p.src, []int32{4}, []int32{3}, 2, 1)
		ok(t, s.Close())
	})
}

// Metadata that cannot be loaded fail the rooms of that decode until they can.
func TestMetadataThatCannotBeLoaded(t *testing.T) {
	for _, k := range engineKinds {
		t.Run(k.String(), func(t *testing.T) {
			p := newFaulty(t, k)
			f := p.faults.Add(faultengine.Rule{On: faultengine.Loads, Do: faultengine.Reject, Err: errMade, Times: 2})
			p.d.register(p.d.registration())
			ok(t, f.Wait(within(t), 1))
			wantFailure(t, p.begin(t, 100), p.d, engine.ErrBackend, "made up")
			wantFailure(t, p.begin(t, 101), p.d, engine.ErrBackend, "made up")
			p.again(t, 200)
			if f.Taken() != 2 {
				t.Errorf("%d loads failed", f.Taken())
			}
			p.quiet(t)
		})
	}
}

// NIXL forgets a peer whose connection broke; its next room has it loaded anew.
func TestMetadataThatVanish(t *testing.T) {
	eachFaulty(t, func(t *testing.T, p *faulty) {
		p.faults.Vanish(p.d.agent.Name())
		wantFailure(t, p.begin(t, 7), p.d, nil, "metadata")
		p.again(t, 8)
	})
}

// A write that does not settle in time fails its room, for its caller only: it may still land. What
// a caller takes between two chunks counts for nothing.
func TestTransferTimeout(t *testing.T) {
	const timeout = 2 * time.Second
	eachFaulty(t, func(t *testing.T, p *faulty) {
		idle := p.bootstrapped(t, 9, p.d)
		ok(t, idle.Send(nil))
		stall := p.faults.Add(faultengine.Rule{On: faultengine.Writes, Do: faultengine.Late, Skip: 1, Times: 1})
		s := p.begin(t, 7)
		ok(t, stall.Wait(within(t), 1))
		wantFailure(t, s, nil, nixlkv.ErrReleaseUnconfirmed, "aux transfer")
		if err := s.Err(); !errors.Is(err, nixlkv.ErrTimeout) {
			t.Error(err)
		}
		p.silent(t, 7)
		if got := p.m.Stats(); got.Quarantined != 1 || got.Agent.InFlight != 1 {
			t.Errorf("in quarantine: %+v", got)
		}
		ok(t, idle.Finish([]int32{3}, nil))
		ok(t, idle.Wait(within(t)))
		ok(t, idle.Close())
		p.d.status(9)
		stall.Release()
		if x := p.d.status(7); x.Status != wire.PollFailed {
			t.Errorf("told %+v", x)
		}
		p.transfer(t, 7)
	}, WithTransferTimeout(timeout), WithSettleTimeout(50*time.Millisecond))
}
