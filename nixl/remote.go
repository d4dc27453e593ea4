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
	p    pins
	// stale is set once; lost says that the engine found the peer gone.
	stale, lost atomic.Bool
	inFlight    atomic.Int64 // transfers posted and not settled
	dropped     bool         // the engine has forgotten a lost peer; guarded by a.loading
}

// Load reads a peer's metadata, as its LocalMetadata gave it. NIXL does not connect before
// the first transfer or Connect. Loading a peer again, after it registered more memory or
// after it was lost, replaces its Remote: prepare its lists anew. While transfers to a lost
// peer are still settling it gives ErrBusy.
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
	if err != nil {
		return nil, a.fail("load", "", err)
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
		err = f()
	}
	return r.a.fail(call, r.name, err)
}

// Check says whether the peer's metadata is loaded. It does not ask the peer: one that died
// without a transfer noticing still passes.
func (r *Remote) Check() error {
	return r.with("check remote", func() error { return r.a.raw.CheckRemote(r.raw) })
}

// Connect wires the peer up, so that the first transfer need not.
func (r *Remote) Connect() error {
	return r.with("connect", func() error { return r.a.raw.Connect(r.raw) })
}

// Notify sends a notification without a transfer. It may overtake and be overtaken by those
// of transfers. The message is copied.
func (r *Remote) Notify(msg []byte) error {
	return r.with("notify", func() error { return r.a.raw.Notify(r.raw, msg) })
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
	if err := r.p.release(); err != nil {
		return err
	}
	return r.end()
}

// end is the last part of Invalidate, for the one caller that released r.p.
func (r *Remote) end() error {
	a := r.a
	a.loading.Lock()
	defer a.loading.Unlock()
	a.mu.Lock()
	isCurrent := a.current[r.name] == r
	a.mu.Unlock()
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
