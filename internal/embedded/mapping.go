package embedded

import (
	"errors"
	"fmt"
	"math"
	"os"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// errNotShareable: a file descriptor whose memory cannot be mapped safely. Its region is
// reached through the connection instead.
var errNotShareable = errors.New("memory cannot be mapped by a peer")

// checkShareable says whether n bytes at off of a file may be mapped without the danger
// that they vanish. Only a seal against shrinking excludes that: without it the file's
// owner may truncate it at any time, and a writer would die of SIGBUS. Memory that is not
// so sealed is treated as foreign.
func checkShareable(fd int, off int64, n uint64) error {
	seals, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if err != nil {
		return fmt.Errorf("%w: no memfd: %w", errNotShareable, err)
	}
	if seals&unix.F_SEAL_SHRINK == 0 {
		return fmt.Errorf("%w: memfd not sealed against shrinking", errNotShareable)
	}
	if seals&(unix.F_SEAL_WRITE|unix.F_SEAL_FUTURE_WRITE) != 0 {
		return fmt.Errorf("%w: memfd sealed against writing", errNotShareable)
	}
	return checkSize(fd, off, n)
}

// checkSize says whether a file holds n bytes at off.
func checkSize(fd int, off int64, n uint64) error {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return fmt.Errorf("%w: %w", errNotShareable, err)
	}
	if off < 0 || n > math.MaxInt64 || off > st.Size || int64(n) > st.Size-off {
		return fmt.Errorf("%w: %d bytes at %d of a file of %d", errNotShareable, n, off, st.Size)
	}
	return nil
}

// mapping is a region of a peer in this process's address space.
type mapping struct {
	data  uint64 // address of the region's first byte
	base  unsafe.Pointer
	size  uintptr
	grant uint64 // what the target calls it

	// word counts holders in its upper bits; its lowest bit says that the mapping is
	// revoked: nobody new may hold it, and the last to let go unmaps.
	word  atomic.Int64
	onEnd func(*mapping) // called once, after the memory is unmapped
}

const (
	revoked   = 1
	oneHolder = 2
)

// newMapping maps n bytes at off of a file, rounded to pages, and nothing else of it. The
// caller keeps fd.
func newMapping(fd int, off int64, n, grant uint64, onEnd func(*mapping)) (*mapping, error) {
	if err := checkShareable(fd, off, n); err != nil {
		return nil, err
	}
	page := int64(os.Getpagesize())
	base, size, err := mmapRange(fd, off, n, page)
	if errors.Is(err, unix.EINVAL) {
		// Huge pages: the file's block is the page.
		var st unix.Stat_t
		if unix.Fstat(fd, &st) == nil && int64(st.Blksize) > page {
			page = int64(st.Blksize)
			base, size, err = mmapRange(fd, off, n, page)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("%w: mmap of %d bytes at %d: %w", errNotShareable, n, off, err)
	}
	// The pages exist already; entering them into this process now saves a fault each later,
	// in a transfer's time. A kernel before 5.14 refuses, and then they fault.
	_ = unix.Madvise(unsafe.Slice((*byte)(base), size), unix.MADV_POPULATE_WRITE)
	data := uint64(uintptr(base)) + uint64(off%page)
	return &mapping{data: data, base: base, size: size, grant: grant, onEnd: onEnd}, nil
}

func mmapRange(fd int, off int64, n uint64, page int64) (unsafe.Pointer, uintptr, error) {
	start := off - off%page
	size := int64(n) + off%page
	if size > math.MaxInt64-page {
		return nil, 0, unix.ENOMEM
	}
	size = (size + page - 1) / page * page
	p, err := unix.MmapPtr(fd, start, nil, uintptr(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	return p, uintptr(size), err
}

// acquire holds the mapping in place, unless it is revoked.
func (m *mapping) acquire() bool {
	for {
		w := m.word.Load()
		if w&revoked != 0 {
			return false
		}
		if m.word.CompareAndSwap(w, w+oneHolder) {
			return true
		}
	}
}

// release undoes acquire.
func (m *mapping) release() {
	if m.word.Add(-oneHolder) == revoked {
		m.end()
	}
}

// isRevoked tells a holder to let go soon.
func (m *mapping) isRevoked() bool { return m.word.Load()&revoked != 0 }

// revoke unmaps the memory once nobody holds it. It may be called again.
func (m *mapping) revoke() {
	if m.word.Or(revoked) == 0 {
		m.end()
	}
}

func (m *mapping) end() {
	if err := unix.MunmapPtr(m.base, m.size); err != nil {
		// The range was made by mmap above and is given back once: the kernel has no reason to
		// refuse. If it did, the memory would still be mapped here, so its owner must not be told
		// otherwise: it goes on waiting, and says so (ErrBusy).
		return
	}
	m.onEnd(m)
}
