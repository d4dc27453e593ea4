package embedded

import (
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/nixlkv/nixlkv/internal/engine"
)

// request is one transfer. It lives in a slot of the agent's table and keeps its memory
// for the next one in that slot.
//
// While it is in progress it is in one place at a time, and whoever has it there moves it
// on: the peer's queues (until the peer welcomed us, until memory is mapped), the pool
// (which shares it among workers), the peer's writer, the table of transfers that wait
// for an answer. settle ends it; nothing touches it after that.
type request struct {
	a       *Agent
	op      engine.Op
	peer    *peer
	plan    plan
	locals  []*localRegion  // by position
	regions []*remoteRegion // by position

	notif    []byte
	hasNotif bool

	status  atomic.Int32          // an engine.Status
	failure atomic.Pointer[error] // the first thing that went wrong since it was posted
	reason  error                 // behind a status that is an error

	missing int // answers to map frames; guarded by peer.mu

	// Copying: where the next worker starts, and how many shares are not done.
	next   *request // in the pool's queue
	at     cursor
	shares atomic.Int32

	// Reading through the connection, after copying; at is where the next bytes go.
	readNumber uint64
	expected   uint64 // bytes asked for and not there yet

	start time.Time
	post  time.Duration
	total time.Duration
}

var errNotPosted = fmt.Errorf("request was not posted: %w", engine.ErrInvalidState)

// Create implements engine.Agent. A transfer of no descriptors is an error.
func (a *Agent) Create(spec *engine.Spec) (engine.Request, engine.Status, error) {
	w, r, err := a.requests.alloc()
	if err != nil {
		return 0, statusOf(err), err
	}
	if err := a.fill(r, spec); err != nil {
		r.clear()
		a.requests.release(w)
		return 0, statusOf(err), fmt.Errorf("embedded: create: %w", err)
	}
	h := engine.Request(w)
	if !spec.Post {
		return h, engine.Success, nil
	}
	st, err := r.doPost()
	return h, st, err
}

// fill makes a request of what a spec says.
func (a *Agent) fill(r *request, spec *engine.Spec) error {
	r.a, r.op = a, spec.Op
	r.setStatus(engine.ErrInvalidState, errNotPosted)
	if spec.Op != engine.Read && spec.Op != engine.Write {
		return fmt.Errorf("operation %d: %w", spec.Op, engine.ErrInvalidParam)
	}
	if spec.HasNotif {
		if err := checkNotification(spec.Notif); err != nil {
			return err
		}
		r.notif, r.hasNotif = append(r.notif[:0], spec.Notif...), true
	}
	byList := spec.LocalList != 0 || spec.RemoteList != 0 || spec.Remote != 0
	byIndex := spec.LocalPrep != 0 || spec.RemotePrep != 0
	switch {
	case byList == byIndex:
		return fmt.Errorf("want either lists or prepared lists: %w", engine.ErrInvalidParam)
	case byList:
		return a.fillByList(r, spec)
	}
	return a.fillByIndex(r, spec)
}

func (a *Agent) fillByList(r *request, spec *engine.Spec) error {
	p, err := a.usablePeer(spec.Remote)
	if err != nil {
		return err
	}
	local, err := a.list(spec.LocalList)
	if err != nil {
		return err
	}
	remote, err := a.list(spec.RemoteList)
	if err != nil {
		return err
	}
	if len(local.descs) != len(remote.descs) {
		return fmt.Errorf("%d local descriptors, %d of the peer: %w", len(local.descs), len(remote.descs), engine.ErrInvalidParam)
	}
	if len(local.descs) == 0 {
		return errEmpty
	}
	here, there := a.local.Load(), p.index.Load()
	r.peer, r.locals, r.regions = p, here.regs, there.regs
	r.plan.reset(len(local.descs), len(here.regs), len(there.regs), spec.NoMerge)
	var herePos, therePos int
	for i, d := range local.descs {
		l, err := locate(here, i, d, &herePos)
		if err != nil {
			return fmt.Errorf("local %w", err)
		}
		m, err := locate(there, i, remote.descs[i], &therePos)
		if err != nil {
			return fmt.Errorf("peer %q: %w", p.name, err)
		}
		if err := r.plan.add(i, l, m); err != nil {
			return err
		}
	}
	return nil
}

