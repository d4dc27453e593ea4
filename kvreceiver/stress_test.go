package kvreceiver

import (
	"errors"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/nixl"
)

// spin lets others run for a moment of any length up to n.
func spin(n int) {
	for range rand.IntN(n) {
		runtime.Gosched()
	}
}

// unlearn makes a manager without rooms ask for its prefills, and register with their ranks,
// anew.
func unlearn(t *testing.T, m *Manager) {
	t.Helper()
	for _, p := range m.snapshotPrefills() {
		p.forget()
	}
	eventually(t, "the links to go", func() bool {
		m.linksMu.Lock()
		defer m.linksMu.Unlock()
		for to, l := range m.links {
			l.mu.Lock()
			if !l.asked && l.generation != 0 {
				m.ctl.Drop(to)
			}
			l.mu.Unlock()
		}
		return len(m.links) == 0
	})
}

// A room may be given up at any moment of Connect, whether its ranks are known and registered
// with or not.
func TestAbortWhileConnecting(t *testing.T) {
	q := newPair(t, openEngine(t, nixl.Embedded), shape{tp: 4})
	q.p.robots(eitherDialect, always)
	for i := range 120 {
		if i%2 == 0 {
			unlearn(t, q.m)
		}
		r := q.open(nixlkv.Room(i))
		var wg sync.WaitGroup
		wg.Go(func() {
			if err := r.Connect(within(t)); err != nil && !errors.Is(err, nixlkv.ErrAborted) {
				t.Errorf("room %d: %v", i, err)
			}
		})
		wg.Go(func() {
			if i%4 == 0 {
				spin(300)
			} else {
				untilRegistering(r)
			}
			if i%3 == 0 {
				ok(t, r.Close())
			} else {
				r.Abort("")
			}
		})
		wg.Wait()
		checkFailed(t, r, nixlkv.ErrAborted, "")
		ok(t, r.Released(within(t)))
		ok(t, r.Close())
	}
	r := q.publish(1, Destination{Pages: []int32{1}, Aux: Aux(0)})
	ok(t, r.Wait(within(t)))
	ok(t, r.Close())
	eventually(t, "links that nobody uses to go", func() bool { return q.m.Stats().Ranks <= 4 })
}

// untilRegistering waits until a room knows its ranks.
func untilRegistering(r *Receiver) {
	for {
		r.r.mu.Lock()
		known := len(r.r.targets) > 0
		r.r.mu.Unlock()
		if known {
			return
		}
		runtime.Gosched()
	}
}

// The manager may be closed at any moment of its rooms. All of them end, and it holds nothing
// afterwards.
func TestCloseWhileRoomsRun(t *testing.T) {
	e := openEngine(t, nixl.Embedded)
	q := &pair{t: t, prefills: newKitMemory(t)}
	q.p = newSite(t, e, q.prefills, shape{tp: 2})
	q.p.robots(eitherDialect, func(id nixlkv.Room) bool { return id%5 != 0 })
	for round := range 12 {
		m, err := NewManager(t.Context(), newKitMemory(t).layout(), quick(e)...)
		ok(t, err)
		var wg sync.WaitGroup
		var ran atomic.Int32
		for g := range 6 {
			wg.Go(func() {
				for id := nixlkv.Room(g * 1000); ; id++ {
					r, err := m.Open(id, q.p.addr)
					if errors.Is(err, nixlkv.ErrClosed) {
						return
					}
					if err != nil {
						t.Error(err)
						return
					}
					if err = r.Connect(within(t)); err == nil {
						err = r.Publish(Destination{Pages: []int32{int32(g)}, Aux: Aux(g)})
					}
					if id%5 == 0 {
						r.Abort("")
					}
					if err == nil {
						err = r.Wait(within(t))
					}
					if err != nil && !errors.Is(err, nixlkv.ErrClosed) && !errors.Is(err, nixlkv.ErrAborted) {
						t.Errorf("room %d: %v", id, err)
					}
					if err := r.Released(within(t)); err != nil {
						t.Errorf("room %d: %v", id, err)
					}
					ok(t, r.Close())
					ran.Add(1)
				}
			})
		}
		eventually(t, "some rooms to have run", func() bool { return ran.Load() >= int32(round) })
		spin(100)
		closeManager(t, m)
		wg.Wait()
		checkEmpty(t, m)
	}
}

