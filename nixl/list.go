package nixl

import (
	"fmt"
	"sync"

	"github.com/nixlkv/nixlkv/internal/engine"
)

// maxListLen bounds a list: NIXL counts and indexes descriptors with 32-bit signed numbers.
const maxListLen = 1<<31 - 1

// List is a list of descriptors of one kind of memory or storage, local or remote. It keeps its memory
// when it is cleared, so that filling it again costs a fraction of the first time. It is
// used by one goroutine at a time.
type List struct {
	a   *Agent
	mem Mem

	mu    sync.Mutex // held across the calls that use the list; tried, never waited for
	raw   engine.List
	n     uint64
	bytes uint64 // of all descriptors, modulo 2^64
	span  span
	free  bool
}

// NewList makes an empty list. Free it when it is not needed any more.
func (a *Agent) NewList(m Mem) (*List, error) {
	if err := a.enter(); err != nil {
		return nil, a.fail("new list", "", err)
	}
	defer a.leave()
	if m > MemFile {
		return nil, a.fail("new list", "", fmt.Errorf("%w: kind of memory %d", ErrUnsupported, m))
	}
	raw, err := a.raw.NewList(m)
	if err != nil {
		return nil, a.fail("new list", "", err)
	}
	l := &List{a: a, mem: m, raw: raw, span: emptySpan(m)}
	a.mu.Lock()
	a.lists[l] = struct{}{}
	a.mu.Unlock()
	return l, nil
}

// use takes the list for a native call; unless it fails, done must follow.
func (l *List) use() error {
	if !l.mu.TryLock() {
		return fmt.Errorf("%w: the list is being used", ErrInUse)
	}
	if l.free {
		l.mu.Unlock()
		return fmt.Errorf("list: %w", ErrReleased)
	}
	return nil
}

func (l *List) done() { l.mu.Unlock() }

// within enters the agent and takes the list.
func (l *List) within(call string) error {
	if err := l.a.enter(); err != nil {
		return l.a.fail(call, "", err)
	}
	if err := l.use(); err != nil {
		l.a.leave()
		return l.a.fail(call, "", err)
	}
	return nil
}

func (l *List) leave() {
	l.done()
	l.a.leave()
}

// Mem gives the kind of memory.
func (l *List) Mem() Mem { return l.mem }

// Append adds descriptors: in one native call where the build has cgo, without allocating.
// Empty descriptors and such that reach past 2^64 are refused, and nothing is added then.
func (l *List) Append(descs ...Desc) error {
	if err := l.within("append"); err != nil {
		return err
	}
	defer l.leave()
	s, err := spanOf(descs, l.span)
	if err == nil && l.n+uint64(len(descs)) > maxListLen {
		err = fmt.Errorf("%w: %d descriptors in one list", ErrBadDescriptor, l.n+uint64(len(descs)))
	}
	if err == nil && len(descs) > 0 {
		err = l.a.raw.Append(l.raw, descs)
	}
	if err != nil {
		return l.a.fail("append", "", err)
	}
	l.span, l.n = s, l.n+uint64(len(descs))
	for i := range descs {
		l.bytes += descs[i].Len
	}
	return nil
}

// AppendRuns adds the descriptors that the runs stand for, expanding them natively. Runs
// that stand for nothing are skipped; bad ones are refused, and nothing is added then.
func (l *List) AppendRuns(runs ...Run) error {
	if err := l.within("append runs"); err != nil {
		return err
	}
	defer l.leave()
	s, n, err := spanOfRuns(runs, l.span)
	if err == nil && l.n+n > maxListLen {
		err = fmt.Errorf("%w: %d descriptors in one list", ErrBadDescriptor, l.n+n)
	}
	if err == nil && n > 0 {
		err = l.a.raw.AppendRuns(l.raw, runs)
	}
	if err != nil {
		return l.a.fail("append runs", "", err)
	}
	l.span, l.n = s, l.n+n
	for i := range runs {
		l.bytes += runs[i].Len * runs[i].Count
	}
	return nil
}

