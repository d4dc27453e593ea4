package main

import (
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/nixlkv/nixlkv/nixl"
)

// sample is what was measured of one request.
type sample struct {
	bytes        int64
	begun, ended time.Time
	pieces       int // pages times regions
	transfers    int
}

// measurement is what was measured of some requests.
type measurement struct {
	bytes     int64
	latencies []time.Duration // of each request
	wall      time.Duration   // from the first beginning to the last end, the pauses between batches left out
	pieces    int
	transfers int
}

// add adds a batch: requests that went side by side.
func (m *measurement) add(batch []sample) {
	var begun, ended time.Time
	for i, s := range batch {
		m.bytes += s.bytes
		m.pieces += s.pieces
		m.transfers += s.transfers
		m.latencies = append(m.latencies, s.ended.Sub(s.begun))
		if i == 0 || s.begun.Before(begun) {
			begun = s.begun
		}
		if s.ended.After(ended) {
			ended = s.ended
		}
	}
	m.wall += ended.Sub(begun)
}

// join adds what was measured one after the other.
func (m *measurement) join(o measurement) {
	m.bytes += o.bytes
	m.latencies = append(m.latencies, o.latencies...)
	m.wall += o.wall
	m.pieces += o.pieces
	m.transfers += o.transfers
}

// rate is in bytes a second.
func (m *measurement) rate() float64 {
	if m.wall <= 0 {
		return 0
	}
	return float64(m.bytes) / m.wall.Seconds()
}

// percentile gives the latency within which that part of the requests ended: the smallest
// one measured for which that is so.
func percentile(ds []time.Duration, part float64) time.Duration {
	if len(ds) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(ds))
	return sorted[max(int(math.Ceil(part*float64(len(sorted)))), 1)-1]
}

// results is what a run has shown.
type results struct {
	info   nixl.Info
	asked  nixl.Kind
	config config
	plan   *plan

	first  measurement // the first request, alone
	others measurement // of the first round
	later  measurement // the rounds after it
	copied measurement // by measureCopy
	decode string      // the decode's own report; empty if it prints it itself
}

// print writes the results for people.
func (r *results) print(w io.Writer) error {
	var b strings.Builder
	r.printSetting(&b)
	b.WriteByte('\n')
	r.printSpeeds(&b)
	b.WriteByte('\n')
	r.printFacts(&b)
	_, err := io.WriteString(w, b.String())
	return err
}

// printSetting says what ran.
func (r *results) printSetting(w io.Writer) {
	p, s := r.plan, r.plan.shape
	fact(w, "engine", "%s", engineName(r.info))
	if r.info.Path != "" {
		fact(w, "library", "%s", r.info.Path)
	}
	fact(w, "chosen", "%s", r.chosen())
	fact(w, "model", "%v", s)
	fact(w, "page", "%d tokens: %s in each of %d regions", s.pageTokens, formatBytes(int64(s.pageBytes())), s.regions())
	fact(w, "KV cache", "%s pages on each side, %s", formatCount(p.pool), formatBytes(s.bytes(p.pool)))
	fact(w, "requests", "%s rounds of %s, each of %s pages (%s tokens, %s) in chunks of %s, %d in flight at most",
		formatCount(p.rounds), formatCount(p.requests()), formatCount(p.pages), formatCount(p.pages*s.pageTokens),
		formatBytes(s.bytes(p.pages)), formatCount(min(r.config.chunk, p.pages)), r.config.inFlight)
}

// fact writes a line that the decode's report is aligned with.
func fact(w io.Writer, name, format string, args ...any) {
	fmt.Fprintf(w, "%-13s%s\n", name, fmt.Sprintf(format, args...))
}

func engineName(i nixl.Info) string {
	if i.Kind == nixl.Embedded {
		return "embedded: pure Go, for Go peers alone"
	}
	version := "of unknown version"
	if i.Version != "" {
		version = i.Version
	}
	return fmt.Sprintf("native: NVIDIA NIXL %s, called through %s", version, i.Calls)
}

