package main

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nixlkv/nixlkv/nixl"
)

func TestPercentile(t *testing.T) {
	ds := []time.Duration{5, 1, 4, 2, 3}
	for part, want := range map[float64]time.Duration{0: 1, 0.2: 1, 0.5: 3, 0.8: 4, 0.99: 5, 1: 5} {
		if got := percentile(ds, part); got != want {
			t.Errorf("%v: %d, want %d", part, got, want)
		}
	}
	if got := percentile(nil, 0.5); got != 0 {
		t.Errorf("of nothing: %d", got)
	}
	if ds[0] != 5 {
		t.Error("the latencies were sorted in place")
	}
}

func TestFormat(t *testing.T) {
	for n, want := range map[int64]string{0: "0 bytes", 1: "1 bytes", 1023: "1023 bytes", 1024: "1 KiB", 1536: "1.5 KiB", 128 << 20: "128 MiB", 5 << 28: "1.25 GiB", 1 << 62: "4 EiB"} {
		if got := formatBytes(n); got != want {
			t.Errorf("%d: %q, want %q", n, got, want)
		}
	}
	for n, want := range map[int]string{0: "0", 999: "999", 1000: "1,000", 1234567: "1,234,567", -1234: "-1,234", -123: "-123"} {
		if got := formatCount(n); got != want {
			t.Errorf("%d: %q, want %q", n, got, want)
		}
	}
}

func TestMeasurement(t *testing.T) {
	var m measurement
	if m.rate() != 0 {
		t.Error("a rate of nothing")
	}
	at := func(s int) time.Time { return time.Unix(int64(s), 0) }
	// Side by side: from 10 to 14; then after a pause from 20 to 21.
	m.add([]sample{
		{bytes: 300, begun: at(11), ended: at(14), pieces: 2, transfers: 1},
		{bytes: 100, begun: at(10), ended: at(12), pieces: 3, transfers: 1},
	})
	m.add([]sample{{bytes: 200, begun: at(20), ended: at(21), pieces: 4, transfers: 2}})
	var all measurement
	all.join(m)
	all.join(measurement{bytes: 400, latencies: []time.Duration{3 * time.Second}, wall: 5 * time.Second, pieces: 1, transfers: 1})
	if m.wall != 5*time.Second || all.rate() != 100 || all.pieces != 10 || all.transfers != 5 {
		t.Errorf("%+v, joined %+v", m, all)
	}
	if want := []time.Duration{3e9, 2e9, 1e9, 3e9}; !slices.Equal(all.latencies, want) {
		t.Errorf("latencies %v, want %v", all.latencies, want)
	}
}

func TestPrint(t *testing.T) {
	c := testConfig(t)
	ms := func(n ...time.Duration) (ds []time.Duration) {
		for _, d := range n {
			ds = append(ds, d*time.Millisecond)
		}
		return ds
	}
	r := results{
		info:   nixl.Info{Kind: nixl.Native, Version: "1.5.1", Path: "/opt/nixl/libnixl_capi.so", Calls: "cgo", Why: "NIXL was loaded from there"},
		config: c, plan: newPlan(&c),
		first:  measurement{bytes: 100e6, latencies: ms(100), wall: 100 * time.Millisecond, pieces: 1000, transfers: 4},
		others: measurement{bytes: 200e6, latencies: ms(40, 60), wall: 100 * time.Millisecond, pieces: 2000, transfers: 8},
		later:  measurement{bytes: 400e6, latencies: ms(10, 20, 30, 40), wall: 100 * time.Millisecond, pieces: 4000, transfers: 16},
		copied: measurement{bytes: 800e6, latencies: ms(50, 50), wall: 100 * time.Millisecond},
		decode: "verified     so much\n",
	}
	const want = `engine       native: NVIDIA NIXL 1.5.1, called through cgo
library      /opt/nixl/libnixl_capi.so
chosen       by -engine auto: NIXL was found
model        Llama-3-8B cut down: 2 layers, K and V, 8 KV heads × 128 × 2 bytes
page         16 tokens: 32 KiB in each of 4 regions
KV cache     38 pages on each side, 4.75 MiB
requests     3 rounds of 6, each of 5 pages (80 tokens, 640 KiB) in chunks of 2, 2 in flight at most

                     requests       bytes     ms  GB/s  p50 ms  p99 ms
  first request             1   95.37 MiB  100.0  1.00   100.0   100.0
  others, round 1           2  190.73 MiB  100.0  2.00    40.0    60.0
  later rounds              4  381.47 MiB  100.0  4.00    20.0    40.0
  memcpy                    2  762.94 MiB  100.0  8.00    50.0    50.0

to memcpy    50 %: the later rounds, against copying the same pages within one process, in one thread
transfers    28: 7,000 pieces of 32 KiB, and 7 metadata slots
verified     so much
`
	var b strings.Builder
	if err := r.print(&b); err != nil {
		t.Fatal(err)
	}
	if b.String() != want {
		t.Errorf("printed:\n%s\nwant:\n%s", b.String(), want)
	}
}

func TestChosen(t *testing.T) {
	fallback := nixl.Info{Kind: nixl.Embedded, Why: "NIXL could not be loaded: not found; tried\n  a: x\n  b: y"}
	for name, c := range map[string]struct {
		r    results
		want string
	}{
		"asked for": {results{asked: nixl.Embedded, info: nixl.Info{Kind: nixl.Embedded}}, "by -engine embedded"},
		"fallback":  {results{info: fallback}, "by -engine auto: NIXL could not be loaded: not found; tried 2 places (-v lists them)"},
		"verbose":   {results{info: fallback, config: config{verbose: true}}, "by -engine auto: NIXL could not be loaded: not found; tried   a: x   b: y"},
	} {
		if got := c.r.chosen(); got != c.want {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}

func TestBrief(t *testing.T) {
	for text, want := range map[string]string{
		"one":               "one",
		"one; tried\n  x":   "one; tried x",
		"one; tried\n x\ny": "one; tried 2 places (-v lists them)",
	} {
		if got := brief(text); got != want {
			t.Errorf("%q becomes %q, want %q", text, got, want)
		}
	}
}

type brokenWriter struct{}

func (brokenWriter) Write([]byte) (int, error) { return 0, errors.New("broken") }

// Results that could not be written are a failure.
func TestPrintFails(t *testing.T) {
	if err := (&results{plan: testPlan(t)}).print(brokenWriter{}); err == nil {
		t.Error("no error")
	}
}

func TestProgress(t *testing.T) {
	var none *progress // not a terminal
	none.say("x")
	none.begin(1)
	none.step()
	none.end()

	var b strings.Builder
	p := &progress{w: &b}
	p.say("wait")
	p.begin(2)
	p.step()
	p.step()
	p.end()
	bar := func(n int) string { return strings.Repeat("█", n) + strings.Repeat("░", barWidth-n) }
	const at = startOfLine
	want := at + "wait…" + at + bar(0) + " 0 of 2 requests" + at + bar(20) + " 1 of 2 requests" + at + bar(40) + " 2 of 2 requests" + at
	if b.String() != want {
		t.Errorf("%q, want %q", b.String(), want)
	}
}
