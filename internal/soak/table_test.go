package main

import (
	"bytes"
	"slices"
	"strings"
	"testing"
	"time"
)

func someSample() sample {
	var h histogram
	for range 100 {
		h.add(3 * time.Millisecond)
	}
	l := func() load {
		return load{usage: usage{resident: 60 << 20, files: 20, threads: 8, goroutines: 40}, processes: 1, settled: 50 << 20, held: map[string]int{"peers": 2}}
	}
	return sample{took: time.Second, rooms: 1000, latency: h.take(), prefill: l(), decodes: l()}
}

func TestGrown(t *testing.T) {
	for _, c := range []struct {
		name    string
		change  func(*sample)
		problem string
	}{
		{"nothing", func(*sample) {}, ""},
		{"less", func(s *sample) { s.prefill.settled, s.decodes.files, s.decodes.held["peers"] = 1, 1, 1 }, ""},
		{"4 percent", func(s *sample) { s.prefill.settled = 52 << 20 }, ""},
		{"noise", func(s *sample) { s.prefill.settled = 53 << 20 }, ""},
		{"garbage", func(s *sample) { s.prefill.resident = 1 << 40 }, ""},
		{"8 percent", func(s *sample) { s.prefill.settled = 54 << 20 }, "prefill: resident memory grew by 8.0 %"},
		{"the decodes", func(s *sample) { s.decodes.settled = 100 << 20 }, "decodes: resident memory grew by 100.0 %"},
		{"files", func(s *sample) { s.decodes.files++ }, "decodes: 21 open files, were 20"},
		{"peers", func(s *sample) { s.prefill.held["peers"]++ }, "prefill: 3 peers, were 2"},
		{"lists", func(s *sample) { s.prefill.held["lists"]++ }, "prefill: 1 lists, were 0"},
	} {
		first, last := someSample(), someSample()
		c.change(&last)
		problems := grown(&first, &last, 5)
		if c.problem == "" && len(problems) != 0 ||
			c.problem != "" && !slices.ContainsFunc(problems, func(p string) bool { return strings.HasPrefix(p, c.problem) }) {
			t.Errorf("%s: %q", c.name, problems)
		}
	}
	first, last := someSample(), someSample()
	last.prefill.settled = 1 << 40
	if problems := grown(&first, &last, 0); len(problems) != 0 {
		t.Errorf("not to be judged: %q", problems)
	}
}

func TestTable(t *testing.T) {
	var out bytes.Buffer
	a, b := someSample(), someSample()
	b.rooms = 500
	if err := printTable(&out, []sample{a, b}); err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimRight(out.String(), "\n"), "\n")
	if len(lines) != 4 || !strings.Contains(lines[2], "warm: 1.0   1000     1000    3.") || !strings.Contains(lines[3], "2.0    500      500    3.") {
		t.Errorf("\n%s", out.String())
	}
	out.Reset()
	printHeld(&out, &a, &b)
	if !strings.Contains(out.String(), "peers 2 (2)") {
		t.Errorf("%s", out.String())
	}
}

func TestSteadiness(t *testing.T) {
	var samples []sample
	for _, rooms := range []uint64{100, 50, 100, 130, 90} {
		s := someSample()
		s.rooms = rooms
		samples = append(samples, s)
	}
	if slow, fast := steadiness(samples); slow != 0.5 || fast != 1.3 {
		t.Errorf("%v, %v", slow, fast)
	}
}
