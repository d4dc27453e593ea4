package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/kvreceiver"
	"github.com/nixlkv/nixlkv/kvsender"
)

// benchPatience bounds a bench that does not say.
const benchPatience = 10 * time.Minute

// benchArgs are the arguments of bench: rooms one after another, so many at a time.
type benchArgs struct {
	Count       int         `json:"count"`
	Pages       int         `json:"pages"` // of a room
	Concurrency int         `json:"concurrency"`
	Chunks      *int        `json:"chunks"`
	Pattern     string      `json:"pattern"` // of pages: scattered or contiguous
	FirstRoom   nixlkv.Room `json:"first_room"`
	Timeout     *float64    `json:"timeout"`        // of the whole bench
	Addr        string      `json:"bootstrap_addr"` // for a decode

	chunks   int
	patience time.Duration
}

func (a *benchArgs) validate(slots, auxSlots int) (err error) {
	a.chunks = 1
	if a.Chunks != nil {
		a.chunks = *a.Chunks
	}
	switch {
	case a.Count < 1 || a.Concurrency < 1 || a.chunks < 1:
		return fmt.Errorf("%w: count %d, concurrency %d, chunks %d", errCommand, a.Count, a.Concurrency, a.chunks)
	case a.Pages < 1 || a.Pages > slots:
		return fmt.Errorf("%w: %d pages a room, of %d", errCommand, a.Pages, slots)
	case a.Pattern != "" && a.Pattern != "scattered" && a.Pattern != "contiguous":
		return fmt.Errorf("%w: pattern is %q", errCommand, a.Pattern)
	case a.FirstRoom > nixlkv.MaxRoom || nixlkv.Room(a.Count) > nixlkv.MaxRoom-a.FirstRoom:
		return fmt.Errorf("%w: %d rooms from %d", errCommand, a.Count, a.FirstRoom)
	case auxSlots == 0:
		return fmt.Errorf("%w: there are no aux slots", errCommand)
	}
	a.patience, err = seconds("timeout", a.Timeout, benchPatience)
	return err
}

// tally collects what the rooms of a bench came to.
type tally struct {
	mu        sync.Mutex
	latencies []time.Duration // of rooms that succeeded
	failed    int
	firstErr  error
}

func (t *tally) add(latency time.Duration, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if err == nil {
		t.latencies = append(t.latencies, latency)
		return
	}
	t.failed++
	if t.firstErr == nil {
		t.firstErr = err
	}
}

// bench sends many rooms and tells how fast they went.
func (p *prefill) bench(d *driver, line []byte) error {
	var a benchArgs
	if err := parse(line, &a); err != nil {
		return err
	}
	if err := a.validate(fewestSlots(p.mem.kv), fewestSlots(p.mem.aux)); err != nil {
		return err
	}
	d.spawn(nil, func(ctx context.Context) error {
		return within(ctx, a.patience, func(ctx context.Context) error {
			e, err := benchRooms(&a, rolePrefill, p.mem, func(i int, pages []int32, aux int) error {
				return p.benchRoom(ctx, a.FirstRoom+nixlkv.Room(i), pages, a.chunks, aux)
			})
			if err == nil {
				p.events.emit(e)
			}
			return err
		})
	})
	return nil
}

// bench receives many rooms and tells how fast they came.
func (p *decode) bench(d *driver, line []byte) error {
	var a benchArgs
	if err := parse(line, &a); err != nil {
		return err
	}
	if err := a.validate(fewestSlots(p.mem.kv), fewestSlots(p.mem.aux)); err != nil {
		return err
	}
	if a.Addr == "" {
		return fmt.Errorf("%w: no bootstrap_addr", errCommand)
	}
	d.spawn(nil, func(ctx context.Context) error {
		return within(ctx, a.patience, func(ctx context.Context) error {
			e, err := benchRooms(&a, roleDecode, p.mem, func(i int, pages []int32, aux int) error {
				return p.benchRoom(ctx, a.FirstRoom+nixlkv.Room(i), a.Addr, pages, aux)
			})
			if err == nil {
				p.events.emit(e)
			}
			return err
		})
	})
	return nil
}

// benchRoom receives one room.
func (p *decode) benchRoom(ctx context.Context, room nixlkv.Room, addr string, pages []int32, aux int) (err error) {
	r, err := p.openRoom(room, addr, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.clear(r)) }()
	if err := r.Connect(ctx); err != nil {
		return err
	}
	if err := r.WaitReady(ctx); err != nil {
		return err
	}
	if err := r.Publish(kvreceiver.Destination{Pages: pages, Aux: kvreceiver.Aux(aux)}); err != nil {
		return err
	}
	return r.Wait(ctx)
}

