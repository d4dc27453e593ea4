//go:build linux

// Package cudamem allocates GPU memory through the CUDA driver API and copies between it
// and the host. The library itself leaves GPU memory to its callers; this is for tests
// and examples that must stand in for them. It needs no cgo.
package cudamem

import (
	"errors"
	"fmt"
	"math"
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/nixlkv/nixlkv/internal/gpu/cuda"
)

// The errors of this package come wrapped with details; compare with errors.Is. A call
// that the driver refused gives a [*cuda.Error], and a missing driver [cuda.ErrNoDriver].
var (
	// ErrSize: the size is not positive.
	ErrSize = errors.New("cudamem: invalid size")
	// ErrOrdinal: the device ordinal is negative or no 32-bit number.
	ErrOrdinal = errors.New("cudamem: invalid CUDA ordinal")
	// ErrRange: an offset outside of the memory, or a write past its end.
	ErrRange = errors.New("cudamem: out of range")
	// ErrInUse: the context still has memory.
	ErrInUse = errors.New("cudamem: context in use")
	// ErrClosed: the context is closed, or the memory freed.
	ErrClosed = errors.New("cudamem: closed")
)

// functions are those of the driver API that this package calls. CUcontext is a pointer,
// CUdeviceptr a 64-bit number.
type functions struct {
	deviceGet   func(dev *int32, ordinal int32) cuda.Code
	retain      func(ctx *uintptr, dev int32) cuda.Code
	release     func(dev int32) cuda.Code
	push        func(ctx uintptr) cuda.Code
	pop         func(ctx *uintptr) cuda.Code
	setCurrent  func(ctx uintptr) cuda.Code
	synchronize func() cuda.Code
	alloc       func(addr *uint64, bytes uintptr) cuda.Code
	free        func(addr uint64) cuda.Code
	toDevice    func(to uint64, from *byte, bytes uintptr) cuda.Code
	toHost      func(to *byte, from uint64, bytes uintptr) cuda.Code
}

// Context holds the primary context of a device, the one that the CUDA runtime (and so
// PyTorch, NIXL and UCX) uses in this process. It may be used from many goroutines.
type Context struct {
	driver  *cuda.Driver
	fn      functions
	ordinal int
	device  int32
	handle  uintptr
	live    atomic.Int64 // pieces of memory

	mu     sync.RWMutex // held shared by calls, exclusively by Close
	closed bool
}

// Open retains the primary context of the device with that CUDA ordinal, through the
// machine's driver. The caller closes it.
func Open(ordinal int) (*Context, error) {
	d, err := cuda.Open()
	if err != nil {
		return nil, fmt.Errorf("cudamem: %w", err)
	}
	return New(d, ordinal)
}

// New is Open with a driver that is open already.
func New(d *cuda.Driver, ordinal int) (*Context, error) {
	if ordinal < 0 || ordinal > math.MaxInt32 {
		return nil, fmt.Errorf("%w: %d", ErrOrdinal, ordinal)
	}
	c := &Context{driver: d, ordinal: ordinal}
	if err := errors.Join(
		d.Bind(&c.fn.deviceGet, "cuDeviceGet"),
		d.Bind(&c.fn.retain, "cuDevicePrimaryCtxRetain"),
		d.Bind(&c.fn.release, "cuDevicePrimaryCtxRelease_v2"),
		d.Bind(&c.fn.push, "cuCtxPushCurrent_v2"),
		d.Bind(&c.fn.pop, "cuCtxPopCurrent_v2"),
		d.Bind(&c.fn.setCurrent, "cuCtxSetCurrent"),
		d.Bind(&c.fn.synchronize, "cuCtxSynchronize"),
		d.Bind(&c.fn.alloc, "cuMemAlloc_v2"),
		d.Bind(&c.fn.free, "cuMemFree_v2"),
		d.Bind(&c.fn.toDevice, "cuMemcpyHtoD_v2"),
		d.Bind(&c.fn.toHost, "cuMemcpyDtoH_v2"),
	); err != nil {
		return nil, fmt.Errorf("cudamem: %w", err)
	}
	if err := d.Check("cuDeviceGet", c.fn.deviceGet(&c.device, int32(ordinal))); err != nil {
		return nil, fmt.Errorf("cudamem: CUDA ordinal %d: %w", ordinal, err)
	}
	if err := d.Check("cuDevicePrimaryCtxRetain", c.fn.retain(&c.handle, c.device)); err != nil {
		return nil, fmt.Errorf("cudamem: CUDA ordinal %d: %w", ordinal, err)
	}
	return c, nil
}

// Ordinal is the CUDA ordinal of the device, NIXL's device id of its memory.
func (c *Context) Ordinal() int { return c.ordinal }

// MakeCurrent makes the context current on the calling thread, and leaves it so. The
// goroutine must be locked to that thread (runtime.LockOSThread). Nothing else here
// needs it; it is for threads on which NIXL or other CUDA code is called next.
func (c *Context) MakeCurrent() error {
	return c.use(func() error {
		return c.driver.Check("cuCtxSetCurrent", c.fn.setCurrent(c.handle))
	})
}

// Sync waits until the device has done all that was asked of it in this context. It
// cannot be cancelled.
func (c *Context) Sync() error { return c.use(func() error { return c.current(c.sync) }) }

func (c *Context) sync() error {
	return c.driver.Check("cuCtxSynchronize", c.fn.synchronize())
}

// Close releases the primary context. While there is memory that was not freed it does
// nothing and gives [ErrInUse]; when closed already, [ErrClosed].
func (c *Context) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return ErrClosed
	}
	if n := c.live.Load(); n > 0 {
		return fmt.Errorf("%w: %d pieces of memory", ErrInUse, n)
	}
	if err := c.driver.Check("cuDevicePrimaryCtxRelease_v2", c.fn.release(c.device)); err != nil {
		return fmt.Errorf("cudamem: %w", err)
	}
	c.closed = true
	return nil
}

// use runs a call while the context is open.
func (c *Context) use(call func() error) error {
	c.mu.RLock()
	defer c.mu.RUnlock()
	if c.closed {
		return ErrClosed
	}
	if err := call(); err != nil {
		return fmt.Errorf("cudamem: %w", err)
	}
	return nil
}

// current runs a call with the context current. CUDA keeps the current context per
// thread, so the goroutine stays on one, which gets back what it had before: Go hands
// the thread to others afterwards.
func (c *Context) current(call func() error) (err error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := c.driver.Check("cuCtxPushCurrent_v2", c.fn.push(c.handle)); err != nil {
		return err
	}
	defer func() {
		var popped uintptr
		err = errors.Join(err, c.driver.Check("cuCtxPopCurrent_v2", c.fn.pop(&popped)))
	}()
	return call()
}
