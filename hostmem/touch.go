//go:build linux

package hostmem

import (
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// touchChunk bounds what one system call populates: an interrupted one may start over,
// and tmpfs undoes an interrupted fallocate. It is a multiple of every page size in use.
const touchChunk = 64 << 20

// Touch makes every page present and mapped, and leaves the contents as they are, also
// while others write to them. The first write into a page that was never touched costs
// a page fault, on a virtual machine often one of the host as well; touch what is to be
// timed. Pages come to lie on the NUMA node of the buffer or, without [NUMANode], on the one
// that the memory policy of the calling thread picks, by default its own.
//
// Running out of memory, which a plain access would answer with SIGBUS, is an error here
// where the kernel can tell (it cannot stop its out-of-memory killer). The buffer is
// pinned meanwhile, so a concurrent Free gives [ErrInUse]. A freed buffer gives
// [ErrFreed].
func (b *Buffer) Touch() (err error) {
	if err := b.Pin(); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.Unpin()) }()

	err = populate(b.mem)
	if errors.Is(err, unix.EINVAL) { // before Linux 5.14
		err = populateByFile(b.mem, b.fd, b.pageSize)
	}
	if err != nil {
		return fmt.Errorf("hostmem: touch %d bytes: %w", b.capacity, err)
	}
	return nil
}

// populate faults pages in without changing them. The kernel reports what would be a
// signal in an access of our own.
func populate(mem []byte) error {
	for len(mem) > 0 {
		n := min(len(mem), touchChunk)
		err := retry(func() error { return unix.Madvise(mem[:n], unix.MADV_POPULATE_WRITE) })
		if err != nil {
			return os.NewSyscallError("madvise(MADV_POPULATE_WRITE)", err)
		}
		mem = mem[n:]
	}
	return nil
}

// populateByFile does the same for older kernels. Once the file has its pages an access
// cannot fail any more, so a read suffices to map them, and changes nothing.
func populateByFile(mem []byte, fd, pageSize int) error {
	if err := allocatePages(fd, len(mem)); err != nil {
		return err
	}
	for i := 0; i < len(mem); i += pageSize {
		// Atomic, so that the compiler keeps a load whose result nobody uses.
		atomic.LoadUint32((*uint32)(unsafe.Pointer(&mem[i])))
	}
	return nil
}

// allocatePages gives the file its pages; those it has keep their contents.
func allocatePages(fd, length int) error {
	for off := 0; off < length; off += touchChunk {
		n := min(length-off, touchChunk)
		err := retry(func() error { return unix.Fallocate(fd, 0, int64(off), int64(n)) })
		if err != nil {
			return os.NewSyscallError("fallocate", err)
		}
	}
	return nil
}

// retry repeats a call that a signal interrupted.
func retry(call func() error) error {
	for {
		if err := call(); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}
