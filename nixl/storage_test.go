package nixl

import (
	"bytes"
	"math"
	"os"
	"path/filepath"
	"slices"
	"testing"
)

// newStorageAgent makes an agent with a storage backend, or skips and says why.
func newStorageAgent(t *testing.T, e *Engine, plugin string, params map[string]string, opts ...AgentOption) *Agent {
	t.Helper()
	a := newAgent(t, e, opts...)
	if plugins := must[[]string](t)(a.Plugins()); !slices.Contains(plugins, plugin) {
		t.Skipf("skip: this NIXL library has no plugin %s, only %q", plugin, plugins)
	}
	if _, err := a.CreateBackend(plugin, params); err != nil {
		t.Skipf("skip: the plugin %s does not work on this machine: %v", plugin, err)
	}
	return a
}

// eachNative runs a test over every way to call NIXL.
func eachNative(t *testing.T, f func(t *testing.T, c engineCase)) {
	for _, c := range engineCases() {
		if c.kind == Native {
			t.Run(c.name, func(t *testing.T) {
				needNative(t)
				f(t, c)
			})
		}
	}
}

// tempFile makes a file of a size with a pattern in it.
func tempFile(t *testing.T, name string, size int, seed uint64) *os.File {
	t.Helper()
	f := must[*os.File](t)(os.OpenFile(filepath.Join(t.TempDir(), name), os.O_RDWR|os.O_CREATE, 0o600))
	t.Cleanup(func() { f.Close() })
	b := make([]byte, size)
	fillPattern(b, seed)
	must[int](t)(f.WriteAt(b, 0))
	return f
}

func contents(t *testing.T, f *os.File) []byte {
	t.Helper()
	return must[[]byte](t)(os.ReadFile(f.Name()))
}

// TestFiles moves pieces of two files to memory and back, over the POSIX backend, by lists
// and by index.
func TestFiles(t *testing.T) {
	const size, page = 1 << 20, 4096
	eachNative(t, func(t *testing.T, c engineCase) {
		// VRAM of a machine without GPUs must not change what a file's descriptor is.
		a := newStorageAgent(t, c.open(t), "POSIX", nil, WithHostVRAM())
		buf := alloc(t, size)
		one, two := tempFile(t, "one", size, 1), tempFile(t, "two", size, 2)
		fds := []uint64{uint64(one.Fd()), uint64(two.Fd())}
		want := [][]byte{contents(t, one), contents(t, two)}
		// They have the same offsets, and differ by their descriptors alone.
		files := must[*Registration](t)(a.Register(File(int(fds[0]), 0, size), File(int(fds[1]), 0, size)))
		mem := must[*Registration](t)(a.Register(Host(buf)))
		self := must[*Remote](t)(a.Self())
		if again := must[*Remote](t)(a.Self()); again != self || self.Name() != a.Name() {
			t.Errorf("another remote, of %q", again.Name())
		}
		check(t, self.Check())
		check(t, self.Connect())

		// Read, by lists: pieces of both files, in another order than in memory.
		at := func(off, n uint64) Desc { return Desc{Addr: uint64(buf.Addr()) + off, Len: n} }
		local := must[*List](t)(a.NewList(DRAM))
		check(t, local.Append(at(0, page), at(3*page, 100), at(size-1, 1)))
		remote := must[*List](t)(a.NewList(MemFile))
		check(t, remote.Append(Desc{Addr: size - page, Len: page, Dev: fds[0]}, Desc{Addr: 7, Len: 100, Dev: fds[1]}, Desc{Addr: 0, Len: 1, Dev: fds[0]}))
		x := a.NewTransfer()
		check(t, x.Create(Read, local, self, remote, TransferOptions{Post: true}))
		wait(t, x)
		mustHold := make([]byte, size)
		copy(mustHold, want[0][size-page:])
		copy(mustHold[3*page:], want[1][7:107])
		mustHold[size-1] = want[0][0]
		if !bytes.Equal(buf.Bytes(), mustHold) {
			t.Fatal("memory does not hold what was read, or more")
		}
		check(t, x.Release())

		// Write, by index, with neighbours that can be merged.
		fillPattern(buf.Bytes(), 3)
		check(t, local.Clear())
		check(t, local.AppendRuns(Run{Addr: uint64(buf.Addr()), Len: page, Stride: page, Count: size / page}))
		check(t, remote.Clear())
		check(t, remote.AppendRuns(Run{Addr: 0, Len: page, Stride: page, Count: size / page, Dev: fds[1]}))
		here, there := must[*Prepared](t)(a.Prepare(local)), must[*Prepared](t)(self.Prepare(remote))
		src, dst := []int32{0, 1, 2, 50, 9}, []int32{10, 11, 12, 0, 255}
		check(t, x.CreateIndexed(Write, here, src, there, dst, TransferOptions{Post: true}))
		wait(t, x)
		for i := range src {
			copy(want[1][dst[i]*page:][:page], buf.Bytes()[src[i]*page:])
		}
		if !bytes.Equal(contents(t, two), want[1]) || !bytes.Equal(contents(t, one), want[0]) {
			t.Fatal("the files do not hold what was written, or more")
		}

		// What is used stays registered, on both sides.
		wantErr(t, "deregister files under a transfer", files.Deregister(), ErrInUse)
		check(t, x.Release())
		wantErr(t, "deregister files under a prepared list", files.Deregister(), ErrInUse)
		check(t, there.Free())
		wantErr(t, "deregister memory under a prepared list", mem.Deregister(), ErrInUse)
		check(t, files.Deregister())
		check(t, here.Free())
		if err := x.Create(Read, local, self, remote, TransferOptions{}); err == nil {
			t.Error("a transfer with a file that is not registered any more")
		}
	})
}