func (a *Agent) fillByIndex(r *request, spec *engine.Spec) error {
	local, remote := a.prepareds.get(uintptr(spec.LocalPrep)), a.prepareds.get(uintptr(spec.RemotePrep))
	if local == nil || local.peer != nil || remote == nil || remote.peer == nil {
		return fmt.Errorf("prepared lists: want one of the local side and one of a peer: %w", engine.ErrInvalidParam)
	}
	if len(spec.LocalIndex) != len(spec.RemoteIndex) {
		return fmt.Errorf("%d local indices, %d of the peer: %w", len(spec.LocalIndex), len(spec.RemoteIndex), engine.ErrInvalidParam)
	}
	if len(spec.LocalIndex) == 0 {
		return errEmpty
	}
	if err := remote.peer.usable(); err != nil {
		return err
	}
	r.peer, r.locals, r.regions = remote.peer, local.local, remote.regions
	r.plan.reset(len(spec.LocalIndex), len(local.local), len(remote.regions), spec.NoMerge)
	for i, l := range spec.LocalIndex {
		m := spec.RemoteIndex[i]
		if uint(l) >= uint(len(local.places)) {
			return badIndex("local", i, l, len(local.places))
		}
		if uint(m) >= uint(len(remote.places)) {
			return badIndex("remote", i, m, len(remote.places))
		}
		if err := r.plan.add(i, local.places[l], remote.places[m]); err != nil {
			return err
		}
	}
	return nil
}

func badIndex(side string, i int, v int32, n int) error {
	return fmt.Errorf("%s index %d is %d, the prepared list has %d descriptors: %w", side, i, v, n, engine.ErrInvalidParam)
}

func (a *Agent) request(h engine.Request) (*request, error) {
	if r := a.requests.get(uintptr(h)); r != nil {
		return r, nil
	}
	return nil, fmt.Errorf("embedded: no request %#x: %w", uintptr(h), engine.ErrInvalidParam)
}

// Post implements engine.Agent. Without hasNotif the request keeps the notification it
// has.
func (a *Agent) Post(h engine.Request, notif []byte, hasNotif bool) (engine.Status, error) {
	r, err := a.request(h)
	if err != nil {
		return statusOf(err), err
	}
	if r.state() == engine.InProgress {
		return engine.ErrInvalidState, fmt.Errorf("embedded: post: request is in progress: %w", engine.ErrInvalidState)
	}
	if hasNotif {
		if err := checkNotification(notif); err != nil {
			return statusOf(err), fmt.Errorf("embedded: post: %w", err)
		}
		r.notif, r.hasNotif = append(r.notif[:0], notif...), true
	}
	return r.doPost()
}

// doPost starts a request that is not in progress. An error means that it was not
// started; whatever goes wrong later, Poll tells.
func (r *request) doPost() (engine.Status, error) {
	r.start = time.Now()
	if err := r.submit(); err != nil {
		r.setStatus(statusOf(err), err)
		return statusOf(err), fmt.Errorf("embedded: post: %w", err)
	}
	r.post = time.Since(r.start)
	if r.state() == engine.Success {
		return engine.Success, nil
	}
	return engine.InProgress, nil
}

// acquireLocal keeps the local regions from being deregistered until the request settles.
func (r *request) acquireLocal() error {
	for i, pos := range r.plan.locals {
		reg := r.locals[pos]
		if !reg.uses.acquire() {
			r.releaseLocal(i)
			return fmt.Errorf("local region of %d bytes at %#x: %w: %w", reg.n, reg.addr, engine.ErrNotRegistered, engine.ErrNotFound)
		}
	}
	return nil
}

func (r *request) releaseLocal(n int) {
	for _, pos := range r.plan.locals[:n] {
		r.locals[pos].uses.release()
	}
}

// submit gives the request to its peer.
func (r *request) submit() error {
	if err := r.acquireLocal(); err != nil {
		return err
	}
	p := r.peer
	p.mu.Lock()
	err := p.goneLocked(r)
	if p.err != nil {
		err = p.unusable()
	}
	if err != nil {
		p.mu.Unlock()
		r.releaseLocal(len(r.plan.locals))
		return err
	}
	r.failure.Store(nil)
	r.missing, r.at, r.expected = 0, cursor{}, 0
	r.shares.Store(1)
	r.a.active.Add(1)
	r.status.Store(int32(engine.InProgress))
	p.startLocked()
	launch := false
	if p.ready {
		launch = p.admitLocked(r)
	} else {
		p.waiting = append(p.waiting, r)
	}
	p.mu.Unlock()
	if launch {
		r.launch(true)
	}
	return nil
}

