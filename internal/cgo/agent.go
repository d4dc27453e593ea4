package cgo

import (
	"errors"
	"fmt"
	"runtime"
	"sync"
	"time"
	"unsafe"

	"github.com/ebitengine/purego"

	"github.com/nixlkv/nixlkv/internal/engine"
)

// agent is one nixl_capi_agent_t.
type agent struct {
	lib     *Library
	sym     *table
	hot     hotCalls
	handle  uintptr
	cfg     engine.AgentConfig
	devMask uint64 // 0 where VRAM is host memory, which has device 0
	self    []byte // the agent's name as a C string

	// storage holds the lists that are not of memory where devMask is 0: their devices count.
	storage struct {
		sync.Mutex
		lists map[engine.List]struct{}
	}

	// drain is held from fetching notifications until they are out of the library's map.
	drain    sync.Mutex
	notifMap uintptr

	backends struct {
		sync.Mutex
		all []engine.Backend
	}
}

var (
	_ engine.Engine = (*Library)(nil)
	_ engine.Agent  = (*agent)(nil)
)

// agentConfig has the layout of nixl_capi_agent_config_t, the same in releases 0.7 to 1.5.
type agentConfig struct {
	progressThread, listenThread bool
	_                            [2]byte
	listenPort                   int32
	sync                         uint32
	workers                      uint32
	progressDelay, listenDelay   uint64 // µs
	telemetry                    bool
	_                            [7]byte
}

// NewAgent implements engine.Engine.
func (l *Library) NewAgent(name string, cfg engine.AgentConfig) (engine.Agent, error) {
	c := &agentConfig{
		progressThread: cfg.ProgressThread,
		sync:           uint32(cfg.Sync),
		progressDelay:  uint64(cfg.ProgressDelay / time.Microsecond),
		telemetry:      cfg.Telemetry,
	}
	a := &agent{lib: l, sym: l.sym, hot: l.hot, cfg: cfg, devMask: ^uint64(0)}
	if cfg.HostVRAM {
		a.devMask = 0
	}
	a.self = cstring(name)
	err := a.call(symCreateAgent, addr(a.self), uintptr(unsafe.Pointer(c)), uintptr(unsafe.Pointer(&a.handle)))
	if err != nil {
		return nil, err
	}
	if err := a.call(symCreateNotifMap, uintptr(unsafe.Pointer(&a.notifMap))); err != nil {
		return nil, joinCleanup(err, a.Destroy())
	}
	return a, nil
}

// call makes one call whose result is a status.
//
//go:uintptrescapes
func (a *agent) call(s symbol, args ...uintptr) error {
	if a.sym[s] == 0 {
		return a.sym.has(s)
	}
	return s.check(status(purego.SyscallN(a.sym[s], args...)))
}

func joinCleanup(err, cleanup error) error {
	if cleanup == nil {
		return err
	}
	return fmt.Errorf("%w (and cleaning up: %w)", err, cleanup)
}

// mem translates a kind of memory for the library.
func (a *agent) mem(m engine.Mem) engine.Mem {
	if m == engine.VRAM && a.cfg.HostVRAM {
		return engine.DRAM
	}
	return m
}

// mask gives what the devices of a kind of memory are ANDed with.
func (a *agent) mask(m engine.Mem) uint64 {
	if isStorage(m) {
		return ^uint64(0)
	}
	return a.devMask
}

func isStorage(m engine.Mem) bool { return m != engine.DRAM && m != engine.VRAM }

// Destroy implements engine.Agent.
func (a *agent) Destroy() error {
	if a.notifMap != 0 {
		if err := a.call(symDestroyNotifMap, a.notifMap); err != nil {
			return err
		}
		a.notifMap = 0
	}
	a.backends.Lock()
	defer a.backends.Unlock()
	if a.sym[symDestroyBackend] != 0 {
		for _, b := range a.backends.all {
			if err := a.call(symDestroyBackend, uintptr(b)); err != nil {
				return err
			}
		}
	}
	a.backends.all = nil
	if err := a.call(symDestroyAgent, a.handle); err != nil {
		return err
	}
	a.handle = 0
	return nil
}

// Register implements engine.Agent.
func (a *agent) Register(m engine.Mem, regs []engine.Region) error {
	return a.withRegions(m, regs, symRegisterMem)
}

