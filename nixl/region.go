package nixl

import (
	"fmt"
	"math/bits"

	"github.com/nixlkv/nixlkv/hostmem"
	"github.com/nixlkv/nixlkv/internal/engine"
)

// Mem is a kind of memory, with NIXL's numbers (nixl_capi_mem_type_t).
type Mem = engine.Mem

// The kinds of memory that this package registers.
const (
	DRAM = engine.DRAM
	VRAM = engine.VRAM
)

// Desc is one contiguous piece of memory: address, bytes, and the device it is on (the
// CUDA ordinal for VRAM, 0 for DRAM).
type Desc = engine.Desc

// Run stands for Count descriptors of Len bytes, Stride bytes apart.
type Run = engine.Run

// Region is memory to register.
type Region struct {
	mem            Mem
	addr, len, dev uint64
	buf            *hostmem.Buffer
	off            uint64
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
// embedded engine's peers map it.
func (r Region) In(buffers ...*hostmem.Buffer) Region {
	for _, b := range buffers {
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

// Addr gives the address of the first byte.
func (r Region) Addr() uintptr { return uintptr(r.addr) }

// Len gives the bytes.
func (r Region) Len() uint64 { return r.len }

// Device gives the device.
func (r Region) Device() uint64 { return r.dev }

func (r Region) validate(i int) error {
	switch {
	case r.addr == 0 || r.len == 0:
		return fmt.Errorf("%w: region %d: %d bytes at %#x, or a part outside its buffer", ErrBadDescriptor, i, r.len, r.addr)
	case r.addr+r.len-1 < r.addr:
		return fmt.Errorf("%w: region %d: %d bytes at %#x reach past 2^64", ErrBadDescriptor, i, r.len, r.addr)
	case r.mem == DRAM && r.dev != 0:
		return fmt.Errorf("%w: region %d: DRAM is on device 0, not %d", ErrBadDescriptor, i, r.dev)
	case r.mem != DRAM && r.mem != VRAM:
		return fmt.Errorf("%w: region %d: kind of memory %d", ErrUnsupported, i, r.mem)
	}
	return nil
}

func (r Region) raw() engine.Region {
	e := engine.Region{Addr: r.addr, Len: r.len, Dev: r.dev, FD: -1}
	if r.buf != nil {
		e.FD, e.Off = r.buf.FD(), int64(r.off)
	}
	return e
}

// span is an interval of addresses, first and last byte. The zero value is empty.
type span struct {
	lo, hi uint64
	some   bool
}

func (s *span) add(lo, hi uint64) {
	if !s.some {
		*s = span{lo, hi, true}
		return
	}
	s.lo, s.hi = min(s.lo, lo), max(s.hi, hi)
}

func (s span) overlaps(lo, hi uint64) bool { return s.some && s.lo <= hi && lo <= s.hi }

// spanOf gives the addresses that descriptors cover, or an error naming the first one that
// cannot be.
func spanOf(descs []Desc, s span) (span, error) {
	for i := range descs {
		d := &descs[i]
		last := d.Addr + d.Len - 1
		if d.Len == 0 || last < d.Addr {
			return s, fmt.Errorf("%w: descriptor %d: %d bytes at %#x", ErrBadDescriptor, i, d.Len, d.Addr)
		}
		s.add(d.Addr, last)
	}
	return s, nil
}

// spanOfRuns is spanOf for runs, and counts the descriptors they stand for.
func spanOfRuns(runs []Run, s span) (span, uint64, error) {
	var n uint64
	for i := range runs {
		r := &runs[i]
		if r.Count == 0 {
			continue
		}
		over, reach := bits.Mul64(r.Stride, r.Count-1)
		first, c1 := bits.Add64(r.Addr, reach, 0) // of the last descriptor
		last, c2 := bits.Add64(first, r.Len-1, 0)
		total, c3 := bits.Add64(n, r.Count, 0)
		if r.Len == 0 || over|c1|c2|c3 != 0 || total > maxListLen {
			return s, 0, fmt.Errorf("%w: run %d: %d descriptors of %d bytes at %#x, %d apart", ErrBadDescriptor, i, r.Count, r.Len, r.Addr, r.Stride)
		}
		s.add(r.Addr, last)
		n = total
	}
	return s, n, nil
}
