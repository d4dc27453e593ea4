package cgo

import (
	"encoding/binary"
	"runtime"
	"sync"

	"github.com/ebitengine/purego"

	"github.com/nixlkv/nixlkv/internal/engine"
)

// puregoCalls crosses into C once per descriptor, request or notification.
type puregoCalls struct {
	sym    *table
	frames sync.Pool // of *frame
}

// frame holds the arguments of a call and what C writes back. SyscallN lets its arguments
// escape, so a call with arguments of its own would allocate them each time; a frame is
// pooled instead.
type frame struct {
	args       [12]uintptr
	word, size [1]uintptr
}

func (c *puregoCalls) frame() *frame {
	if f, ok := c.frames.Get().(*frame); ok {
		return f
	}
	return new(frame)
}

// call makes a call with the first n arguments of the frame.
func (f *frame) call(fn uintptr, n int) engine.Status {
	return status(purego.SyscallN(fn, f.args[:n]...))
}

func (f *frame) call1(fn, a uintptr) engine.Status {
	f.args[0] = a
	return f.call(fn, 1)
}

func (f *frame) call2(fn, a, b uintptr) engine.Status {
	f.args[0], f.args[1] = a, b
	return f.call(fn, 2)
}

func (f *frame) call3(fn, a, b, c uintptr) engine.Status {
	f.args[0], f.args[1], f.args[2] = a, b, c
	return f.call(fn, 3)
}

func status(r, _, _ uintptr) engine.Status { return engine.Status(int32(r)) }

func (c *puregoCalls) name() string { return "purego" }

func (c *puregoCalls) append(list engine.List, d []engine.Desc, devMask uint64) engine.Status {
	f := c.frame()
	defer c.frames.Put(f)
	for i := range d {
		f.args[0], f.args[1], f.args[2], f.args[3] = uintptr(list), uintptr(d[i].Addr), uintptr(d[i].Len), uintptr(d[i].Dev&devMask)
		if st := f.call(c.sym[symListAdd], 4); st < 0 {
			return st
		}
	}
	return engine.Success
}

func (c *puregoCalls) appendRuns(list engine.List, runs []engine.Run, devMask uint64) engine.Status {
	f := c.frame()
	defer c.frames.Put(f)
	for _, r := range runs {
		a := r.Addr
		for range r.Count {
			f.args[0], f.args[1], f.args[2], f.args[3] = uintptr(list), uintptr(a), uintptr(r.Len), uintptr(r.Dev&devMask)
			if st := f.call(c.sym[symListAdd], 4); st < 0 {
				return st
			}
			a += r.Stride
		}
	}
	return engine.Success
}

func (c *puregoCalls) clear(list engine.List) engine.Status {
	f := c.frame()
	defer c.frames.Put(f)
	return f.call1(c.sym[symListClear], uintptr(list))
}

// options makes an options handle, or none when nothing is asked for. NIXL copies what is
// in it during the call that takes it (nixlAgent::createXferReq, makeXferReq,
// postXferReq), so the caller destroys it right after.
func (c *puregoCalls) options(f *frame, notif []byte, hasNotif, noMerge bool) (uintptr, engine.Status) {
	if !hasNotif && !noMerge {
		return 0, engine.Success
	}
	if st := f.call1(c.sym[symOptCreate], addr(f.word[:])); st < 0 {
		return 0, st
	}
	h, st := f.word[0], engine.Success
	if hasNotif {
		st = f.call3(c.sym[symOptNotif], h, addr(notif), uintptr(len(notif)))
		runtime.KeepAlive(notif)
		if st >= 0 {
			st = f.call2(c.sym[symOptHasNotif], h, 1)
		}
	}
	if noMerge && st >= 0 && c.sym[symOptSkipMerge] != 0 {
		st = f.call2(c.sym[symOptSkipMerge], h, 1)
	}
	if st < 0 {
		c.destroyOptions(f, h)
		return 0, st
	}
	return h, engine.Success
}

// destroyOptions ends an options handle; the library's destructor has no way to fail.
func (c *puregoCalls) destroyOptions(f *frame, h uintptr) {
	if h != 0 {
		f.call1(c.sym[symOptDestroy], h)
	}
}

