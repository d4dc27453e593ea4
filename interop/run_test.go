package interop

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/nixlkv/nixlkv/internal/control"
)

const (
	// patience is how long a room may take; on a loaded machine the first contact takes long.
	patience = 30 * time.Second
	// shortPatience is for a rank that nothing will ever be told.
	shortPatience = 2 * time.Second
	// reportPatience is how much longer than its patience a rank may take to report.
	reportPatience = 30 * time.Second
)

// pair is a setup in operation: a prefill and the ranks of one decode.
type pair struct {
	setup   *setup
	prefill *group
	decode  []*process
	decodes release // as which the decode behaves
	golden  release // whose own pairs have the right answers
	used    *used
}

// used are the decode's slots that rooms have named so far: nothing else may be written.
type used struct {
	kv    [][]int32 // by decode rank
	aux   []int32
	state [][]int32 // by component
}

// startPair starts all ranks of a setup.
func startPair(t *testing.T, env environment, s *setup, prefill, decode impl) *pair {
	t.Helper()
	g := launchGroup(t, env, s, prefill, decode, freePorts.take(t))
	p := g.launchDecode(t, s, decode) // it needs no prefill to start
	g.complete(t)
	p.waitReady(t)
	return p
}

// launchDecode launches a decode for a prefill.
func (g *group) launchDecode(t *testing.T, s *setup, by impl) *pair {
	t.Helper()
	p := &pair{setup: s, prefill: g, decodes: by.standsFor(), golden: g.by.standsFor(),
		used: &used{kv: make([][]int32, len(s.decode))}}
	if by.sglang != nil {
		p.golden = *by.sglang
	}
	dir := t.TempDir()
	for i, c := range s.decode {
		c.Role, c.BootstrapPort = "decode", g.port
		p.decode = append(p.decode, startRank(t, g.env, by, dir, fmt.Sprintf("decode%d", i), c))
	}
	return p
}

// startDecode starts a decode for a prefill.
func (g *group) startDecode(t *testing.T, s *setup, by impl) *pair {
	t.Helper()
	p := g.launchDecode(t, s, by)
	p.waitReady(t)
	return p
}

// at is the same decode with another prefill.
func (p *pair) at(g *group) *pair {
	q := *p
	q.prefill, q.golden = g, g.by.standsFor()
	return &q
}

// waitReady waits until the decode takes commands.
func (p *pair) waitReady(t *testing.T) {
	t.Helper()
	for _, x := range p.decode {
		x.waitReady(t)
	}
}

func (p *pair) ranks() []*process { return slices.Concat(p.prefill.ranks, p.decode) }

// broken says whether a rank has ended.
func (p *pair) broken() bool { return slices.ContainsFunc(p.ranks(), (*process).hasEnded) }

// stopDecode ends the decode, and stop the prefill too. No rank of this library's may have kept
// anything of the rooms.
func (p *pair) stopDecode(t *testing.T) {
	t.Helper()
	checkKept(t, p.decode)
	exitAll(t, p.decode...)
}

func (p *pair) stop(t *testing.T) {
	t.Helper()
	checkKept(t, p.ranks())
	exitAll(t, p.ranks()...)
}

// run puts the pair through a case.
func (p *pair) run(t *testing.T, c *testCase) result {
	t.Helper()
	for _, x := range p.prefill.ranks {
		if x.ours && c.foreign != nil {
			sendForeign(t, x, c.foreign)
		}
	}
	for _, x := range p.decode {
		if x.ours && c.foreignAtDecode != nil {
			sendForeign(t, x, c.foreignAtDecode)
		}
	}
	p.begin(t, c)
	return p.finish(t, c)
}

// begin opens the rooms of a case.
func (p *pair) begin(t *testing.T, c *testCase) {
	t.Helper()
	patience := p.patience(c)
	for i := range c.rooms {
		p.open(t, &c.rooms[i], patience)
	}
}

// finish waits for the end of the rooms.
func (p *pair) finish(t *testing.T, c *testCase) result {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience+reportPatience)
	defer cancel()
	for i := range c.rooms {
		p.abort(t, ctx, &c.rooms[i])
	}
	got := result{Prefill: p.collect(t, ctx, c, p.prefill.ranks), Decode: p.collect(t, ctx, c, p.decode)}
	p.checkStray(t)
	for _, x := range p.ranks() {
		x.forget(c)
	}
	return got
}

// patience gives the patience of prefill and decode: short where they will be told nothing.
func (p *pair) patience(c *testCase) map[string]float64 {
	m := map[string]float64{"prefill": patience.Seconds(), "decode": patience.Seconds()}
	if c.want == nil {
		return m
	}
	if w := c.want(p.decodes); w.decode == "WaitingForInput" {
		m["decode"] = shortPatience.Seconds()
	}
	return m
}

// open opens a room at all ranks of both sides.
func (p *pair) open(t *testing.T, r *room, patience map[string]float64) {
	t.Helper()
	if !r.prefillOnly {
		p.receive(t, r, patience["decode"])
	}
	if r.send != nil {
		p.send(t, r, patience["prefill"])
	}
}

