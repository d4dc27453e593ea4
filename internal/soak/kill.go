package main

import (
	"context"
	"encoding/json"
	"fmt"
	"time"
)

// killTimes says when decodes are killed, in tenths of the run. None is in the first tenth, with
// which the prefill's end is compared, nor in the last two, so that those in their place are
// warm for one of them.
func (r *run) killTimes() (times []float64) {
	const first, last = 1, parts - 2
	for i := range r.kills {
		times = append(times, first+(last-first)*(float64(i)+0.5)/float64(r.kills))
	}
	return times
}

// killEach kills each decode process once before anything is measured, where memory is to be judged:
// the heaps take more from the system while the first peers are lost, and use it again for the
// others.
func (r *run) killEach(ctx context.Context) error {
	if r.kills == 0 || r.growth == 0 {
		return nil
	}
	for k := range r.decodes {
		if err := r.replace(ctx, k); err != nil {
			return err
		}
	}
	return nil
}

// calm waits at the ends of the parts that are compared until the prefill has let go of all
// connections to decodes that were killed.
func (r *run) calm(part int) error {
	if r.kills == 0 || part != 0 && part != parts-1 {
		return nil
	}
	return r.each(cmdCalm, []*process{r.prefill}, func(_ *process, a *report) error {
		for _, l := range a.Left {
			return fmt.Errorf("%w: %s", errUnsteady, l)
		}
		return nil
	})
}

// replace kills a decode process in the middle of its rooms and starts another in its place. The
// rooms of all others go on meanwhile.
func (r *run) replace(ctx context.Context, k int) error {
	prefill := []*process{r.prefill}
	if err := r.each(fmt.Sprint(cmdKilling, " ", k), prefill, nil); err != nil {
		return err
	}
	killed := time.Now()
	r.decodes[k].kill()
	var lost report
	err := r.each(fmt.Sprint(cmdKilled, " ", k), prefill, func(_ *process, a *report) error {
		lost = *a
		for _, l := range a.Left {
			return fmt.Errorf("%w: %s", errUnsteady, l)
		}
		return nil
	})
	if err != nil {
		return err
	}
	settled := time.Now()
	r.killed[k]++
	for _, n := range []struct{ all, more *uint64 }{{&r.ended.Arrived, &lost.Arrived}, {&r.ended.Aborted, &lost.Aborted},
		{&r.ended.Lost, &lost.Lost}, {&r.ended.Unmet, &lost.Unmet}} {
		*n.all += *n.more
	}
	if r.decodes[k], err = r.revive(ctx, k, lost.Next); err != nil {
		return err
	}
	fmt.Fprintf(r.out, "after %.1f s decode process %d was killed: %d rooms failed, %d never began; all was over and its %d peers forgotten %.2f s later, another in its place %.2f s after that\n",
		killed.Sub(r.started).Seconds(), k, lost.Lost, lost.Unmet, r.plan.Managers, settled.Sub(killed).Seconds(), time.Since(settled).Seconds())
	return nil
}

// revive starts a decode process whose streams go on with these rooms, and waits until each has
// had one.
func (r *run) revive(ctx context.Context, k int, next []int) (*process, error) {
	first, err := json.Marshal(next)
	if err != nil {
		return nil, err
	}
	d, err := r.spawnDecode(k)
	if err != nil {
		return nil, err
	}
	ps := []*process{d}
	for _, c := range []struct {
		to      []*process
		command string
	}{{ps, cmdStart + " " + string(first)}, {ps, cmdGo}, {[]*process{r.prefill}, fmt.Sprint(cmdRevived, " ", k)}} {
		if err := r.each(c.command, c.to, nil); err != nil {
			d.kill()
			return nil, err
		}
	}
	wanted := 0
	for i, s := range r.plan.streamsOf(k) {
		if _, there := r.plan.room(s, next[i]); there {
			wanted++
		}
	}
	return d, r.untilOf(ctx, ps, func(_ uint64, begun int) bool { return begun >= wanted })
}
