package main

import (
	"bytes"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// No decode is killed in the first tenth or the last two, however many are.
func TestKillTimes(t *testing.T) {
	for _, n := range []int{0, 1, 2, 5, 100} {
		r := run{options: options{kills: n}}
		times := r.killTimes()
		if len(times) != n || !slices.IsSorted(times) || n > 0 && (times[0] < 1 || times[n-1] >= parts-2) {
			t.Errorf("%d kills: %v", n, times)
		}
	}
}

// A process is compared with itself since it was there for a whole part.
func TestStartOf(t *testing.T) {
	part := func(killed ...int) sample {
		s := sample{killed: killed, each: make([]load, len(killed))}
		return s
	}
	samples := []sample{part(1, 1, 1), part(1, 2, 1), part(1, 2, 1), part(1, 2, 2)}
	for i := range samples {
		for p := range samples[i].each {
			samples[i].each[p] = load{processes: 1, settled: int64(10*i + p), held: map[string]int{"ranks": 1}}
		}
	}
	// The first since the beginning, the second was killed in the second part, the third in the last.
	if l := startOf(samples); l.settled != 0+(20+1)+(30+2) || l.processes != 3 || l.held["ranks"] != 3 {
		t.Errorf("%+v", l)
	}
}

// Decodes are killed, some of them more than once, and each time everything goes on.
func TestKills(t *testing.T) {
	var out, log bytes.Buffer
	args := strings.Fields("-engine embedded -decodes 2 -managers 2 -in-flight 40 -rooms 6000 -aborts 50 -kills 3 -growth 0")
	if code := runProgram(args, nil, &out, &log); code != 0 {
		t.Errorf("exit code %d", code)
	}
	t.Logf("\n%s%s", out.String(), log.String())
	if n := strings.Count(out.String(), " was killed: "); n != 3 {
		t.Errorf("%d processes were killed", n)
	}
	var all, arrived, aborted, lost, unmet int
	line := regexp.MustCompile(`(?m)^\d+ rooms: .*`).FindString(out.String())
	if _, err := fmt.Sscanf(line, "%d rooms: %d arrived as sent, %d were given up, %d failed and %d never began", &all, &arrived, &aborted, &lost, &unmet); err != nil {
		t.Fatalf("%v in %q", err, line)
	}
	// Each kill ends a room of each stream that has any left, or two where the decode was ahead.
	if all != 6000 || arrived+aborted+lost+unmet != all || lost == 0 || lost+unmet > 2*3*20 || arrived < 5000 {
		t.Errorf("%d rooms, %d arrived, %d given up, %d lost, %d never begun", all, arrived, aborted, lost, unmet)
	}
}

// A run that is not warm says so, and is judged by all that can be.
func TestTooShort(t *testing.T) {
	for _, args := range []string{"-rooms 4", "-duration 1ms"} {
		var out, log bytes.Buffer
		if code := runProgram(strings.Fields("-engine embedded -decodes 1 -managers 2 -in-flight 4 -kills 0 "+args), nil, &out, &log); code != 0 {
			t.Errorf("%s: exit code %d: %s", args, code, log.String())
		}
		if s := out.String(); !strings.Contains(s, "too short to judge memory or throughput") || strings.Contains(s, "of the median") {
			t.Errorf("%s:\n%s", args, s)
		}
	}
}

// A child refuses commands about processes and streams that are not there.
func TestKillCommands(t *testing.T) {
	for name, c := range map[string]struct {
		s       side
		command string
	}{
		"no number":       {&prefill{lives: make([]*life, 2)}, cmdKilled},
		"no such process": {&prefill{lives: make([]*life, 2)}, cmdKilling + " 2"},
		"negative":        {&prefill{lives: make([]*life, 2)}, cmdRevived + " -1"},
		"not a prefill":   {&decodes{}, cmdKilled + " 0"},
		"no list":         {&decodes{}, cmdStart + " 7"},
		"too few streams": {&decodes{managers: []*decode{{streams: []int{0, 1}}}}, cmdStart + " [5]"},
	} {
		x := &child{side: c.s}
		if err := x.do(c.command, new(report)); !errors.Is(err, errPlan) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
