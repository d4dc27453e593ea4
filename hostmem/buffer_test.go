//go:build linux

package hostmem

import (
	"bytes"
	"errors"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"
)

func mustAlloc(t testing.TB, size int, opts ...Option) *Buffer {
	t.Helper()
	b, err := Alloc(size, opts...)
	if err != nil {
		t.Fatalf("Alloc(%d): %v", size, err)
	}
	return b
}

func TestPinHoldsFreeOff(t *testing.T) {
	b := mustAlloc(t, 100)
	for range 2 {
		if err := b.Pin(); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 {
		if err := b.Free(); !errors.Is(err, ErrInUse) {
			t.Fatalf("Free while pinned: %v", err)
		}
		b.Bytes()[99]++ // would fault, had Free unmapped it
		if err := b.Unpin(); err != nil {
			t.Fatal(err)
		}
	}
	if err := b.Unpin(); !errors.Is(err, ErrNotPinned) {
		t.Fatalf("third Unpin: %v", err)
	}
	if err := b.Free(); err != nil {
		t.Fatalf("the failed Unpin counted: %v", err)
	}
}

func TestFreed(t *testing.T) {
	b := mustAlloc(t, 100)
	capacity := b.Cap()
	if err := b.Free(); err != nil {
		t.Fatal(err)
	}
	for name, call := range map[string]func() error{"Free": b.Free, "Pin": b.Pin, "Touch": b.Touch} {
		if err := call(); !errors.Is(err, ErrFreed) {
			t.Errorf("%s after Free: %v", name, err)
		}
	}
	if err := b.Unpin(); !errors.Is(err, ErrNotPinned) {
		t.Errorf("Unpin after Free: %v", err)
	}
	if b.Addr() != 0 || b.Bytes() != nil || b.FD() != -1 {
		t.Errorf("freed buffer still gives addr %#x, %d bytes, fd %d", b.Addr(), len(b.Bytes()), b.FD())
	}
	if b.Len() != 100 || b.Cap() != capacity || b.PageSize() != os.Getpagesize() {
		t.Errorf("freed buffer forgot its size: len %d, cap %d, page %d", b.Len(), b.Cap(), b.PageSize())
	}
}

// TestPinFreeMachine drives one buffer against a model of two numbers.
func TestPinFreeMachine(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		b, err := Alloc(rapid.IntRange(1, 3*os.Getpagesize()).Draw(t, "size"))
		if err != nil {
			t.Fatal(err)
		}
		pins, freed := 0, false
		defer func() {
			for range pins {
				if err := b.Unpin(); err != nil {
					t.Fatal(err)
				}
			}
			if !freed {
				if err := b.Free(); err != nil {
					t.Fatal(err)
				}
			}
		}()
		want := func(name string, got, wanted error) {
			if !errors.Is(got, wanted) || (got == nil) != (wanted == nil) {
				t.Fatalf("%s with %d pins, freed %v: got %v, want %v", name, pins, freed, got, wanted)
			}
		}
		t.Repeat(map[string]func(*rapid.T){
			"pin": func(*rapid.T) {
				if freed {
					want("Pin", b.Pin(), ErrFreed)
					return
				}
				want("Pin", b.Pin(), nil)
				pins++
			},
			"unpin": func(*rapid.T) {
				if pins == 0 {
					want("Unpin", b.Unpin(), ErrNotPinned)
					return
				}
				want("Unpin", b.Unpin(), nil)
				pins--
			},
			"free": func(*rapid.T) {
				switch {
				case freed:
					want("Free", b.Free(), ErrFreed)
				case pins > 0:
					want("Free", b.Free(), ErrInUse)
				default:
					want("Free", b.Free(), nil)
					freed = true
				}
			},
			"touch": func(*rapid.T) {
				if freed {
					want("Touch", b.Touch(), ErrFreed)
					return
				}
				want("Touch", b.Touch(), nil)
			},
			"": func(t *rapid.T) {
				if freed != (b.Addr() == 0) || freed != (b.Bytes() == nil) || freed != (b.FD() < 0) {
					t.Fatalf("freed %v, but addr %#x, fd %d", freed, b.Addr(), b.FD())
				}
				if !freed {
					b.Bytes()[b.Len()-1]++
				}
			},
		})
	})
}

