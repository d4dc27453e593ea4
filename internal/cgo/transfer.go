package cgo

import (
	"fmt"
	"time"
	"unsafe"

	"github.com/ebitengine/purego"

	"github.com/nixlkv/nixlkv/internal/engine"
)

// NewList implements engine.Agent.
func (a *agent) NewList(m engine.Mem) (engine.List, error) {
	var h uintptr
	err := a.call(symCreateList, uintptr(a.mem(m)), uintptr(unsafe.Pointer(&h)))
	if err == nil && a.devMask == 0 && isStorage(m) {
		s := &a.storage
		s.Lock()
		defer s.Unlock()
		if s.lists == nil {
			s.lists = map[engine.List]struct{}{}
		}
		s.lists[engine.List(h)] = struct{}{}
	}
	return engine.List(h), err
}

// listMask is mask for a list.
func (a *agent) listMask(l engine.List) uint64 {
	if a.devMask == 0 {
		a.storage.Lock()
		defer a.storage.Unlock()
		if _, ok := a.storage.lists[l]; ok {
			return ^uint64(0)
		}
	}
	return a.devMask
}

// Append implements engine.Agent.
func (a *agent) Append(l engine.List, d []engine.Desc) error {
	return symListAdd.check(a.hot.append(l, d, a.listMask(l)))
}

// AppendRuns implements engine.Agent.
func (a *agent) AppendRuns(l engine.List, r []engine.Run) error {
	return symListAdd.check(a.hot.appendRuns(l, r, a.listMask(l)))
}

// Clear implements engine.Agent. The library keeps the list's memory.
func (a *agent) Clear(l engine.List) error { return symListClear.check(a.hot.clear(l)) }

// FreeList implements engine.Agent. The library's destructor has no way to fail.
func (a *agent) FreeList(l engine.List) {
	if a.devMask == 0 {
		a.storage.Lock()
		delete(a.storage.lists, l)
		a.storage.Unlock()
	}
	purego.SyscallN(a.sym[symDestroyList], uintptr(l))
}

// localSide is how NIXL names the own side in prepXferDlist (NIXL_INIT_AGENT): "".
var localSide = [1]byte{}

// PrepareLocal implements engine.Agent.
func (a *agent) PrepareLocal(l engine.List) (engine.Prepared, error) {
	return a.prepare(uintptr(unsafe.Pointer(&localSide)), l)
}

// PrepareRemote implements engine.Agent.
func (a *agent) PrepareRemote(r engine.Remote, l engine.List) (engine.Prepared, error) {
	return a.prepare(uintptr(r), l)
}

func (a *agent) prepare(side uintptr, l engine.List) (engine.Prepared, error) {
	if err := a.sym.has(symPrepare, symReleasePrepared, symCreateByIndex); err != nil {
		return 0, err
	}
	var h uintptr
	err := a.call(symPrepare, a.handle, side, uintptr(l), uintptr(unsafe.Pointer(&h)), 0)
	return engine.Prepared(h), err
}

// FreePrepared implements engine.Agent.
func (a *agent) FreePrepared(p engine.Prepared) error {
	return a.call(symReleasePrepared, a.handle, uintptr(p))
}

// Create implements engine.Agent.
func (a *agent) Create(s *engine.Spec) (engine.Request, engine.Status, error) {
	r, made, posted := a.hot.create(a.handle, s)
	if made < 0 {
		if s.LocalPrep != 0 {
			return 0, made, symCreateByIndex.check(made)
		}
		return 0, made, symCreateByList.check(made)
	}
	return r, posted, postError(posted)
}

// errEndpoint explains a transfer that failed in the backend. UCX, run with error handling
// by peer as NIXL does, answers any failed operation by closing the endpoint, and nothing
// gets to the peer any more until its metadata was dropped and loaded again. The C API
// folds NIXL's "remote disconnected" and all else that a backend reports into one status;
// the library's log tells them apart.
var errEndpoint = fmt.Errorf("%w: the backend gave up the connection (NIXL's log on standard error says why)", engine.ErrPeerLost)

// postError gives the error of a posting.
func postError(st engine.Status) error { return connectionError(symPost, st) }

// connectionError gives the error of a call that sends something to a peer.
func connectionError(s symbol, st engine.Status) error {
	err := s.check(st)
	if st == engine.ErrBackend || st == engine.ErrNotFound {
		return fmt.Errorf("%w: %w", err, errEndpoint)
	}
	return err
}

// Post implements engine.Agent.
func (a *agent) Post(r engine.Request, notif []byte, hasNotif bool) (engine.Status, error) {
	st := a.hot.post(a.handle, r, notif, hasNotif)
	return st, postError(st)
}

// Poll implements engine.Agent.
func (a *agent) Poll(reqs []engine.Request, out []engine.Status) { a.hot.poll(a.handle, reqs, out) }

// Reason implements engine.Agent. A posted transfer fails for nothing but its connection:
// what else can be wrong with it was refused when it was created or posted.
func (a *agent) Reason(engine.Request) error { return errEndpoint }

// Release implements engine.Agent.
func (a *agent) Release(r engine.Request) error { return symRelease.check(a.hot.release(a.handle, r)) }

// xferTelemetry has the layout of nixl_capi_xfer_telemetry_s.
type xferTelemetry struct{ start, post, total, bytes, descs uint64 }

// Telemetry implements engine.Agent. NIXL counts the start from its steady clock, which
// has no date; the field stays zero.
func (a *agent) Telemetry(r engine.Request) (engine.Telemetry, error) {
	t := new(xferTelemetry)
	if err := a.call(symTelemetry, a.handle, uintptr(r), uintptr(unsafe.Pointer(t))); err != nil {
		return engine.Telemetry{}, err
	}
	return engine.Telemetry{
		Post:        time.Duration(t.post) * time.Microsecond,
		Total:       time.Duration(t.total) * time.Microsecond,
		Bytes:       t.bytes,
		Descriptors: t.descs,
	}, nil
}

// EstimateCost implements engine.Agent.
func (a *agent) EstimateCost(r engine.Request) (engine.Cost, error) {
	var us, margin int64
	var method uint32
	err := a.call(symEstimateCost, a.handle, uintptr(r), 0,
		uintptr(unsafe.Pointer(&us)), uintptr(unsafe.Pointer(&margin)), uintptr(unsafe.Pointer(&method)))
	if err != nil {
		return engine.Cost{}, err
	}
	if us < 0 {
		return engine.Cost{}, fmt.Errorf("%s: %w: estimate of %d µs", names[symEstimateCost], engine.ErrUnsupported, us)
	}
	return engine.Cost{Duration: time.Duration(us) * time.Microsecond, Margin: time.Duration(margin) * time.Microsecond, Method: method}, nil
}