// TestFilesApart: files that have nothing but their offsets in common do not keep each other
// registered, and neither do a file and memory.
func TestFilesApart(t *testing.T) {
	const size = 4096
	eachNative(t, func(t *testing.T, c engineCase) {
		a := newStorageAgent(t, c.open(t), "POSIX", nil)
		buf := alloc(t, size)
		one, two := tempFile(t, "one", size, 1), tempFile(t, "two", size, 2)
		must[*Registration](t)(a.Register(Host(buf)))
		kept := must[*Registration](t)(a.Register(File(int(one.Fd()), 0, size)))
		// As large as the address space, so that every address is an offset in it.
		other := must[*Registration](t)(a.Register(File(int(two.Fd()), 0, math.MaxInt64)))
		local := must[*List](t)(a.NewList(DRAM))
		check(t, local.Append(Desc{Addr: uint64(buf.Addr()), Len: size}))
		remote := must[*List](t)(a.NewList(MemFile))
		check(t, remote.Append(Desc{Addr: 0, Len: size, Dev: uint64(one.Fd())}))
		x := a.NewTransfer()
		check(t, x.Create(Read, local, must[*Remote](t)(a.Self()), remote, TransferOptions{Post: true}))
		wait(t, x)
		check(t, other.Deregister())
		wantErr(t, "deregister a file under a transfer", kept.Deregister(), ErrInUse)
		check(t, x.Release())
		check(t, kept.Deregister())
	})
}

