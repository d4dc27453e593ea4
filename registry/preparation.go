package registry

import (
	"errors"

	"github.com/nixlkv/nixlkv"
)

// Preparation is the making of a peer's plan, by whoever holds it. It has to be ended once, by
// Attach or by Fail. Until then nothing else is prepared for this agent, so that loading its
// metadata twice at once cannot happen.
//
// While it goes on the peer may register anew or be reloaded. Then this plan is of no use, and
// its end gives the next preparation to the one who ended it. It may also go stale, be refused
// or be forgotten: then there is no next one either.
type Preparation[P any] struct {
	t    *Table[P]
	e    *entry[P]
	peer *Peer
	gen  uint64
}

// Peer gives the peer to prepare for.
func (p *Preparation[P]) Peer() *Peer { return p.peer }

// Generation numbers the plan. No two preparations of a table have the same, later ones have
// greater ones.
func (p *Preparation[P]) Generation() uint64 { return p.gen }

// Attach ends the preparation with a plan, which belongs to the table from then on. If the
// plan is of no use any more it is dropped, and either next is to be ended as well, or the
// error says what the peer is now: it wraps nixlkv.ErrPeerStale, ErrClosed or the reason of
// its refusal. A second end gives [ErrEnded] and leaves the plan alone.
func (p *Preparation[P]) Attach(plan P) (next *Preparation[P], err error) {
	var d dropping[P]
	t, e := p.t, p.e
	defer t.dropAll(&d)
	t.mu.Lock()
	defer t.mu.Unlock()
	if e.prep != p {
		return nil, ErrEnded
	}
	a := &attached[P]{peer: p.peer, plan: plan, gen: p.gen}
	if p.current() {
		e.prep, e.plan, e.proven = nil, a, true
		e.settle(Live, nil)
		e.seen = t.now()
		return nil, nil
	}
	a.reason = errReplaced
	if e.phase != Preparing {
		a.reason = e.reason
	}
	d = append(d, a)
	return p.over()
}

// Fail ends the preparation without a plan. The peer is refused with the reason, until it
// registers again. But if a plan was made for it before, or the reason wraps
// nixlkv.ErrPeerStale, another try may succeed: then it is stale, and can be reloaded. next is
// to be ended as well if there is one.
func (p *Preparation[P]) Fail(reason error) (next *Preparation[P]) {
	t, e := p.t, p.e
	t.mu.Lock()
	defer t.mu.Unlock()
	if e.prep != p {
		return nil
	}
	if p.current() {
		phase := Refused
		if e.proven || errors.Is(reason, nixlkv.ErrPeerStale) {
			phase = Stale
		}
		e.prep = nil
		e.settle(phase, reason)
		return nil
	}
	next, _ = p.over()
	return next
}

// current says whether the plan is still the one that is wanted.
func (p *Preparation[P]) current() bool { return p.e.phase == Preparing && p.e.gen == p.gen }

// over ends a preparation that something came in between.
func (p *Preparation[P]) over() (next *Preparation[P], err error) {
	e := p.e
	e.prep = nil
	if e.phase == Preparing {
		return p.t.begin(e), nil
	}
	if e.phase == gone {
		delete(p.t.entries, e.agent)
	}
	return nil, e.err()
}
