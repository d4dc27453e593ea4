package embedded

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/nixlkv/nixlkv/internal/engine"
)

// Deregister implements engine.Agent. Peers that have the memory mapped are asked to
// unmap it, which ends their transfers to it, and the agent's own requests must settle.
// If that takes longer than the release timeout, the error wraps engine.ErrBusy, all of
// the regions stay registered and Deregister can be called again. A peer whose connection
// ended holds nothing.
func (a *Agent) Deregister(mem engine.Mem, regions []engine.Region) error {
	if err := a.checkMem(mem); err != nil {
		return fmt.Errorf("embedded: deregister: %w", err)
	}
	found, err := a.findRegistered(regions)
	if err != nil {
		return fmt.Errorf("embedded: deregister: %w", err)
	}
	if err := a.withdraw(found); err != nil {
		return fmt.Errorf("embedded: deregister: %w", err)
	}
	return nil
}

// findRegistered gives the regions with exactly these bounds. One that was registered
// twice is there twice.
func (a *Agent) findRegistered(regions []engine.Region) ([]*localRegion, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := a.usable(); err != nil {
		return nil, err
	}
	taken := make(map[span]int)
	found := make([]*localRegion, 0, len(regions))
	for i, spec := range regions {
		key := span{spec.Addr, spec.Addr + spec.Len}
		same := a.bySpan[key]
		if taken[key] == len(same) {
			return nil, fmt.Errorf("region %d, %d bytes at %#x: %w: %w", i, spec.Len, spec.Addr, engine.ErrNotRegistered, engine.ErrNotFound)
		}
		// The newest first: the order matters only to those who hold one of them.
		taken[key]++
		found = append(found, same[len(same)-taken[key]])
	}
	return found, nil
}

// withdraw takes regions away from peers and requests, then out of the agent; all of them
// or, with an error, none.
func (a *Agent) withdraw(regions []*localRegion) error {
	idle := make([]<-chan struct{}, 0, len(regions))
	reopen := func() {
		for _, r := range regions[:len(idle)] {
			r.uses.reopen()
		}
	}
	for _, r := range regions {
		ch := r.uses.shut()
		if ch == nil {
			reopen()
			return fmt.Errorf("%w: %w", errAlreadyShut, engine.ErrBusy)
		}
		idle = append(idle, ch)
	}
	// Shut first, then ask: whoever got a grant before is asked, nobody gets one after.
	inbounds := a.listInbound()
	for _, in := range inbounds {
		in.recall(regions)
	}
	deadline := time.NewTimer(a.settings.releaseTimeout)
	defer deadline.Stop()
	for i, ch := range idle {
		select {
		case <-ch:
			continue
		default:
		}
		select {
		case <-ch:
		case <-deadline.C:
			reopen()
			r := regions[i]
			return fmt.Errorf("%d bytes at %#x after %v, held by %s: %w", r.n, r.addr, a.settings.releaseTimeout, holders(inbounds, r), engine.ErrBusy)
		}
	}

	a.mu.Lock()
	for _, r := range regions {
		delete(a.byID, r.id)
		same := slices.DeleteFunc(a.bySpan[r.span()], func(x *localRegion) bool { return x == r })
		if len(same) == 0 {
			delete(a.bySpan, r.span())
		} else {
			a.bySpan[r.span()] = same
		}
	}
	a.reindex()
	a.mu.Unlock()
	for _, r := range regions {
		r.closeFD()
	}
	return nil
}

// errAlreadyShut: two calls want to take the same region away.
var errAlreadyShut = errors.New("another call is taking the region away")

// holders names, for an error, the peers that have a region mapped.
func holders(inbounds []*inbound, r *localRegion) string {
	var names []string
	for _, in := range inbounds {
		if name, ok := in.holds(r); ok {
			names = append(names, fmt.Sprintf("%q", name))
		}
	}
	if len(names) == 0 {
		return "a transfer of this agent"
	}
	return strings.Join(names, ", ")
}
