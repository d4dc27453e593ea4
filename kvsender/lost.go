package kvsender

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"syscall"
	"time"

	"go.uber.org/zap"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/internal/control"
	"github.com/nixlkv/nixlkv/nixl"
	"github.com/nixlkv/nixlkv/registry"
)

// A decode that dies shows in a transfer that fails, in the connection to its control socket, or
// in another one that registers from its address. They are signs only: a transfer may fail and a
// connection break for other reasons, and anybody may name an address. So the loader looks whether
// the decode's engine still answers. If not, all its rooms fail, and if its process is gone as well
// it is forgotten.

// peerFailed lets go of a peer whose connection is broken, or that the engine has forgotten for
// that. It is loaded anew, if it lives.
func (m *Manager) peerFailed(d *dest, err error) {
	if d.lease != nil && (errors.Is(err, nixl.ErrPeerLost) || errors.Is(err, nixl.ErrStale) || forgotten(err)) {
		if p := d.lease.Peer(); d.lease.MarkStale(err) {
			m.peers.look(p.Agent, p.Addr)
		}
	}
}

// forgotten says whether an engine knows nothing of a peer any more. NIXL says as much of memory
// that the peer has not registered, as far as it can be told; the plan keeps to what is.
func forgotten(err error) bool {
	return errors.Is(err, nixl.StatusNotFound) && !errors.Is(err, nixl.ErrNotRegistered)
}

// observe follows the connections to decodes.
func (m *Manager) observe(e control.Event) {
	if e.Kind == control.Disconnected {
		<-m.listening // it may call before ctl is ours
		m.suspect(e.Endpoint.AddrPort().String(), "")
	}
}

// suspect has the decodes at an address looked at, but for one that has just registered.
func (m *Manager) suspect(addr, but string) {
	for _, agent := range m.peers.ByAddr(addr) {
		if _, info, ok := m.peers.Lookup(agent); ok && agent != but && info.Phase != registry.Refused {
			m.peers.look(agent, addr)
		}
	}
}

// A decode is looked at several times: what ends a process ends its connections one by one, and
// memory that is shared can be read a moment longer. A peer is not loaded more often than once in
// a second (registry.TableConfig), which the last look is behind.
const (
	looks     = 4
	lookPause = 400 * time.Millisecond
)

// look has the loader see whether a decode lives. Signs that come while it does are one with the
// last: nobody can have it look more often.
func (t *peerTable) look(agent, addr string) {
	t.mu.Lock()
	under := t.looking[agent] > 0
	t.looking[agent] = looks
	t.mu.Unlock()
	if !under {
		t.lookAgain(agent, addr)
	}
}

func (t *peerTable) lookAgain(agent, addr string) {
	over := func(known bool) {
		t.mu.Lock()
		defer t.mu.Unlock()
		left := t.looking[agent] - 1
		if known || left <= 0 {
			delete(t.looking, agent)
			return
		}
		t.looking[agent] = left
		time.AfterFunc(lookPause, func() { t.lookAgain(agent, addr) })
	}
	job := func() {
		t.answers(agent, addr, func(err error) { t.judge(agent, addr, err, over) })
	}
	if len(t.jobs) >= t.m.cfg.limits.LoadQueue || !t.enqueue(job) {
		over(true)
	}
}

// judge acts on what a look has shown, and tells over whether nothing more is to be known: the
// decode is gone.
func (t *peerTable) judge(agent, addr string, err error, over func(known bool)) {
	switch {
	case errors.Is(err, nixlkv.ErrNotRegistered), t.m.ctx.Err() != nil:
		over(true) // it was forgotten meanwhile
		return
	case err == nil, errors.Is(err, registry.ErrPreparing), errors.Is(err, registry.ErrNotStale), errors.Is(err, registry.ErrTooSoon),
		errors.Is(err, nixl.ErrBusy), errors.Is(err, errNoPlace):
		over(false) // it lives, or nobody can tell yet
		return
	}
	t.whetherVacated(agent, addr, func(gone bool) {
		t.m.failRoomsOf(agent, gone || t.contested(agent, addr), fmt.Errorf("%w: Lost connection with decode instance %s: %w", nixlkv.ErrPeerLost, addr, err))
		if gone {
			t.m.warn.Warn("a decode is gone", zap.String("decode", agent), zap.String("address", addr), zap.Error(err))
			t.Forget(agent)
			t.m.disconnect(addr)
		}
		over(gone)
	})
}

