package main

import (
	"context"
	"fmt"
	"text/tabwriter"
	"time"
)

// compareGuests measures the rooms of peers that are there while others come. Intervals in
// which nobody comes, in which decodes come and go without meeting the prefill, and in which
// each is met take turns, so that what else the machine does meets all of them: the difference
// between the last two is what wiring a new peer up costs the others.
func (r *run) compareGuests(ctx context.Context) error {
	kinds := []struct {
		name, command string
		latency       times
		took          time.Duration
		guests        uint64
	}{{name: "nobody comes"}, {name: "decodes made, not met", command: cmdPass}, {name: "decodes met", command: cmdVisit}}
	const rounds = 5
	interval := r.duration / time.Duration(rounds*len(kinds))
	if err := r.each(cmdGo, r.decodes, nil); err != nil {
		return err
	}
	for range rounds {
		for i := range kinds {
			k := &kinds[i]
			before, err := r.arrivedGuests(k.command)
			if err != nil {
				return err
			}
			if _, _, err := r.sample(); err != nil {
				return err
			}
			begun := time.Now()
			if err := r.pass(ctx, interval); err != nil {
				return err
			}
			s, _, err := r.sample()
			if err != nil {
				return err
			}
			k.took += time.Since(begun)
			if k.latency == nil {
				k.latency = times{}
			}
			k.latency.merge(s.latency)
			after, err := r.arrivedGuests("")
			if err != nil {
				return err
			}
			k.guests += after - before
		}
	}
	w := tabwriter.NewWriter(r.out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "\tdecodes\trooms\trooms/s\tp50 ms\tp90 ms\tp99 ms\tp99.9 ms\tmax ms\tp99 by time\t")
	for _, k := range kinds {
		n := k.latency.count()
		fmt.Fprintf(w, "%s\t%d\t%d\t%.0f\t", k.name, k.guests, n, float64(n)/k.took.Seconds())
		for _, q := range []float64{0.5, 0.9, 0.99, 0.999, 1} {
			fmt.Fprintf(w, "%.2f\t", ms(k.latency.quantile(q)))
		}
		fmt.Fprintf(w, "%.2f\t\n", ms(k.latency.byTime().quantile(0.99)))
	}
	return w.Flush()
}

// arrivedGuests counts the guests, after it has told them what to do; without a command they
// end.
func (r *run) arrivedGuests(command string) (n uint64, err error) {
	if command == "" {
		command = cmdStop
	}
	err = r.each(command, []*process{r.guest}, func(_ *process, a *report) error {
		n = a.Arrived
		return nil
	})
	return n, err
}

func (r *run) pass(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
