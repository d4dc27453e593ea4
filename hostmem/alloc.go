//go:build linux

package hostmem

import (
	"errors"
	"fmt"
	"math"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

const (
	hugePageSize = 2 << 20
	// maxName is what memfd_create leaves of NAME_MAX after its own "memfd:" prefix.
	maxName = 249
	// seals keep a peer that was given the descriptor from resizing the file, and from
	// taking these seals back or adding one that forbids writing.
	seals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL
)

type options struct {
	name   string
	huge   bool
	placed bool
	node   int
	mode   int // MPOL_BIND or MPOL_PREFERRED
}

// Option changes what [Alloc] makes. A nil one changes nothing.
type Option func(*options)

// HugePages asks for 2 MiB pages. They come from the system's pool (vm.nr_hugepages); if
// it cannot serve the whole buffer, normal pages are used, [Buffer.Huge] is false and
// [Buffer.HugeErr] says why.
//
// Huge pages are all allocated, and zeroed, before Alloc returns. The kernel's own
// reservation at mmap is not enough: it knows nothing of the limits of a control group,
// a cpuset or a memory policy, and where one of those strikes later the first access is
// SIGBUS (Linux, admin-guide/cgroup-v1/hugetlb). They lie on the NUMA node that
// [NUMANode] says or, without it, the memory policy of the calling thread, by default its
// own. A node whose pool cannot serve the whole buffer gives normal pages of that node.
func HugePages() Option { return func(o *options) { o.huge = true } }

// Name sets the name under which the memory shows in /proc/PID/maps and /proc/PID/fd, as
// /memfd:NAME; at most 249 bytes without NUL. The default is "nixlkv". Names need not be
// unique.
func Name(name string) Option { return func(o *options) { o.name = name } }

// Alloc gives a buffer of size bytes, rounded up to whole pages, zeroed. It belongs to the
// caller, who frees it with [Buffer.Free].
//
// Normal pages are not there until they are first touched; [Buffer.Touch] does it ahead
// of time. Errors: [ErrSize], [ErrName], [ErrNUMANode], [ErrNUMA], or the system's own, wrapped (ENOMEM for a size
// that the address space does not hold, EMFILE when descriptors run out).
func Alloc(size int, opts ...Option) (*Buffer, error) {
	o := options{name: "nixlkv", node: noNode}
	for _, opt := range opts {
		if opt != nil {
			opt(&o)
		}
	}
	if size <= 0 {
		return nil, fmt.Errorf("%w: %d bytes", ErrSize, size)
	}
	if len(o.name) > maxName || strings.IndexByte(o.name, 0) >= 0 {
		return nil, fmt.Errorf("%w: %q", ErrName, o.name)
	}
	if o.placed {
		if err := checkNode(o.node); err != nil {
			return nil, err
		}
	}
	var hugeErr error
	if o.huge {
		b, err := newBuffer(&o, size, hugePageSize, unix.MFD_HUGETLB|unix.MFD_HUGE_2MB)
		if err == nil {
			b.huge = true
			return b, nil
		}
		hugeErr = fmt.Errorf("%w: %w", ErrNoHugePages, err)
	}
	b, err := newBuffer(&o, size, os.Getpagesize(), 0)
	if err != nil {
		return nil, fmt.Errorf("hostmem: allocate %d bytes: %w", size, errors.Join(err, hugeErr))
	}
	b.hugeErr = hugeErr
	return b, nil
}

// newBuffer makes a buffer of pages of the given size. flags select them for memfd_create.
func newBuffer(o *options, size, pageSize, flags int) (_ *Buffer, err error) {
	length, err := roundUp(size, pageSize)
	if err != nil {
		return nil, err
	}
	fd, err := createMemfd(o.name, flags)
	if err != nil {
		return nil, os.NewSyscallError("memfd_create", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.NewSyscallError("close", unix.Close(fd)))
		}
	}()
	if err := unix.Ftruncate(fd, int64(length)); err != nil {
		return nil, os.NewSyscallError("ftruncate", err)
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals); err != nil {
		return nil, os.NewSyscallError("fcntl(F_ADD_SEALS)", err)
	}
	mem, err := unix.Mmap(fd, 0, length, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, os.NewSyscallError("mmap", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.NewSyscallError("munmap", unix.Munmap(mem)))
		}
	}()
	if o.placed {
		if err := place(mem, o.node, o.mode); err != nil {
			return nil, err
		}
	}
	if flags&unix.MFD_HUGETLB != 0 {
		if err := allocatePages(fd, length); err != nil {
			return nil, err
		}
	}
	return &Buffer{size: size, pageSize: pageSize, capacity: length, node: o.node, mem: mem, fd: fd}, nil
}

// createMemfd opens a memfd that can be sealed and, where the kernel knows how (6.3 and
// later), never executed: vm.memfd_noexec=2 refuses any other.
func createMemfd(name string, flags int) (int, error) {
	flags |= unix.MFD_CLOEXEC | unix.MFD_ALLOW_SEALING
	fd, err := unix.MemfdCreate(name, flags|unix.MFD_NOEXEC_SEAL)
	if errors.Is(err, unix.EINVAL) {
		fd, err = unix.MemfdCreate(name, flags)
	}
	return fd, err
}

// roundUp rounds a positive size up to whole pages.
func roundUp(size, pageSize int) (int, error) {
	if size > math.MaxInt-(pageSize-1) {
		return 0, fmt.Errorf("%w: %d bytes do not round up to pages of %d", ErrSize, size, pageSize)
	}
	return (size + pageSize - 1) / pageSize * pageSize, nil
}
