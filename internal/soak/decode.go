package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/kvreceiver"
	"github.com/nixlkv/nixlkv/nixl"
)

// decodes are the decode managers of a process.
type decodes struct {
	plan     *plan
	addr     string // of the prefill's bootstrap server
	first    []int  // which room each stream has first, manager by manager; nil: the first there is
	managers []*decode
	tally    tally
	stopped  atomic.Bool
	warm     chan struct{} // closed when the streams go on after their first rooms
	warmOnce sync.Once
	streams  sync.WaitGroup
}

// decode is one manager with its memory.
type decode struct {
	mem     *memory
	manager *kvreceiver.Manager
	streams []int
}

func newDecodes(ctx context.Context, p *plan, process int, addr string, engine *nixl.Engine) (_ *decodes, err error) {
	d := &decodes{plan: p, addr: addr, warm: make(chan struct{})}
	defer func() {
		if err != nil {
			err = errors.Join(err, d.close(ctx))
		}
	}()
	for i := range p.Managers {
		streams := p.streams(process*p.Managers + i)
		mem, err := newMemory(p, len(streams))
		if err != nil {
			return nil, err
		}
		x := &decode{mem: mem, streams: streams}
		d.managers = append(d.managers, x)
		if x.manager, err = newDecodeManager(ctx, mem, engine); err != nil {
			return nil, err
		}
	}
	return d, nil
}

func newDecodeManager(ctx context.Context, mem *memory, engine *nixl.Engine) (*kvreceiver.Manager, error) {
	return kvreceiver.NewManager(ctx, mem.layout(), kvreceiver.WithEngine(engine), kvreceiver.WithMemory(mem.buf),
		kvreceiver.WithConnectTimeout(roomTimeout), kvreceiver.WithCloseTimeout(closeTimeout))
}

// startAt has the streams start with these rooms, in the place of a process that was killed.
func (d *decodes) startAt(first []int) error {
	n := 0
	for _, x := range d.managers {
		n += len(x.streams)
	}
	if len(first) != n {
		return fmt.Errorf("%w: first rooms of %d streams, there are %d", errPlan, len(first), n)
	}
	d.first = first
	d.start()
	return nil
}

func (d *decodes) start() {
	n := 0
	for _, x := range d.managers {
		for k, s := range x.streams {
			first := 0
			if d.first != nil {
				first = d.first[n]
			}
			n++
			d.streams.Go(func() { d.stream(x, s, k, first) })
		}
	}
}

// stream receives the rooms of a stream, the manager's k-th: the first when it starts, the others
// when all are to go on.
func (d *decodes) stream(x *decode, s, k, first int) {
	for i := first; !d.stopped.Load(); i++ {
		room, there := d.plan.room(s, i)
		if !there {
			return
		}
		what := d.plan.fate(room)
		begun := time.Now()
		err := receive(x.manager, x.mem, d.addr, room, what, k)
		d.tally.add(what, time.Since(begun), err)
		if i == first {
			d.tally.begun.Add(1)
			<-d.warm
		}
	}
}

func (d *decodes) goOn() { d.warmOnce.Do(func() { close(d.warm) }) }

// receive receives a room into the memory of the k-th stream.
func receive(m *kvreceiver.Manager, mem *memory, addr string, room nixlkv.Room, what fate, k int) error {
	ctx, cancel := context.WithTimeout(context.Background(), roomTimeout)
	defer cancel()
	r, err := m.Open(room, addr)
	if err != nil {
		return err
	}
	defer r.Close()
	if err := r.Connect(ctx); err != nil {
		return err
	}
	if err := r.Publish(kvreceiver.Destination{Pages: mem.pagesOf(k), Aux: kvreceiver.Aux(k)}); err != nil {
		return err
	}
	if what == givenUp {
		if err := untilBegun(ctx, r, mem, k); err != nil {
			return err
		}
		r.Abort("")
	}
	if err := r.Wait(ctx); err != nil {
		// The next room of the stream goes to the same pages.
		return errors.Join(outcome(what, err), r.Released(ctx))
	}
	return mem.check(k, room)
}

// untilBegun waits until something of a room has arrived, of which a decode is not told.
func untilBegun(ctx context.Context, r *kvreceiver.Receiver, mem *memory, k int) error {
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for !mem.begun(k, r.Room()) {
		select {
		case <-tick.C:
		case <-r.Done():
			return fmt.Errorf("room %d ended before it was aborted: %w", r.Room(), r.Err())
		case <-ctx.Done():
			return fmt.Errorf("room %d: waiting for its first page: %w", r.Room(), ctx.Err())
		}
	}
	return nil
}

// stop lets the streams end with the rooms that are under way.
func (d *decodes) stop() {
	d.stopped.Store(true)
	d.goOn()
	d.streams.Wait()
}

func (d *decodes) counts() *tally { return &d.tally }

func (d *decodes) report(r *report) {
	r.Held, r.Busy = map[string]int{}, map[string]int{}
	for _, x := range d.managers {
		s := x.manager.Stats()
		for name, n := range map[string]int{"prefills": s.Prefills, "ranks": s.Ranks, "registrations": s.Agent.Registrations,
			"lists": s.Agent.Lists, "connections": s.Control.Endpoints} {
			r.Held[name] += n
		}
		for name, n := range map[string]int{"rooms": s.Rooms + s.Waiting, "transfers": s.Agent.Transfers, "messages": s.Control.Pending} {
			r.Busy[name] += n
		}
	}
}

func (d *decodes) close(ctx context.Context) error {
	var errs []error
	for _, x := range d.managers {
		if x.manager != nil {
			if err := x.manager.Shutdown(ctx); err != nil {
				return errors.Join(append(errs, err)...) // the memory is in use
			}
			if s := x.manager.Stats(); s.Agent != (nixl.AgentStats{}) || s.Rooms+s.Waiting != 0 {
				errs = append(errs, fmt.Errorf("left in a decode's manager: %+v", s))
			}
		}
		errs = append(errs, x.mem.buf.Free())
	}
	return errors.Join(errs...)
}