// TestPinFreeRace lets many pins meet many frees. Whoever holds a pin writes; had a Free
// won beside it, the write would fault.
func TestPinFreeRace(t *testing.T) {
	const pinners, freers, pins, rounds = 4, 2, 20, 100
	for range rounds {
		b := mustAlloc(t, 1)
		addr := b.Addr()
		var frees atomic.Int32
		var start, done sync.WaitGroup
		start.Add(1)
		for range pinners {
			done.Go(func() {
				start.Wait()
				for range pins {
					err := b.Pin()
					if errors.Is(err, ErrFreed) {
						return
					}
					if err != nil {
						t.Errorf("Pin: %v", err)
						return
					}
					atomic.AddUint32((*uint32)(unsafe.Pointer(unsafe.SliceData(b.Bytes()))), 1)
					if got := b.Addr(); got != addr {
						t.Errorf("pinned buffer at %#x, was at %#x", got, addr)
					}
					if err := b.Unpin(); err != nil {
						t.Errorf("Unpin: %v", err)
					}
				}
			})
		}
		for range freers {
			done.Go(func() {
				start.Wait()
				for {
					err := b.Free()
					switch {
					case err == nil:
						frees.Add(1)
						return
					case errors.Is(err, ErrFreed):
						return
					case !errors.Is(err, ErrInUse):
						t.Errorf("Free: %v", err)
						return
					}
					runtime.Gosched()
				}
			})
		}
		start.Done()
		done.Wait()
		if n := frees.Load(); n != 1 {
			t.Fatalf("%d frees succeeded", n)
		}
	}
}

// presentBytes is how much memory the file behind the buffer takes.
func presentBytes(t *testing.T, b *Buffer) int {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Fstat(b.FD(), &st); err != nil {
		t.Fatal(err)
	}
	return int(st.Blocks) * 512
}

func TestTouch(t *testing.T) {
	ways := map[string]func(*Buffer) error{
		"Touch":      (*Buffer).Touch,
		"by file":    func(b *Buffer) error { return populateByFile(b.mem, b.fd, b.pageSize) },
		"pages only": func(b *Buffer) error { return allocatePages(b.fd, b.capacity) },
	}
	sizes := map[string]int{"one byte": 1, "pages": 5*os.Getpagesize() + 1, "more than a chunk": touchChunk + 3*os.Getpagesize()}
	for name, touch := range ways {
		for what, size := range sizes {
			t.Run(name+"/"+what, func(t *testing.T) {
				b := mustAlloc(t, size)
				defer b.Free()
				if n := presentBytes(t, b); n != 0 {
					t.Fatalf("%d bytes present before they were touched", n)
				}
				b.Bytes()[size-1] = 0xa5
				for range 2 {
					if err := touch(b); err != nil {
						t.Fatal(err)
					}
				}
				if n := presentBytes(t, b); n != b.Cap() {
					t.Errorf("%d of %d bytes present", n, b.Cap())
				}
				if b.Bytes()[size-1] != 0xa5 || bytes.IndexByte(b.Bytes(), 0xa5) != size-1 {
					t.Error("touching changed the contents")
				}
				if err := b.Unpin(); !errors.Is(err, ErrNotPinned) {
					t.Errorf("touching left a pin behind: %v", err)
				}
			})
		}
	}
}

// TestTouchReports asks for pages where there can be none; a plain access would fault.
func TestTouchReports(t *testing.T) {
	b := mustAlloc(t, os.Getpagesize())
	defer b.Free()
	// The first page of the file exists, the second one of the mapping has no file behind it.
	mem, err := unix.Mmap(b.FD(), 0, 2*os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(mem)
	err = populate(mem)
	if errors.Is(err, unix.EINVAL) {
		t.Skip("skip: this kernel has no MADV_POPULATE_WRITE (Linux 5.14)")
	}
	if !errors.Is(err, unix.EFAULT) {
		t.Errorf("populate past the end of the file: %v", err)
	}
	if err := allocatePages(b.FD(), 2*os.Getpagesize()); !errors.Is(err, unix.EPERM) {
		t.Errorf("fallocate past the sealed end of the file: %v", err)
	}
}
