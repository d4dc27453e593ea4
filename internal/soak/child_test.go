package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/nixlkv/nixlkv/nixl"
)

// leaky is a side that leaves something behind.
type leaky struct {
	closed error
	leak   chan struct{}
	busy   int // how often it is busy before it is idle
}

func (l *leaky) start() {}
func (l *leaky) stop()  {}

func (l *leaky) counts() *tally { return new(tally) }

func (l *leaky) report(r *report) {
	l.busy--
	r.Busy = map[string]int{"rooms": max(l.busy, 0)}
}

func (l *leaky) close(context.Context) error {
	go func() { <-l.leak }()
	return l.closed
}

func newChild(t *testing.T, s side) *child {
	t.Helper()
	e, err := nixl.Open(nixl.Embedded)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	})
	x := &child{engine: e, side: s, gone: 50 * time.Millisecond}
	if x.before, err = ownUsage(); err != nil {
		t.Fatal(err)
	}
	return x
}

func TestWhatIsLeftIsTold(t *testing.T) {
	l := &leaky{leak: make(chan struct{})}
	defer close(l.leak)
	x := newChild(t, l)
	var r report
	if err := x.do(cmdClose, &r); err != nil || len(r.Left) != 1 || r.Left[0] != "1 goroutines" {
		t.Errorf("%v, %q", err, r.Left)
	}
	l.closed = errors.New("does not close")
	if err := x.do(cmdClose, &r); !errors.Is(err, l.closed) {
		t.Errorf("%v", err)
	}
	if err := x.do(cmdVisit, &r); !errors.Is(err, errPlan) {
		t.Errorf("%v", err)
	}
}

func TestUntilIdle(t *testing.T) {
	if left := newChild(t, &leaky{busy: 4}).untilIdle(); len(left) != 0 {
		t.Errorf("%q", left)
	}
}

// A child does what it is told, and says when it cannot do what it is started for.
func TestChildAlone(t *testing.T) {
	var out bytes.Buffer
	p := plan{Engine: "embedded", InFlight: 1, Processes: 1, Managers: 1, Regions: 1, Pages: 1, PageBytes: 64}
	if err := runChild(childConfig{Role: rolePrefill, Plan: p}, strings.NewReader("count\ndance\nclose\nstart\n"), &out); err != nil {
		t.Fatal(err)
	}
	d := json.NewDecoder(&out)
	var ready, count, dance, closed report
	if err := errors.Join(d.Decode(&ready), d.Decode(&count), d.Decode(&dance), d.Decode(&closed)); err != nil || d.More() {
		t.Fatalf("%v, or more reports than commands", err)
	}
	if ready.Addr == "" || count.Error != "" || count.Goroutines == 0 || dance.Error == "" || closed.Error != "" || len(closed.Left) != 0 {
		t.Errorf("%+v, %+v, %+v, %+v", ready, count, dance, closed)
	}
	for _, c := range []childConfig{{Role: "other", Plan: p}, {Role: roleDecode, Plan: plan{Engine: "other"}}} {
		out.Reset()
		var r report
		if err := runChild(c, strings.NewReader(""), &out); !errors.Is(err, errPlan) {
			t.Errorf("got %v", err)
		}
		if err := json.Unmarshal(out.Bytes(), &r); err != nil || r.Error == "" {
			t.Errorf("%v, %+v", err, r)
		}
	}
}

// A child ends with whoever has started it.
func TestOrphan(t *testing.T) {
	var log bytes.Buffer
	p := plan{Engine: "embedded", InFlight: 1, Processes: 1, Managers: 1, Regions: 1, Pages: 1, PageBytes: 64}
	x, ready, err := spawn("prefill", childConfig{Role: rolePrefill, Plan: p}, &shared{w: &log})
	if err != nil {
		t.Fatal(err)
	}
	defer x.kill()
	if ready.Addr == "" {
		t.Errorf("%+v", ready)
	}
	if err := x.in.Close(); err != nil {
		t.Error(err)
	}
	if err := x.wait(); !errors.Is(err, errChild) || !strings.Contains(log.String(), "is gone") {
		t.Errorf("%v, said %q", err, log.String())
	}
}
