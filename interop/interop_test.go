package interop

import (
	"fmt"
	"reflect"
	"runtime"
	"slices"
	"testing"

	"github.com/nixlkv/nixlkv/nixl"
)

// allSetups are those of the matrix. Their prefills have two UCX threads and not eight: each
// takes long to start. All other tests leave it at eight.
func allSetups() []*setup {
	all := slices.Concat(oneRankSetups(), ranksSetups(), headsSetups(), hostSetups(), shardSetups(), dcpSetups(),
		stateSetups(), stateSliceSetups(), stateStageSetups())
	for _, s := range all {
		for i, c := range s.prefill {
			s.prefill[i] = c.env(envNIXLParams, `{"num_threads": "2"}`)
		}
	}
	return all
}

// atOnce bounds the setups in operation: each has at least two processes, which mostly wait for
// each other.
var atOnce = make(chan struct{}, 2*runtime.NumCPU())

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
		c := cast{prefill: golang(nixl.Native), beside: sglang(r), decode: sglang(r)}
		for _, f := range families(allSetups(), func(*setup) bool { return true }) {
			inTurn(t, fmt.Sprintf("%v/%s", r, f[0].name), func(t *testing.T) { runFamily(t, env, f, c, anyCase) })
		}
	}
}

// TestGoDecode: this library's decode is served by the prefills of every release.
func TestGoDecode(t *testing.T) {
	env := need(t)
	for _, r := range env.releases {
		c := cast{prefill: sglang(r), decode: golang(nixl.Native)}
		for _, f := range families(allSetups(), func(s *setup) bool { return s.sglang == nil && !s.prefillOnly }) {
			inTurn(t, fmt.Sprintf("%v/%s", r, f[0].name), func(t *testing.T) { runFamily(t, env, f, c, (*testCase).isSGLangs) })
		}
	}
}

// TestGoPair: this library's prefill and decode do with each other what they do with SGLang's, on
// both engines.
func TestGoPair(t *testing.T) {
	for _, engine := range []nixl.Kind{nixl.Native, nixl.Embedded} {
		t.Run(engine.String(), func(t *testing.T) {
			env := needEngine(t, engine)
			c := cast{prefill: golang(engine), decode: golang(engine)}
			for _, f := range families(allSetups(), func(s *setup) bool { return s.sglang == nil }) {
				inTurn(t, f[0].name, func(t *testing.T) { runFamily(t, env, f, c, anyCase) })
			}
		})
	}
}

// TestMixedPrefill: prefills that have ranks of this library's and of SGLang's serve this
// library's decode. All ranks of one have to tell of success in the same way: those of releases up
// to 0.5.22 do it by notifications, this library's and later ones by KV_STATUS.
func TestMixedPrefill(t *testing.T) {
	env := need(t)
	for _, r := range env.only(23) {
		c := cast{prefill: golang(nixl.Native), beside: sglang(r), decode: golang(nixl.Native)}
		for _, f := range families(allSetups(), func(s *setup) bool { return s.sglang != nil }) {
			inTurn(t, fmt.Sprintf("%v/%s", r, f[0].name), func(t *testing.T) { runFamily(t, env, f, c, (*testCase).isSGLangs) })
		}
	}
}

// cast says whose code runs: a prefill and a decode, and beside are the prefill's ranks that a
// setup says are SGLang's.
type cast struct{ prefill, beside, decode impl }

// families groups those setups that are wanted and have the same prefill: it serves one decode of
// them after another.
func families(all []*setup, wanted func(*setup) bool) (grouped [][]*setup) {
	for _, s := range all {
		if !wanted(s) {
			continue
		}
		i := slices.IndexFunc(grouped, func(f []*setup) bool {
			return reflect.DeepEqual(f[0].prefill, s.prefill) && slices.Equal(f[0].sglang, s.sglang)
		})
		if i < 0 {
			grouped = append(grouped, nil)
			i = len(grouped) - 1
		}
		grouped[i] = append(grouped[i], s)
	}
	return grouped
}