// Deregister implements engine.Agent. NIXL cannot tell whether a peer is writing: a write
// that a peer has posted may still land, and the protocol above has to rule it out.
func (a *agent) Deregister(m engine.Mem, regs []engine.Region) error {
	return a.withRegions(m, regs, symDeregisterMem)
}

func (a *agent) withRegions(m engine.Mem, regs []engine.Region, s symbol) (err error) {
	var list uintptr
	if err := a.call(symCreateRegList, uintptr(a.mem(m)), uintptr(unsafe.Pointer(&list))); err != nil {
		return err
	}
	defer func() {
		if e := a.call(symDestroyRegList, list); err == nil {
			err = e
		}
	}()
	for _, r := range regs {
		err := a.call(symRegListAdd, list, uintptr(r.Addr), uintptr(r.Len), uintptr(r.Dev&a.mask(m)), addr(r.Meta), uintptr(len(r.Meta)))
		runtime.KeepAlive(r.Meta)
		if err != nil {
			return err
		}
	}
	return a.call(s, a.handle, list, 0)
}

// LocalMetadata implements engine.Agent.
func (a *agent) LocalMetadata() ([]byte, error) {
	var data, size uintptr
	if err := a.call(symGetLocalMD, a.handle, uintptr(unsafe.Pointer(&data)), uintptr(unsafe.Pointer(&size))); err != nil {
		return nil, err
	}
	defer a.lib.free(data)
	return append([]byte(nil), cbytes(data, int(size))...), nil
}

// MetadataName implements engine.Agent.
func (a *agent) MetadataName(metadata []byte) (string, error) { return checkMetadata(metadata) }

// LoadRemote implements engine.Agent. The handle is the peer's name as a C string.
func (a *agent) LoadRemote(metadata []byte) (engine.Remote, string, error) {
	agent, err := checkMetadata(metadata)
	if err != nil {
		return 0, "", err
	}
	var name uintptr
	err = a.call(symLoadRemoteMD, a.handle, addr(metadata), uintptr(len(metadata)), uintptr(unsafe.Pointer(&name)))
	runtime.KeepAlive(metadata)
	if err != nil {
		// What was loaded halfway would be in the way of the next try.
		n := cstring(agent)
		cleanup := a.call(symInvalidateRemoteMD, a.handle, addr(n))
		runtime.KeepAlive(n)
		if errors.Is(cleanup, engine.ErrNotFound) {
			cleanup = nil
		}
		return 0, agent, joinCleanup(err, cleanup)
	}
	return engine.Remote(name), gostring(name), nil
}

// CheckRemote implements engine.Agent.
func (a *agent) CheckRemote(r engine.Remote) error {
	return a.call(symCheckRemoteMD, a.handle, uintptr(r), 0)
}

// Connect implements engine.Agent.
func (a *agent) Connect(r engine.Remote) error {
	return a.call(symMakeConnection, a.handle, uintptr(r), 0)
}

// InvalidateRemote implements engine.Agent.
func (a *agent) InvalidateRemote(r engine.Remote) error {
	return a.call(symInvalidateRemoteMD, a.handle, uintptr(r))
}

// FreeRemote implements engine.Agent.
func (a *agent) FreeRemote(r engine.Remote) { a.lib.free(uintptr(r)) }

// Self implements engine.Agent. NIXL knows the agent itself by its name, too, once something
// is registered (nixlAgent::registerMem).
func (a *agent) Self() (engine.Remote, error) { return engine.Remote(addr(a.self)), nil }

// Notify implements engine.Agent.
func (a *agent) Notify(r engine.Remote, msg []byte) error {
	return connectionError(symGenNotif, a.hot.notify(a.handle, r, msg))
}

// minDrain is the first size of a drain buffer, enough for some hundred tags.
const minDrain = 16 << 10

// Notifications implements engine.Agent.
func (a *agent) Notifications(dst *engine.Notifications) error {
	dst.Reset()
	if cap(dst.Records) == 0 {
		dst.Records = make([]byte, 0, minDrain)
	}
	a.drain.Lock()
	defer a.drain.Unlock()
	for fetch := true; ; fetch = false {
		buf := dst.Records[:cap(dst.Records)]
		need, count, st := a.hot.drain(a.handle, a.notifMap, fetch, buf)
		if st < 0 {
			return symGetNotifs.check(st)
		}
		if need <= len(buf) {
			dst.Records, dst.Count = buf[:need], count
			return nil
		}
		dst.Records = make([]byte, 0, need+need/4)
	}
}
