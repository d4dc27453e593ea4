package embedded

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// maxVector is how many pieces of memory one system call takes (Linux, UIO_MAXIOV).
const maxVector = 1024

// vector is the memory that one system call reads into or writes from, piece by piece.
type vector struct {
	pieces []unix.Iovec
	bytes  uint64
}

func (v *vector) reset() {
	clear(v.pieces) // they must not keep buffers alive
	v.pieces, v.bytes = v.pieces[:0], 0
}

func (v *vector) full() bool { return len(v.pieces) == maxVector }

// add appends a piece; the vector is not full.
func (v *vector) add(b []byte) {
	if len(b) == 0 {
		return
	}
	p := unix.Iovec{Base: unsafe.SliceData(b)}
	p.SetLen(len(b))
	v.pieces = append(v.pieces, p)
	v.bytes += uint64(len(b))
}

// read and write make one system call on a socket that does not block, and give how much
// of the memory it was for. Memory that is not there is unix.EFAULT, and not a signal.
func (v *vector) read(fd uintptr) (uint64, error)  { return v.call(unix.SYS_READV, fd) }
func (v *vector) write(fd uintptr) (uint64, error) { return v.call(unix.SYS_WRITEV, fd) }

func (v *vector) call(trap, fd uintptr) (uint64, error) {
	for {
		n, _, errno := unix.Syscall(trap, fd, uintptr(unsafe.Pointer(unsafe.SliceData(v.pieces))), uintptr(len(v.pieces)))
		switch errno {
		case 0:
			return uint64(n), nil
		case unix.EINTR:
		default:
			return 0, errno
		}
	}
}

// fill copies bytes into the memory, which has room for them. Memory that is not there is
// an error.
func (v *vector) fill(b []byte) error {
	return guardFaults(func() {
		for i := range v.pieces {
			b = b[copy(v.piece(i), b):]
		}
	})
}

// appendTo appends what is in the memory. With an error nothing is appended.
func (v *vector) appendTo(b []byte) ([]byte, error) {
	out := b
	err := guardFaults(func() {
		for i := range v.pieces {
			out = append(out, v.piece(i)...)
		}
	})
	if err != nil {
		return b, err
	}
	return out, nil
}

func (v *vector) piece(i int) []byte {
	return unsafe.Slice(v.pieces[i].Base, int(v.pieces[i].Len))
}
