package embedded

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/nixlkv/nixlkv/internal/engine"
)

// patience is how long a test waits for what must happen.
const patience = 30 * time.Second

// memory is page-aligned memory off the Go heap.
type memory struct {
	data []byte
	fd   int
}

func (m *memory) addr() uint64 { return uint64(uintptr(unsafe.Pointer(&m.data[0]))) }

// region describes all of the memory.
func (m *memory) region() engine.Region {
	return engine.Region{Addr: m.addr(), Len: uint64(len(m.data)), FD: m.fd}
}

func (m *memory) free() {
	unix.Munmap(m.data)
	if m.fd >= 0 {
		unix.Close(m.fd)
	}
}

// newShared makes memory backed by a memfd that is sealed against changes of its size.
func newShared(size int) (*memory, error) {
	m, err := newUnsealed(size)
	if err != nil {
		return nil, err
	}
	if _, err := unix.FcntlInt(uintptr(m.fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW); err != nil {
		m.free()
		return nil, err
	}
	return m, nil
}

func newUnsealed(size int) (*memory, error) {
	fd, err := unix.MemfdCreate("embedded-test", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, err
	}
	if err := unix.Ftruncate(fd, int64(size)); err != nil {
		unix.Close(fd)
		return nil, err
	}
	data, err := unix.Mmap(fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		unix.Close(fd)
		return nil, err
	}
	return &memory{data: data, fd: fd}, nil
}

// newForeign makes memory that only its own process can reach.
func newForeign(size int) (*memory, error) {
	data, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, err
	}
	return &memory{data: data, fd: -1}, nil
}

// wayKind is a way in which a target's memory is reached.
type wayKind struct {
	name   string
	make   func(size int) (*memory, error)
	params map[string]string // of the backend
}

var (
	memfdKind   = wayKind{"memfd", newShared, nil}
	foreignKind = wayKind{"foreign", newForeign, nil}
	tcpKind     = wayKind{"tcp", newShared, map[string]string{ParamListen: "127.0.0.1:0", ParamTransport: "tcp"}}

	// unsealedKind is memory whose size its owner can change.
	unsealedKind = wayKind{"unsealed", newUnsealed, nil}

	kinds = []wayKind{memfdKind, foreignKind, tcpKind}
	// transports are for what is the same for all memory.
	transports = []wayKind{memfdKind, tcpKind}
)

// overEach runs a test in several ways.
func overEach(t *testing.T, ways []wayKind, f func(t *testing.T, kind wayKind)) {
	for _, kind := range ways {
		t.Run(kind.name, func(t *testing.T) { f(t, kind) })
	}
}

// get makes memory that is freed with the test.
func (k wayKind) get(t testing.TB, size int) *memory {
	t.Helper()
	m, err := k.make(size)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.free)
	return m
}

func shared(t testing.TB, size int) *memory  { t.Helper(); return memfdKind.get(t, size) }
func foreign(t testing.TB, size int) *memory { t.Helper(); return foreignKind.get(t, size) }

// fill writes bytes that depend on the seed.
func fill(b []byte, seed uint64) {
	r := rand.NewPCG(seed, 1)
	for ; len(b) >= 8; b = b[8:] {
		binary.LittleEndian.PutUint64(b, r.Uint64())
	}
	for i := range b {
		b[i] = byte(r.Uint64())
	}
}

// newTestAgent makes an agent that is not reached over TCP.
func newTestAgent(t testing.TB, name string, cfg engine.AgentConfig, opts ...Option) *Agent {
	t.Helper()
	return memfdKind.agent(t, name, cfg, opts...)
}

// agent makes an agent with a backend. It is destroyed before memory made earlier is freed.
func (k wayKind) agent(t testing.TB, name string, cfg engine.AgentConfig, opts ...Option) *Agent {
	t.Helper()
	a, err := New(opts...).NewAgent(name, cfg)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := a.CreateBackend("UCX", k.params); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := a.Destroy(); err != nil {
			t.Error(err)
		}
	})
	return a.(*Agent)
}

func register(t testing.TB, a *Agent, mems ...*memory) {
	t.Helper()
	var regions []engine.Region
	for _, m := range mems {
		regions = append(regions, m.region())
	}
	if err := a.Register(engine.DRAM, regions); err != nil {
		t.Fatal(err)
	}
}

