package main

import (
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/nixl"
)

func testConfig(t testing.TB, more ...string) config {
	t.Helper()
	c, err := parseFlags(small(nixl.Embedded, more...))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func testPlan(t testing.TB, more ...string) *plan {
	t.Helper()
	c := testConfig(t, more...)
	return newPlan(&c)
}

func TestPlan(t *testing.T) {
	p := testPlan(t)
	if !reflect.DeepEqual(p, testPlan(t, "-in-flight", "1", "-chunk", "5", "-timeout", "1s")) {
		t.Error("flags that are one side's alone give another plan")
	}
	for _, flag := range []string{"-seed=2", "-layers=3", "-pages=4", "-requests=5", "-rounds=2", "-pool=50"} {
		if other := testPlan(t, flag); slices.ContainsFunc(p.rooms, func(r nixlkv.Room) bool { return slices.Contains(other.rooms, r) }) {
			t.Errorf("%s gives the same rooms", flag)
		}
	}
	for round := range p.rounds {
		rs := p.round(round)
		sources, targets, slots := map[int]bool{}, map[int]bool{}, [][]int32{}
		for i, r := range rs {
			if r.room != p.rooms[round*len(rs)+i] || r.token < 0 || r.token >= vocabulary {
				t.Errorf("round %d, request %d: %+v", round, i, r)
			}
			sources[r.source], targets[r.target] = true, true
			slots = append(slots, r.sources)
		}
		if len(rs) != 6 || len(sources) != 6 || len(targets) != 6 {
			t.Errorf("round %d: %d requests, in %d and %d slots", round, len(rs), len(sources), len(targets))
		}
		if err := checkPages(slots, p.pool, p.pages); err != nil {
			t.Errorf("round %d: %v", round, err)
		}
		if got := slices.Concat(p.batches(round)...); !reflect.DeepEqual(got, rs) {
			t.Errorf("the batches of round %d are not its requests", round)
		}
	}
	if b := p.batches(0); len(b) != 2 || len(b[0]) != 1 {
		t.Errorf("the first request is not alone: %d batches", len(b))
	}
	if p.bytes() != 6*5*4*32<<10 || p.untouched() != 8*4*32<<10 {
		t.Errorf("%d bytes, %d untouched", p.bytes(), p.untouched())
	}
}

// The decode that a prefill starts has the same plan.
func TestDecodeArgs(t *testing.T) {
	for _, more := range []string{"", "-seed 7 -pool 60 -v -timeout 3s", "-layers=1 -rounds 1 -v=false"} {
		c := testConfig(t, strings.Fields(more)...)
		d, err := parseFlags(c.decodeArgs("127.0.0.1:7000", nixl.Native))
		if err != nil {
			t.Fatal(err)
		}
		if d.role != roleDecode || d.bootstrap != "127.0.0.1:7000" || d.kind != nixl.Native || d.verbose != c.verbose || d.timeout != c.timeout {
			t.Errorf("%q: %+v", more, d)
		}
		if !reflect.DeepEqual(newPlan(&d), newPlan(&c)) {
			t.Errorf("%q: another plan", more)
		}
	}
}
