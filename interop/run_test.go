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

// pair is a setup in operation.
type pair struct {
	setup   *setup
	decodes release
	port    int // of the bootstrap server
	prefill []*process
	decode  []*process
	used    used
}

// used are the decode's slots that rooms have named so far: nothing else may be written.
type used struct {
	kv  [][]int32 // by decode rank
	aux []int32
}

// startPair starts all ranks. The prefill is this library's, except for the ranks that the
// setup says otherwise of, or it is SGLang's like the decode.
func startPair(t *testing.T, env environment, s *setup, prefillToo bool, r release) *pair {
	t.Helper()
	p := &pair{setup: s, decodes: r, port: freePorts.take(t), used: used{kv: make([][]int32, len(s.decode))}}
	dir := t.TempDir()
	for i, c := range s.decode {
		c.Role, c.BootstrapPort = "decode", p.port
		p.decode = append(p.decode, startRank(t, env, &r, dir, fmt.Sprintf("decode%d", i), c))
	}
	for i, c := range s.prefill {
		c.Role, c.BootstrapPort, c.ServeBootstrap = "prefill", p.port, i == 0
		c.FillSeed = fmt.Sprintf("p%d", i)
		var impl *release
		if prefillToo || slices.Contains(s.sglang, i) {
			impl = &r
		}
		p.prefill = append(p.prefill, startRank(t, env, impl, dir, fmt.Sprintf("prefill%d", i), c))
		if i == 0 {
			p.prefill[0].waitReady(t) // it serves the others
		}
	}
	for _, x := range p.ranks()[1:] {
		x.waitReady(t)
	}
	return p
}

// beside starts a decode more, with one rank, at the prefill of a pair.
func (p *pair) beside(t *testing.T, env environment, r release, name string) *pair {
	t.Helper()
	q := &pair{setup: p.setup, decodes: r, port: p.port, prefill: p.prefill, used: used{kv: make([][]int32, 1)}}
	c := p.setup.decode[0]
	c.Role, c.BootstrapPort = "decode", p.port
	q.decode = append(q.decode, startRank(t, env, &r, t.TempDir(), name, c))
	q.decode[0].waitReady(t)
	return q
}

func (p *pair) ranks() []*process { return slices.Concat(p.prefill, p.decode) }

// run puts the pair through a case.
func (p *pair) run(t *testing.T, c *testCase) result {
	t.Helper()
	for _, x := range p.prefill {
		if x.native && c.foreign != nil {
			sendForeign(t, x, c.foreign)
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
	got := result{Prefill: p.collect(t, ctx, c, p.prefill), Decode: p.collect(t, ctx, c, p.decode)}
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
		p.used.aux = append(p.used.aux, int32(r.toAux))
		for i, x := range p.decode {
			p.used.kv[i] = append(p.used.kv[i], r.pagesAt(i)...)
			x.tell(t, map[string]any{"cmd": "receive", "room": r.number, "bootstrap_addr": fmt.Sprintf("127.0.0.1:%d", p.port),
				"kv_indices": orEmpty(r.pagesAt(i)), "aux_index": r.toAux, "decode_prefix_len": r.prefix, "timeout": patience["decode"]})
		}
	}
	if r.send != nil {
		for _, x := range p.prefill {
			x.tell(t, map[string]any{"cmd": "send", "room": r.number, "chunks": r.send, "aux_index": r.aux,
				"gap_s": r.gap.Seconds(), "timeout": patience["prefill"]})
		}
	}
}

// orEmpty makes JSON write an empty list, not null.
func orEmpty(list []int32) []int32 {
	if list == nil {
		return []int32{}
	}
	return list
}

// abort has a side give the room up, once the two have met.
func (p *pair) abort(t *testing.T, ctx context.Context, r *room) {
	t.Helper()
	if r.abort == "" {
		return
	}
	for _, x := range p.prefill {
		if _, err := x.takeOf(ctx, "bootstrapped", &r.number); err != nil {
			t.Fatal(err)
		}
	}
	ranks := p.prefill
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
			e, err := x.takeOf(ctx, "done", &r.number)
			if err != nil {
				t.Fatal(err)
			}
			all[i] = append(all[i], outcome{Status: e.Status, KV: e.KVSHA256, Aux: e.AuxSHA256, State: e.StateSHA256, message: e.Message})
			if !isDecode && r.prefix != 0 {
				checkPrefix(t, ctx, x, r)
			}
		}
	}
	return all
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
		e := x.ask(t, "stray", map[string]any{"cmd": "stray", "kv_indices": orEmpty(p.used.kv[i]), "aux_indices": orEmpty(p.used.aux)})
		if e.Bytes != 0 {
			t.Errorf("%s: %d bytes were written outside of the pages and slots of all rooms", x.name, e.Bytes)
		}
	}
}

// stop ends all ranks. This library's must not have kept anything of the rooms.
func (p *pair) stop(t *testing.T) {
	t.Helper()
	for _, x := range p.prefill {
		if !x.native {
			continue
		}
		e := x.ask(t, "rooms", map[string]any{"cmd": "rooms"})
		if len(e.RequestStatus) != 0 || len(e.Failures) != 0 || e.Held != 0 {
			t.Errorf("%s has kept rooms: %d, %v, %v", x.name, e.Held, e.RequestStatus, e.Failures)
		}
	}
	for _, x := range p.ranks() {
		x.exit(t)
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
