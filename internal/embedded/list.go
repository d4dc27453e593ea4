package embedded

import (
	"fmt"
	"math/bits"
	"slices"

	"github.com/nixlkv/nixlkv/internal/engine"
)

// list is a list of descriptors. It keeps its memory while it is cleared and filled.
type list struct {
	descs []engine.Desc
}

// prepared is a list bound to its side: where each descriptor lies. It never changes.
type prepared struct {
	places  []place
	local   []*localRegion // of positions, on the local side
	peer    *peer          // nil on the local side
	regions []*remoteRegion
}

// NewList implements engine.Agent.
func (a *Agent) NewList(mem engine.Mem) (engine.List, error) {
	if err := a.checkMem(mem); err != nil {
		return 0, fmt.Errorf("embedded: list: %w", err)
	}
	w, _, err := a.lists.alloc()
	return engine.List(w), err
}

func (a *Agent) list(h engine.List) (*list, error) {
	if l := a.lists.get(uintptr(h)); l != nil {
		return l, nil
	}
	return nil, fmt.Errorf("embedded: no list %#x: %w", uintptr(h), engine.ErrInvalidParam)
}

// Append implements engine.Agent.
func (a *Agent) Append(h engine.List, descs []engine.Desc) error {
	l, err := a.list(h)
	if err != nil {
		return err
	}
	if len(descs) > MaxDescriptors-len(l.descs) {
		return tooMany(len(l.descs), uint64(len(descs)))
	}
	if !a.config.HostVRAM {
		for i, d := range descs {
			if d.Dev != 0 {
				return badDevice("descriptor", i, d.Dev)
			}
		}
	}
	l.descs = append(l.descs, descs...)
	return nil
}

// AppendRuns implements engine.Agent. A list holds either all of the runs or, with an
// error, none.
func (a *Agent) AppendRuns(h engine.List, runs []engine.Run) error {
	l, err := a.list(h)
	if err != nil {
		return err
	}
	total := uint64(len(l.descs))
	for i, r := range runs {
		if r.Count > MaxDescriptors || total+r.Count > MaxDescriptors {
			return tooMany(len(l.descs), r.Count)
		}
		total += r.Count
		if r.Dev != 0 && !a.config.HostVRAM {
			return badDevice("run", i, r.Dev)
		}
		if r.Count == 0 {
			continue
		}
		hi, way := bits.Mul64(r.Stride, r.Count-1)
		start, carry := bits.Add64(r.Addr, way, 0)
		if _, more := bits.Add64(start, r.Len, 0); hi|carry|more != 0 {
			return fmt.Errorf("embedded: run %d: %d descriptors of %d bytes, %d apart, from %#x pass the end of memory: %w",
				i, r.Count, r.Len, r.Stride, r.Addr, engine.ErrInvalidParam)
		}
	}
	l.descs = slices.Grow(l.descs, int(total)-len(l.descs))
	for _, r := range runs {
		for k := range r.Count {
			l.descs = append(l.descs, engine.Desc{Addr: r.Addr + k*r.Stride, Len: r.Len, Dev: r.Dev})
		}
	}
	return nil
}

// Clear implements engine.Agent.
func (a *Agent) Clear(h engine.List) error {
	l, err := a.list(h)
	if err != nil {
		return err
	}
	l.descs = l.descs[:0]
	return nil
}

// FreeList implements engine.Agent.
func (a *Agent) FreeList(h engine.List) {
	if l := a.lists.get(uintptr(h)); l != nil {
		l.descs = nil
		a.lists.release(uintptr(h))
	}
}

// PrepareLocal implements engine.Agent.
func (a *Agent) PrepareLocal(h engine.List) (engine.Prepared, error) {
	l, err := a.list(h)
	if err != nil {
		return 0, err
	}
	index := a.local.Load()
	places, err := locateAll(index, l.descs)
	if err != nil {
		return 0, fmt.Errorf("embedded: prepare local list: %w", err)
	}
	return a.keep(prepared{places: places, local: index.regs})
}

// PrepareRemote implements engine.Agent.
func (a *Agent) PrepareRemote(r engine.Remote, h engine.List) (engine.Prepared, error) {
	l, err := a.list(h)
	if err != nil {
		return 0, err
	}
	p, err := a.usablePeer(r)
	if err != nil {
		return 0, fmt.Errorf("embedded: prepare remote list: %w", err)
	}
	index := p.index.Load()
	places, err := locateAll(index, l.descs)
	if err != nil {
		return 0, fmt.Errorf("embedded: prepare list for peer %q: %w", p.name, err)
	}
	return a.keep(prepared{places: places, peer: p, regions: index.regs})
}

func (a *Agent) keep(p prepared) (engine.Prepared, error) {
	w, v, err := a.prepareds.alloc()
	if err != nil {
		return 0, err
	}
	*v = p
	return engine.Prepared(w), nil
}

// FreePrepared implements engine.Agent.
func (a *Agent) FreePrepared(h engine.Prepared) error {
	p := a.prepareds.get(uintptr(h))
	if p == nil {
		return fmt.Errorf("embedded: no prepared list %#x: %w", uintptr(h), engine.ErrInvalidParam)
	}
	*p = prepared{}
	a.prepareds.release(uintptr(h))
	return nil
}

func locateAll[R any](index *spanIndex[R], descs []engine.Desc) ([]place, error) {
	if len(descs) == 0 {
		return nil, errEmpty
	}
	places := make([]place, len(descs))
	pos := 0
	for i, d := range descs {
		pl, err := locate(index, i, d, &pos)
		if err != nil {
			return nil, err
		}
		places[i] = pl
	}
	return places, nil
}

// locate finds the region of a descriptor; pos is that of the last one found.
func locate[R any](index *spanIndex[R], i int, d engine.Desc, pos *int) (place, error) {
	at := index.find(d.Addr, d.Len, *pos)
	if at < 0 {
		return place{}, fmt.Errorf("descriptor %d: %d bytes at %#x: %w: %w", i, d.Len, d.Addr, engine.ErrNotRegistered, engine.ErrNotFound)
	}
	*pos = at
	return place{addr: d.Addr, n: d.Len, pos: uint32(at)}, nil
}

var errEmpty = fmt.Errorf("empty list of descriptors: %w", engine.ErrInvalidParam)

func tooMany(have int, more uint64) error {
	return fmt.Errorf("embedded: %d descriptors onto %d, a list holds %d: %w", more, have, MaxDescriptors, engine.ErrInvalidParam)
}

func badDevice(what string, i int, dev uint64) error {
	return fmt.Errorf("embedded: %s %d: device %d, host memory has device 0: %w", what, i, dev, engine.ErrInvalidParam)
}
