package faultengine

import (
	"fmt"
	"slices"
	"sync"

	"github.com/nixlkv/nixlkv/internal/engine"
)

// Engine wraps an engine. Its agents share the rules.
type Engine struct {
	engine.Engine

	mu     sync.Mutex
	faults []*Fault
	agents []*agent
}

// New wraps an engine. Without rules it does what that one does.
func New(e engine.Engine) *Engine { return &Engine{Engine: e} }

// Add puts a rule in force. Of several rules that match a call the first takes it.
func (e *Engine) Add(r Rule) *Fault {
	f := &Fault{rule: r, changed: make(chan struct{})}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.faults = append(e.faults, f)
	return f
}

// Clear releases all rules.
func (e *Engine) Clear() {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, f := range e.faults {
		f.Release()
	}
	e.faults = nil
}

// fault gives the rule that takes a call, nil if none does.
func (e *Engine) fault(on On, peer string, message []byte) *Fault {
	e.mu.Lock()
	faults := slices.Clone(e.faults)
	e.mu.Unlock()
	for _, f := range faults {
		if f.take(on, peer, message) {
			return f
		}
	}
	return nil
}

// Vanish has every agent forget a peer's metadata, as NIXL does by itself when it sees the
// connection break: nothing can be made with the peer until it is loaded anew. What is in
// flight goes on.
func (e *Engine) Vanish(name string) {
	e.mu.Lock()
	agents := slices.Clone(e.agents)
	e.mu.Unlock()
	for _, a := range agents {
		a.mu.Lock()
		for r, p := range a.remotes {
			if p.name == name {
				a.remotes[r] = peer{name: name, gone: true}
			}
		}
		a.mu.Unlock()
	}
}

// NewAgent implements engine.Engine.
func (e *Engine) NewAgent(name string, cfg engine.AgentConfig) (engine.Agent, error) {
	raw, err := e.Engine.NewAgent(name, cfg)
	if err != nil {
		return nil, err
	}
	a := &agent{
		Agent: raw, e: e,
		remotes:  map[engine.Remote]peer{},
		prepared: map[engine.Prepared]engine.Remote{},
		requests: map[engine.Request]*request{},
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.agents = append(e.agents, a)
	return a, nil
}

// agent is an agent of the wrapped engine whose calls may go wrong.
type agent struct {
	engine.Agent
	e *Engine

	mu       sync.Mutex
	remotes  map[engine.Remote]peer
	prepared map[engine.Prepared]engine.Remote
	requests map[engine.Request]*request // that something has become of, or that may be posted again
	late     []note                      // notifications held back
}

// peer is a peer whose metadata was loaded.
type peer struct {
	name string
	gone bool // see Vanish
}

func (a *agent) peerOf(r engine.Remote) peer {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.remotes[r]
}

func errGone(name string) error {
	return fmt.Errorf("metadata of %q is gone: %w", name, engine.ErrNotFound)
}

// LoadRemote implements engine.Agent.
func (a *agent) LoadRemote(metadata []byte) (engine.Remote, string, error) {
	name, err := a.MetadataName(metadata)
	if err == nil {
		if f := a.e.fault(Loads, name, nil); f != nil {
			return 0, "", f.rule.Err
		}
	}
	r, name, err := a.Agent.LoadRemote(metadata)
	if err == nil {
		a.mu.Lock()
		a.remotes[r] = peer{name: name}
		a.mu.Unlock()
	}
	return r, name, err
}

// CheckRemote implements engine.Agent.
func (a *agent) CheckRemote(r engine.Remote) error {
	if p := a.peerOf(r); p.gone {
		return errGone(p.name)
	}
	return a.Agent.CheckRemote(r)
}

// Notify implements engine.Agent.
func (a *agent) Notify(r engine.Remote, msg []byte) error {
	if p := a.peerOf(r); p.gone {
		return errGone(p.name)
	}
	return a.Agent.Notify(r, msg)
}

// PrepareRemote implements engine.Agent.
func (a *agent) PrepareRemote(r engine.Remote, l engine.List) (engine.Prepared, error) {
	if p := a.peerOf(r); p.gone {
		return 0, errGone(p.name)
	}
	prep, err := a.Agent.PrepareRemote(r, l)
	if err == nil {
		a.mu.Lock()
		a.prepared[prep] = r
		a.mu.Unlock()
	}
	return prep, err
}

// FreePrepared implements engine.Agent.
func (a *agent) FreePrepared(p engine.Prepared) error {
	a.mu.Lock()
	delete(a.prepared, p)
	a.mu.Unlock()
	return a.Agent.FreePrepared(p)
}

// FreeRemote implements engine.Agent.
func (a *agent) FreeRemote(r engine.Remote) {
	a.mu.Lock()
	delete(a.remotes, r)
	a.mu.Unlock()
	a.Agent.FreeRemote(r)
}

// Destroy implements engine.Agent.
func (a *agent) Destroy() error {
	err := a.Agent.Destroy()
	if err == nil {
		a.e.mu.Lock()
		defer a.e.mu.Unlock()
		a.e.agents = slices.DeleteFunc(a.e.agents, func(x *agent) bool { return x == a })
	}
	return err
}
