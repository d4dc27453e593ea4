package kvsender

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/internal/embedded"
	"github.com/nixlkv/nixlkv/internal/engine"
	"github.com/nixlkv/nixlkv/nixl"
	"github.com/nixlkv/nixlkv/registry"
)

// silencing is an engine whose reads of some peers settle only when these are let go: what a
// peer that is stopped looks like.
type silencing struct {
	engine.Engine
	mu     sync.Mutex
	silent map[string]bool // by agent
	reads  map[string]int  // posted while silent
}

func newSilencing() *silencing {
	return &silencing{Engine: embedded.New(), silent: map[string]bool{}, reads: map[string]int{}}
}

func (s *silencing) set(agent string, silent bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.silent[agent] = silent
}

func (s *silencing) readsOf(agent string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.reads[agent]
}

func (s *silencing) NewAgent(name string, cfg engine.AgentConfig) (engine.Agent, error) {
	a, err := s.Engine.NewAgent(name, cfg)
	if err != nil {
		return nil, err
	}
	return &silencingAgent{Agent: a, s: s, names: map[engine.Remote]string{}, held: map[engine.Request]string{}}, nil
}

type silencingAgent struct {
	engine.Agent
	s     *silencing
	names map[engine.Remote]string // guarded by s.mu, as is held
	held  map[engine.Request]string
}

func (a *silencingAgent) LoadRemote(md []byte) (engine.Remote, string, error) {
	r, name, err := a.Agent.LoadRemote(md)
	a.s.mu.Lock()
	defer a.s.mu.Unlock()
	a.names[r] = name
	return r, name, err
}

func (a *silencingAgent) Create(spec *engine.Spec) (engine.Request, engine.Status, error) {
	remote := spec.Remote
	r, st, err := a.Agent.Create(spec)
	a.s.mu.Lock()
	defer a.s.mu.Unlock()
	if name := a.names[remote]; err == nil && spec.Op == engine.Read && a.s.silent[name] {
		a.held[r] = name
		a.s.reads[name]++
		st = engine.InProgress
	}
	return r, st, err
}

func (a *silencingAgent) Poll(reqs []engine.Request, out []engine.Status) {
	a.Agent.Poll(reqs, out)
	a.s.mu.Lock()
	defer a.s.mu.Unlock()
	for i, r := range reqs {
		if a.s.silent[a.held[r]] {
			out[i] = engine.InProgress
		} else {
			delete(a.held, r)
		}
	}
}

func withProbeTimeout(d time.Duration) Option { return func(c *config) { c.probeTimeout = d } }

// newSilent gives a pair whose decode has registered and does not answer.
func newSilent(t *testing.T, timeout time.Duration) (*silencing, *pairUp, *nixl.Engine) {
	t.Helper()
	s := newSilencing()
	e := nixl.OpenOver(s, nixl.Embedded, zap.NewNop())
	p := newPair(t, e, 25, withProbeTimeout(timeout))
	name := p.d.agent.Name()
	s.set(name, true)
	t.Cleanup(func() { s.set(name, false) })
	p.d.register(p.d.registration())
	p.d.until("the read of the silent peer", func() bool { return s.readsOf(name) == 1 })
	return s, p, e
}

// A peer that does not answer holds up its own rooms and nobody else's.
func TestSilentPeerAmongOthers(t *testing.T) {
	s, p, e := newSilent(t, time.Hour)
	waiting := p.begin(t, 1)
	for i := range 3 {
		d := newDecode(t, e, p.m, newKitMemory(t, 4), 25)
		defer func() {
			d.close()
			d.mem.free(t)
		}()
		d.register(d.registration())
		other := &pairUp{m: p.m, src: p.src, d: d}
		other.transfer(t, nixlkv.Room(10+i))
		d.status(nixlkv.Room(10 + i))
	}
	if st := waiting.Status(); st.Ended() {
		t.Errorf("the room of the silent peer: %v, %v", st, waiting.Err())
	}
	if _, info, _ := p.m.peers.Lookup(p.d.agent.Name()); info.Phase != registry.Preparing {
		t.Errorf("the silent peer is %v", info.Phase)
	}
	s.set(p.d.agent.Name(), false)
	ok(t, waiting.Wait(within(t)))
	ok(t, waiting.Close())
	p.d.status(1)
}

