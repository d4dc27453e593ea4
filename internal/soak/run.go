package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"time"

	"github.com/nixlkv/nixlkv/nixl"
)

// run is the parent of a run's processes.
type run struct {
	options
	out io.Writer // the table
	log *shared   // what the children say

	prefill *process
	decodes []*process
	guest   *process // nil without guests
	addr    string   // of the prefill's bootstrap server
	started time.Time

	killed []int  // how often each decode process was
	ended  report // the rooms of those that were
}

// errUnsteady: the run went through, and something of it is not as it should be.
var errUnsteady = errors.New("not steady")

// do runs everything and prints what it was like.
func (r *run) do(ctx context.Context) (err error) {
	defer r.kill()
	if err := r.open(); err != nil {
		return err
	}
	r.started = time.Now()
	if err := r.each(cmdStart, r.both(), nil); err != nil {
		return err
	}
	if err := r.warmUp(ctx); err != nil {
		return err
	}
	var problems []string
	if r.plan.Guests {
		err = r.compareGuests(ctx)
	} else {
		problems, err = r.soak(ctx)
	}
	if err != nil {
		return err
	}
	left, err := r.end()
	if err != nil {
		return err
	}
	for _, p := range append(problems, left...) {
		err = errors.Join(err, fmt.Errorf("%w: %s", errUnsteady, p))
	}
	return err
}

// open starts all processes.
func (r *run) open() error {
	prefill, ready, err := spawn("prefill", childConfig{Role: rolePrefill, Plan: r.plan}, r.log)
	if err != nil {
		return err
	}
	r.prefill, r.addr = prefill, ready.Addr
	if r.kills < 0 {
		r.kills = 0
		if ready.Engine == nixl.Embedded.String() && !r.plan.Guests {
			r.kills = defaultKills
		}
	}
	r.killed = make([]int, r.plan.Processes)
	for i := range r.plan.Processes {
		d, err := r.spawnDecode(i)
		if err != nil {
			return err
		}
		r.decodes = append(r.decodes, d)
	}
	if r.plan.Guests {
		r.guest, _, err = spawn("guest", childConfig{Role: roleGuest, Addr: ready.Addr, Other: ready.Other, Plan: r.plan}, r.log)
	}
	return err
}

func (r *run) spawnDecode(i int) (*process, error) {
	d, _, err := spawn(fmt.Sprint("decode ", i), childConfig{Role: roleDecode, Process: i, Addr: r.addr, Plan: r.plan}, r.log)
	return d, err
}

// both lists the processes that rooms go between.
func (r *run) both() []*process { return append([]*process{r.prefill}, r.decodes...) }

// each gives processes a command, all at once, and takes their answers one by one.
func (r *run) each(command string, ps []*process, take func(*process, *report) error) error {
	var (
		mu   sync.Mutex
		wait sync.WaitGroup
		errs = make([]error, len(ps))
	)
	for i, p := range ps {
		wait.Go(func() {
			answer, err := p.do(command)
			mu.Lock()
			defer mu.Unlock()
			if err == nil && answer.Failed > 0 {
				err = fmt.Errorf("%w: %s: %d rooms failed, the first: %s", errUnsteady, p.name, answer.Failed, answer.FirstFailure)
			}
			if err == nil && take != nil {
				err = take(p, &answer)
			}
			errs[i] = err
		})
	}
	wait.Wait()
	return errors.Join(errs...)
}

// warmUp waits until every stream has had a room, so that all peers are wired up and all memory
// was used once.
func (r *run) warmUp(ctx context.Context) error {
	all := r.plan.InFlight
	if r.plan.Rooms > 0 {
		all = min(all, r.plan.Rooms)
	}
	return r.until(ctx, func(_ uint64, begun int) bool { return begun >= all })
}

// parts is how many samples a run is divided into once it is warm.
const parts = 10

// soak takes the samples and prints the table. The first is of warming up.
func (r *run) soak(ctx context.Context) (problems []string, err error) {
	var (
		samples []sample
		last    = r.started
		rooms   uint64
	)
	take := func() error {
		s, done, err := r.sample()
		now := time.Now()
		s.took, s.rooms = now.Sub(last), done-rooms
		last, rooms = now, done
		samples = append(samples, s)
		return err
	}
	if err := r.each(cmdGo, r.decodes, nil); err != nil {
		return nil, err
	}
	if err := r.killEach(ctx); err != nil {
		return nil, err
	}
	if err := take(); err != nil {
		return nil, err
	}
	warm, steady := rooms, time.Now()
	// At the end of the last part all streams still have a room.
	total := max(uint64(max(r.plan.Rooms-r.plan.InFlight, 0)), warm)
	// reaches waits for a point of the run, counted in tenths.
	reaches := func(tenths float64) error {
		return r.until(ctx, func(done uint64, _ int) bool {
			if r.plan.Rooms > 0 {
				return float64(done-warm) >= float64(total-warm)*tenths/parts
			}
			return time.Since(steady) >= time.Duration(float64(r.duration)*tenths/parts)
		})
	}
	kills := r.killTimes()
	for part := range parts {
		for end := float64(part + 1); len(kills) > 0 && kills[0] < end; kills = kills[1:] {
			if err := reaches(kills[0]); err != nil {
				return nil, err
			}
			if err := r.replace(ctx, (r.kills-len(kills))%r.plan.Processes); err != nil {
				return nil, err
			}
		}
		if err := reaches(float64(part + 1)); err != nil {
			return nil, err
		}
		if err := r.calm(part); err != nil {
			return nil, err
		}
		if err := take(); err != nil {
			return nil, err
		}
	}
	if r.plan.Rooms > 0 {
		if err := r.until(ctx, func(done uint64, _ int) bool { return done >= uint64(r.plan.Rooms) }); err != nil {
			return nil, err
		}
	}
	if err := printTable(r.out, samples); err != nil {
		return nil, err
	}
	first, end := samples[1], &samples[parts]
	first.decodes = startOf(samples[1:])
	printHeld(r.out, &first, end)
	growth := r.growth
	if want := uint64(r.plan.InFlight) * roomsToJudge; first.rooms < want {
		growth = 0
		fmt.Fprintf(r.out, "too short to judge memory or throughput: the first tenth had %d rooms, and %d are needed, %d for each in flight\n", first.rooms, want, roomsToJudge)
	} else {
		slow, fast := steadiness(samples[1:])
		fmt.Fprintf(r.out, "rooms/s of the tenths: the slowest %.2f, the fastest %.2f of the median\n", slow, fast)
	}
	return grown(&first, end, growth), nil
}

