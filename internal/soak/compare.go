package main

import (
	"context"
	"fmt"
	"io"
	"text/tabwriter"
	"time"
)

// intervals are those of one kind.
type intervals struct {
	name, command string // what the guests do meanwhile
	took          time.Duration
	latency       times // of the rooms of the peers that are there
	guests        uint64
}

// rounds is how often the kinds of intervals take turns.
const rounds = 5

// compareGuests measures the rooms of peers that are there while others come. Intervals of four
// kinds take turns, so that what else the machine does meets all of them: nobody comes; decodes
// come and go without meeting a prefill; each is met by another prefill in the same process; each
// is met by theirs. The last two cost the machine and the process the same, and differ in the agent
// alone and what is locked with it: what is worse in the last is what wiring a new peer up costs
// the others beyond the CPU that it takes.
func (r *run) compareGuests(ctx context.Context) error {
	kinds := []*intervals{
		{name: "nobody comes", command: cmdStop, latency: times{}},
		{name: "decodes made, not met", command: cmdPass, latency: times{}},
		{name: "decodes met, another agent", command: cmdOther, latency: times{}},
		{name: "decodes met, this agent", command: cmdVisit, latency: times{}},
	}
	if err := r.each(cmdGo, r.decodes, nil); err != nil {
		return err
	}
	first, _, err := r.sample()
	if err != nil {
		return err
	}
	last := first
	for round := range rounds {
		for i := range kinds {
			k := kinds[(i+round)%len(kinds)] // none always follows the same
			if last, err = r.interval(ctx, k, r.duration/time.Duration(rounds*len(kinds))); err != nil {
				return err
			}
		}
	}
	if err := printIntervals(r.out, kinds); err != nil {
		return err
	}
	printRatio(r.out, kinds[len(kinds)-2], kinds[len(kinds)-1])
	a, b := &first.prefill, &last.prefill
	fmt.Fprintf(r.out, "the prefill before and after it met %d decodes that are gone: %.1f and %.1f MiB, %d and %d files, %d and %d remotes\n",
		kinds[len(kinds)-1].guests, mib(a.settled), mib(b.settled), a.files, b.files, a.held["remotes"], b.held["remotes"])
	return nil
}

// interval is one interval of a kind.
func (r *run) interval(ctx context.Context, k *intervals, d time.Duration) (s sample, err error) {
	before, err := r.tellGuests(k.command)
	if err != nil {
		return s, err
	}
	if _, _, err := r.sample(); err != nil { // ends what came before
		return s, err
	}
	begun := time.Now()
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
		return s, context.Cause(ctx)
	}
	if s, _, err = r.sample(); err != nil {
		return s, err
	}
	k.took += time.Since(begun)
	k.latency.merge(s.latency)
	after, err := r.tellGuests(cmdStop)
	k.guests += after - before
	return s, err
}

// tellGuests tells the guests what to do, and gives how many there were before.
func (r *run) tellGuests(command string) (n uint64, err error) {
	err = r.each(command, []*process{r.guest}, func(_ *process, a *report) error {
		n = a.Arrived
		return nil
	})
	return n, err
}

// printRatio prints what the last kind has of the one that differs in the agent alone.
func printRatio(out io.Writer, other, this *intervals) {
	ratio := func(q float64) float64 {
		return float64(this.latency.quantile(q)) / float64(max(other.latency.quantile(q), 1))
	}
	fmt.Fprintf(out, "met by this agent, of met by another: p50 %.2f, p99 %.2f; guests %.2f\n", ratio(0.5), ratio(0.99),
		float64(this.guests)/float64(max(other.guests, 1)))
}

func printIntervals(out io.Writer, kinds []*intervals) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
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