// settle ends a request. The caller is the only one who has it, and loses it.
func (r *request) settle(err error) {
	r.total = time.Since(r.start)
	if err == nil {
		r.a.cost.observe(r.plan.bytes, r.total)
	}
	r.releaseLocal(len(r.plan.locals))
	r.a.active.Add(-1)
	if err != nil {
		r.setStatus(statusOf(err), err)
		return
	}
	r.status.Store(int32(engine.Success))
}

func (r *request) state() engine.Status { return engine.Status(r.status.Load()) }

func (r *request) setStatus(st engine.Status, reason error) {
	r.reason = reason
	r.status.Store(int32(st))
}

// failWith notes what went wrong; the first call counts.
func (r *request) failWith(err error) { r.failure.CompareAndSwap(nil, &err) }

// failed says why the request cannot go on, or nil.
func (r *request) failed() error {
	if err := r.failure.Load(); err != nil {
		return *err
	}
	if r.peer.down.Load() {
		r.peer.mu.Lock()
		defer r.peer.mu.Unlock()
		return r.peer.err
	}
	return nil
}

// statusOf gives the status that an error wraps, else engine.ErrBackend.
func statusOf(err error) engine.Status {
	var st engine.Status
	if errors.As(err, &st) {
		return st
	}
	return engine.ErrBackend
}

// Poll implements engine.Agent. A handle that names no request gives
// engine.ErrInvalidParam, a request never posted engine.ErrInvalidState.
func (a *Agent) Poll(reqs []engine.Request, out []engine.Status) {
	for i, h := range reqs {
		if i == len(out) {
			return
		}
		if r := a.requests.get(uintptr(h)); r != nil {
			out[i] = r.state()
		} else {
			out[i] = engine.ErrInvalidParam
		}
	}
}

// Reason implements engine.Agent.
func (a *Agent) Reason(h engine.Request) error {
	r, err := a.request(h)
	if err != nil {
		return err
	}
	if r.state() >= 0 {
		return nil
	}
	return r.reason
}

// Release implements engine.Agent.
func (a *Agent) Release(h engine.Request) error {
	r, err := a.request(h)
	if err != nil {
		return err
	}
	if r.state() == engine.InProgress {
		return fmt.Errorf("embedded: release: request is in progress: %w", engine.ErrInvalidState)
	}
	r.clear()
	a.requests.release(uintptr(h))
	return nil
}

// clear readies a slot for another request.
func (r *request) clear() {
	const keep = 4 << 10
	r.peer, r.locals, r.regions = nil, nil, nil
	r.failure.Store(nil)
	r.reason = nil
	r.hasNotif = false
	if cap(r.notif) > keep {
		r.notif = nil
	}
	r.start, r.post, r.total = time.Time{}, 0, 0
	r.plan.trim()
}

// Telemetry implements engine.Agent.
func (a *Agent) Telemetry(h engine.Request) (engine.Telemetry, error) {
	r, err := a.request(h)
	if err != nil {
		return engine.Telemetry{}, err
	}
	if !a.config.Telemetry {
		return engine.Telemetry{}, fmt.Errorf("embedded: agent %q keeps no telemetry: %w", a.name, engine.ErrNoTelemetry)
	}
	if st := r.state(); st != engine.Success {
		return engine.Telemetry{}, fmt.Errorf("embedded: telemetry of a request that did not succeed: %w", engine.ErrInvalidState)
	}
	return engine.Telemetry{
		Start: r.start, Post: r.post, Total: r.total,
		Bytes: r.plan.bytes, Descriptors: uint64(len(r.plan.items)),
	}, nil
}

// EstimateCost implements engine.Agent, from how long earlier transfers of about this
// size took this agent, to any peer.
func (a *Agent) EstimateCost(h engine.Request) (engine.Cost, error) {
	r, err := a.request(h)
	if err != nil {
		return engine.Cost{}, err
	}
	return a.cost.estimate(r.plan.bytes)
}
