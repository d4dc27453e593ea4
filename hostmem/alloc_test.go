//go:build linux

package hostmem

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"
)

func TestAlloc(t *testing.T) {
	page := os.Getpagesize()
	for _, tc := range []struct{ size, capacity int }{
		{1, page},
		{page - 1, page},
		{page, page},
		{page + 1, 2 * page},
		{3*page + 5, 4 * page},
		{1 << 20, 1 << 20},
	} {
		t.Run(strconv.Itoa(tc.size), func(t *testing.T) {
			b := mustAlloc(t, tc.size)
			defer b.Free()
			if b.Len() != tc.size || b.Cap() != tc.capacity || b.PageSize() != page {
				t.Errorf("len %d, cap %d, page size %d", b.Len(), b.Cap(), b.PageSize())
			}
			if b.Addr() == 0 || b.Addr()%uintptr(page) != 0 {
				t.Errorf("address %#x is not on a page", b.Addr())
			}
			if b.Huge() || b.HugeErr() != nil {
				t.Errorf("huge pages without being asked: %v, %v", b.Huge(), b.HugeErr())
			}
			mem := b.Bytes()
			if len(mem) != tc.size || cap(mem) != tc.size {
				t.Errorf("%d bytes, room for %d", len(mem), cap(mem))
			}
			if n := bytes.Count(mem, []byte{0}); n != tc.size {
				t.Errorf("%d of %d bytes are zero", n, tc.size)
			}
			var st unix.Stat_t
			if err := unix.Fstat(b.FD(), &st); err != nil || st.Size != int64(tc.capacity) {
				t.Errorf("file of %d bytes: %v", st.Size, err)
			}
		})
	}
}

func TestAllocRefuses(t *testing.T) {
	for _, tc := range []struct {
		name string
		size int
		opts []Option
		want error
	}{
		{"zero", 0, nil, ErrSize},
		{"negative", -1, nil, ErrSize},
		{"most negative", math.MinInt, nil, ErrSize},
		{"greatest", math.MaxInt, nil, ErrSize},
		{"just past the last page", math.MaxInt - os.Getpagesize() + 2, nil, ErrSize},
		{"greatest, huge pages", math.MaxInt, []Option{HugePages()}, ErrSize},
		{"last page, more than any address space", math.MaxInt - os.Getpagesize() + 1, nil, unix.ENOMEM},
		{"huge pages, more than any address space", 1 << 60, []Option{HugePages()}, ErrNoHugePages},
		{"name too long", 1, []Option{Name(strings.Repeat("n", 250))}, ErrName},
		{"NUL in name", 1, []Option{Name("a\x00b")}, ErrName},
	} {
		t.Run(tc.name, func(t *testing.T) {
			b, err := Alloc(tc.size, tc.opts...)
			if b != nil || !errors.Is(err, tc.want) {
				t.Errorf("Alloc: %v, %v; want %v", b, err, tc.want)
			}
		})
	}
}

func TestRoundUp(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		page := 1 << rapid.IntRange(12, 30).Draw(t, "page")
		size := rapid.IntRange(1, math.MaxInt).Draw(t, "size")
		got, err := roundUp(size, page)
		if err != nil {
			if largest := math.MaxInt / page * page; size <= largest {
				t.Fatalf("%d refused, though %d is representable: %v", size, largest, err)
			}
			return
		}
		if got%page != 0 || got < size || got-size >= page {
			t.Fatalf("%d rounds up to %d by pages of %d", size, got, page)
		}
	})
}

