//go:build cgo

package cgo

// #cgo CFLAGS: -O2 -std=c11 -Wall -Werror
// #cgo noescape nixlkv_append
// #cgo nocallback nixlkv_append
// #cgo noescape nixlkv_append_runs
// #cgo nocallback nixlkv_append_runs
// #cgo noescape nixlkv_create_by_list
// #cgo nocallback nixlkv_create_by_list
// #cgo noescape nixlkv_create_by_index
// #cgo nocallback nixlkv_create_by_index
// #cgo noescape nixlkv_post
// #cgo nocallback nixlkv_post
// #cgo noescape nixlkv_poll
// #cgo nocallback nixlkv_poll
// #cgo noescape nixlkv_drain
// #cgo nocallback nixlkv_drain
// #cgo noescape nixlkv_clear
// #cgo nocallback nixlkv_clear
// #cgo noescape nixlkv_release
// #cgo nocallback nixlkv_release
// #cgo noescape nixlkv_notify
// #cgo nocallback nixlkv_notify
// #include "shim.h"
import "C"

import (
	"fmt"
	"unsafe"

	"github.com/nixlkv/nixlkv/internal/engine"
)

// haveShim says that this build has the C shim.
const haveShim = true

// shimCalls crosses into C once per call, whatever its size.
type shimCalls struct{ c C.uintptr_t }

func newShimCalls(t *table) (hotCalls, error) {
	c := C.nixlkv_new_calls((*C.uintptr_t)(unsafe.Pointer(&t[0])), C.size_t(symHotEnd))
	if c == 0 {
		return nil, fmt.Errorf("%w: the shim's table is not of %d symbols", engine.ErrUnsupported, symHotEnd)
	}
	return &shimCalls{c}, nil
}

func (s *shimCalls) name() string { return "cgo" }

func (s *shimCalls) append(list engine.List, d []engine.Desc, devMask uint64) engine.Status {
	return engine.Status(C.nixlkv_append(s.c, C.uintptr_t(list),
		(*C.nixlkv_desc)(unsafe.Pointer(unsafe.SliceData(d))), C.size_t(len(d)), C.uint64_t(devMask)))
}

func (s *shimCalls) appendRuns(list engine.List, r []engine.Run, devMask uint64) engine.Status {
	return engine.Status(C.nixlkv_append_runs(s.c, C.uintptr_t(list),
		(*C.nixlkv_run)(unsafe.Pointer(unsafe.SliceData(r))), C.size_t(len(r)), C.uint64_t(devMask)))
}

func (s *shimCalls) clear(list engine.List) engine.Status {
	return engine.Status(C.nixlkv_clear(s.c, C.uintptr_t(list)))
}

func (s *shimCalls) create(agent uintptr, spec *engine.Spec) (engine.Request, engine.Status, engine.Status) {
	var req C.uintptr_t
	var posted, made C.int
	flags := flagsOf(spec.HasNotif, spec.NoMerge, spec.Post)
	notif := (*C.uint8_t)(unsafe.SliceData(spec.Notif))
	if spec.LocalPrep != 0 {
		made = C.nixlkv_create_by_index(s.c, C.uintptr_t(agent), C.int(spec.Op),
			C.uintptr_t(spec.LocalPrep), (*C.int32_t)(unsafe.SliceData(spec.LocalIndex)),
			C.uintptr_t(spec.RemotePrep), (*C.int32_t)(unsafe.SliceData(spec.RemoteIndex)), C.size_t(len(spec.LocalIndex)),
			notif, C.size_t(len(spec.Notif)), flags, &req, &posted)
	} else {
		made = C.nixlkv_create_by_list(s.c, C.uintptr_t(agent), C.int(spec.Op),
			C.uintptr_t(spec.LocalList), C.uintptr_t(spec.RemoteList), C.uintptr_t(spec.Remote),
			notif, C.size_t(len(spec.Notif)), flags, &req, &posted)
	}
	return engine.Request(req), engine.Status(made), engine.Status(posted)
}

func (s *shimCalls) post(agent uintptr, r engine.Request, notif []byte, has bool) engine.Status {
	return engine.Status(C.nixlkv_post(s.c, C.uintptr_t(agent), C.uintptr_t(r),
		(*C.uint8_t)(unsafe.SliceData(notif)), C.size_t(len(notif)), flagsOf(has, false, false)))
}

func (s *shimCalls) poll(agent uintptr, reqs []engine.Request, out []engine.Status) {
	if len(reqs) == 0 {
		return
	}
	_ = out[len(reqs)-1]
	C.nixlkv_poll(s.c, C.uintptr_t(agent), (*C.uintptr_t)(unsafe.Pointer(unsafe.SliceData(reqs))),
		C.size_t(len(reqs)), (*C.int32_t)(unsafe.Pointer(unsafe.SliceData(out))))
}

func (s *shimCalls) release(agent uintptr, r engine.Request) engine.Status {
	return engine.Status(C.nixlkv_release(s.c, C.uintptr_t(agent), C.uintptr_t(r)))
}

func (s *shimCalls) notify(agent uintptr, r engine.Remote, msg []byte) engine.Status {
	return engine.Status(C.nixlkv_notify(s.c, C.uintptr_t(agent), C.uintptr_t(r),
		(*C.uint8_t)(unsafe.SliceData(msg)), C.size_t(len(msg))))
}

func (s *shimCalls) drain(agent, notifMap uintptr, fetch bool, buf []byte) (int, int, engine.Status) {
	var need, count C.size_t
	var f C.int
	if fetch {
		f = 1
	}
	st := C.nixlkv_drain(s.c, C.uintptr_t(agent), C.uintptr_t(notifMap), f,
		(*C.uint8_t)(unsafe.SliceData(buf)), C.size_t(len(buf)), &need, &count)
	return int(need), int(count), engine.Status(st)
}

func flagsOf(hasNotif, noMerge, post bool) C.int {
	var f C.int
	if hasNotif {
		f |= C.NIXLKV_HAS_NOTIF
	}
	if noMerge {
		f |= C.NIXLKV_NO_MERGE
	}
	if post {
		f |= C.NIXLKV_POST
	}
	return f
}
