//go:build linux

// Package hostmem hands out memory off the Go heap that NIXL, a network card or a peer
// process may write to.
//
// Go may not move or reclaim such memory while somebody else holds its address, and a
// peer on the same host must be able to map it. A [Buffer] is therefore a sealed memfd,
// mapped shared: its address is fixed, its file descriptor can be passed over a Unix
// socket, and nobody who got that descriptor can shrink the file under the mapping
// (which would turn the next access into SIGBUS). A shared mapping is also immune to
// fork: there is no copy on write that would part the process from the pages a network
// card has registered.
//
// A registration pins its buffer, and a pinned buffer cannot be freed. There is no
// finalizer and no cleanup: the garbage collector sees Go references only. It does not
// see the address that a peer was given, nor the write that is still in flight towards
// it. A buffer that becomes unreachable without Free stays mapped until the process
// ends, which is a leak; unmapping it under a peer's write would be a corruption.
//
// The package needs no cgo.
package hostmem

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The errors of this package come wrapped with details; compare with errors.Is.
var (
	// ErrSize: the size is not positive or cannot be rounded up to whole pages.
	ErrSize = errors.New("hostmem: invalid size")
	// ErrName: the name is too long for a memfd or holds a NUL byte.
	ErrName = errors.New("hostmem: invalid name")
	// ErrNoHugePages: why [Buffer.HugeErr] reports normal pages. It wraps the system's reason.
	ErrNoHugePages = errors.New("hostmem: no huge pages")
	// ErrNUMANode: there is no such NUMA node, or this process gets no memory from it.
	ErrNUMANode = errors.New("hostmem: no such NUMA node")
	// ErrNUMA: the kernel cannot place memory, or says that this process may not.
	ErrNUMA = errors.New("hostmem: NUMA placement not possible")
	// ErrInUse: the buffer is pinned, so it cannot be freed.
	ErrInUse = errors.New("hostmem: buffer in use")
	// ErrFreed: the buffer has been freed.
	ErrFreed = errors.New("hostmem: buffer freed")
	// ErrNotPinned: an Unpin without its Pin, a fault in the calling program.
	ErrNotPinned = errors.New("hostmem: buffer not pinned")
)

// Buffer is a piece of page-aligned, zeroed, shared memory. [Alloc] makes it. It must not
// be copied. All methods may be called from many goroutines; what is in the memory is
// for the callers to synchronise.
type Buffer struct {
	size     int
	pageSize int
	capacity int
	node     int // or noNode
	huge     bool
	hugeErr  error

	mu   sync.Mutex
	mem  []byte // the whole mapping, nil once freed
	fd   int    // -1 once freed
	pins int
}

// Addr is the address of the first byte, or 0 once the buffer is freed.
func (b *Buffer) Addr() uintptr {
	b.mu.Lock()
	defer b.mu.Unlock()
	return uintptr(unsafe.Pointer(unsafe.SliceData(b.mem)))
}

// Len is the number of bytes that Alloc was asked for. Free does not change it.
func (b *Buffer) Len() int { return b.size }

// Cap is the number of bytes that are mapped: Len rounded up to whole pages. Free does
// not change it.
func (b *Buffer) Cap() int { return b.capacity }

// PageSize is the size in bytes of the pages behind the buffer.
func (b *Buffer) PageSize() int { return b.pageSize }

// Huge says whether huge pages are behind the buffer.
func (b *Buffer) Huge() bool { return b.huge }

// HugeErr says why huge pages were asked for and not given: an [ErrNoHugePages] that
// wraps the system's error. It is nil if there are huge pages, or none were asked for.
func (b *Buffer) HugeErr() error { return b.hugeErr }

// Bytes is the memory itself, Len bytes of it, not a copy. The slice is valid until Free,
// and nil afterwards. The garbage collector does not keep the memory mapped for the sake
// of a slice: touching one that was kept past Free faults and ends the process, or hits
// whatever has been mapped at that address since.
func (b *Buffer) Bytes() []byte {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.mem == nil {
		return nil
	}
	return b.mem[:b.size:b.size]
}

// FD is the memfd behind the buffer, or -1 once it is freed; the memory starts at offset
// 0. The buffer owns it: do not close it, and pin the buffer while passing it on. Who
// receives it can read and write the whole of Cap, and keeps the pages alive after Free.
func (b *Buffer) FD() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.fd
}

// Pin keeps the buffer from being freed until a matching Unpin. Pins add up. Between Pin
// and a concurrent Free one wins: either Pin returns [ErrFreed], or Free returns
// [ErrInUse].
func (b *Buffer) Pin() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.mem == nil {
		return ErrFreed
	}
	b.pins++
	return nil
}

// Unpin takes back one Pin. Without one it changes nothing and returns [ErrNotPinned].
func (b *Buffer) Unpin() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.pins == 0 {
		return ErrNotPinned
	}
	b.pins--
	return nil
}

// Free unmaps the memory and closes its file descriptor. A pinned buffer is left as it is
// and gives [ErrInUse], a freed one [ErrFreed]. Free never waits for a pin.
func (b *Buffer) Free() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.mem == nil {
		return ErrFreed
	}
	if b.pins > 0 {
		return fmt.Errorf("%w: %d pins", ErrInUse, b.pins)
	}
	if err := unix.Munmap(b.mem); err != nil {
		return fmt.Errorf("hostmem: free: %w", os.NewSyscallError("munmap", err))
	}
	fd := b.fd
	b.mem, b.fd = nil, -1
	// The descriptor is gone whatever close returns, so there is nothing to retry.
	if err := unix.Close(fd); err != nil {
		return fmt.Errorf("hostmem: free: memory unmapped, but %w", os.NewSyscallError("close", err))
	}
	return nil
}
