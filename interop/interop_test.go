package interop

import (
	"fmt"
	"runtime"
	"slices"
	"testing"
)

func allSetups() []*setup { return append(oneRankSetups(), ranksSetups()...) }

// atOnce bounds the setups in operation: each has at least two processes.
var atOnce = make(chan struct{}, max(2, runtime.NumCPU()/2))

// inTurn runs a subtest beside others, as many as the machine can take.
func inTurn(t *testing.T, name string, f func(t *testing.T)) {
	t.Run(name, func(t *testing.T) {
		t.Parallel()
		atOnce <- struct{}{}
		defer func() { <-atOnce }()
		f(t)
	})
}

// TestGoPrefill: this library's prefill, alone and among SGLang's ranks, serves the decodes of
// every release.
func TestGoPrefill(t *testing.T) {
	env := need(t)
	for _, r := range env.releases {
		for _, s := range allSetups() {
			inTurn(t, fmt.Sprintf("%v/%s", r, s.name), func(t *testing.T) { testGoPrefill(t, env, s, r) })
		}
	}
}

func testGoPrefill(t *testing.T, env environment, s *setup, r release) {
	p := startPair(t, env, s, false, r)
	for i := range s.cases {
		c := &s.cases[i]
		ok := t.Run(c.name, func(t *testing.T) { p.judge(t, c, p.run(t, c)) })
		if !ok && p.broken() {
			return
		}
	}
	p.stop(t)
}

// judge fails the test for all that is wrong with a result.
func (p *pair) judge(t *testing.T, c *testCase, got result) {
	t.Helper()
	var wrong []string
	if c.want != nil {
		wrong = c.want(p.decodes).against(got)
	} else {
		right, err := rightAnswer(release{minor: max(p.decodes.minor, p.setup.since)}, p.setup.answers(), c.name)
		if err != nil {
			t.Fatal(err)
		}
		wrong = got.against(right)
	}
	for _, w := range wrong {
		t.Error(w)
	}
}

// broken says whether a rank has ended.
func (p *pair) broken() bool {
	return slices.ContainsFunc(p.ranks(), func(x *process) bool {
		select {
		case <-x.exited:
			return true
		default:
			return false
		}
	})
}

// TestSGLangPairs: SGLang's prefill and decode of one release still give the answers in
// testdata/golden, on this machine and through this harness. All setups take a while, so
// without -update the oldest and the newest release go through one.
func TestSGLangPairs(t *testing.T) {
	env := need(t)
	for i, r := range env.releases {
		for _, s := range allSetups() {
			if s.golden != "" || r.minor < s.since {
				continue // has no answers of its own
			}
			if !*update && (s.name != "plain" || i != 0 && i != len(env.releases)-1) {
				continue
			}
			inTurn(t, fmt.Sprintf("%v/%s", r, s.name), func(t *testing.T) { testSGLangPair(t, env, s, r) })
		}
	}
}

func testSGLangPair(t *testing.T, env environment, s *setup, r release) {
	p := startPair(t, env, s, true, r)
	answers := map[string]result{}
	for i := range s.cases {
		c := &s.cases[i]
		if c.want != nil {
			continue
		}
		t.Run(c.name, func(t *testing.T) {
			got := p.run(t, c)
			for _, d := range append(allSucceeded("prefill", got.Prefill), allSucceeded("decode", got.Decode)...) {
				t.Error(d)
			}
			answers[c.name] = got
			if !*update {
				p.judge(t, c, got)
			}
		})
	}
	p.stop(t)
	if *update && !t.Failed() {
		saveAnswers(t, r, s.name, answers)
	}
}

// allSucceeded: an answer that is no success would be no use.
func allSucceeded(side string, got [][]outcome) (diff []string) {
	for rank, rooms := range got {
		for i, o := range rooms {
			if o.Status != "Success" {
				diff = append(diff, fmt.Sprintf("%s rank %d, room %d of the case: %s %s", side, rank, i, o.Status, o.message))
			}
		}
	}
	return diff
}