// Clear empties the list and keeps its memory.
func (l *List) Clear() error {
	if err := l.within("clear list"); err != nil {
		return err
	}
	defer l.leave()
	if err := l.a.raw.Clear(l.raw); err != nil {
		return l.a.fail("clear list", "", err)
	}
	l.n, l.bytes, l.span = 0, 0, emptySpan(l.mem)
	return nil
}

// Len counts the descriptors; 0 for a list that is freed or being used.
func (l *List) Len() int {
	if l.use() != nil {
		return 0
	}
	defer l.done()
	return int(l.n)
}

// Free ends the list. Prepared lists and transfers made from it live on.
func (l *List) Free() error {
	if err := l.within("free list"); err != nil {
		return err
	}
	defer l.leave()
	l.a.mu.Lock()
	delete(l.a.lists, l)
	l.a.mu.Unlock()
	l.end()
	return nil
}

// end frees the native list; the caller holds it.
func (l *List) end() {
	l.free = true
	l.a.raw.FreeList(l.raw)
}

// Prepared is a list bound to its side. Transfers pick from it by index.
type Prepared struct {
	a      *Agent
	remote *Remote // nil for the local side
	mem    Mem
	raw    engine.Prepared
	n      int
	span   span
	p      pins
}

// Prepare binds a list of the agent's own registered memory, so that transfers pick from it
// by index. The list may be used for something else afterwards.
func (a *Agent) Prepare(l *List) (*Prepared, error) {
	if err := a.enter(); err != nil {
		return nil, a.fail("prepare", "", err)
	}
	defer a.leave()
	p, err := a.prepare(l, nil)
	return p, a.fail("prepare", "", err)
}

// prepare binds a list for either side, inside the agent.
func (a *Agent) prepare(l *List, r *Remote) (*Prepared, error) {
	if l == nil {
		return nil, fmt.Errorf("%w: nil list", StatusInvalidParam)
	}
	if l.a != a {
		return nil, ErrForeign
	}
	if err := l.use(); err != nil {
		return nil, err
	}
	defer l.done()
	if l.n == 0 {
		return nil, fmt.Errorf("%w: empty list", ErrBadDescriptor)
	}
	p := &Prepared{a: a, remote: r, mem: l.mem, n: int(l.n), span: l.span}
	// It counts before it exists, so that memory cannot be deregistered in between.
	a.mu.Lock()
	var err error
	if p.ownMemory() {
		err = a.mayCover(p.span)
	}
	if err == nil {
		a.prepared[p] = struct{}{}
	}
	a.mu.Unlock()
	if err != nil {
		return nil, err
	}
	if r == nil {
		p.raw, err = a.raw.PrepareLocal(l.raw)
	} else {
		p.raw, err = a.raw.PrepareRemote(r.raw, l.raw)
	}
	if err != nil {
		a.mu.Lock()
		delete(a.prepared, p)
		a.mu.Unlock()
		return nil, err
	}
	return p, nil
}

// ownMemory says whether the list is of what the agent itself has registered.
func (p *Prepared) ownMemory() bool { return p.remote == nil || p.remote.self }

// Len counts the descriptors.
func (p *Prepared) Len() int { return p.n }

// Free ends the prepared list: ErrInUse while a transfer is being made from it. Transfers
// made from it live on.
func (p *Prepared) Free() error {
	peer := ""
	if p.remote != nil {
		peer = p.remote.name
	}
	if err := p.a.enter(); err != nil {
		return p.a.fail("free prepared list", peer, err)
	}
	defer p.a.leave()
	err := p.p.release()
	if err == nil {
		err = p.end()
	}
	return p.a.fail("free prepared list", peer, err)
}

// end frees the native handle, for the one caller that released p.p.
func (p *Prepared) end() error {
	if err := p.a.raw.FreePrepared(p.raw); err != nil {
		p.p.revive()
		return err
	}
	p.a.mu.Lock()
	delete(p.a.prepared, p)
	p.a.mu.Unlock()
	return nil
}