// A rank whose connection comes and goes fails rooms and never hangs one; none is told its
// pages before this decode is registered; those that succeed have all their bytes.
func TestFlappingRank(t *testing.T) {
	q := newPair(t, openEngine(t, nixl.Embedded), shape{}, WithSendTimeout(5*time.Second), WithReleaseTimeout(100*time.Millisecond), WithLossGrace(0))
	b := q.p.robots(eitherDialect, always)[0]
	var next, good, bad atomic.Int32
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for {
				i := next.Add(1) - 1
				if i >= kitPages {
					return
				}
				r := q.open(nixlkv.Room(i))
				err := r.Connect(within(t))
				if err == nil {
					spin(50)
					err = r.Publish(Destination{Pages: []int32{i}, Aux: Aux(int(i) % kitSlots)})
				}
				if err == nil {
					err = r.Wait(within(t))
				}
				switch {
				case err == nil:
					good.Add(1)
					if !q.arrived(r.Room(), i, int(i)%kitSlots) {
						t.Errorf("room %d succeeded without its bytes", i)
					}
				case errors.Is(err, nixlkv.ErrPeerLost) || errors.Is(err, nixlkv.ErrSendBlocked):
					bad.Add(1)
				default:
					t.Errorf("room %d: %v", i, err)
				}
				if err := r.Released(within(t)); err != nil && !errors.Is(err, nixlkv.ErrReleaseUnconfirmed) {
					t.Errorf("room %d: %v", i, err)
				}
				ok(t, r.Close())
			}
		})
	}
	for next.Load() < kitPages {
		before := next.Load()
		b.flap()
		// Let some rooms through, or none get far.
		eventually(t, "a room", func() bool { return next.Load() > before })
	}
	wg.Wait()
	t.Logf("%d rooms succeeded, %d failed, %d connections were lost", good.Load(), bad.Load(), q.m.Stats().Losses)
	r := q.publish(1<<20, Destination{Pages: []int32{1}, Aux: Aux(0)})
	ok(t, r.Wait(within(t)))
	ok(t, r.Close())
	eventually(t, "the rooms to be given up", func() bool { return q.m.Stats().Waiting == 0 })
}

// One number, used again and again, at once after each end, however it ended and whether its
// pages were released: each use has its own bytes or fails.
func TestOneNumberAgainAndAgain(t *testing.T) {
	q := newPair(t, openEngine(t, nixl.Embedded), shape{})
	var count atomic.Int32
	var surely [2]atomic.Bool // served, by number
	q.p.robots(eitherDialect, func(id nixlkv.Room) bool { return surely[id%2].Load() || count.Add(1)%4 != 0 })
	var wg sync.WaitGroup
	for g := range 2 { // a number of each dialect
		id := nixlkv.Room(40 + g)
		wg.Go(func() {
			for i := range 40 { // a use that was given up holds the next one back a moment
				page, slot := int32(g*kitPages/2+i%(kitPages/2)), g*kitSlots/2+i%(kitSlots/2)
				q.wipe(page, slot)
				surely[g].Store(i%5 == 4)
				r := q.publish(id, Destination{Pages: []int32{page}, Aux: Aux(slot)})
				switch {
				case i%5 == 4:
					ok(t, r.Wait(within(t)))
				case i%2 == 0:
					spin(200)
				default:
					ctx, cancel := contextOf(10)
					_ = r.Wait(ctx)
					cancel()
				}
				r.Abort("")
				err := r.Wait(within(t))
				if err == nil && !q.arrived(id, page, slot) {
					t.Errorf("use %d of room %d succeeded without its bytes", i, id)
				}
				if err != nil && !errors.Is(err, nixlkv.ErrAborted) {
					t.Errorf("use %d of room %d: %v", i, id, err)
				}
				if i%3 == 0 || i%(kitSlots/2) == kitSlots/2-1 { // before pages and slots come round
					ok(t, r.Released(within(t)))
				}
				ok(t, r.Close())
			}
		})
	}
	wg.Wait()
	eventually(t, "all uses to be released", func() bool { return q.m.Stats().Waiting == 0 })
	s := q.m.Stats()
	if s.Succeeded == 0 || s.Failed == 0 || s.Unconfirmed != 0 {
		t.Errorf("stats %+v", s)
	}
	t.Logf("%d succeeded, %d failed", s.Succeeded, s.Failed)
}

// Pages that are released are not written to any more, even where the abort and the writes
// race: this decode gives them to another room at once.
func TestReleasedPagesAreQuiet(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *nixl.Engine) {
		q := newPair(t, e, shape{})
		q.p.robots(eitherDialect, always)
		for i := range 30 {
			r := q.publish(nixlkv.Room(i), Destination{Pages: []int32{5}, Aux: Aux(5)})
			spin(100)
			r.Abort("")
			ok(t, r.Released(within(t)))
			q.wipe(5, 5)
			ok(t, r.Close())
			q.drained()
			q.mem.compare(q.prefills, placed{srcSlot: -1})
		}
	})
}
