package main

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"text/tabwriter"
	"time"
)

// sample is a part of a run, and what there was at its end.
type sample struct {
	took    time.Duration
	rooms   uint64 // that ended, as the decodes see it
	latency times  // at the decodes, from opening a room until its pages are there
	prefill load
	decodes load
	each    []load // of the decode processes
	killed  []int  // how often each had been
}

// load is what the processes of a side have together.
type load struct {
	usage
	processes int
	settled   int64 // bytes resident once garbage was collected
	held      map[string]int
}

func (l *load) add(u usage, settled int64, r *report) {
	u.goroutines = r.Goroutines
	l.merge(load{usage: u, processes: 1, settled: settled, held: r.Held})
}

func (l *load) merge(o load) {
	l.resident += o.resident
	l.files += o.files
	l.threads += o.threads
	l.goroutines += o.goroutines
	l.processes += o.processes
	l.settled += o.settled
	if l.held == nil {
		l.held = map[string]int{}
	}
	for name, n := range o.held {
		l.held[name] += n
	}
}

func (s *sample) rate() float64 { return float64(s.rooms) / s.took.Seconds() }

// printTable prints the samples, a line each.
func printTable(out io.Writer, samples []sample) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "\t\t\t\t\tprefill\t\t\t\tdecodes\t\t\t\t")
	fmt.Fprintln(w, "seconds\trooms\trooms/s\tp50 ms\tp99 ms\tMiB\tafter GC\tgoroutines\tfiles\tMiB\tafter GC\tgoroutines\tfiles\t")
	total := time.Duration(0)
	for i, s := range samples {
		total += s.took
		if i == 0 {
			fmt.Fprint(w, "warm: ")
		}
		fmt.Fprintf(w, "%.1f\t%d\t%.0f\t%.2f\t%.2f\t", total.Seconds(), s.rooms, s.rate(), ms(s.latency.quantile(0.5)), ms(s.latency.quantile(0.99)))
		for _, l := range []load{s.prefill, s.decodes} {
			fmt.Fprintf(w, "%.1f\t%.1f\t%d\t%d\t", mib(l.resident), mib(l.settled), l.goroutines, l.files)
		}
		fmt.Fprintln(w)
	}
	return w.Flush()
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

func mib(n int64) float64 { return float64(n) / (1 << 20) }

// printHeld prints what each side held at the end of the first and the last sample.
func printHeld(out io.Writer, first, last *sample) {
	for _, side := range []struct {
		name        string
		first, last load
	}{{"prefill", first.prefill, last.prefill}, {"decodes", first.decodes, last.decodes}} {
		fmt.Fprintf(out, "held by the %s at the end (after the first tenth):", side.name)
		for _, name := range slices.Sorted(maps.Keys(side.last.held)) {
			fmt.Fprintf(out, "  %s %d (%d)", name, side.last.held[name], side.first.held[name])
		}
		fmt.Fprintln(out)
	}
}

// startOf gives what the decodes are compared with at the end: each process at the end of its first
// sample that it was there for all the time and warm. One that has no such sample is as it is.
func startOf(samples []sample) (l load) {
	last := len(samples) - 1
	for i, killed := range samples[last].killed {
		first := slices.IndexFunc(samples, func(s sample) bool { return s.killed[i] == killed })
		if first > 0 { // it came in the middle of that one
			first = min(first+1, last)
		}
		l.merge(samples[first].each[i])
	}
	return l
}

// noise is by how much the resident memory of a process that does the same all the time differs
// from one moment to another.
const noise = 3 << 20

// grown compares the end of a run with the end of its first part, and says of what there is
// more. Resident memory may have grown by so many percent.
func grown(first, last *sample, percent float64) (problems []string) {
	for _, side := range []struct {
		name        string
		first, last load
	}{{"prefill", first.prefill, last.prefill}, {"decodes", first.decodes, last.decodes}} {
		a, b := side.first, side.last
		if more := 100 * (float64(b.settled)/float64(a.settled) - 1); percent > 0 && more > percent && b.settled-a.settled > int64(a.processes)*noise {
			problems = append(problems, fmt.Sprintf("%s: resident memory grew by %.1f %%, from %.1f to %.1f MiB", side.name, more, mib(a.settled), mib(b.settled)))
		}
		for _, name := range slices.Sorted(maps.Keys(b.held)) {
			if b.held[name] > a.held[name] {
				problems = append(problems, fmt.Sprintf("%s: %d %s, were %d", side.name, b.held[name], name, a.held[name]))
			}
		}
		if b.files > a.files {
			problems = append(problems, fmt.Sprintf("%s: %d open files, were %d", side.name, b.files, a.files))
		}
	}
	return problems
}

// steadiness gives the slowest and the fastest sample, as parts of the median.
func steadiness(samples []sample) (slowest, fastest float64) {
	sorted := slices.Clone(samples)
	slices.SortFunc(sorted, func(a, b sample) int { return cmp.Compare(a.rate(), b.rate()) })
	median := sorted[len(sorted)/2].rate()
	if median == 0 {
		return 0, 0 // too few rooms to tell
	}
	return sorted[0].rate() / median, sorted[len(sorted)-1].rate() / median
}