// chosen says why it is this engine.
func (r *results) chosen() string {
	switch {
	case r.asked != nixl.Auto:
		return fmt.Sprintf("by -engine %v", r.asked)
	case r.info.Kind == nixl.Native:
		return "by -engine auto: NIXL was found"
	case r.config.verbose:
		return "by -engine auto: " + strings.ReplaceAll(r.info.Why, "\n", " ")
	}
	return "by -engine auto: " + brief(r.info.Why)
}

// printSpeeds is the table.
func (r *results) printSpeeds(w io.Writer) {
	// The names are of equal width, so that they are aligned to the left all the same.
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	defer t.Flush()
	fmt.Fprint(t, "\trequests\tbytes\tms\tGB/s\tp50 ms\tp99 ms\t\n")
	row := func(name string, m *measurement) {
		if n := len(m.latencies); n > 0 {
			fmt.Fprintf(t, "%-17s\t%s\t%s\t%s\t%.2f\t%s\t%s\t\n", name, formatCount(n), formatBytes(m.bytes), formatMillis(m.wall), m.rate()/1e9,
				formatMillis(percentile(m.latencies, 0.50)), formatMillis(percentile(m.latencies, 0.99)))
		}
	}
	row("first request", &r.first)
	row("others, round 1", &r.others)
	row("later rounds", &r.later)
	row("memcpy", &r.copied)
}

// printFacts says what the table does not.
func (r *results) printFacts(w io.Writer) {
	steady, what := &r.first, "the first request"
	if len(r.others.latencies) > 0 {
		steady, what = &r.others, "the others of round 1"
	}
	if len(r.later.latencies) > 0 {
		steady, what = &r.later, "the later rounds"
	}
	if base := r.copied.rate(); base > 0 {
		fact(w, "to memcpy", "%.0f %%: %s, against copying the same pages within one process, in one thread", 100*steady.rate()/base, what)
	}
	all := r.first
	all.join(r.others)
	all.join(r.later)
	fact(w, "transfers", "%s: %s pieces of %s, and %s metadata slots", formatCount(all.transfers), formatCount(all.pieces),
		formatBytes(int64(r.plan.shape.pageBytes())), formatCount(len(all.latencies)))
	io.WriteString(w, r.decode)
}

// report is what the decode says at its end.
func (d *decode) report(w io.Writer) error {
	var b strings.Builder
	told := d.manager.Stats()
	fact(&b, "decode", "p50 %s ms, p99 %s ms from telling where a request goes until it is there", formatMillis(percentile(d.latencies, 0.50)), formatMillis(percentile(d.latencies, 0.99)))
	fact(&b, "control", "the prefill was told of %s registration and %s rooms, and told %s KV_STATUS",
		formatCount(int(told.Registrations)), formatCount(len(d.latencies)), formatCount(int(told.Statuses)))
	verified := int64(d.plan.rounds) * d.plan.bytes()
	fact(&b, "verified", "%s written (%s bytes), %s untouched and zero, %s first tokens",
		formatBytes(verified), formatCount(int(verified)), formatBytes(d.plan.untouched()), formatCount(len(d.latencies)))
	_, err := io.WriteString(w, b.String())
	return err
}

func formatMillis(d time.Duration) string { return fmt.Sprintf("%.1f", float64(d)/1e6) }

// formatBytes gives bytes in the largest binary unit of which there is at least one.
func formatBytes(n int64) string {
	units := []string{"bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"}
	x, u := float64(n), 0
	for ; x >= 1024 && u < len(units)-1; u++ {
		x /= 1024
	}
	return strings.TrimSuffix(strings.TrimSuffix(fmt.Sprintf("%.2f", x), "0"), ".0") + " " + units[u]
}

// formatCount groups digits by threes.
func formatCount(n int) string {
	s := fmt.Sprint(n)
	for i := len(s) - 3; i > 0 && s[i-1] != '-'; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}
