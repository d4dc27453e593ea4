package nixl

import (
	"fmt"
	"slices"

	"go.uber.org/zap"

	"github.com/nixlkv/nixlkv/internal/engine"
)

// Registration is memory that an agent made reachable.
type Registration struct {
	a       *Agent
	regions []Region
	p       pins
}

// Register makes memory reachable for the agent's transfers and, through its metadata, for
// those of peers that load the metadata afterwards. All regions are registered, or none.
func (a *Agent) Register(regions ...Region) (*Registration, error) {
	reg, err := a.register(regions)
	return reg, a.fail("register", "", err)
}

func (a *Agent) register(regions []Region) (*Registration, error) {
	if len(regions) == 0 {
		return nil, fmt.Errorf("%w: nothing to register", StatusInvalidParam)
	}
	for i, r := range regions {
		if err := r.validate(i); err != nil {
			return nil, err
		}
		// NIXL loses count of the same region twice in one registration, and crashes when it is
		// taken back.
		if slices.ContainsFunc(regions[:i], r.same) {
			return nil, fmt.Errorf("%w: region %d: %d bytes at %#x are given twice", ErrBadDescriptor, i, r.len, r.addr)
		}
		if err := a.checkDevice(r); err != nil {
			return nil, fmt.Errorf("region %d: %w", i, err)
		}
	}
	if err := a.enter(); err != nil {
		return nil, err
	}
	defer a.leave()
	reg := &Registration{a: a, regions: slices.Clone(regions)}
	if err := reg.pinBuffers(); err != nil {
		return nil, err
	}
	done := make([]Mem, 0, len(allMems))
	for _, m := range allMems {
		raw := reg.rawOf(m)
		if raw == nil {
			continue
		}
		if err := a.raw.Register(m, raw); err != nil {
			for _, d := range done {
				if e := a.raw.Deregister(d, reg.rawOf(d)); e != nil {
					// The memory may still be reachable, so its buffers stay pinned.
					return nil, fmt.Errorf("%w (and taking back: %w; the buffers stay pinned)", err, e)
				}
			}
			reg.unpinBuffers(len(reg.regions))
			return nil, err
		}
		done = append(done, m)
	}
	a.mu.Lock()
	a.regs[reg] = struct{}{}
	a.mu.Unlock()
	return reg, nil
}

// allMems are registered one after the other: NIXL's lists are of one kind.
var allMems = [...]Mem{DRAM, VRAM, MemBlock, MemObject, MemFile}

// rawOf gives the regions of one kind.
func (r *Registration) rawOf(m Mem) []engine.Region {
	var raw []engine.Region
	for _, reg := range r.regions {
		if reg.mem == m {
			raw = append(raw, reg.raw())
		}
	}
	return raw
}

func (r *Registration) pinBuffers() error {
	for i, reg := range r.regions {
		if reg.buf == nil {
			continue
		}
		if err := reg.buf.Pin(); err != nil {
			r.unpinBuffers(i)
			return fmt.Errorf("region %d: %w", i, err)
		}
	}
	return nil
}

func (r *Registration) unpinBuffers(n int) {
	for _, reg := range r.regions[:n] {
		r.unpin(reg)
	}
}

// unpin gives a region's buffer back. Only a pin that somebody else took off can make it
// fail, and then there is nothing left to do but to say so.
func (r *Registration) unpin(reg Region) {
	if reg.buf == nil {
		return
	}
	if err := reg.buf.Unpin(); err != nil {
		r.a.log.Error("unpinning a buffer", zap.Error(err))
	}
}

// Regions gives what is registered; nothing after Deregister.
func (r *Registration) Regions() []Region {
	r.a.mu.Lock()
	defer r.a.mu.Unlock()
	return slices.Clone(r.regions)
}

// Deregister makes the memory unreachable and unpins its buffers. It gives ErrInUse while
// a prepared list or a transfer of this agent covers any of it, and ErrReleased the second
// time. Whether a peer is still writing to the memory only the protocol between the two can
// tell with NIXL; the embedded engine asks its peers, and gives ErrBusy if one does not
// answer.
func (r *Registration) Deregister() error {
	return r.a.fail("deregister", "", r.deregister())
}

func (r *Registration) deregister() error {
	a := r.a
	if err := a.enter(); err != nil {
		return err
	}
	defer a.leave()
	if err := r.p.release(); err != nil {
		return err
	}
	// From here on nothing new may cover the memory; what does already is looked for under
	// the same lock.
	a.mu.Lock()
	err := a.coveredBy(r)
	if err == nil {
		a.leaving = append(a.leaving, r)
	}
	a.mu.Unlock()
	if err == nil {
		err = r.deregisterRaw()
		a.mu.Lock()
		a.leaving = slices.DeleteFunc(a.leaving, func(x *Registration) bool { return x == r })
		if err == nil {
			delete(a.regs, r)
		}
		a.mu.Unlock()
	}
	if err != nil {
		r.p.revive()
	}
	return err
}

// deregisterRaw is the native part. It runs with nothing in the agent covering the memory.
func (r *Registration) deregisterRaw() error {
	for _, m := range allMems {
		raw := r.rawOf(m)
		if raw == nil {
			continue
		}
		if err := r.a.raw.Deregister(m, raw); err != nil {
			return err
		}
		// What is done is done: a retry after a failure of the other kind must not do it again.
		r.forgetKind(m)
	}
	return nil
}

// forgetKind unpins and drops the regions of one kind.
func (r *Registration) forgetKind(m Mem) {
	r.a.mu.Lock()
	defer r.a.mu.Unlock()
	r.regions = slices.DeleteFunc(r.regions, func(reg Region) bool {
		if reg.mem != m {
			return false
		}
		r.unpin(reg)
		return true
	})
}

// coveredBy says whether a prepared list or a request of the agent covers memory of r. The
// caller holds a.mu. Lists are compared by the addresses between their first and last byte,
// which may refuse more than it must, never less.
func (a *Agent) coveredBy(r *Registration) error {
	for _, reg := range r.regions {
		s := spanOfRegion(reg)
		for p := range a.prepared {
			if p.ownMemory() && p.span.overlaps(s) {
				return fmt.Errorf("%w: a prepared list covers the memory", ErrInUse)
			}
		}
		for t := a.transfers.head; t != nil; t = t.next {
			if t.span.overlaps(s) || t.far.overlaps(s) {
				return fmt.Errorf("%w: a transfer to or from %s covers the memory", ErrInUse, t.remote.name)
			}
		}
	}
	return nil
}

// mayCover says whether something new may cover these addresses. The caller holds a.mu.
func (a *Agent) mayCover(s span) error {
	for _, r := range a.leaving {
		for _, reg := range r.regions {
			if s.overlaps(spanOfRegion(reg)) {
				return fmt.Errorf("%w: the memory is being deregistered", ErrInUse)
			}
		}
	}
	return nil
}
