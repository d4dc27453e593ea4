package nixl

import (
	"errors"
	"fmt"
	"sync/atomic"

	"go.uber.org/zap"

	"github.com/nixlkv/nixlkv/internal/engine"
)

// Remote is a peer whose metadata an agent has loaded. It goes stale when the metadata is
// invalidated, when the same peer is loaded again, and when the engine finds the peer gone:
// then nothing can be made from it any more, and what was made can only be released.
type Remote struct {
	a    *Agent
	raw  engine.Remote
	name string
	self bool // the agent itself, for storage
	p    pins
	// stale is set once; lost says that the engine found the peer gone.
	stale, lost atomic.Bool
	inFlight    atomic.Int64 // transfers posted and not settled
	dropped     bool         // the engine has forgotten a lost peer; guarded by a.loading
}

// MetadataName tells whose metadata it is, without loading it: a caller who expects that of
// a certain peer checks before Load replaces what is known of another.
func (a *Agent) MetadataName(metadata []byte) (string, error) {
	if err := a.enter(); err != nil {
		return "", a.fail("metadata name", "", err)
	}
	defer a.leave()
	name, err := a.raw.MetadataName(metadata)
	return name, a.fail("metadata name", "", err)
}

// Load reads a peer's metadata, as its LocalMetadata gave it. The lists and transfers made
// with it reach the memory that was registered then.
//
// Loading a peer again, after it registered other memory or after it was lost, replaces its
// Remote: prepare its lists anew, and invalidate the old one as well, which then only frees
// it. As long as transfers made with the old one hold requests, NIXL goes on knowing the
// memory that it knew. While transfers to a lost peer are still settling Load gives ErrBusy.
//
// The framing of the metadata is checked. What is inside NIXL trusts: metadata that somebody
// tampered with can crash the process, so take it only from peers you trust. An agent cannot
// load its own.
func (a *Agent) Load(metadata []byte) (*Remote, error) {
	if len(metadata) == 0 {
		return nil, a.fail("load", "", fmt.Errorf("%w: empty metadata", StatusInvalidParam))
	}
	if err := a.enter(); err != nil {
		return nil, a.fail("load", "", err)
	}
	defer a.leave()
	a.loading.Lock()
	defer a.loading.Unlock()
	a.dropLost()
	raw, name, err := a.raw.LoadRemote(metadata)
	if err == nil {
		raw, err = a.reload(raw, name, metadata)
	}
	if err != nil {
		a.lostByLoading(name)
		return nil, a.fail("load", name, err)
	}
	r := &Remote{a: a, raw: raw, name: name}
	a.mu.Lock()
	old := a.current[name]
	busy := old != nil && old.lost.Load() && !old.dropped
	if !busy {
		if old != nil {
			old.stale.Store(true)
		}
		a.current[name] = r
		a.remotes[r] = struct{}{}
	}
	a.mu.Unlock()
	if busy {
		// The library still has the broken connection under this name, and would use it.
		a.raw.FreeRemote(raw)
		return nil, a.fail("load", name, fmt.Errorf("%w: %d transfers to the lost peer have not settled", ErrBusy, old.inFlight.Load()))
	}
	return r, nil
}

// reload loads a peer a second time, if it was known and nothing is made with it, where the
// engine only adds to what it knows, as NIXL does: memory that the peer has deregistered
// could still be written. The caller holds a.loading.
func (a *Agent) reload(raw engine.Remote, name string, metadata []byte) (engine.Remote, error) {
	a.mu.Lock()
	old := a.current[name]
	known := a.eng.adds && old != nil && !old.dropped && !old.lost.Load() && a.unusedName(name, nil)
	if known {
		old.stale.Store(true)
	}
	a.mu.Unlock()
	if !known {
		return raw, nil
	}
	err := a.raw.InvalidateRemote(raw)
	a.raw.FreeRemote(raw)
	if err != nil && !errors.Is(err, StatusNotFound) {
		return 0, err
	}
	raw, _, err = a.raw.LoadRemote(metadata)
	return raw, err
}

// unusedName says whether no Remote of a name but this one is in use: they share what the
// engine knows of the peer. The caller holds a.mu.
func (a *Agent) unusedName(name string, but *Remote) bool {
	for r := range a.remotes {
		if r != but && r.name == name && r.p.n.Load() > 0 {
			return false
		}
	}
	return true
}

// lostByLoading notes that the engine knows nothing of a peer any more, after loading it
// failed halfway. The caller holds a.loading.
func (a *Agent) lostByLoading(name string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if r := a.current[name]; r != nil {
		r.lost.Store(true)
		r.dropped = true
	}
}