// TestStorageErrors: what goes wrong with storage loses no peer, and the agent goes on.
func TestStorageErrors(t *testing.T) {
	const size = 4096
	eachNative(t, func(t *testing.T, c engineCase) {
		a := newStorageAgent(t, c.open(t), "POSIX", nil)
		buf := alloc(t, size)
		must[*Registration](t)(a.Register(Host(buf)))
		self := must[*Remote](t)(a.Self())
		wantErr(t, "notify", self.Notify(nil), ErrUnsupported)
		wantErr(t, "invalidate", self.Invalidate(), ErrUnsupported)
		for _, r := range []Region{
			File(-1, 0, size), File(math.MaxInt32+1, 0, size), File(1, 0, 0), File(1, math.MaxInt64, 1), File(1, 1, math.MaxInt64),
			Object("k", 1, 0), Block(1, 0, 0), Host(buf).As(MemFile, 1),
		} {
			if _, err := a.Register(r); err == nil {
				t.Errorf("registered %+v", r)
			} else {
				wantErr(t, "register", err, ErrBadDescriptor)
			}
		}
		f := tempFile(t, "f", size, 1)
		file := File(int(f.Fd()), 0, size)
		_, err := a.Register(file, file)
		wantErr(t, "register a file twice", err, ErrBadDescriptor)
		must[*Registration](t)(a.Register(file))

		local := must[*List](t)(a.NewList(DRAM))
		check(t, local.Append(Desc{Addr: uint64(buf.Addr()), Len: size}))
		remote := must[*List](t)(a.NewList(MemFile))
		check(t, remote.Append(Desc{Addr: 0, Len: size, Dev: uint64(f.Fd())}))
		x := a.NewTransfer()
		// Neither does the backend notify, nor is there anybody to notify.
		err = x.Create(Write, local, self, remote, TransferOptions{Notif: []byte("n"), Post: true})
		if err == nil {
			t.Error("a file was notified")
		}
		wantErr(t, "usable", self.usable(), nil)
		if x.Held() {
			check(t, x.Release())
		}
		// Outside of what is registered.
		check(t, remote.Clear())
		check(t, remote.Append(Desc{Addr: 1, Len: size, Dev: uint64(f.Fd())}))
		if err := x.Create(Write, local, self, remote, TransferOptions{Post: true}); err == nil {
			t.Error("wrote past what was registered")
		}
		// Past the end: NIXL says nothing, which is written down at Agent.Self.
		past := must[*Registration](t)(a.Register(File(int(f.Fd()), size, size)))
		check(t, remote.Clear())
		check(t, remote.Append(Desc{Addr: size, Len: size, Dev: uint64(f.Fd())}))
		check(t, x.Create(Read, local, self, remote, TransferOptions{Post: true}))
		for st := InProgress; st == InProgress; {
			st, err = x.Status()
		}
		t.Logf("reading past the end of a file: %v", err)
		if err != nil {
			wantErr(t, "read past the end", err, errStorage)
		}
		wantErr(t, "usable", self.usable(), nil)
		check(t, x.Release())
		check(t, past.Deregister())

		// The agent still moves files.
		check(t, remote.Clear())
		check(t, remote.Append(Desc{Addr: 0, Len: size, Dev: uint64(f.Fd())}))
		check(t, x.Create(Read, local, self, remote, TransferOptions{Post: true}))
		wait(t, x)
		if !bytes.Equal(buf.Bytes(), contents(t, f)) {
			t.Error("other bytes were read than the file holds")
		}
		check(t, x.Release())
	})
}

// TestStorageNeedsNative: the embedded engine has none, and says so.
func TestStorageNeedsNative(t *testing.T) {
	e := engineCases()[0].open(t)
	a := newAgent(t, e)
	_, err := a.Self()
	wantErr(t, "self", err, ErrUnsupported)
	for _, r := range []Region{File(0, 0, 1), Object("key", 7, 1), Block(3, 0, 1)} {
		_, err := a.Register(r)
		wantErr(t, "register", err, ErrUnsupported)
		_, err = a.NewList(r.Mem())
		wantErr(t, "list", err, ErrUnsupported)
	}
	_, err = a.NewList(MemFile + 1)
	wantErr(t, "list of no kind", err, ErrUnsupported)
	if s := a.Stats(); s.Registrations != 0 || s.Lists != 0 {
		t.Errorf("left behind: %+v", s)
	}
}
