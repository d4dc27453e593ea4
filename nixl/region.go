package nixl

import (
	"fmt"
	"math"

	"github.com/nixlkv/nixlkv/hostmem"
	"github.com/nixlkv/nixlkv/internal/engine"
)

// Mem is a kind of memory, with NIXL's numbers (nixl_capi_mem_type_t).
type Mem = engine.Mem

// The kinds of memory that this package registers. The last three are storage: the native
// engine reaches it through backends that serve the kind (POSIX, GDS and GDS_MT files, OBJ
// objects, GUSLI block devices), between an agent's own memory and what it registered itself
// (Agent.Self).
const (
	DRAM      = engine.DRAM
	VRAM      = engine.VRAM
	MemBlock  = engine.Block
	MemObject = engine.Object
	MemFile   = engine.File
)

// Desc is one contiguous piece of memory: address, bytes, and the device it is on (the
// CUDA ordinal for VRAM, 0 for DRAM). In storage the address is an offset, and the device
// what it is an offset in: the file's descriptor, the object's or the block device's number.
type Desc = engine.Desc

// Run stands for Count descriptors of Len bytes, Stride bytes apart.
type Run = engine.Run

// Region is memory to register.
type Region struct {
	mem            Mem
	addr, len, dev uint64
	buf            *hostmem.Buffer
	off            uint64
	meta           string
}

// Host is a whole buffer. A registration pins it: it cannot be freed before it is
// deregistered.
func Host(b *hostmem.Buffer) Region {
	if b == nil {
		return Region{} // refused by validate
	}
	return HostRange(b, 0, b.Len())
}

// HostRange is a part of a buffer: n bytes from offset off. Register refuses a part that
// does not lie in the buffer.
func HostRange(b *hostmem.Buffer, off, n int) Region {
	if b == nil {
		return Region{} // refused by validate
	}
	r := Region{mem: DRAM, addr: uint64(b.Addr()) + uint64(off), len: uint64(n), buf: b, off: uint64(off)}
	if off < 0 || n < 0 || off > b.Len() || n > b.Len()-off {
		r.len = 0 // refused by validate
	}
	return r
}

// In gives the region as a part of the one of some buffers that it lies in, as [HostRange]
// would, and as it is if it lies in none: registering it then pins the buffer, and the
// embedded engine's peers map it. A nil buffer is none.
func (r Region) In(buffers ...*hostmem.Buffer) Region {
	for _, b := range buffers {
		if b == nil {
			continue
		}
		base, n := uint64(b.Addr()), uint64(b.Len())
		if base != 0 && r.addr >= base && r.addr-base <= n && r.len <= n-(r.addr-base) {
			r.buf, r.off = b, r.addr-base
			return r
		}
	}
	return r
}

// Foreign is memory of the caller: n bytes at an address, which must stay mapped until they
// are deregistered; nothing here can check that they are. For VRAM, device is the CUDA ordinal; for DRAM it is 0. Memory of the
// Go heap must not be registered.
func Foreign(m Mem, addr uintptr, n uint64, device uint64) Region {
	return Region{mem: m, addr: uint64(addr), len: n, dev: device}
}

// As gives the region another kind. It is for agents made WithHostVRAM, whose VRAM is host
// memory: Host(b).As(VRAM, 0).
func (r Region) As(m Mem, device uint64) Region {
	r.mem, r.dev = m, device
	return r
}

// Mem gives the kind of memory.
func (r Region) Mem() Mem { return r.mem }

// Addr gives the address of the first byte; of storage its offset.
func (r Region) Addr() uintptr { return uintptr(r.addr) }

// Len gives the bytes.
func (r Region) Len() uint64 { return r.len }

// Device gives the device.
func (r Region) Device() uint64 { return r.dev }

func (r Region) validate(i int) error {
	switch {
	case r.len == 0, r.addr == 0 && !isStorage(r.mem):
		return fmt.Errorf("%w: region %d: %d bytes at %#x, or a part outside its buffer", ErrBadDescriptor, i, r.len, r.addr)
	case r.addr+r.len-1 < r.addr:
		return fmt.Errorf("%w: region %d: %d bytes at %#x reach past 2^64", ErrBadDescriptor, i, r.len, r.addr)
	case r.mem == DRAM && r.dev != 0:
		return fmt.Errorf("%w: region %d: DRAM is on device 0, not %d", ErrBadDescriptor, i, r.dev)
	case r.mem > MemFile:
		return fmt.Errorf("%w: region %d: kind of memory %d", ErrUnsupported, i, r.mem)
	case isStorage(r.mem) && r.buf != nil:
		return fmt.Errorf("%w: region %d: a buffer is no storage", ErrBadDescriptor, i)
	case r.mem == MemFile && r.dev > math.MaxInt32:
		return fmt.Errorf("%w: region %d: file descriptor %d", ErrBadDescriptor, i, int64(r.dev))
	case r.mem == MemFile && (r.addr > math.MaxInt64 || r.len > math.MaxInt64-r.addr):
		return fmt.Errorf("%w: region %d: %d bytes at %d of a file", ErrBadDescriptor, i, r.len, r.addr)
	}
	return nil
}

// same says whether two regions are one to NIXL.
func (r Region) same(x Region) bool {
	return r.addr == x.addr && r.len == x.len && (!isStorage(r.mem) || r.mem == x.mem && r.dev == x.dev)
}

func (r Region) raw() engine.Region {
	e := engine.Region{Addr: r.addr, Len: r.len, Dev: r.dev, FD: -1}
	if r.meta != "" {
		e.Meta = []byte(r.meta)
	}
	if r.buf != nil {
		e.FD, e.Off = r.buf.FD(), int64(r.off)
	}
	return e
}