// mapsLines are the mappings of this process whose name contains s.
func mapsLines(t *testing.T, s string) []string {
	t.Helper()
	f, err := os.Open("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var lines []string
	sc := bufio.NewScanner(f)
	for sc.Scan() {
		if strings.Contains(sc.Text(), s) {
			lines = append(lines, sc.Text())
		}
	}
	if err := sc.Err(); err != nil {
		t.Fatal(err)
	}
	return lines
}

// descriptors counts the open ones of this process whose name contains s.
func descriptors(t *testing.T, s string) int {
	t.Helper()
	links, err := filepath.Glob("/proc/self/fd/*")
	if err != nil || len(links) == 0 {
		t.Fatalf("no /proc/self/fd: %v", err)
	}
	n := 0
	for _, l := range links {
		if target, err := os.Readlink(l); err == nil && strings.Contains(target, s) {
			n++
		}
	}
	return n
}

func TestNameShows(t *testing.T) {
	for _, name := range []string{"", "kv-test", "with space", strings.Repeat("x", maxName)} {
		b := mustAlloc(t, 1, Name(name))
		lines := mapsLines(t, fmt.Sprintf("%x-", b.Addr()))
		if len(lines) != 1 || !strings.Contains(lines[0], "/memfd:"+name+" ") || !strings.Contains(lines[0], " rw-s ") {
			t.Errorf("name %q shows as %q", name, lines)
		}
		if err := b.Free(); err != nil {
			t.Error(err)
		}
	}
}

func TestSealed(t *testing.T) {
	b := mustAlloc(t, 2*os.Getpagesize())
	defer b.Free()
	for _, size := range []int64{0, 1, int64(b.Cap()) - 1, int64(b.Cap()) + 1} {
		if err := unix.Ftruncate(b.FD(), size); !errors.Is(err, unix.EPERM) {
			t.Errorf("resize to %d: %v", size, err)
		}
	}
	if _, err := unix.FcntlInt(uintptr(b.FD()), unix.F_ADD_SEALS, unix.F_SEAL_FUTURE_WRITE); !errors.Is(err, unix.EPERM) {
		t.Errorf("another seal: %v", err)
	}
	got, err := unix.FcntlInt(uintptr(b.FD()), unix.F_GET_SEALS, 0)
	if err != nil || got&seals != seals {
		t.Errorf("seals %#x: %v", got, err)
	}
	flags, err := unix.FcntlInt(uintptr(b.FD()), unix.F_GETFD, 0)
	if err != nil || flags&unix.FD_CLOEXEC == 0 {
		t.Errorf("inherited by children: flags %#x, %v", flags, err)
	}
}

// TestSecondMapping is what a peer process does with the descriptor.
func TestSecondMapping(t *testing.T) {
	b := mustAlloc(t, 3*os.Getpagesize())
	fd, err := unix.Dup(b.FD())
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	peer, err := unix.Mmap(fd, 0, b.Cap(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(peer)
	last := b.Len() - 1
	peer[last] = 7
	b.Bytes()[0] = 9
	if b.Bytes()[last] != 7 || peer[0] != 9 {
		t.Error("the two mappings are not the same memory")
	}
	if err := b.Free(); err != nil {
		t.Fatal(err)
	}
	if peer[last] != 7 || peer[0] != 9 {
		t.Error("Free took the pages from the peer")
	}
}

func TestNothingStaysBehind(t *testing.T) {
	const name = "hostmem-leak"
	var live []*Buffer
	for i := range 64 {
		live = append(live, mustAlloc(t, 1+i*1000, Name(name)))
		// Fails after the memfd was opened.
		if _, err := Alloc(1<<60, Name(name), HugePages()); err == nil {
			t.Fatal("an exbibyte was mapped")
		}
	}
	if n, m := descriptors(t, name), len(mapsLines(t, name)); n != len(live) || m != len(live) {
		t.Errorf("%d descriptors and %d mappings of %d buffers", n, m, len(live))
	}
	for _, b := range live {
		if err := b.Free(); err != nil {
			t.Fatal(err)
		}
	}
	if n, m := descriptors(t, name), len(mapsLines(t, name)); n != 0 || m != 0 {
		t.Errorf("%d descriptors and %d mappings after all buffers were freed", n, m)
	}
}

// hugePool reads how many 2 MiB pages the system has free, and how many it may make.
func hugePool(t *testing.T) (free, more int) {
	t.Helper()
	read := func(file string) int {
		raw, err := os.ReadFile("/sys/kernel/mm/hugepages/hugepages-2048kB/" + file)
		if errors.Is(err, os.ErrNotExist) {
			return 0
		}
		if err != nil {
			t.Fatal(err)
		}
		n, err := strconv.Atoi(strings.TrimSpace(string(raw)))
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	return read("free_hugepages"), read("nr_overcommit_hugepages")
}

func TestHugePages(t *testing.T) {
	if free, _ := hugePool(t); free < 2 {
		t.Skipf("skip: not tested: huge pages need 2 free ones of 2 MiB, there are %d (vm.nr_hugepages)", free)
	}
	b := mustAlloc(t, hugePageSize+1, HugePages(), Name("hostmem-huge"))
	defer b.Free()
	if !b.Huge() || b.HugeErr() != nil {
		t.Skipf("skip: not tested: somebody else took the huge pages: %v", b.HugeErr())
	}
	if b.Len() != hugePageSize+1 || b.Cap() != 2*hugePageSize || b.PageSize() != hugePageSize || b.Addr()%hugePageSize != 0 {
		t.Errorf("len %d, cap %d, page size %d, addr %#x", b.Len(), b.Cap(), b.PageSize(), b.Addr())
	}
	if n := presentBytes(t, b); n != b.Cap() {
		t.Errorf("%d of %d bytes present: an access may yet fail", n, b.Cap())
	}
	got, err := unix.FcntlInt(uintptr(b.FD()), unix.F_GET_SEALS, 0)
	if err != nil || got&seals != seals {
		t.Errorf("seals %#x: %v", got, err)
	}
	if lines := mapsLines(t, "hostmem-huge"); len(lines) != 1 {
		t.Errorf("mappings: %q", lines)
	}
	b.Bytes()[hugePageSize] = 1
	for name, touch := range map[string]func() error{
		"Touch":   b.Touch,
		"by file": func() error { return populateByFile(b.mem, b.fd, b.pageSize) },
	} {
		if err := touch(); err != nil || b.Bytes()[hugePageSize] != 1 {
			t.Errorf("%s: byte %d, %v", name, b.Bytes()[hugePageSize], err)
		}
	}
}

// TestHugePagesFallBack asks for one page more than the system can have.
func TestHugePagesFallBack(t *testing.T) {
	free, more := hugePool(t)
	size := (free + more + 1) * hugePageSize
	b := mustAlloc(t, size-1, HugePages(), Name("hostmem-fallback"))
	defer b.Free()
	if b.Huge() || b.PageSize() != os.Getpagesize() || b.Len() != size-1 || b.Cap() != size {
		t.Fatalf("huge %v, page size %d, len %d, cap %d", b.Huge(), b.PageSize(), b.Len(), b.Cap())
	}
	if err := b.HugeErr(); !errors.Is(err, ErrNoHugePages) {
		t.Errorf("no reason given: %v", err)
	} else {
		t.Log(err)
	}
	b.Bytes()[size-2] = 1
	if n, m := descriptors(t, "hostmem-fallback"), len(mapsLines(t, "hostmem-fallback")); n != 1 || m != 1 {
		t.Errorf("the attempt left something behind: %d descriptors, %d mappings", n, m)
	}
}
