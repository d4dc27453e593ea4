package nixl

import (
	"fmt"
	"math/bits"
)

// space is what two addresses have to be in to be the same.
type space uint8

const (
	memorySpace space = iota // of all kinds: a machine without GPUs has VRAM in host memory
	blockSpace
	objectSpace
	fileSpace
)

func spaceOf(m Mem) space {
	switch m {
	case MemBlock:
		return blockSpace
	case MemObject:
		return objectSpace
	case MemFile:
		return fileSpace
	}
	return memorySpace
}

func isStorage(m Mem) bool { return spaceOf(m) != memorySpace }

// span is what descriptors cover, from above: the addresses between the first and the last
// byte and, in storage, the devices between the lowest and the highest. The zero value is
// empty, and of memory.
type span struct {
	space        space
	lo, hi       uint64
	devLo, devHi uint64
	some         bool
}

func emptySpan(m Mem) span { return span{space: spaceOf(m)} }

// spanOfRegion covers a region.
func spanOfRegion(r Region) span {
	s := emptySpan(r.mem)
	s.add(r.addr, r.addr+r.len-1, r.dev)
	return s
}

func (s *span) add(lo, hi, dev uint64) {
	if s.space == memorySpace {
		dev = 0
	}
	if !s.some {
		s.lo, s.hi, s.devLo, s.devHi, s.some = lo, hi, dev, dev, true
		return
	}
	s.lo, s.hi = min(s.lo, lo), max(s.hi, hi)
	s.devLo, s.devHi = min(s.devLo, dev), max(s.devHi, dev)
}

func (s span) overlaps(o span) bool {
	return s.some && o.some && s.space == o.space && s.lo <= o.hi && o.lo <= s.hi && s.devLo <= o.devHi && o.devLo <= s.devHi
}

// spanOf gives the addresses that descriptors cover, or an error naming the first one that
// cannot be.
func spanOf(descs []Desc, s span) (span, error) {
	for i := range descs {
		d := &descs[i]
		last := d.Addr + d.Len - 1
		if d.Len == 0 || last < d.Addr {
			return s, fmt.Errorf("%w: descriptor %d: %d bytes at %#x", ErrBadDescriptor, i, d.Len, d.Addr)
		}
		s.add(d.Addr, last, d.Dev)
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
		s.add(r.Addr, last, r.Dev)
		n = total
	}
	return s, n, nil
}