// benchRooms runs the rooms of a bench, so many at a time.
func benchRooms(a *benchArgs, role string, mem *memory, run func(i int, pages []int32, aux int) error) (benchEvent, error) {
	cpu, err := cpuTime()
	if err != nil {
		return benchEvent{}, err
	}
	var (
		t       tally
		next    atomic.Int64
		workers sync.WaitGroup
		slots   = fewestSlots(mem.kv)
		auxs    = fewestSlots(mem.aux)
		start   = time.Now()
	)
	for w := range min(a.Concurrency, a.Count) {
		workers.Add(1)
		go func() {
			defer workers.Done()
			pick := newPicker(a.Pattern, slots, a.Pages, uint64(w))
			for {
				i := int(next.Add(1)) - 1
				if i >= a.Count {
					return
				}
				opened := time.Now()
				err := run(i, pick.pages(i), i%auxs)
				t.add(time.Since(opened), err)
			}
		}()
	}
	workers.Wait()
	wall := time.Since(start)
	cpuEnd, err := cpuTime()
	if err != nil {
		return benchEvent{}, err
	}
	roomBytes := 0
	for _, s := range mem.kv {
		roomBytes += a.Pages * s.itemLen
	}
	return t.report(role, wall, cpuEnd-cpu, roomBytes), nil
}

// benchRoom sends one room.
func (p *prefill) benchRoom(ctx context.Context, room nixlkv.Room, pages []int32, chunks, aux int) (err error) {
	s, err := p.openRoom(room)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.clear(s)) }()
	s.Computed() // there is no model
	if _, err := s.WaitBootstrapped(ctx); err != nil {
		return err
	}
	if err := s.Begin(kvsender.Plan{Pages: len(pages), Aux: kvsender.Aux(aux)}); err != nil {
		return err
	}
	for i := range chunks - 1 {
		if err := s.Send(chunk(pages, i, chunks)); err != nil {
			return err
		}
	}
	if err := s.Finish(chunk(pages, chunks-1, chunks), nil); err != nil {
		return err
	}
	return s.Wait(ctx)
}

// chunk gives chunk i of n that are as equal as can be, the longer ones first.
func chunk(pages []int32, i, n int) []int32 {
	size, longer := len(pages)/n, len(pages)%n
	from := i*size + min(i, longer)
	if i < longer {
		size++
	}
	return pages[from : from+size]
}

// report gives the figures.
func (t *tally) report(role string, wall, cpu time.Duration, roomBytes int) benchEvent {
	e := benchEvent{Event: "bench", Role: role, OK: len(t.latencies), Failed: t.failed, WallS: wall.Seconds(), CPUS: cpu.Seconds()}
	e.RoomsPS = float64(e.OK) / e.WallS
	e.GBPS = float64(e.OK) * float64(roomBytes) / e.WallS / 1e9
	if t.firstErr != nil {
		e.FirstErr = t.firstErr.Error()
	}
	if e.OK > 0 {
		slices.Sort(t.latencies)
		p50, p99 := t.latencies[e.OK/2].Seconds(), t.latencies[e.OK*99/100].Seconds()
		e.P50S, e.P99S = &p50, &p99
	}
	return e
}

// picker picks the pages of rooms.
type picker struct {
	contiguous bool
	n          int
	slots      []int32 // in any order
	rng        *rand.Rand
}

func newPicker(pattern string, slots, pages int, seed uint64) *picker {
	p := &picker{contiguous: pattern == "contiguous", n: pages, slots: make([]int32, slots), rng: rand.New(rand.NewPCG(1, seed))}
	for i := range p.slots {
		p.slots[i] = int32(i)
	}
	return p
}

// pages gives the pages of room i, valid until the next call: a run, or distinct ones at
// random.
func (p *picker) pages(i int) []int32 {
	if p.contiguous {
		from := i * p.n % (len(p.slots) - p.n + 1)
		return p.slots[from : from+p.n]
	}
	for k := range p.n {
		j := k + p.rng.IntN(len(p.slots)-k)
		p.slots[k], p.slots[j] = p.slots[j], p.slots[k]
	}
	return p.slots[:p.n]
}

func fewestSlots(list []slotted) int {
	if len(list) == 0 {
		return 0
	}
	return slices.MinFunc(list, func(a, b slotted) int { return a.slots() - b.slots() }).slots()
}

// cpuTime is what the process has used so far, in user and system mode.
func cpuTime() (time.Duration, error) {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		return 0, fmt.Errorf("getrusage: %w", err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano()), nil
}
