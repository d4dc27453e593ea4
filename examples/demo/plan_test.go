package main

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"

	"github.com/nixlkv/nixlkv/nixl"
)

func testPlan(t testing.TB, more ...string) plan {
	t.Helper()
	c, err := parseFlags(small(nixl.Embedded, more...))
	if err != nil {
		t.Fatal(err)
	}
	return makePlan(c, nixl.Embedded, "prefill")
}

func TestPlan(t *testing.T) {
	p := testPlan(t)
	if err := p.check(); err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(p, testPlan(t)) {
		t.Error("the same flags give another plan")
	}
	if reflect.DeepEqual(p.Sources, testPlan(t, "-seed", "2").Sources) {
		t.Error("another seed gives the same pages")
	}
	for round := range p.Rounds {
		if n := len(p.rooms(round)); n != p.requests() || n != len(p.sources(round)) {
			t.Errorf("round %d has %d rooms and %d lists of pages", round, n, len(p.sources(round)))
		}
	}
	for name, spoil := range map[string]func(*plan){
		"no engine":         func(p *plan) { p.Engine = "" },
		"engine auto":       func(p *plan) { p.Engine = "auto" },
		"no requests":       func(p *plan) { p.Sources, p.Rooms = nil, nil },
		"no layers":         func(p *plan) { p.Layers = 0 },
		"too many layers":   func(p *plan) { p.Layers = maxLayers + 1 },
		"no rounds":         func(p *plan) { p.Rounds = 0 },
		"negative rounds":   func(p *plan) { p.Rounds = -1 },
		"too many rounds":   func(p *plan) { p.Rounds = maxRounds + 1 },
		"a room too few":    func(p *plan) { p.Rooms = p.Rooms[1:] },
		"room zero":         func(p *plan) { p.Rooms[3] = 0 },
		"room twice":        func(p *plan) { p.Rooms[3] = p.Rooms[0] },
		"room of 64 bits":   func(p *plan) { p.Rooms[3] = 1 << 63 },
		"no pages":          func(p *plan) { p.Pages = 0 },
		"negative pages":    func(p *plan) { p.Pages = -5 },
		"a page less":       func(p *plan) { p.Sources[2] = p.Sources[2][1:] },
		"page past the end": func(p *plan) { p.Sources[2][0] = int32(p.Pool) },
		"page twice":        func(p *plan) { p.Sources[2][0] = p.Sources[1][0] },
		"no pool":           func(p *plan) { p.Pool = 0 },
		"pool too small":    func(p *plan) { p.Pool = p.requests() * p.Pages },
		"pool too large":    func(p *plan) { p.Pool = maxPool + 1 },
		"too many descriptors": func(p *plan) {
			p.Layers, p.Pool = maxLayers, maxPool
		},
	} {
		p := testPlan(t)
		spoil(&p)
		if err := p.check(); err == nil {
			t.Errorf("%s: passes", name)
		}
	}
}

func TestReady(t *testing.T) {
	p := testPlan(t)
	good := func() *ready {
		return &ready{
			Metadata: []byte("m"),
			Regions:  make([]uint64, p.shape().regions()),
			Targets:  pickPages(random(1, streamDecode), p.Pool, p.requests(), p.Pages),
		}
	}
	if err := good().check(&p); err != nil {
		t.Fatal(err)
	}
	for name, spoil := range map[string]func(*ready){
		"no metadata":    func(r *ready) { r.Metadata = nil },
		"a region less":  func(r *ready) { r.Regions = r.Regions[1:] },
		"a request less": func(r *ready) { r.Targets = r.Targets[1:] },
		"a page less":    func(r *ready) { r.Targets[1] = r.Targets[1][1:] },
		"page zero":      func(r *ready) { r.Targets[1][1] = 0 },
		"page twice":     func(r *ready) { r.Targets[1][1] = r.Targets[0][0] },
	} {
		r := good()
		spoil(r)
		if err := r.check(&p); err == nil {
			t.Errorf("%s: passes", name)
		}
	}
}

// What one side sends the other one reads.
func TestMessages(t *testing.T) {
	p := testPlan(t)
	for _, m := range []message{
		{Plan: &p},
		{Ready: &ready{Metadata: []byte{0, 1, 255}, Regions: []uint64{1 << 63}, Targets: [][]int32{{1}, {2}}}},
		{Report: &report{Written: 1, Zero: 2}},
		{Bye: true},
		{Failed: "line 1\nline 2"},
	} {
		line, err := json.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := parseMessage(line); err != nil || !reflect.DeepEqual(got, m) {
			t.Errorf("%s becomes %+v, %v", line, got, err)
		}
	}
	for _, bad := range []string{"", "{}", "null", "[]", "x", `{"bye":true,"failed":"x"}`, `{"bye":true}{}`, `{"hello":1}`, `{"bye":"yes"}`, `{"plan":{"pool":1.5}}`} {
		if m, err := parseMessage([]byte(bad)); err == nil {
			t.Errorf("%s is read as %+v", bad, m)
		}
	}
}

func FuzzParseMessage(f *testing.F) {
	for _, s := range []string{`{"bye":true}`, `{"failed":"x"}`, `{"report":{"written":1,"zero":2}}`,
		`{"plan":{"engine":"native","agent":"a","layers":1,"pool":3,"pages":1,"rounds":2,"seed":1,"rooms":[1,2],"sources":[[1]]}}`,
		`{"ready":{"metadata":"AAEC","regions":[4096,8192],"targets":[[2]]}}`, "{}"} {
		f.Add([]byte(s))
	}
	small := testPlan(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := parseMessage(b)
		if err != nil {
			return
		}
		if m.Ready != nil {
			_ = m.Ready.check(&small) // must not panic
		}
		if m.Plan == nil || m.Plan.check() != nil {
			return
		}
		// What passes can be carried out.
		for round := range m.Plan.Rounds {
			if err := checkPages(m.Plan.sources(round), m.Plan.Pool, m.Plan.Pages); err != nil {
				t.Fatal(err)
			}
			m.Plan.rooms(round)
		}
		if m.Plan.bytes() <= 0 || strings.TrimSpace(m.Plan.Engine) == "" {
			t.Errorf("plan %+v passes", m.Plan)
		}
	})
}
