package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/bootstrap"
	"github.com/nixlkv/nixlkv/kvsender"
	"github.com/nixlkv/nixlkv/nixl"
)

// guestTimeout is for the room of the next guest, who may not come for long.
const guestTimeout = 24 * time.Hour

// prefill is the prefill's process.
type prefill struct {
	plan    *plan
	mem     *memory
	boot    *bootstrap.Server
	manager *kvsender.Manager
	other   *prefill // with guests: one more in this process, for guests alone
	tally   tally

	lives  []*life // of the decode processes
	guests life
	next   []int // which room each stream has next; its goroutine's while there is one
}

// newPrefill makes the prefill and, with guests, the other one beside it, as large as it is.
func newPrefill(ctx context.Context, p *plan, engine *nixl.Engine) (*prefill, error) {
	f, err := newOnePrefill(ctx, p, engine)
	if err != nil || !p.Guests {
		return f, err
	}
	if f.other, err = newOnePrefill(ctx, p, engine); err != nil {
		return nil, errors.Join(err, f.close(ctx))
	}
	return f, nil
}

func newOnePrefill(ctx context.Context, p *plan, engine *nixl.Engine) (_ *prefill, err error) {
	f := &prefill{plan: p, lives: make([]*life, p.Processes), next: make([]int, p.InFlight)}
	defer func() {
		if err != nil {
			err = errors.Join(err, f.close(ctx))
		}
	}()
	if f.mem, err = newMemory(p, p.InFlight+1); err != nil { // the last one for guests
		return nil, err
	}
	if f.boot, err = bootstrap.Listen("127.0.0.1:0"); err != nil {
		return nil, err
	}
	opts := []kvsender.Option{kvsender.WithEngine(engine), kvsender.WithMemory(f.mem.buf),
		kvsender.WithBootstrap(f.addr()), kvsender.WithCloseTimeout(closeTimeout)}
	if p.Guests {
		opts = append(opts, kvsender.WithBootstrapTimeout(guestTimeout))
	}
	f.manager, err = kvsender.NewManager(ctx, f.mem.layout(), opts...)
	return f, err
}

func (f *prefill) addr() string { return f.boot.Endpoint().String() }

func (f *prefill) start() {
	for k := range f.lives {
		f.begin(k)
	}
	if f.plan.Guests {
		f.receiveGuests()
		f.other.receiveGuests()
	}
}

// receiveGuests sends a room to each guest.
func (f *prefill) receiveGuests() {
	f.guests.begin()
	f.guests.streams.Go(func() {
		for room := firstGuestRoom; f.send(&f.guests, room, f.plan.InFlight); room++ {
		}
	})
}

// send sends a room from the memory of the k-th stream; false if its decode does not come any
// more.
func (f *prefill) send(l *life, room nixlkv.Room, k int) bool {
	what := arrives
	if room < firstGuestRoom {
		what = f.plan.fate(room)
	}
	s, err := f.manager.Open(room)
	if err != nil {
		f.tally.fail(err)
		return false
	}
	defer s.Close()
	begun := time.Now()
	_, err = s.WaitBootstrapped(l.ctx)
	if err != nil && errors.Is(err, l.ctx.Err()) {
		f.count(l, func(t *tally) {
			if l.killed.Load() {
				t.unmet.Add(1)
			}
		})
		return false
	}
	if err == nil {
		begun = time.Now()
		err = outcome(what, f.serve(l, s, what, k))
	}
	f.count(l, func(t *tally) {
		if l.killed.Load() && ofRoom(err) {
			t.lost.Add(1)
		} else {
			t.add(what, time.Since(begun), err)
		}
	})
	return true
}

// serve sends a room whose decode has told where it goes.
func (f *prefill) serve(l *life, s *kvsender.Sender, what fate, k int) error {
	ctx, cancel := context.WithTimeout(context.Background(), roomTimeout)
	defer cancel()
	if what == refused {
		s.Abort("")
		return s.Wait(ctx)
	}
	f.mem.stamp(k, s.Room())
	pages := f.mem.pagesOf(k)
	if err := s.Begin(kvsender.Plan{Pages: len(pages), Aux: kvsender.Aux(k)}); err != nil {
		return err
	}
	killed := l.killed.Load()
	if what == givenUp || killed {
		if err := s.Send(pages); err != nil {
			return err
		}
		if killed {
			l.holdOnce.Do(func() { close(l.held) })
		}
		return s.Wait(ctx)
	}
	if err := s.Finish(pages, nil); err != nil {
		return err
	}
	if what == interrupted {
		s.Abort("")
	}
	return s.Wait(ctx)
}

// outcome says what is wrong with how a room has ended: one that was aborted may have arrived
// before that was known.
func outcome(what fate, err error) error {
	if what != arrives && ofRoom(err) && !errors.Is(err, nixlkv.ErrReleaseUnconfirmed) {
		return nil
	}
	return err
}

// ofRoom says whether a room has failed, and not just taken too long.
func ofRoom(err error) bool {
	var failed *nixlkv.KVTransferError
	return errors.As(err, &failed)
}

func (f *prefill) stop() {
	for _, l := range append(f.lives, &f.guests) {
		l.end()
	}
	if f.other != nil {
		f.other.stop()
	}
}

func (f *prefill) counts() *tally { return &f.tally }

func (f *prefill) report(r *report) {
	s := f.manager.Stats()
	r.Held = map[string]int{"peers": len(s.Peers), "registrations": s.Agent.Registrations, "remotes": s.Agent.Remotes,
		"prepared": s.Agent.Prepared, "lists": s.Agent.Lists, "connections": s.Control.Endpoints}
	r.Busy = map[string]int{"rooms": s.Rooms, "transfers": s.Agent.Transfers, "in flight": s.Agent.InFlight,
		"run queue": s.RunQueue, "messages": s.Control.Pending}
}

func (f *prefill) close(ctx context.Context) error {
	var errs []error
	if f.other != nil {
		errs = append(errs, f.other.close(ctx))
	}
	if f.manager != nil {
		if err := f.manager.Shutdown(ctx); err != nil {
			return errors.Join(append(errs, err)...) // the memory is in use
		}
		if s := f.manager.Stats(); s.Agent != (nixl.AgentStats{}) || s.Rooms != 0 || len(s.Peers) != 0 {
			errs = append(errs, fmt.Errorf("left in the prefill's manager: %+v", s))
		}
	}
	if f.boot != nil {
		errs = append(errs, f.boot.Close())
	}
	if f.mem != nil {
		errs = append(errs, f.mem.buf.Free())
	}
	return errors.Join(errs...)
}
