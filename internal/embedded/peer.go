package embedded

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nixlkv/nixlkv/internal/engine"
)

// peer is an agent whose metadata is loaded, until it is lost or invalidated; loading it
// again after that makes another peer. It is also the initiator's end of the connection
// to that agent: one goroutine connects, reads and in the end cleans up (link.go), one
// writes (link_send.go).
type peer struct {
	a    *Agent
	name string
	id   agentID
	to   addresses

	index atomic.Pointer[spanIndex[*remoteRegion]]
	down  atomic.Bool // err is set: whoever copies stops at the next piece

	welcomed chan struct{} // closed when the connection can be used
	done     chan struct{} // closed when nothing of the connection is left

	// mapped counts mappings of the peer's memory that are not unmapped yet.
	mapped sync.WaitGroup

	mu      sync.Mutex
	wake    sync.Cond // the writer has work, or err is set
	err     error     // why the peer cannot be used any more
	epoch   uint64
	regions map[uint64]*remoteRegion
	started bool
	cancel  context.CancelFunc // of dialling
	conn    *connection
	ready   bool // welcomed

	asked    map[uint64]*remoteRegion // by id; a map frame is on its way
	mappings map[uint64]remoteMapping // by grant, until unmapped
	control  []control

	waiting []*request // for the welcome
	sends   fifo[outgoing]
	reads   fifo[*request]

	sending   *request // the writer has it in its hands
	reading   *request // its read frame is on its way
	moreRead  bool     // and the next one can be asked for
	transfers uint64   // numbers given out
	awaiting  map[uint64]outgoing

	window int           // bytes of notifications not acknowledged, with their cost
	queued int           // those of Notify, including ones not sent yet
	room   chan struct{} // if Notify waits: closed when queued shrinks or err is set
}

// ErrOtherHost: metadata of an agent that cannot be reached, because it is on another host
// and one of the two does without TCP. It wraps engine.ErrUnsupported.
var ErrOtherHost = fmt.Errorf("there is no way to it: %w", engine.ErrUnsupported)

var errInvalidated = fmt.Errorf("metadata was invalidated: %w", engine.ErrNotFound)

// MetadataName implements engine.Agent.
func (a *Agent) MetadataName(b []byte) (string, error) {
	m, err := parseMetadata(b)
	if err != nil {
		return "", fmt.Errorf("embedded: metadata: %w: %w", err, engine.ErrInvalidParam)
	}
	return m.name, nil
}

// LoadRemote implements engine.Agent. Metadata that is older than what is loaded of the
// same agent changes nothing. Metadata of another agent with the same name replaces the
// former, as after a restart: requests to that end with engine.ErrPeerLost.
func (a *Agent) LoadRemote(b []byte) (engine.Remote, string, error) {
	m, err := parseMetadata(b)
	switch {
	case errors.Is(err, errForeignMetadata):
		return 0, "", fmt.Errorf("embedded: load metadata: %w (does the peer run on NIXL?): %w: %w", err, engine.ErrUnsupported, engine.ErrInvalidParam)
	case err != nil:
		return 0, "", fmt.Errorf("embedded: load metadata: %w: %w", err, engine.ErrInvalidParam)
	case m.name == a.name:
		return 0, "", fmt.Errorf("embedded: load metadata: %q is this agent's own name: %w", m.name, engine.ErrInvalidParam)
	}
	p, replaced, err := a.loadPeer(m)
	if replaced != nil {
		replaced.fail(fmt.Errorf("peer %q was replaced by a later agent of its name: %w: %w", m.name, engine.ErrPeerLost, engine.ErrBackend))
	}
	if err != nil {
		return 0, "", fmt.Errorf("embedded: load metadata of %q: %w", m.name, err)
	}
	w, slot, err := a.remotes.alloc()
	if err != nil {
		return 0, "", err
	}
	*slot = p
	return engine.Remote(w), p.name, nil
}

func (a *Agent) loadPeer(m *metadata) (p, replaced *peer, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := a.usable(); err != nil {
		return nil, nil, fmt.Errorf("%w: %w", err, engine.ErrBackend)
	}
	to, err := a.reach(m)
	if err != nil {
		return nil, nil, fmt.Errorf("%w: %w", err, engine.ErrInvalidParam)
	}
	p = a.peers[m.name]
	if p != nil && p.id == m.id && p.update(m) {
		return p, nil, nil
	}
	replaced = p
	p = &peer{
		a: a, name: m.name, id: m.id, to: to,
		welcomed: make(chan struct{}),
		done:     make(chan struct{}),
		regions:  make(map[uint64]*remoteRegion),
		asked:    make(map[uint64]*remoteRegion),
		mappings: make(map[uint64]remoteMapping),
		awaiting: make(map[uint64]outgoing),
	}
	p.wake.L = &p.mu
	p.index.Store(&spanIndex[*remoteRegion]{})
	p.update(m)
	a.peers[m.name] = p
	a.allPeers[p] = struct{}{}
	return p, replaced, nil
}

