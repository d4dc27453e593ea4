package registry

import (
	"errors"
	"fmt"
	"time"

	"github.com/nixlkv/nixlkv"
)

// What follows is called with the table's lock held, except dropAll.

// dropping collects the plans that a call has to drop once it has let go of the lock.
type dropping[P any] []*attached[P]

// dropAll is deferred before the lock is taken, so that it runs after it is released.
func (t *Table[P]) dropAll(d *dropping[P]) {
	for _, a := range *d {
		t.drop(a.peer, a.plan, a.reason)
	}
}

// find gives an agent's entry, nil if there is none to be seen.
func (t *Table[P]) find(agent string) *entry[P] {
	if e := t.entries[agent]; e != nil && e.phase != gone {
		return e
	}
	return nil
}

// enter gives an agent's entry, a new one if it has none, and says whether it was known.
func (t *Table[P]) enter(agent string, now time.Time, d *dropping[P]) (e *entry[P], known bool, err error) {
	if t.closed {
		return nil, false, fmt.Errorf("%w: peer table", nixlkv.ErrClosed)
	}
	e = t.entries[agent]
	known = e != nil && e.phase != gone
	if e == nil {
		if len(t.entries) >= t.limit && !t.evict(d) {
			return nil, false, fmt.Errorf("%w: %d peers, all in use", nixlkv.ErrLimit, len(t.entries))
		}
		e = &entry[P]{agent: agent, settled: make(chan struct{})}
		t.entries[agent] = e
	}
	e.seen = now
	return e, known, nil
}

// evict takes out the peer that can be missed most easily, and says whether there was one.
func (t *Table[P]) evict(d *dropping[P]) bool {
	victim := t.easiestMissed(func(*entry[P]) bool { return true })
	if victim != nil {
		t.remove(victim, errEvicted, d)
	}
	return victim != nil
}

// evictable says whether nothing holds an entry.
func (e *entry[P]) evictable() bool { return e.rooms == 0 && e.prep == nil }

// easiestMissed gives the entry that can be missed most easily of those that may go; nil if there
// is none.
func (t *Table[P]) easiestMissed(may func(*entry[P]) bool) (victim *entry[P]) {
	for _, e := range t.entries {
		if !e.evictable() || !may(e) {
			continue
		}
		if victim == nil || e.easierMissed(victim) {
			victim = e
		}
	}
	return victim
}

func (e *entry[P]) easierMissed(than *entry[P]) bool {
	if (e.phase == Live) != (than.phase == Live) {
		return than.phase == Live
	}
	if !e.seen.Equal(than.seen) {
		return e.seen.Before(than.seen)
	}
	return e.gen < than.gen
}

// remove takes an entry out, or out of sight if its preparation has not ended.
func (t *Table[P]) remove(e *entry[P], reason error, d *dropping[P]) {
	t.giveUp(e, reason, d)
	t.move(e, "")
	t.keep(e, nil)
	e.settle(gone, reason)
	if e.prep == nil {
		delete(t.entries, e.agent)
	}
}

// giveUp takes an entry's plan away; it is dropped now or by the last room that holds it.
func (t *Table[P]) giveUp(e *entry[P], reason error, d *dropping[P]) {
	a := e.plan
	if a == nil {
		return
	}
	e.plan = nil
	a.reason = orUnnamed(reason)
	if a.rooms == 0 {
		*d = append(*d, a)
	}
}

// move puts an entry under another address; the empty one is none.
func (t *Table[P]) move(e *entry[P], addr string) {
	if e.addr == addr {
		return
	}
	if agents := t.addrs[e.addr]; agents != nil {
		delete(agents, e.agent)
		if len(agents) == 0 {
			delete(t.addrs, e.addr)
		}
	}
	e.addr = addr
	if addr == "" {
		return
	}
	if t.addrs[addr] == nil {
		t.addrs[addr] = map[string]struct{}{}
	}
	t.addrs[addr][e.agent] = struct{}{}
}

// want begins a preparation of the entry's peer. If an earlier one has not ended there is
// none yet: its end sees that the generation is another, and begins the next.
func (t *Table[P]) want(e *entry[P]) *Preparation[P] {
	t.gen++
	e.gen = t.gen
	if e.phase != Preparing {
		e.phase, e.reason = Preparing, nil
		e.settled = make(chan struct{})
	}
	if e.prep != nil {
		return nil
	}
	return t.begin(e)
}

func (t *Table[P]) begin(e *entry[P]) *Preparation[P] {
	e.prep = &Preparation[P]{t: t, e: e, peer: e.peer, gen: e.gen}
	return e.prep
}

// settle leaves the phase Preparing, or changes between others.
func (e *entry[P]) settle(phase Phase, reason error) {
	if e.phase == Preparing {
		close(e.settled)
	}
	e.phase, e.reason = phase, nil
	if phase != Live {
		e.reason = orUnnamed(reason)
	}
}

// err says why there is no lease on the peer.
func (e *entry[P]) err() error {
	switch e.phase {
	case Preparing:
		return fmt.Errorf("%w: %s", ErrPreparing, e.agent)
	case Refused:
		return fmt.Errorf("peer %s refused: %w", e.agent, e.reason)
	default:
		return staleError(e.agent, e.reason)
	}
}

func staleError(agent string, reason error) error {
	if errors.Is(reason, nixlkv.ErrPeerStale) {
		return fmt.Errorf("peer %s: %w", agent, reason)
	}
	return fmt.Errorf("%w: %s: %w", nixlkv.ErrPeerStale, agent, reason)
}

func (t *Table[P]) unknown(agent string) error {
	if t.closed {
		return fmt.Errorf("%w: peer table", nixlkv.ErrClosed)
	}
	return fmt.Errorf("%w: %.256q", nixlkv.ErrNotRegistered, agent)
}

func orUnnamed(reason error) error {
	if reason == nil {
		return errUnnamed
	}
	return reason
}