// contested says whether another decode may listen at an address.
func (t *peerTable) contested(agent, addr string) bool {
	return t.anyAt(addr, func(other string, phase registry.Phase) bool {
		return other != agent && (phase == registry.Live || phase == registry.Preparing)
	})
}

// anyAt says whether some decode that is known at an address is one of those wanted.
func (t *peerTable) anyAt(addr string, wanted func(agent string, phase registry.Phase) bool) bool {
	return slices.ContainsFunc(t.ByAddr(addr), func(agent string) bool {
		_, info, ok := t.Lookup(agent)
		return ok && wanted(agent, info.Phase)
	})
}

// disconnect ends the connection to an address where no decode is any more, which would be tried
// again and again.
func (m *Manager) disconnect(addr string) {
	if len(m.peers.ByAddr(addr)) > 0 {
		return
	}
	if at, err := netip.ParseAddrPort(addr); err == nil {
		if e, err := control.NewEndpoint(at.Addr().String(), int(at.Port())); err == nil {
			m.ctl.Drop(e)
		}
	}
}

// maxDials bounds the addresses that are tried at a time.
const maxDials = 16

// whetherVacated finds out whether a decode has left its address for certain: nobody listens there
// any more, or another one does that answers. One whose network is gone has not; it will not
// register again when it is back. The loader calls it, and then; the loader does not wait meanwhile.
func (t *peerTable) whetherVacated(agent, addr string, then func(bool)) {
	if t.anyAt(addr, func(other string, phase registry.Phase) bool { return other != agent && phase == registry.Live }) {
		then(true)
		return
	}
	select {
	case t.dials <- struct{}{}:
	default:
		then(false)
		return
	}
	t.m.workers.Add(1) // the loader is one of them, and has not ended
	go func() {
		defer t.m.workers.Done()
		ctx, cancel := context.WithTimeout(t.m.ctx, lookPause)
		defer cancel()
		c, err := new(net.Dialer).DialContext(ctx, "tcp", addr)
		if err == nil {
			_ = c.Close()
		}
		<-t.dials
		if !t.enqueue(func() { then(errors.Is(err, syscall.ECONNREFUSED)) }) {
			t.mu.Lock()
			delete(t.looking, agent)
			t.mu.Unlock()
		}
	}()
}

// answers asks whether a decode's engine answers, and has it given up if not. One that is given up
// already is taken up again, which tells as well; not where it has left its address, for UCX may
// abort the process when it loads what ends at that moment. The loader calls it, and done.
func (t *peerTable) answers(agent, addr string, done func(error)) {
	l, err := t.Acquire(agent)
	switch {
	case errors.Is(err, nixlkv.ErrPeerStale):
		t.whetherVacated(agent, addr, func(gone bool) {
			if gone {
				done(err)
				return
			}
			prep, e := t.Reload(agent)
			if e != nil {
				done(e)
				return
			}
			t.begin(prep, func(err error) {
				t.wake(agent)
				done(err)
			})
		})
		return
	case err != nil:
		done(err)
		return
	}
	w := l.Plan()
	told := func(err error) {
		if err != nil && !errors.Is(err, errNoPlace) {
			l.MarkStale(err)
		}
		l.Release()
		done(err)
	}
	if len(w.aux.buffers) == 0 {
		told(w.remote.Check())
		return
	}
	t.probes.read(w.remote, w.aux.buffers[0].dst, told)
}

// failRoomsOf fails the rooms of a decode that have not ended. One that is gone, or may be, is not
// told: who listens at its address now would take that for a room of its own.
func (m *Manager) failRoomsOf(agent string, gone bool, cause error) {
	m.roomsMu.Lock()
	rooms := make([]*room, 0, len(m.live))
	for r := range m.live {
		rooms = append(rooms, r)
	}
	m.roomsMu.Unlock()
	for _, r := range rooms {
		r.mu.Lock()
		if i := slices.IndexFunc(r.dests, func(d *dest) bool { return d.meta.Agent == agent }); i >= 0 {
			d := r.dests[i]
			d.gaveUp = d.gaveUp || gone
			r.fail(&destError{agent, d.meta.From, cause})
		}
		r.mu.Unlock()
	}
}
