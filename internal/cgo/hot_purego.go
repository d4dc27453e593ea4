package cgo

import (
	"encoding/binary"
	"sync"
	"unsafe"

	"github.com/ebitengine/purego"

	"github.com/nixlkv/nixlkv/internal/engine"
)

// puregoCalls crosses into C once per descriptor, request or notification.
type puregoCalls struct {
	sym     *table
	scratch sync.Pool // of *outs
}

// outs is where C puts results. It is pooled because SyscallN lets its arguments escape.
type outs struct{ word, size uintptr }

func (c *puregoCalls) outs() *outs {
	if o, ok := c.scratch.Get().(*outs); ok {
		*o = outs{}
		return o
	}
	return new(outs)
}

func status(r, _, _ uintptr) engine.Status { return engine.Status(int32(r)) }

func (c *puregoCalls) name() string { return "purego" }

func (c *puregoCalls) append(list engine.List, d []engine.Desc, devMask uint64) engine.Status {
	add := c.sym[symListAdd]
	for i := range d {
		st := status(purego.SyscallN(add, uintptr(list), uintptr(d[i].Addr), uintptr(d[i].Len), uintptr(d[i].Dev&devMask)))
		if st < 0 {
			return st
		}
	}
	return engine.Success
}

func (c *puregoCalls) appendRuns(list engine.List, runs []engine.Run, devMask uint64) engine.Status {
	add := c.sym[symListAdd]
	for _, r := range runs {
		a := r.Addr
		for range r.Count {
			if st := status(purego.SyscallN(add, uintptr(list), uintptr(a), uintptr(r.Len), uintptr(r.Dev&devMask))); st < 0 {
				return st
			}
			a += r.Stride
		}
	}
	return engine.Success
}

// options makes an options handle, or none when nothing is asked for. NIXL copies what is
// in it during the call that takes it (nixlAgent::createXferReq, makeXferReq,
// postXferReq), so the caller destroys it right after.
func (c *puregoCalls) options(notif []byte, hasNotif, noMerge bool) (uintptr, engine.Status) {
	if !hasNotif && !noMerge {
		return 0, engine.Success
	}
	o := c.outs()
	defer c.scratch.Put(o)
	st := status(purego.SyscallN(c.sym[symOptCreate], uintptr(unsafe.Pointer(&o.word))))
	if st < 0 {
		return 0, st
	}
	h := o.word
	if hasNotif {
		st = status(purego.SyscallN(c.sym[symOptNotif], h, uintptr(unsafe.Pointer(unsafe.SliceData(notif))), uintptr(len(notif))))
		if st >= 0 {
			st = status(purego.SyscallN(c.sym[symOptHasNotif], h, 1))
		}
	}
	if noMerge && st >= 0 && c.sym[symOptSkipMerge] != 0 {
		st = status(purego.SyscallN(c.sym[symOptSkipMerge], h, 1))
	}
	if st < 0 {
		purego.SyscallN(c.sym[symOptDestroy], h)
		return 0, st
	}
	return h, engine.Success
}

func (c *puregoCalls) destroyOptions(h uintptr) {
	if h != 0 {
		purego.SyscallN(c.sym[symOptDestroy], h)
	}
}

func (c *puregoCalls) create(agent uintptr, s *engine.Spec) (engine.Request, engine.Status, engine.Status) {
	opts, st := c.options(s.Notif, s.HasNotif, s.NoMerge)
	if st < 0 {
		return 0, st, 0
	}
	defer c.destroyOptions(opts)
	o := c.outs()
	defer c.scratch.Put(o)
	if s.LocalPrep != 0 {
		st = status(purego.SyscallN(c.sym[symCreateByIndex], agent, uintptr(s.Op),
			uintptr(s.LocalPrep), uintptr(unsafe.Pointer(unsafe.SliceData(s.LocalIndex))), uintptr(len(s.LocalIndex)),
			uintptr(s.RemotePrep), uintptr(unsafe.Pointer(unsafe.SliceData(s.RemoteIndex))), uintptr(len(s.RemoteIndex)),
			uintptr(unsafe.Pointer(&o.word)), opts))
	} else {
		st = status(purego.SyscallN(c.sym[symCreateByList], agent, uintptr(s.Op),
			uintptr(s.LocalList), uintptr(s.RemoteList), uintptr(s.Remote), uintptr(unsafe.Pointer(&o.word)), opts))
	}
	if st < 0 {
		return 0, st, 0
	}
	posted := engine.Success
	if s.Post {
		// Without options the notification given at creation is kept.
		posted = status(purego.SyscallN(c.sym[symPost], agent, o.word, 0))
	}
	return engine.Request(o.word), st, posted
}

func (c *puregoCalls) post(agent uintptr, r engine.Request, notif []byte, has bool) engine.Status {
	opts, st := c.options(notif, has, false)
	if st < 0 {
		return st
	}
	st = status(purego.SyscallN(c.sym[symPost], agent, uintptr(r), opts))
	c.destroyOptions(opts)
	return st
}

func (c *puregoCalls) poll(agent uintptr, reqs []engine.Request, out []engine.Status) {
	fn := c.sym[symStatus]
	for i, r := range reqs {
		out[i] = status(purego.SyscallN(fn, agent, uintptr(r)))
	}
}

func (c *puregoCalls) drain(agent, notifMap uintptr, fetch bool, buf []byte) (need, count int, st engine.Status) {
	if fetch {
		if st := status(purego.SyscallN(c.sym[symGetNotifs], agent, notifMap, 0)); st < 0 {
			return 0, 0, st
		}
	}
	// The first pass measures, the second writes.
	need, count, st = c.walk(notifMap, nil)
	if st < 0 || need > len(buf) || count == 0 {
		return need, count, st
	}
	if _, _, st = c.walk(notifMap, buf); st < 0 {
		return need, count, st
	}
	return need, count, status(purego.SyscallN(c.sym[symNotifMapClear], notifMap))
}

// walk goes through the notification map, adding up the records' sizes, and writes them to
// buf unless it is nil.
func (c *puregoCalls) walk(m uintptr, buf []byte) (need, count int, st engine.Status) {
	o := c.outs()
	defer c.scratch.Put(o)
	word, size := uintptr(unsafe.Pointer(&o.word)), uintptr(unsafe.Pointer(&o.size))
	if st = status(purego.SyscallN(c.sym[symNotifMapSize], m, size)); st < 0 {
		return 0, 0, st
	}
	agents := o.size
	for i := range agents {
		if st = status(purego.SyscallN(c.sym[symNotifMapAgent], m, i, word)); st < 0 {
			return 0, 0, st
		}
		name := o.word
		from := cstringBytes(name)
		if st = status(purego.SyscallN(c.sym[symNotifMapCount], m, name, size)); st < 0 {
			return 0, 0, st
		}
		for j := range o.size {
			if st = status(purego.SyscallN(c.sym[symNotifMapGet], m, name, j, word, size)); st < 0 {
				return 0, 0, st
			}
			if buf != nil {
				rec := buf[need:]
				binary.LittleEndian.PutUint32(rec, uint32(len(from)))
				binary.LittleEndian.PutUint32(rec[4:], uint32(o.size))
				copy(rec[8:], from)
				copy(rec[8+len(from):], cbytes(o.word, int(o.size)))
			}
			need += 8 + len(from) + int(o.size)
			count++
		}
	}
	return need, count, engine.Success
}
