//go:build linux

package cudamem

import (
	"fmt"
	"io"
	"sync"
	"unsafe"
)

// Memory is a piece of GPU memory (cuMemAlloc), whose contents are undefined at first.
// It may be used from many goroutines; what is in the memory is for the callers to
// synchronise.
type Memory struct {
	ctx  *Context
	addr uint64
	size int

	mu    sync.RWMutex // held shared by copies, exclusively by Free
	freed bool
}

var (
	_ io.ReaderAt = (*Memory)(nil)
	_ io.WriterAt = (*Memory)(nil)
)

// Alloc gives size bytes of GPU memory, aligned to at least 256 bytes. The caller frees
// it.
func (c *Context) Alloc(size int) (*Memory, error) {
	if size <= 0 {
		return nil, fmt.Errorf("%w: %d bytes", ErrSize, size)
	}
	m := &Memory{ctx: c, size: size}
	err := c.use(func() error {
		return c.current(func() error {
			if err := c.driver.Check("cuMemAlloc_v2", c.fn.alloc(&m.addr, uintptr(size))); err != nil {
				return fmt.Errorf("allocate %d bytes: %w", size, err)
			}
			c.live.Add(1)
			return nil
		})
	})
	if err != nil {
		return nil, err
	}
	return m, nil
}

// Addr is the device address of the first byte (CUdeviceptr). Free does not change it.
func (m *Memory) Addr() uint64 { return m.addr }

// Len is the number of bytes. Free does not change it.
func (m *Memory) Len() int { return m.size }

// Ordinal is the CUDA ordinal of the device.
func (m *Memory) Ordinal() int { return m.ctx.ordinal }

// WriteAt copies p to offset off. What does not fit is not written at all ([ErrRange]).
// The bytes are in GPU memory when it returns, for any reader: cuMemcpyHtoD may return
// while bytes from pageable memory are still on their way, so WriteAt then waits for all
// work in the context. When the driver fails, the count is 0 and the contents are
// undefined.
func (m *Memory) WriteAt(p []byte, off int64) (int, error) {
	if off < 0 || off > int64(m.size) || int64(len(p)) > int64(m.size)-off {
		return 0, fmt.Errorf("%w: write of %d bytes at %d into %d", ErrRange, len(p), off, m.size)
	}
	err := m.use(len(p), func() error {
		to := m.addr + uint64(off)
		if err := m.ctx.driver.Check("cuMemcpyHtoD_v2", m.ctx.fn.toDevice(to, unsafe.SliceData(p), uintptr(len(p)))); err != nil {
			return err
		}
		return m.ctx.sync()
	})
	if err != nil {
		return 0, err
	}
	return len(p), nil
}

// ReadAt copies from offset off into p, after all earlier work of the device on the
// context's default stream. It gives io.EOF when p reaches past the end of the memory,
// as io.ReaderAt says, and [ErrRange] for a negative offset.
func (m *Memory) ReadAt(p []byte, off int64) (int, error) {
	if off < 0 {
		return 0, fmt.Errorf("%w: read at %d", ErrRange, off)
	}
	n := int(min(int64(len(p)), max(0, int64(m.size)-off)))
	err := m.use(n, func() error {
		from := m.addr + uint64(off)
		return m.ctx.driver.Check("cuMemcpyDtoH_v2", m.ctx.fn.toHost(unsafe.SliceData(p), from, uintptr(n)))
	})
	if err != nil {
		return 0, err
	}
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

// Free gives the memory back; a second time it gives [ErrClosed]. It waits for copies
// that are under way, not for others that use the address.
func (m *Memory) Free() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.freed {
		return ErrClosed
	}
	c := m.ctx
	return c.use(func() error {
		return c.current(func() error {
			if err := c.driver.Check("cuMemFree_v2", c.fn.free(m.addr)); err != nil {
				return err
			}
			m.freed = true
			c.live.Add(-1)
			return nil
		})
	})
}

// use runs a copy of n bytes while the memory is there; none at all for n = 0.
func (m *Memory) use(n int, call func() error) error {
	m.mu.RLock()
	defer m.mu.RUnlock()
	if m.freed {
		return ErrClosed
	}
	if n == 0 {
		return nil
	}
	return m.ctx.use(func() error { return m.ctx.current(call) })
}