// update takes over what the metadata says, unless it is older than what is known. It
// gives false if the peer cannot be used any more.
func (p *peer) update(m *metadata) bool {
	var revoke []*mapping
	defer func() {
		// Without p.mu, which the end of a mapping takes.
		for _, m := range revoke {
			m.revoke()
		}
	}()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.err != nil {
		return false
	}
	if m.epoch <= p.epoch {
		return true
	}
	p.epoch = m.epoch
	regions := make(map[uint64]*remoteRegion, len(m.regions))
	list := make([]*remoteRegion, 0, len(m.regions))
	for _, info := range m.regions {
		r := p.regions[info.id]
		if r == nil {
			r = &remoteRegion{id: info.id, addr: info.addr, n: info.n, shared: info.shared}
		}
		regions[info.id] = r
		list = append(list, r)
	}
	for id, r := range p.regions {
		if regions[id] != nil {
			continue
		}
		r.gone = true
		if m := r.takeMapping(); m != nil {
			revoke = append(revoke, m)
		}
	}
	p.regions = regions
	p.index.Store(newSpanIndex(list, (*remoteRegion).span))
	return true
}

// peer gives the peer of a handle.
func (a *Agent) peer(h engine.Remote) (*peer, error) {
	if p := a.remotes.get(uintptr(h)); p != nil {
		return *p, nil
	}
	return nil, fmt.Errorf("no remote %#x: %w", uintptr(h), engine.ErrInvalidParam)
}

// usablePeer gives the peer of a handle if its metadata is still loaded.
func (a *Agent) usablePeer(h engine.Remote) (*peer, error) {
	p, err := a.peer(h)
	if err != nil {
		return nil, err
	}
	return p, p.usable()
}

// usable gives nil, or an error that wraps engine.ErrNotFound and why.
func (p *peer) usable() error {
	if !p.down.Load() {
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.unusable()
}

// unusable is the error for new calls on a peer that cannot be used. p.mu is held.
func (p *peer) unusable() error {
	return fmt.Errorf("metadata of peer %q is not loaded any more: %w: %w", p.name, engine.ErrNotFound, p.err)
}

// CheckRemote implements engine.Agent.
func (a *Agent) CheckRemote(h engine.Remote) error {
	_, err := a.usablePeer(h)
	if err != nil {
		return fmt.Errorf("embedded: %w", err)
	}
	return nil
}

// Connect implements engine.Agent. It waits for the peer's answer, up to the connect
// timeout; after that the connection is still being tried.
func (a *Agent) Connect(h engine.Remote) error {
	p, err := a.usablePeer(h)
	if err == nil {
		err = p.connect()
	}
	if err != nil {
		return fmt.Errorf("embedded: connect: %w", err)
	}
	return nil
}

func (p *peer) connect() error {
	p.mu.Lock()
	if p.err != nil {
		defer p.mu.Unlock()
		return p.unusable()
	}
	p.startLocked()
	p.mu.Unlock()
	select {
	case <-p.welcomed:
		return nil
	default:
	}
	timeout := time.NewTimer(p.a.settings.connectTimeout)
	defer timeout.Stop()
	select {
	case <-p.welcomed:
		return nil
	case <-p.done:
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.err
	case <-timeout.C:
		return fmt.Errorf("peer %q did not answer within %v: %w", p.name, p.a.settings.connectTimeout, engine.ErrBackend)
	}
}

// InvalidateRemote implements engine.Agent. Requests to the peer end with
// engine.ErrNotFound. When it returns without error, this agent has none of the peer's
// memory mapped.
func (a *Agent) InvalidateRemote(h engine.Remote) error {
	p, err := a.usablePeer(h)
	if err != nil {
		return fmt.Errorf("embedded: invalidate: %w", err)
	}
	p.fail(errInvalidated)
	timeout := time.NewTimer(a.settings.releaseTimeout)
	defer timeout.Stop()
	select {
	case <-p.done:
		return nil
	case <-timeout.C:
		return fmt.Errorf("embedded: invalidate %q: still copying after %v: %w", p.name, a.settings.releaseTimeout, engine.ErrBusy)
	}
}

// FreeRemote implements engine.Agent. The peer's metadata stays loaded, as in NIXL.
func (a *Agent) FreeRemote(h engine.Remote) {
	if p := a.remotes.get(uintptr(h)); p != nil {
		*p = nil
		a.remotes.release(uintptr(h))
	}
}

// Self implements engine.Agent. There is no storage here.
func (*Agent) Self() (engine.Remote, error) {
	return 0, fmt.Errorf("embedded: an agent cannot be its own peer, and storage needs NIXL: %w", engine.ErrUnsupported)
}

// forget takes a peer that cannot be used out of those that are loaded.
func (a *Agent) forget(p *peer, lost bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.peers[p.name] == p {
		delete(a.peers, p.name)
	}
	if lost {
		a.stats.lost.Add(1)
	}
}