func load(t testing.TB, a, peer *Agent) engine.Remote {
	t.Helper()
	md, err := peer.LocalMetadata()
	if err != nil {
		t.Fatal(err)
	}
	return loadBytes(t, a, md)
}

func loadBytes(t testing.TB, a *Agent, md []byte) engine.Remote {
	t.Helper()
	r, _, err := a.LoadRemote(md)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.FreeRemote(r) })
	return r
}

func newList(t testing.TB, a *Agent, descs ...engine.Desc) engine.List {
	t.Helper()
	l, err := a.NewList(engine.DRAM)
	if err != nil {
		t.Fatal(err)
	}
	if err := a.Append(l, descs); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.FreeList(l) })
	return l
}

// pages cuts memory into descriptors.
func (m *memory) pages(size int) []engine.Desc { return pagesAt(m.addr(), len(m.data), size) }

func pagesAt(addr uint64, total, size int) []engine.Desc {
	var d []engine.Desc
	for off := 0; off < total; off += size {
		d = append(d, engine.Desc{Addr: addr + uint64(off), Len: uint64(min(size, total-off))})
	}
	return d
}

// transfer makes a request that is released with the test.
func transfer(t testing.TB, a *Agent, spec engine.Spec) engine.Request {
	t.Helper()
	r, st, err := a.Create(&spec)
	if err != nil || st < 0 {
		t.Fatalf("create: %v, %v", st, err)
	}
	t.Cleanup(func() {
		if err := a.Release(r); err != nil {
			t.Error(err)
		}
	})
	return r
}

// spin waits for something without an event of its own.
func spin(what string, done func() bool) error {
	for end := time.Now().Add(patience); !done(); runtime.Gosched() {
		if time.Now().After(end) {
			return fmt.Errorf("%s did not happen within %v", what, patience)
		}
	}
	return nil
}

func eventually(t testing.TB, what string, done func() bool) {
	t.Helper()
	if err := spin(what, done); err != nil {
		t.Fatal(err)
	}
}

func poll(a *Agent, r engine.Request) engine.Status {
	var out [1]engine.Status
	a.Poll([]engine.Request{r}, out[:])
	return out[0]
}

// settled waits for a request's end.
func settled(t testing.TB, a *Agent, r engine.Request) engine.Status {
	t.Helper()
	eventually(t, "the end of a request", func() bool { return poll(a, r) != engine.InProgress })
	return poll(a, r)
}

func mustSucceed(t testing.TB, a *Agent, r engine.Request) {
	t.Helper()
	if st := settled(t, a, r); st != engine.Success {
		t.Fatalf("status %v: %v", st, a.Reason(r))
	}
}

// mustFail waits for the end and wants the status and reasons.
func mustFail(t testing.TB, a *Agent, r engine.Request, want engine.Status, reasons ...error) {
	t.Helper()
	if st := settled(t, a, r); st != want {
		t.Fatalf("status %v, want %v: %v", st, want, a.Reason(r))
	}
	wantErr(t, a.Reason(r), append(reasons, want)...)
}

func wantErr(t testing.TB, err error, targets ...error) {
	t.Helper()
	for _, target := range targets {
		if !errors.Is(err, target) {
			t.Fatalf("error %v, want one that is %v", err, target)
		}
	}
}

// note is one notification.
type note struct{ from, msg string }

// notes drains n notifications.
func notes(t testing.TB, a *Agent, n int) []note {
	t.Helper()
	var got []note
	var buf engine.Notifications
	eventually(t, fmt.Sprintf("arrival of %d notifications", n), func() bool {
		if err := a.Notifications(&buf); err != nil {
			t.Fatal(err)
		}
		if err := buf.Validate(); err != nil {
			t.Fatal(err)
		}
		for from, msg := range buf.All() {
			got = append(got, note{string(from), string(msg)})
		}
		return len(got) >= n
	})
	if len(got) != n {
		t.Fatalf("%d notifications, want %d: %q", len(got), n, got)
	}
	return got
}

func wantBytes(t testing.TB, got, want []byte) {
	t.Helper()
	if !bytes.Equal(got, want) {
		t.Fatal("bytes differ")
	}
}