// roomsToJudge is how many rooms of each stream make the processes as large as they get: with
// fewer in the first tenth, what comes after it would be taken for growth.
const roomsToJudge = 10

// until waits until something holds of the rooms that have ended, and of the streams that have had
// their first.
func (r *run) until(ctx context.Context, holds func(done uint64, begun int) bool) error {
	return r.untilOf(ctx, r.decodes, func(done uint64, begun int) bool { return holds(r.ended.rooms()+done, begun) })
}

// untilOf is until for some decode processes alone.
func (r *run) untilOf(ctx context.Context, decodes []*process, holds func(done uint64, begun int) bool) error {
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		var done uint64
		var begun int
		err := r.each(cmdCount, decodes, func(_ *process, a *report) error {
			done += a.rooms()
			begun += a.Begun
			return nil
		})
		if err != nil || holds(done, begun) {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// sample asks every process.
func (r *run) sample() (s sample, done uint64, err error) {
	s.latency, s.killed, s.each, done = times{}, slices.Clone(r.killed), make([]load, len(r.decodes)), r.ended.rooms()
	before := map[*process]usage{}
	for _, p := range r.both() {
		if before[p], err = p.usage(); err != nil {
			return s, 0, err
		}
	}
	err = r.each(cmdSample, r.both(), func(p *process, a *report) error {
		after, err := p.usage()
		if err != nil {
			return err
		}
		if p == r.prefill {
			s.prefill.add(before[p], after.resident, a)
			return nil
		}
		s.decodes.add(before[p], after.resident, a)
		s.each[slices.Index(r.decodes, p)].add(before[p], after.resident, a)
		s.latency.merge(a.Latency)
		done += a.rooms()
		return nil
	})
	return s, done, err
}

// end ends the rooms and then everything, the decodes first, and gives what was left over.
func (r *run) end() (left []string, err error) {
	take := func(p *process, a *report) error {
		for _, l := range a.Left {
			left = append(left, p.name+": "+l)
		}
		return nil
	}
	arrived, aborted, sent := r.ended.Arrived, r.ended.Aborted, uint64(0)
	err = r.each(cmdStop, r.decodes, func(p *process, a *report) error {
		arrived, aborted = arrived+a.Arrived, aborted+a.Aborted
		return take(p, a)
	})
	if err != nil {
		return nil, err
	}
	err = r.each(cmdStop, []*process{r.prefill}, func(p *process, a *report) error {
		sent = a.rooms()
		return take(p, a)
	})
	if err != nil {
		return nil, err
	}
	lost := ""
	if r.kills > 0 {
		lost = fmt.Sprintf("%d failed and %d never began because their decode was killed, ", r.ended.Lost, r.ended.Unmet)
	}
	all := arrived + aborted + r.ended.Lost + r.ended.Unmet
	fmt.Fprintf(r.out, "%d rooms: %d arrived as sent, %d were given up, %snone failed otherwise\n", all, arrived, aborted, lost)
	if r.plan.Rooms > 0 && all != uint64(r.plan.Rooms) {
		left = append(left, fmt.Sprintf("%d rooms have ended, of %d", all, r.plan.Rooms))
	}
	if r.guest == nil && sent != all {
		left = append(left, fmt.Sprintf("the prefill ended %d rooms, the decodes %d", sent, all))
	}
	groups := [][]*process{r.decodes, {r.prefill}}
	if r.guest != nil {
		groups = append([][]*process{{r.guest}}, groups...)
	}
	for i, ps := range groups {
		if i == len(groups)-1 {
			if err := r.each(cmdAlone, ps, take); err != nil {
				return nil, err
			}
		}
		if err := r.each(cmdClose, ps, take); err != nil {
			return nil, err
		}
		for _, p := range ps {
			if err := p.wait(); err != nil {
				return nil, err
			}
		}
	}
	return left, nil
}

// kill ends what has not ended.
func (r *run) kill() {
	for _, p := range append(r.both(), r.guest) {
		if p != nil {
			p.kill()
		}
	}
}