// runFamily runs setups that have the same prefill. After a failure it is started anew: the fault
// may be its own.
func runFamily(t *testing.T, env environment, family []*setup, c cast, wanted func(*testCase) bool) {
	var g *group
	for _, s := range family {
		if why := s.obstacle(c.prefill, c.decode); why != "" {
			t.Run(s.name, func(t *testing.T) { t.Skipf("skip: %v to %v: %s", c.prefill, c.decode, why) })
			continue
		}
		if g == nil {
			g = startGroup(t, env, s, c.prefill, c.beside, freePorts.take(t))
		}
		ok := t.Run(s.name, func(t *testing.T) {
			p := g.startDecode(t, s, c.decode)
			if p.runCases(t, wanted) {
				p.stopDecode(t)
			}
		})
		if !ok {
			g = nil
		}
	}
	if g != nil {
		g.stop(t)
	}
}

func anyCase(*testCase) bool { return true }

// runCases runs the cases that are wanted, and says whether all ranks are there at the end.
func (p *pair) runCases(t *testing.T, wanted func(*testCase) bool) bool {
	t.Helper()
	n := 0
	for i := range p.setup.cases {
		c := &p.setup.cases[i]
		if !wanted(c) {
			continue
		}
		n++
		t.Run(c.name, func(t *testing.T) { p.judge(t, c, p.run(t, c)) })
		if p.broken() {
			t.Error("a rank has ended")
			return false
		}
	}
	if n == 0 {
		t.Error("none of the cases is wanted")
	}
	return true
}

// judge fails the test for all that is wrong with a result.
func (p *pair) judge(t *testing.T, c *testCase, got result) {
	t.Helper()
	var wrong []string
	if c.want != nil {
		wrong = c.want(p.decodes).against(got)
	} else {
		right, err := rightAnswer(p.setup.nearest(p.golden), p.setup.answers(), c.name)
		if err != nil {
			t.Fatal(err)
		}
		wrong = got.against(p.setup.right(right))
	}
	for _, w := range wrong {
		t.Error(w)
	}
}

// TestSGLangPairs: SGLang's prefill and decode of one release still give the answers in
// testdata/golden, on this machine and through this harness. All setups take a while, so
// without -update the oldest and the newest release go through one.
func TestSGLangPairs(t *testing.T) {
	env := need(t)
	for i, r := range env.releases {
		for _, s := range allSetups() {
			if !s.own() || !s.of(r) {
				continue
			}
			if !*update && (s.name != "plain" || i != 0 && i != len(env.releases)-1) {
				continue
			}
			inTurn(t, fmt.Sprintf("%v/%s", r, s.name), func(t *testing.T) { testSGLangPair(t, env, s, r) })
		}
	}
}

func testSGLangPair(t *testing.T, env environment, s *setup, r release) {
	p := startPair(t, env, s, sglang(r), sglang(r))
	answers := map[string]result{}
	for i := range s.cases {
		c := &s.cases[i]
		if !c.isSGLangs() {
			continue
		}
		t.Run(c.name, func(t *testing.T) {
			got := p.run(t, c)
			for _, d := range append(allSucceeded("prefill", got.Prefill), allSucceeded("decode", got.Decode)...) {
				t.Error(d)
			}
			p.look(t, c, got)
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

// look replaces what a decode has found at the end of its rooms by what lies there when the prefill
// has ended them too. SGLang's decode up to 0.5.22 takes the first state component of a source for
// all of them, and may find the others still on their way.
func (p *pair) look(t *testing.T, c *testCase, got result) {
	t.Helper()
	for i, x := range p.decode {
		for k := range c.rooms {
			r, o := &c.rooms[k], &got.Decode[i][k]
			command := map[string]any{"cmd": "expect", "kv_indices": orEmpty(r.pagesAt(i)), "aux_index": r.toAux}
			if r.toState != nil {
				command["state_indices"] = r.toState
			}
			e := x.ask(t, "expect", command)
			o.KV, o.Aux, o.State = e.KVSHA256, e.AuxSHA256, e.StateSHA256
		}
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