// receive opens a room at the decode.
func (p *pair) receive(t *testing.T, r *room, timeout float64) {
	t.Helper()
	p.use(r)
	for i, x := range p.decode {
		command := map[string]any{"cmd": "receive", "room": r.number, "bootstrap_addr": p.prefill.addr(),
			"kv_indices": orEmpty(r.pagesAt(i)), "aux_index": r.toAux, "decode_prefix_len": r.prefix, "timeout": timeout}
		if r.toState != nil {
			command["state_indices"] = r.toState
		}
		x.tell(t, command)
	}
}

// use notes the slots of a room.
func (p *pair) use(r *room) {
	p.used.aux = append(p.used.aux, int32(r.toAux))
	for i := range p.decode {
		p.used.kv[i] = append(p.used.kv[i], r.pagesAt(i)...)
	}
	for i, slots := range r.toState {
		if i == len(p.used.state) {
			p.used.state = append(p.used.state, nil)
		}
		p.used.state[i] = append(p.used.state[i], p.setup.slots(i, slots)...)
	}
}

// send opens a room at the prefill.
func (p *pair) send(t *testing.T, r *room, timeout float64) {
	t.Helper()
	for _, x := range p.prefill.ranks {
		command := map[string]any{"cmd": "send", "room": r.number, "chunks": r.send, "aux_index": r.aux,
			"gap_s": r.gap.Seconds(), "timeout": timeout}
		if r.sendState != nil {
			command["state_indices"] = r.sendState
		}
		if r.tokens != 0 {
			command["num_kv_tokens"] = r.tokens
		}
		x.tell(t, command)
	}
}

// orEmpty makes JSON write an empty list, not null.
func orEmpty[T any](list []T) []T {
	if list == nil {
		return []T{}
	}
	return list
}

// abort has a side give the room up, once the two have met.
func (p *pair) abort(t *testing.T, ctx context.Context, r *room) {
	t.Helper()
	if r.abort == "" {
		return
	}
	for _, x := range p.prefill.ranks {
		if _, err := x.takeOf(ctx, "bootstrapped", &r.number); err != nil {
			t.Fatal(err)
		}
	}
	ranks := p.prefill.ranks
	if r.abort == "decode" {
		ranks = p.decode
	}
	for _, x := range ranks {
		x.tell(t, map[string]any{"cmd": "abort", "room": r.number})
	}
	for _, x := range ranks {
		if _, err := x.takeOf(ctx, "aborted", &r.number); err != nil {
			t.Fatal(err)
		}
	}
}

// collect waits for the end of all rooms at some ranks.
func (p *pair) collect(t *testing.T, ctx context.Context, c *testCase, ranks []*process) [][]outcome {
	t.Helper()
	all := make([][]outcome, len(ranks))
	isDecode := len(ranks) > 0 && ranks[0] == p.decode[0]
	for i, x := range ranks {
		for k := range c.rooms {
			r := &c.rooms[k]
			if isDecode && r.prefillOnly || !isDecode && r.send == nil {
				all[i] = append(all[i], outcome{})
				continue
			}
			all[i] = append(all[i], done(t, ctx, x, r.number))
			if !isDecode && r.prefix != 0 {
				checkPrefix(t, ctx, x, r)
			}
		}
	}
	return all
}

// done waits for the end of a room at a rank.
func done(t *testing.T, ctx context.Context, x *process, room uint64) outcome {
	t.Helper()
	e, err := x.takeOf(ctx, "done", &room)
	if err != nil {
		t.Fatal(err)
	}
	return outcome{Status: e.Status, KV: e.KVSHA256, Aux: e.AuxSHA256, State: e.StateSHA256, message: e.Message}
}

// checkPrefix: the prefill has learned what the decode has already.
func checkPrefix(t *testing.T, ctx context.Context, x *process, r *room) {
	t.Helper()
	e, err := x.takeOf(ctx, "bootstrapped", &r.number)
	if err != nil {
		t.Fatal(err)
	}
	if e.DecodePrefixLen != r.prefix {
		t.Errorf("%s: room %d has a prefix of %d tokens, want %d", x.name, r.number, e.DecodePrefixLen, r.prefix)
	}
}

// checkStray: nothing was written but what rooms have asked for so far.
func (p *pair) checkStray(t *testing.T) {
	t.Helper()
	for i, x := range p.decode {
		e := x.ask(t, "stray", map[string]any{"cmd": "stray", "kv_indices": orEmpty(p.used.kv[i]),
			"aux_indices": orEmpty(p.used.aux), "state_indices": orEmpty(p.used.state)})
		if e.Bytes != 0 {
			t.Errorf("%s: %d bytes were written outside of the pages and slots of all rooms", x.name, e.Bytes)
		}
	}
}

// sendForeign sends messages of text frames to a rank's control socket.
func sendForeign(t *testing.T, x *process, messages [][]string) {
	t.Helper()
	c, err := control.New(control.Config{Handler: func([][]byte) {}})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), exitPatience)
	defer cancel()
	defer func() {
		if err := c.Close(ctx); err != nil {
			t.Error(err)
		}
	}()
	to, err := control.NewEndpoint(x.ready.LocalIP, x.ready.RankPort)
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range messages {
		frames := make([][]byte, len(m))
		for i := range m {
			frames[i] = []byte(m[i])
		}
		if _, err := c.Send(ctx, control.Message{To: to, Frames: frames}); err != nil {
			t.Fatal(err)
		}
	}
}