// dropLost makes the engine forget the peers that were lost and have nothing in flight any
// more, so that loading them again makes a new connection. The caller holds a.loading.
func (a *Agent) dropLost() {
	a.mu.Lock()
	var drop []*Remote
	for _, r := range a.current {
		if r.lost.Load() && !r.dropped && r.inFlight.Load() == 0 {
			drop = append(drop, r)
		}
	}
	a.mu.Unlock()
	for _, r := range drop {
		if err := a.raw.InvalidateRemote(r.raw); err != nil && !errors.Is(err, StatusNotFound) {
			a.log.Warn("dropping a lost peer", zap.String("peer", r.name), zap.Error(err))
			continue
		}
		r.dropped = true
	}
}

// Name gives the peer's agent name.
func (r *Remote) Name() string { return r.name }

// usable says whether something new may be made with the peer.
func (r *Remote) usable() error {
	switch {
	case r.lost.Load():
		return ErrPeerLost
	case r.stale.Load():
		return ErrStale
	}
	return nil
}

// with runs a native call that uses the peer's handle.
func (r *Remote) with(call string, f func() error) error {
	if err := r.a.enter(); err != nil {
		return r.a.fail(call, r.name, err)
	}
	defer r.a.leave()
	if !r.p.pin() {
		return r.a.fail(call, r.name, ErrReleased)
	}
	defer r.p.unpin()
	err := r.usable()
	if err == nil {
		if err = f(); errors.Is(err, ErrPeerLost) {
			r.noteLost()
		}
	}
	return r.a.fail(call, r.name, err)
}

// Check says whether the peer's metadata is loaded. It does not ask the peer: one that died
// without a transfer noticing still passes.
func (r *Remote) Check() error {
	return r.with("check remote", func() error {
		if r.self {
			return nil
		}
		return r.a.raw.CheckRemote(r.raw)
	})
}

// Connect wires the peer up, so that the first transfer need not.
func (r *Remote) Connect() error {
	return r.with("connect", func() error {
		if r.self {
			return nil
		}
		return r.a.raw.Connect(r.raw)
	})
}

// Notify sends a notification without a transfer. It may overtake and be overtaken by those
// of transfers. The message is copied.
func (r *Remote) Notify(msg []byte) error {
	return r.with("notify", func() error {
		if r.self {
			return errSelf
		}
		return r.a.raw.Notify(r.raw, msg)
	})
}

// Invalidate drops the peer's metadata and connections, and ends the Remote. It gives
// ErrInUse while a transfer with the peer holds a request or a call uses it. Prepared lists
// of the peer go stale and still have to be freed.
func (r *Remote) Invalidate() error {
	return r.a.fail("invalidate", r.name, r.invalidate())
}

func (r *Remote) invalidate() error {
	if err := r.a.enter(); err != nil {
		return err
	}
	defer r.a.leave()
	if r.self {
		return errSelf
	}
	if err := r.p.release(); err != nil {
		return err
	}
	return r.end()
}

var errSelf = fmt.Errorf("%w: it is the agent itself", ErrUnsupported)

// end is the last part of Invalidate, for the one caller that released r.p.
func (r *Remote) end() error {
	a := r.a
	a.loading.Lock()
	defer a.loading.Unlock()
	a.mu.Lock()
	isCurrent := a.current[r.name] == r
	inUse := isCurrent && !a.unusedName(r.name, r)
	a.mu.Unlock()
	if inUse {
		r.p.revive()
		return fmt.Errorf("%w: a transfer made before the peer was loaded again holds a request", ErrInUse)
	}
	// A replaced Remote shares its metadata with the one that replaced it.
	if isCurrent && !r.dropped {
		if err := a.raw.InvalidateRemote(r.raw); err != nil && !errors.Is(err, StatusNotFound) {
			r.p.revive()
			return err
		}
	}
	r.stale.Store(true)
	a.mu.Lock()
	if isCurrent {
		delete(a.current, r.name)
	}
	delete(a.remotes, r)
	a.mu.Unlock()
	a.raw.FreeRemote(r.raw)
	return nil
}

// noteLost records that a transfer found the peer gone. The caller keeps r pinned.
func (r *Remote) noteLost() {
	if r.lost.CompareAndSwap(false, true) {
		r.a.log.Warn("peer lost", zap.String("peer", r.name))
	}
}

// settled counts a transfer out, and lets the engine forget a lost peer after the last. It
// does not wait for a Load that is going on; that one looks itself.
func (r *Remote) settled() {
	if r.inFlight.Add(-1) == 0 && r.lost.Load() && r.a.loading.TryLock() {
		r.a.dropLost()
		r.a.loading.Unlock()
	}
}

// Prepare binds a list of memory of the peer, so that transfers pick from it by index.
// Every descriptor must lie in what the peer had registered when its metadata was made. The
// list may be used for something else afterwards.
func (r *Remote) Prepare(l *List) (*Prepared, error) {
	var p *Prepared
	err := r.with("prepare", func() (err error) {
		p, err = r.a.prepare(l, r)
		return err
	})
	return p, err
}
