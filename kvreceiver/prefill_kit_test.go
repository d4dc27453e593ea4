package kvreceiver

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/bootstrap"
	"github.com/nixlkv/nixlkv/internal/control"
	"github.com/nixlkv/nixlkv/internal/wire"
	"github.com/nixlkv/nixlkv/nixl"
)

// A prefill for tests: a bootstrap server, and ranks that each have a control socket and a
// NIXL agent and do what the test says. It is no prefill of this library; the real ones are
// in the interop tests.

// patience bounds every wait of a test for something that has to happen.
const patience = 30 * time.Second

// site is one prefill.
type site struct {
	t      *testing.T
	engine *nixl.Engine
	mem    *kitMemory // of all ranks: each has its share of it
	routes *bootstrap.Server
	http   *http.Server
	addr   string
	ranks  []*rank

	mu     sync.Mutex
	asked  map[string]int                                    // requests by method and path
	refuse func(w http.ResponseWriter, r *http.Request) bool // answers instead of the server, if it says so
	heard  chan struct{}                                     // closed and replaced with every request
}

// shape is how many ranks a prefill has, and what else they register.
type shape struct {
	tp, cp, pp, dp int
	later          int // ranks that do not register with the others
	info           func(*bootstrap.RankInfo)
}

// newSite starts a prefill, which ends with the test.
func newSite(t *testing.T, e *nixl.Engine, mem *kitMemory, s shape) *site {
	t.Helper()
	p := &site{
		t: t, engine: e, mem: mem, routes: bootstrap.NewServer(),
		asked: map[string]int{}, heard: make(chan struct{}),
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	ok(t, err)
	p.addr = l.Addr().String()
	p.serve(l)
	for dp := range max(s.dp, 1) {
		for cp := range max(s.cp, 1) {
			for tp := range max(s.tp, 1) {
				for pp := range max(s.pp, 1) {
					p.addRank(s, dp, cp, tp, pp)
				}
			}
		}
	}
	for _, r := range p.ranks[:len(p.ranks)-s.later] {
		r.register()
	}
	return p
}

// serve answers at a listener until the test ends.
func (p *site) serve(l net.Listener) {
	srv := &http.Server{Handler: p}
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = srv.Serve(l)
	}()
	p.http = srv
	p.t.Cleanup(func() {
		_ = srv.Close()
		<-served
	})
}

// restart makes the bootstrap server answer at its address again.
func (p *site) restart() {
	p.t.Helper()
	l, err := net.Listen("tcp", p.addr)
	ok(p.t, err)
	p.serve(l)
}

func (p *site) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	p.mu.Lock()
	p.asked[r.Method+" "+r.URL.Path]++
	close(p.heard)
	p.heard = make(chan struct{})
	refuse := p.refuse
	p.mu.Unlock()
	if refuse == nil || !refuse(w, r) {
		p.routes.ServeHTTP(w, r)
	}
}

// refusing answers requests to a path with a status and a body; 0 takes it back.
func (p *site) refusing(path string, status int, body string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.refuse = nil
	if status != 0 {
		p.refuse = func(w http.ResponseWriter, r *http.Request) bool {
			if r.URL.Path == path {
				w.WriteHeader(status)
				_, _ = w.Write([]byte(body))
			}
			return r.URL.Path == path
		}
	}
}

func (p *site) count(request string) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.asked[request]
}

// untilAsked waits until a request has come so many times.
func (p *site) untilAsked(request string, n int) {
	p.t.Helper()
	for end := time.After(patience); ; {
		p.mu.Lock()
		have, heard := p.asked[request], p.heard
		p.mu.Unlock()
		if have >= n {
			return
		}
		select {
		case <-heard:
		case <-end:
			p.t.Fatalf("%s: asked %d times, want %d", request, have, n)
		}
	}
}

// rank is one rank of a prefill.
type rank struct {
	t      *testing.T
	site   *site
	info   bootstrap.RankInfo
	number int // in KV_STATUS and ABORT_ACK
	source int // in notifications
	agent  *nixl.Agent
	ctl    *control.Control

	// What of a page, and which regions, the rank has.
	lo, hi      int
	first, last int

	mu      sync.Mutex
	inbox   []wire.Message // in the order in which they came
	peers   map[string]*peer
	changed chan struct{} // closed and replaced with every message
}

// peer is a decode as a rank knows it.
type peer struct {
	geometry *wire.Registration
	remote   *nixl.Remote
}

var agentNumber atomic.Int64

func (p *site) addRank(s shape, dp, cp, tp, pp int) {
	p.t.Helper()
	r := &rank{
		t: p.t, site: p, lo: 0, hi: kitPage, first: 0, last: kitRegions,
		peers: map[string]*peer{}, changed: make(chan struct{}),
	}
	r.number = wire.PrefillPosition{TPRank: tp, PPSize: max(s.pp, 1), PPRank: pp, CPSize: max(s.cp, 1), CPRank: cp}.Rank()
	r.source = wire.SourceRank(pp, max(s.dp, 1)*max(s.cp, 1)*max(s.tp, 1), (dp*max(s.cp, 1)+cp)*max(s.tp, 1)+tp)
	var err error
	r.agent, err = p.engine.NewAgent(fmt.Sprintf("prefill-%d-%d", os.Getpid(), agentNumber.Add(1)))
	ok(p.t, err)
	p.t.Cleanup(func() {
		if err := r.agent.Close(); err != nil {
			p.t.Error(err)
		}
	})
	_, err = r.agent.Register(p.mem.buffers()...)
	ok(p.t, err)
	r.info = bootstrap.RankInfo{
		AttnTPSize: max(s.tp, 1), AttnTPRank: tp, AttnCPSize: max(s.cp, 1), AttnCPRank: cp, AttnDPSize: max(s.dp, 1), AttnDPRank: dp,
		SystemDPSize: 1, PPSize: max(s.pp, 1), PPRank: pp, RankIP: "127.0.0.1", PageSize: kitPageSize,
	}
	if s.info != nil {
		s.info(&r.info)
	}
	r.listen(0)
	p.ranks = append(p.ranks, r)
	p.t.Cleanup(r.die)
}

