//go:build linux

// Package cuda calls the CUDA driver API in libcuda.so.1, which is loaded at run time, so
// that a program that imports it starts on a machine without a GPU. It needs no cgo.
//
// It knows what package gpu needs to list devices. Others bind what else they call with
// [Driver.Bind].
package cuda

import (
	"errors"
	"fmt"
	"runtime"
	"strings"
	"unsafe"

	"github.com/ebitengine/purego"
)

// library is the driver's part of CUDA. The loader finds it; its path differs between
// distributions and containers.
const library = "libcuda.so.1"

// Driver is the loaded and initialised library. It may be used from many goroutines.
//
// It is never unloaded: libcuda leaves threads and thread-local state behind that
// outlive any handle, and other libraries in the process share it.
type Driver struct {
	path         string
	handle       uintptr
	getErrorName func(code Code, name **byte) Code
}

// Open loads libcuda.so.1 and calls cuInit, which reads CUDA_VISIBLE_DEVICES and
// CUDA_DEVICE_ORDER once for the life of the process. It makes no context. cuInit can
// take seconds on a machine of many GPUs, and cannot be cancelled. Every error wraps
// [ErrNoDriver].
func Open() (*Driver, error) { return OpenLibrary(library) }

// OpenLibrary is Open for a library of another name or path.
func OpenLibrary(path string) (*Driver, error) {
	d, err := load(path)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNoDriver, err)
	}
	return d, nil
}

func load(path string) (_ *Driver, err error) {
	defer func() {
		if err != nil && !strings.Contains(err.Error(), path) { // the linker's own words have it
			err = fmt.Errorf("%s: %w", path, err)
		}
	}()
	handle, err := dl(func() (uintptr, error) { return purego.Dlopen(path, purego.RTLD_NOW|purego.RTLD_LOCAL) })
	if err != nil {
		return nil, err
	}
	d := &Driver{path: path, handle: handle}
	var cuInit func(flags uint32) Code
	if err := errors.Join(
		d.Bind(&d.getErrorName, "cuGetErrorName"),
		d.Bind(&cuInit, "cuInit"),
	); err != nil {
		return nil, err
	}
	if err := d.Check("cuInit", cuInit(0)); err != nil {
		return nil, err
	}
	return d, nil
}

// Bind points *fn, a variable of function type, at the first of the names that the
// library has; see purego.RegisterFunc for how Go types stand for C ones. The signature
// must be that of all the names. It gives [ErrNoSymbol] if there is none of them.
func (d *Driver) Bind(fn any, names ...string) error {
	for _, name := range names {
		addr, err := dl(func() (uintptr, error) { return purego.Dlsym(d.handle, name) })
		if err == nil {
			purego.RegisterFunc(fn, addr)
			return nil
		}
	}
	return fmt.Errorf("%w: %q in %s", ErrNoSymbol, names, d.path)
}

// Check gives nil for Success, else an [*Error] with the name that the library has for
// the code.
func (d *Driver) Check(call string, code Code) error {
	if code == Success {
		return nil
	}
	e := &Error{Call: call, Code: code}
	var name *byte
	if d.getErrorName(code, &name) == Success {
		e.Name = cString(name)
	}
	return e
}

// dl keeps a call to the dynamic linker and the question for its error on one thread:
// dlerror answers per thread.
func dl(call func() (uintptr, error)) (uintptr, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	return call()
}

// maxString bounds the strings that the driver gives; its longest are under 64 bytes.
const maxString = 256

// cString copies a string that belongs to the library.
func cString(p *byte) string {
	if p == nil {
		return ""
	}
	n := 0
	for n < maxString && *(*byte)(unsafe.Add(unsafe.Pointer(p), n)) != 0 {
		n++
	}
	return string(unsafe.Slice(p, n))
}
