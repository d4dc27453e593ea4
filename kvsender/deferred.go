package kvsender

import (
	"fmt"
	"slices"
	"time"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/bootstrap"
	"github.com/nixlkv/nixlkv/internal/control"
	"github.com/nixlkv/nixlkv/internal/wire"
	"github.com/nixlkv/nixlkv/registry"
)

// Under the policy prefill_complete (SGLang 0.5.22 and later, DeferredBootstrap in
// common/bootstrap.py) a decode finds pages for a room only once the prefill has computed it:
// it asks to be told (BOOTSTRAP), is told (KV_STATUS 2), and then sends the metadata.

// checkPolicy refuses what SGLang refuses: there is one prefill rank to ask.
func checkPolicy(l *registry.Layout, p bootstrap.AllocationPolicy) error {
	k := l.Ranks.Normalized()
	if p == bootstrap.PrefillCompleteAllocation && max(k.TP, k.CP, k.PP) > 1 {
		return fmt.Errorf("kvsender: %w: %s requires TP, CP and PP sizes of 1, found TP %d, CP %d, PP %d", nixlkv.ErrTopology, p, k.TP, k.CP, k.PP)
	}
	return nil
}

// asker is the decode that waits for a room to be computed.
type asker struct {
	at     wire.Endpoint // zero if nobody does
	told   bool          // that it is
	gaveUp bool
}

// asked takes the question of a decode for a room, which may come before the room is opened
// here.
func (m *Manager) asked(b *wire.Bootstrap) {
	if !m.registered(b.From) { // a decode registers before it asks, on the same connection
		m.stats.dropped.Add(1)
		m.tellFailure(b.From, b.Room, fmt.Errorf("%w: a decode at %s", nixlkv.ErrNotRegistered, b.From))
		return
	}
	for {
		r, err := m.roomFor(b.Room, true)
		if err != nil {
			m.tellFailure(b.From, b.Room, err)
			return
		}
		if m.ask(r, b) {
			return
		}
	}
}

// ask gives a question to a room; false if the room is of the past, and another has to be
// found.
func (m *Manager) ask(r *room, b *wire.Bootstrap) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.detached:
		return false
	case r.asker.at == b.From && !r.status.Ended():
		return true // a repeat
	case r.status == nixlkv.Failed && r.asker.at.IsZero() && len(r.dests) == 0:
		// It failed before anybody asked.
		m.tellFailure(b.From, r.id, r.failure)
		return true
	case r.status.Ended():
		m.detach(r) // the number is used again while the old room was not closed yet
		if r.sender == nil {
			r.forget(nil)
		}
		return false
	case !r.asker.at.IsZero():
		m.stats.dropped.Add(1)
		m.tellFailure(b.From, r.id, fmt.Errorf("%w: another decode waits for room %d", nixlkv.ErrRoomInUse, r.id))
		return true
	}
	r.asker.at = b.From
	if r.sender == nil && r.announce == nil {
		r.announce = time.AfterFunc(m.cfg.bootstrapTimeout, r.expired)
	}
	r.tellComputed()
	return true
}

// tellComputed tells the decode that waits that the room is computed. The caller holds r.mu.
func (r *room) tellComputed() {
	if !r.computed || r.asker.at.IsZero() || r.asker.told || r.failure != nil {
		return
	}
	r.asker.told = true
	r.m.tellStatus(r.asker.at, &wire.KVStatus{Room: r.id, Status: wire.PollWaitingForInput, PrefillRank: r.m.rank}, r.stranger(r.asker.at))
	// Shortly before the message is given up, or the wait for what follows from it.
	least := min(tellTimeout, r.m.cfg.bootstrapTimeout)
	time.AfterFunc(least-least/16, r.askerUnreached)
}

// askerUnreached fails a room whose decode cannot be told that it is computed: nothing would come
// of it but a timeout that does not say why. It takes mu.
func (r *room) askerUnreached() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.bootstrapped() || r.failure != nil || r.status.Ended() || r.asker.gaveUp {
		return
	}
	at, err := control.NewEndpoint(r.asker.at.IP, r.asker.at.Port)
	if err != nil {
		return // logged as the message was given up
	}
	if err := r.m.ctl.Trouble(at); err != nil {
		r.fail(fmt.Errorf("%w: telling the decode at %s that room %d is computed: %w", nixlkv.ErrSendBlocked, r.asker.at, r.id, err))
	}
}

// askerUntold says whether a decode waits for the room that is not among those whose metadata
// came, and so would not be told of its end.
func (r *room) askerUntold() bool {
	a := r.asker
	return !a.at.IsZero() && !a.gaveUp && !slices.ContainsFunc(r.dests, func(d *dest) bool { return d.meta.From == a.at })
}

// Computed says, under bootstrap.PrefillCompleteAllocation, that the room's KV cache is
// computed: its decode finds pages for it now, and WaitBootstrapped returns when it has. Under
// another policy it does nothing.
func (s *Sender) Computed() {
	r := s.r
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.m.cfg.policy != bootstrap.PrefillCompleteAllocation || r.computed || s.closed {
		return
	}
	r.computed = true
	if r.timer != nil { // computing may have taken long
		r.timer.Reset(r.m.cfg.bootstrapTimeout)
	}
	r.tellComputed()
}