// listen opens the rank's control socket at a port, 0 for any.
func (r *rank) listen(port int) {
	r.t.Helper()
	var err error
	r.ctl, err = control.New(control.Config{Handler: r.receive, Port: port})
	ok(r.t, err)
	r.info.RankPort = r.ctl.Port()
}

// die closes the control socket, as the end of the process would.
func (r *rank) die() {
	if r.ctl == nil {
		return
	}
	if err := r.ctl.Close(context.Background()); err != nil {
		r.t.Error(err)
	}
	r.ctl = nil
}

// register tells the bootstrap server of the rank.
func (r *rank) register() {
	r.t.Helper()
	c, err := bootstrap.NewClient(r.site.addr)
	ok(r.t, err)
	defer c.Close()
	ok(r.t, c.Register(within(r.t), r.info))
}

func (r *rank) receive(frames [][]byte) {
	msg, err := wire.ParseAtPrefill(frames, wire.Limits{})
	if err != nil {
		r.t.Errorf("the decode sent %q: %v", frames, err)
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.inbox = append(r.inbox, msg)
	close(r.changed)
	r.changed = make(chan struct{})
}

// take waits for a message and takes it out of the rank's inbox.
func take[M wire.Message](r *rank, what string, match func(M) bool) M {
	r.t.Helper()
	for end := time.After(patience); ; {
		r.mu.Lock()
		for i, m := range r.inbox {
			if m, is := m.(M); is && match(m) {
				r.inbox = slices.Delete(r.inbox, i, i+1)
				r.mu.Unlock()
				return m
			}
		}
		inbox, changed := slices.Clone(r.inbox), r.changed
		r.mu.Unlock()
		select {
		case <-changed:
		case <-end:
			r.t.Fatalf("rank %d waits for %s and has %+v", r.number, what, inbox)
		}
	}
}

// has counts messages that came and were not taken.
func has[M wire.Message](r *rank, match func(M) bool) (n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, m := range r.inbox {
		if m, is := m.(M); is && match(m) {
			n++
		}
	}
	return n
}

// metadata waits for a room's metadata.
func (r *rank) metadata(id nixlkv.Room) *wire.Metadata {
	r.t.Helper()
	return take(r, fmt.Sprintf("the metadata of room %d", id), func(m *wire.Metadata) bool { return m.Room == id })
}

// aborted waits for a room's ABORT.
func (r *rank) aborted(id nixlkv.Room) *wire.Abort {
	r.t.Helper()
	a := take(r, fmt.Sprintf("the ABORT of room %d", id), func(m *wire.Abort) bool { return m.Room == id })
	if a.HasGeneration && (a.Generation == 0 || a.From.IsZero()) {
		r.t.Errorf("ABORT asks for an answer, and does not say where: %+v", a)
	}
	return a
}

// unanswered waits for an abort that asks for no answer: of a room whose pages were not told.
func (r *rank) unanswered(id nixlkv.Room) {
	r.t.Helper()
	a := take(r, fmt.Sprintf("the ABORT of room %d", id), func(m *wire.Abort) bool { return m.Room == id })
	if a.HasGeneration || !a.From.IsZero() {
		r.t.Errorf("ABORT asks for an answer: %+v", a)
	}
}

// send sends a message to a decode.
func (r *rank) send(to wire.Endpoint, frames [][]byte, err error) {
	r.t.Helper()
	ok(r.t, err)
	at, err := control.NewEndpoint(to.IP, to.Port)
	ok(r.t, err)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if _, err := r.ctl.Send(ctx, control.Message{To: at, Frames: frames}); err != nil {
		r.t.Fatal(err)
	}
}

// tell sends a KV_STATUS.
func (r *rank) tell(to wire.Endpoint, id nixlkv.Room, status wire.KVPoll, reason string) {
	r.t.Helper()
	r.tellAs(r.number, to, id, status, reason)
}

// tellAs sends a KV_STATUS that names another rank.
func (r *rank) tellAs(number int, to wire.Endpoint, id nixlkv.Room, status wire.KVPoll, reason string) {
	r.t.Helper()
	frames, err := new(wire.Encoder).KVStatus(&wire.KVStatus{Room: id, Status: status, PrefillRank: number, Reason: reason})
	r.send(to, frames, err)
}

// ack answers an ABORT as a prefill of 0.5.22 does, plainAck as one of 0.5.19 to 0.5.21.
func (r *rank) ack(a *wire.Abort) {
	r.t.Helper()
	frames, err := new(wire.Encoder).AbortAck(&wire.AbortAck{Room: a.Room, PrefillRank: r.number, Generation: a.Generation, HasGeneration: true})
	r.send(a.From, frames, err)
}

func (r *rank) plainAck(a *wire.Abort) {
	r.t.Helper()
	frames, err := new(wire.Encoder).AbortAck(&wire.AbortAck{Room: a.Room, PrefillRank: r.number})
	r.send(a.From, frames, err)
}
