package cgo

import (
	"runtime"
	"unsafe"

	"github.com/nixlkv/nixlkv/internal/engine"
)

// Plugins implements engine.Agent.
func (a *agent) Plugins() (names []string, err error) {
	if err := a.sym.has(symGetPlugins, symStringListSize, symStringListGet, symDestroyStringList); err != nil {
		return nil, err
	}
	var list, n, s uintptr
	if err := a.call(symGetPlugins, a.handle, uintptr(unsafe.Pointer(&list))); err != nil {
		return nil, err
	}
	defer func() {
		if e := a.call(symDestroyStringList, list); err == nil {
			err = e
		}
	}()
	if err := a.call(symStringListSize, list, uintptr(unsafe.Pointer(&n))); err != nil {
		return nil, err
	}
	for i := range n {
		if err := a.call(symStringListGet, list, i, uintptr(unsafe.Pointer(&s))); err != nil {
			return nil, err
		}
		names = append(names, gostring(s))
	}
	return names, nil
}

// PluginParams implements engine.Agent.
func (a *agent) PluginParams(plugin string) (map[string]string, []engine.Mem, error) {
	n := cstring(plugin)
	defer runtime.KeepAlive(n)
	return a.describe(symPluginParams, addr(n))
}

// BackendParams implements engine.Agent.
func (a *agent) BackendParams(b engine.Backend) (map[string]string, []engine.Mem, error) {
	return a.describe(symBackendParams, uintptr(b))
}

// describe asks for the parameters and memory kinds of a plugin or a backend.
func (a *agent) describe(s symbol, what uintptr) (map[string]string, []engine.Mem, error) {
	var mems, params uintptr
	if err := a.call(s, a.handle, what, uintptr(unsafe.Pointer(&mems)), uintptr(unsafe.Pointer(&params))); err != nil {
		return nil, nil, err
	}
	p, err := a.readParams(params)
	if err == nil {
		var m []engine.Mem
		if m, err = a.readMems(mems); err == nil {
			err = a.destroyDescription(mems, params)
			return p, m, err
		}
	}
	return nil, nil, joinCleanup(err, a.destroyDescription(mems, params))
}

func (a *agent) destroyDescription(mems, params uintptr) error {
	if err := a.call(symDestroyMemList, mems); err != nil {
		return err
	}
	return a.call(symDestroyParams, params)
}

func (a *agent) readMems(list uintptr) ([]engine.Mem, error) {
	var n uintptr
	if err := a.call(symMemListSize, list, uintptr(unsafe.Pointer(&n))); err != nil {
		return nil, err
	}
	var mems []engine.Mem
	for i := range n {
		var m uint32
		if err := a.call(symMemListGet, list, i, uintptr(unsafe.Pointer(&m))); err != nil {
			return nil, err
		}
		mems = append(mems, engine.Mem(m))
	}
	return mems, nil
}

func (a *agent) readParams(params uintptr) (m map[string]string, err error) {
	m = map[string]string{}
	var empty bool
	if err := a.call(symParamsEmpty, params, uintptr(unsafe.Pointer(&empty))); err != nil || empty {
		return m, err
	}
	var it, k, v uintptr
	if err := a.call(symParamsIter, params, uintptr(unsafe.Pointer(&it))); err != nil {
		return nil, err
	}
	defer func() {
		if e := a.call(symDestroyParamsIter, it); err == nil {
			err = e
		}
	}()
	// The strings belong to the iterator until its next step; "more" speaks of what comes
	// after the pair that was just given.
	for more := true; more; {
		if err := a.call(symParamsNext, it, uintptr(unsafe.Pointer(&k)), uintptr(unsafe.Pointer(&v)), uintptr(unsafe.Pointer(&more))); err != nil {
			return nil, err
		}
		m[gostring(k)] = gostring(v)
	}
	return m, nil
}

// CreateBackend implements engine.Agent. The plugin's own defaults are the starting point,
// as NIXL asks for, and params replace them one by one.
func (a *agent) CreateBackend(plugin string, params map[string]string) (b engine.Backend, err error) {
	n := cstring(plugin)
	defer runtime.KeepAlive(n)
	var mems, p, handle uintptr
	if err := a.call(symPluginParams, a.handle, addr(n), uintptr(unsafe.Pointer(&mems)), uintptr(unsafe.Pointer(&p))); err != nil {
		return 0, err
	}
	defer func() {
		if e := a.destroyDescription(mems, p); err == nil {
			err = e
		}
	}()
	for k, v := range params {
		ck, cv := cstring(k), cstring(v)
		err := a.call(symParamsAdd, p, addr(ck), addr(cv))
		runtime.KeepAlive(ck)
		runtime.KeepAlive(cv)
		if err != nil {
			return 0, err
		}
	}
	if err := a.call(symCreateBackend, a.handle, addr(n), p, uintptr(unsafe.Pointer(&handle))); err != nil {
		return 0, err
	}
	a.backends.Lock()
	a.backends.all = append(a.backends.all, engine.Backend(handle))
	a.backends.Unlock()
	return engine.Backend(handle), nil
}
