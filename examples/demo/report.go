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

// measurement is what was measured of some requests.
type measurement struct {
	bytes       int64
	latencies   []time.Duration // of each request, from posting it to seeing its end
	wall        time.Duration   // from the first posting to the last end
	descriptors int             // before merging
	merged      int             // after
}

func (m *measurement) add(bytes int64, latency time.Duration) {
	m.bytes += bytes
	m.latencies = append(m.latencies, latency)
}

// join adds what was measured one after the other.
func (m *measurement) join(o measurement) {
	m.bytes += o.bytes
	m.latencies = append(m.latencies, o.latencies...)
	m.wall += o.wall
	m.descriptors += o.descriptors
	m.merged += o.merged
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
	info     nixl.Info
	asked    nixl.Kind
	plan     *plan
	inFlight int
	verbose  bool

	load           time.Duration // the decode's metadata and both lists
	first          measurement   // the first request, alone
	others         measurement   // of the first round
	later          measurement   // the rounds after it
	copied         measurement   // by measureCopy
	verified, zero int64         // bytes
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
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	defer t.Flush()
	s := r.plan.shape()
	fmt.Fprintf(t, "engine\t%s\n", engineName(r.info))
	if r.info.Path != "" {
		fmt.Fprintf(t, "library\t%s\n", r.info.Path)
	}
	fmt.Fprintf(t, "chosen\t%s\n", r.chosen())
	fmt.Fprintf(t, "model\t%v\n", s)
	fmt.Fprintf(t, "page\t%d tokens: %s in each of %d regions\n", s.pageTokens, formatBytes(int64(s.pageBytes())), s.regions())
	fmt.Fprintf(t, "KV cache\t%s pages on each side, %s\n", formatCount(r.plan.Pool), formatBytes(s.bytes(r.plan.Pool)))
	fmt.Fprintf(t, "requests\t%s rounds of %s, each of %s pages (%s tokens, %s), %d in flight at most\n", formatCount(r.plan.Rounds), formatCount(r.plan.requests()),
		formatCount(r.plan.Pages), formatCount(r.plan.Pages*s.pageTokens), formatBytes(s.bytes(r.plan.Pages)), r.inFlight)
}

func engineName(i nixl.Info) string {
	if i.Kind == nixl.Embedded {
		return "embedded: pure Go, for one machine"
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
	case r.verbose:
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
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	defer t.Flush()
	steady, what := &r.first, "the first request"
	if len(r.others.latencies) > 0 {
		steady, what = &r.others, "the others of round 1"
	}
	if len(r.later.latencies) > 0 {
		steady, what = &r.later, "the later rounds"
	}
	if base := r.copied.rate(); base > 0 {
		fmt.Fprintf(t, "to memcpy\t%.0f %%: %s, against copying the same pages within one process, in one thread\n", 100*steady.rate()/base, what)
	}
	all := r.first
	all.join(r.others)
	all.join(r.later)
	fmt.Fprintf(t, "descriptors\t%s, merged into %s\n", formatCount(all.descriptors), formatCount(all.merged))
	fmt.Fprintf(t, "setting up\t%s ms for the decode's metadata and the lists of all pages\n", formatMillis(r.load))
	fmt.Fprintf(t, "verified\t%s written (%s bytes), %s untouched and zero\n", formatBytes(r.verified), formatCount(int(r.verified)), formatBytes(r.zero))
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