// A peer that has not answered in time is stale, is not read anew while the read is under way,
// and is taken up once it answers.
func TestSilentPeerComesBack(t *testing.T) {
	s, p, _ := newSilent(t, 20*time.Millisecond)
	wantFailure(t, p.begin(t, 1), p.d, nixlkv.ErrPeerStale, "has not answered")
	name := p.d.agent.Name()
	again := func() {
		t.Helper()
		prep, err := p.m.peers.Reload(name)
		for errors.Is(err, registry.ErrTooSoon) {
			p.d.until("the interval of reloads", func() bool {
				prep, err = p.m.peers.Reload(name)
				return !errors.Is(err, registry.ErrTooSoon)
			})
		}
		ok(t, err)
		p.m.peers.prepare(name, prep)
	}
	again()
	p.d.until("the end of the second try", func() bool {
		_, info, _ := p.m.peers.Lookup(name)
		return info.Phase == registry.Stale
	})
	if n := s.readsOf(name); n != 1 {
		t.Errorf("%d reads at once of one peer", n)
	}
	s.set(name, false)
	p.d.until("the end of the read", func() bool { return p.m.Stats().Agent.InFlight == 0 })
	again()
	p.transfer(t, 2)
	p.d.status(2)
	// What the tries without success had loaded is let go.
	p.d.until("one peer", func() bool { return p.m.Stats().Agent.Remotes == 1 })
}

// The manager closes when what it has begun to read has settled.
func TestCloseWithSilentPeer(t *testing.T) {
	s, p, _ := newSilent(t, time.Hour)
	waiting := p.begin(t, 1)
	_, err := waiting.WaitBootstrapped(within(t))
	ok(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := p.m.Shutdown(ctx); !errors.Is(err, nixl.ErrStillInFlight) {
		t.Errorf("got %v", err)
	}
	wantFailure(t, waiting, p.d, nixlkv.ErrClosed, "shutting down")
	s.set(p.d.agent.Name(), false)
	ok(t, p.m.Close())
}

// Who asks for a read that is under way waits for that.
func TestReadsAreShared(t *testing.T) {
	s := newSilencing()
	p := newPair(t, nixl.OpenOver(s, nixl.Embedded, zap.NewNop()), 25)
	name, addr := p.d.agent.Name(), uint64(p.d.mem.aux.Addr())
	r, err := p.m.agent.Load(p.d.registration().AgentMetadata)
	ok(t, err)
	own, err := newProber(p.m.agent, time.Hour)
	ok(t, err)
	t.Cleanup(func() {
		ok(t, p.m.Close())
		ok(t, own.free())
	})
	s.set(name, true)
	told := 0
	for range 3 {
		own.read(r, addr, func(err error) {
			told++
			ok(t, err)
		})
	}
	if pause := own.look(time.Now()); pause == 0 || told != 0 || s.readsOf(name) != 1 {
		t.Errorf("%v until the next look, %d told, %d reads", pause, told, s.readsOf(name))
	}
	s.set(name, false)
	p.d.until("the end of the read", func() bool { return own.look(time.Now()) == 0 })
	if told != 3 {
		t.Errorf("%d told", told)
	}
}

// Beyond the bound peers are taken up without a first read.
func TestManySilentPeers(t *testing.T) {
	e, err := nixl.Open(nixl.Embedded)
	ok(t, err)
	p := newPair(t, e, 25)
	r, err := p.m.agent.Load(p.d.registration().AgentMetadata)
	ok(t, err)
	full := &prober{agent: p.m.agent}
	for range maxProbes {
		full.flying = append(full.flying, &probe{remote: new(nixl.Remote), late: true})
	}
	told := errors.New("not told")
	full.read(r, uint64(p.d.mem.aux.Addr()), func(err error) { told = err })
	if !errors.Is(told, errNoPlace) {
		t.Errorf("told %v", told)
	}
}