func (c *puregoCalls) create(agent uintptr, s *engine.Spec) (engine.Request, engine.Status, engine.Status) {
	f := c.frame()
	defer c.frames.Put(f)
	opts, st := c.options(f, s.Notif, s.HasNotif, s.NoMerge)
	if st < 0 {
		return 0, st, 0
	}
	if s.LocalPrep != 0 {
		f.args = [...]uintptr{agent, uintptr(s.Op),
			uintptr(s.LocalPrep), addr(s.LocalIndex), uintptr(len(s.LocalIndex)),
			uintptr(s.RemotePrep), addr(s.RemoteIndex), uintptr(len(s.RemoteIndex)),
			addr(f.word[:]), opts, 0, 0}
		st = f.call(c.sym[symCreateByIndex], 10)
		runtime.KeepAlive(s)
	} else {
		f.args = [...]uintptr{agent, uintptr(s.Op), uintptr(s.LocalList), uintptr(s.RemoteList), uintptr(s.Remote),
			addr(f.word[:]), opts, 0, 0, 0, 0, 0}
		st = f.call(c.sym[symCreateByList], 7)
	}
	req := f.word[0]
	c.destroyOptions(f, opts)
	if st < 0 {
		return 0, st, 0
	}
	posted := engine.Success
	if s.Post {
		// Without options the notification given at creation is kept.
		posted = f.call3(c.sym[symPost], agent, req, 0)
	}
	return engine.Request(req), st, posted
}

func (c *puregoCalls) post(agent uintptr, r engine.Request, notif []byte, has bool) engine.Status {
	f := c.frame()
	defer c.frames.Put(f)
	opts, st := c.options(f, notif, has, false)
	if st < 0 {
		return st
	}
	st = f.call3(c.sym[symPost], agent, uintptr(r), opts)
	c.destroyOptions(f, opts)
	return st
}

func (c *puregoCalls) poll(agent uintptr, reqs []engine.Request, out []engine.Status) {
	f := c.frame()
	defer c.frames.Put(f)
	for i, r := range reqs {
		out[i] = f.call2(c.sym[symStatus], agent, uintptr(r))
	}
}

func (c *puregoCalls) release(agent uintptr, r engine.Request) engine.Status {
	f := c.frame()
	defer c.frames.Put(f)
	if st := f.call2(c.sym[symRelease], agent, uintptr(r)); st < 0 {
		return st
	}
	return f.call1(c.sym[symDestroyRequest], uintptr(r))
}

func (c *puregoCalls) notify(agent uintptr, r engine.Remote, msg []byte) engine.Status {
	f := c.frame()
	defer c.frames.Put(f)
	f.args = [...]uintptr{agent, uintptr(r), addr(msg), uintptr(len(msg)), 0, 0, 0, 0, 0, 0, 0, 0}
	st := f.call(c.sym[symGenNotif], 5)
	runtime.KeepAlive(msg)
	return st
}

func (c *puregoCalls) drain(agent, notifMap uintptr, fetch bool, buf []byte) (need, count int, st engine.Status) {
	f := c.frame()
	defer c.frames.Put(f)
	if fetch {
		if st := f.call3(c.sym[symGetNotifs], agent, notifMap, 0); st < 0 {
			return 0, 0, st
		}
	}
	// The first pass measures, the second writes.
	need, count, st = c.walk(f, notifMap, nil)
	if st < 0 || need > len(buf) || count == 0 {
		return need, count, st
	}
	if _, _, st = c.walk(f, notifMap, buf); st < 0 {
		return need, count, st
	}
	return need, count, f.call1(c.sym[symNotifMapClear], notifMap)
}

// walk goes through the notification map, adding up the records' sizes, and writes them to
// buf unless it is nil.
func (c *puregoCalls) walk(f *frame, m uintptr, buf []byte) (need, count int, st engine.Status) {
	word, size := addr(f.word[:]), addr(f.size[:])
	if st = f.call2(c.sym[symNotifMapSize], m, size); st < 0 {
		return 0, 0, st
	}
	for i := range f.size[0] {
		if st = f.call3(c.sym[symNotifMapAgent], m, i, word); st < 0 {
			return 0, 0, st
		}
		name := f.word[0]
		from := cstringBytes(name)
		if st = f.call3(c.sym[symNotifMapCount], m, name, size); st < 0 {
			return 0, 0, st
		}
		for j := range f.size[0] {
			f.args[0], f.args[1], f.args[2], f.args[3], f.args[4] = m, name, j, word, size
			if st = f.call(c.sym[symNotifMapGet], 5); st < 0 {
				return 0, 0, st
			}
			n := int(f.size[0])
			if buf != nil {
				rec := buf[need:]
				binary.LittleEndian.PutUint32(rec, uint32(len(from)))
				binary.LittleEndian.PutUint32(rec[4:], uint32(n))
				copy(rec[8:], from)
				copy(rec[8+len(from):], cbytes(f.word[0], n))
			}
			need += 8 + len(from) + n
			count++
		}
	}
	return need, count, engine.Success
}
