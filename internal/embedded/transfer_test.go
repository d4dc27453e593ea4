package embedded

import (
	"bytes"
	"math/rand/v2"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nixlkv/nixlkv/internal/engine"
)

// pair is an initiator with local memory and a target with remote memory.
type pair struct {
	a, b        *Agent
	local, peer *memory
	remote      engine.Remote
}

func newPair(t testing.TB, kind wayKind, size int, opts ...Option) *pair {
	t.Helper()
	p := &pair{local: foreign(t, size), peer: kind.get(t, size)}
	p.a = kind.agent(t, "initiator", engine.AgentConfig{Telemetry: true}, opts...)
	p.b = kind.agent(t, "target", engine.AgentConfig{}, opts...)
	register(t, p.a, p.local)
	register(t, p.b, p.peer)
	p.remote = load(t, p.a, p.b)
	return p
}

// spec copies all of the memory in pages, in order.
func (p *pair) spec(t testing.TB, op engine.Op, page int) engine.Spec {
	t.Helper()
	return engine.Spec{
		Op: op, Remote: p.remote,
		LocalList:  newList(t, p.a, p.local.pages(page)...),
		RemoteList: newList(t, p.a, p.peer.pages(page)...),
	}
}

func TestTransfers(t *testing.T) {
	sizes := []struct {
		name        string
		total, page int
		noMerge     bool
	}{
		{"one page", 4096, 4096, false},
		{"inline", 64 << 10, 1 << 10, true},
		{"several shares", 9 << 20, 32 << 10, true},
		{"one large piece", 9 << 20, 9 << 20, false},
		{"tiny descriptors", 64 << 10, 16, true},
		{"odd descriptors", 3<<20 + 17, 4099, true},
	}
	for _, kind := range kinds {
		for _, s := range sizes {
			for _, op := range []engine.Op{engine.Write, engine.Read} {
				t.Run(kind.name+"/"+s.name+"/"+[]string{"read", "write"}[op], func(t *testing.T) {
					p := newPair(t, kind, s.total)
					fill(p.local.data, 1)
					fill(p.peer.data, 2)
					src, dst := p.local.data, p.peer.data
					if op == engine.Read {
						src, dst = dst, src
					}
					want := bytes.Clone(src)
					spec := p.spec(t, op, s.page)
					spec.NoMerge = s.noMerge
					spec.Notif, spec.HasNotif = []byte("done"), true
					r := transfer(t, p.a, spec)
					if st, err := p.a.Post(r, nil, false); err != nil {
						t.Fatal(st, err)
					}
					// Once the peer has the notification, the bytes are there.
					if got := notes(t, p.b, 1); got[0] != (note{"initiator", "done"}) {
						t.Fatalf("notification %q", got)
					}
					wantBytes(t, dst, want)
					mustSucceed(t, p.a, r)

					// Again, after the source changed, without a notification of success.
					fill(src, 3)
					want = bytes.Clone(src)
					if _, err := p.a.Post(r, []byte("again"), true); err != nil {
						t.Fatal(err)
					}
					mustSucceed(t, p.a, r)
					wantBytes(t, dst, want)
					if got := notes(t, p.b, 1); got[0].msg != "again" {
						t.Fatalf("notification %q", got)
					}
				})
			}
		}
	}
}

// TestWithoutNotification needs no answer of the target for memory that is mapped.
func TestWithoutNotification(t *testing.T) {
	for _, kind := range kinds {
		t.Run(kind.name, func(t *testing.T) {
			p := newPair(t, kind, 1<<20)
			fill(p.local.data, 1)
			r := transfer(t, p.a, p.spec(t, engine.Write, 64<<10))
			if st := poll(p.a, r); st != engine.ErrInvalidState {
				t.Fatalf("status of a request not posted: %v", st)
			}
			if _, err := p.a.Post(r, nil, false); err != nil {
				t.Fatal(err)
			}
			mustSucceed(t, p.a, r)
			wantBytes(t, p.peer.data, p.local.data)
			notes(t, p.b, 0)
		})
	}
}

// TestInline: a small write to memory that is mapped is over when Post returns.
func TestInline(t *testing.T) {
	p := newPair(t, memfdKind, 4096)
	r := transfer(t, p.a, p.spec(t, engine.Write, 4096))
	if _, err := p.a.Post(r, nil, false); err != nil {
		t.Fatal(err)
	}
	mustSucceed(t, p.a, r)
	fill(p.local.data, 1)
	st, err := p.a.Post(r, nil, false)
	if st != engine.Success || err != nil {
		t.Fatal(st, err)
	}
	wantBytes(t, p.peer.data, p.local.data)
}

// TestMixed copies between regions of both kinds, in an order that jumps, in one request.
func TestMixed(t *testing.T) { overEach(t, transports, testMixed) }

func testMixed(t *testing.T, kind wayKind) {
	const page, count = 8 << 10, 64
	a, b := kind.agent(t, "a", engine.AgentConfig{}), kind.agent(t, "b", engine.AgentConfig{})
	var here, there []*memory
	for i := range 4 {
		here = append(here, foreign(t, page*count))
		there = append(there, kinds[i%2].get(t, page*count))
		fill(here[i].data, uint64(i))
	}
	register(t, a, here...)
	register(t, b, there...)
	var l, r []engine.Desc
	for i := range here {
		l = append(l, here[i].pages(page)...)
		r = append(r, there[i].pages(page)...)
	}
	rand.New(rand.NewPCG(1, 2)).Shuffle(len(l), func(i, k int) {
		l[i], l[k] = l[k], l[i]
		r[i], r[k] = r[k], r[i]
	})
	remote := load(t, a, b)
	write := transfer(t, a, engine.Spec{
		Op: engine.Write, Remote: remote, Post: true, HasNotif: true,
		LocalList: newList(t, a, l...), RemoteList: newList(t, a, r...),
	})
	mustSucceed(t, a, write)
	for i := range here {
		wantBytes(t, there[i].data, here[i].data)
		clear(here[i].data)
	}
	read := transfer(t, a, engine.Spec{
		Op: engine.Read, Remote: remote, Post: true,
		LocalList: newList(t, a, l...), RemoteList: newList(t, a, r...),
	})
	mustSucceed(t, a, read)
	for i := range here {
		wantBytes(t, here[i].data, there[i].data)
	}
	if got := notes(t, b, 1); got[0].msg != "" {
		t.Fatalf("notification %q, want an empty one", got[0].msg)
	}
}

// TestEmptyDescriptors: they copy nothing and harm nobody.
func TestEmptyDescriptors(t *testing.T) {
	for _, kind := range kinds {
		for _, op := range []engine.Op{engine.Write, engine.Read} {
			t.Run(kind.name+"/"+[]string{"read", "write"}[op], func(t *testing.T) {
				p := newPair(t, kind, 8192)
				fill(p.local.data, 1)
				fill(p.peer.data, 2)
				for _, sizes := range [][]uint64{{0}, {0, 0, 100, 0, 4096, 0}} {
					var l, r []engine.Desc
					for i, n := range sizes {
						// Some at the very end of the region.
						off := uint64(i%2) * (8192 - n)
						l = append(l, engine.Desc{Addr: p.local.addr() + off, Len: n})
						r = append(r, engine.Desc{Addr: p.peer.addr() + off, Len: n})
					}
					req := transfer(t, p.a, engine.Spec{
						Op: op, Remote: p.remote, HasNotif: true, Post: true, NoMerge: true,
						LocalList: newList(t, p.a, l...), RemoteList: newList(t, p.a, r...),
					})
					mustSucceed(t, p.a, req)
					notes(t, p.b, 1)
				}
				wantBytes(t, p.peer.data[:4096], p.local.data[:4096])
			})
		}
	}
}

// TestPart maps a region that starts and ends inside of pages, and checks that nothing
// around it changes.
func TestPart(t *testing.T) {
	for _, kind := range kinds {
		t.Run(kind.name, func(t *testing.T) {
			const off, n = 4096 + 100, 10_000
			mem, local := kind.get(t, 64<<10), foreign(t, n)
			fill(mem.data, 1)
			fill(local.data, 2)
			want := bytes.Clone(mem.data)
			copy(want[off:], local.data)
			a, b := kind.agent(t, "a", engine.AgentConfig{}), kind.agent(t, "b", engine.AgentConfig{})
			register(t, a, local)
			reg := engine.Region{Addr: mem.addr() + off, Len: n, FD: mem.fd, Off: off}
			if err := b.Register(engine.DRAM, []engine.Region{reg}); err != nil {
				t.Fatal(err)
			}
			r := transfer(t, a, engine.Spec{
				Op: engine.Write, Remote: load(t, a, b), Post: true, HasNotif: true,
				LocalList:  newList(t, a, local.pages(n)...),
				RemoteList: newList(t, a, pagesAt(mem.addr()+off, n, n)...),
			})
			mustSucceed(t, a, r)
			wantBytes(t, mem.data, want)
		})
	}
}

// TestUnsealed: a memfd that its owner can cut short is not mapped by a peer; its bytes go
// through the connection, and cutting it is the owner's failure alone.
func TestUnsealed(t *testing.T) { overEach(t, transports, testUnsealed) }

func testUnsealed(t *testing.T, kind wayKind) {
	p := newPair(t, wayKind{"unsealed", newUnsealed, kind.params}, 1<<20)
	fill(p.local.data, 1)
	r := transfer(t, p.a, p.spec(t, engine.Write, 64<<10))
	if _, err := p.a.Post(r, nil, false); err != nil {
		t.Fatal(err)
	}
	mustSucceed(t, p.a, r)
	wantBytes(t, p.peer.data, p.local.data)
	if err := unix.Ftruncate(p.peer.fd, 4096); err != nil {
		t.Fatal(err)
	}
	if _, err := p.a.Post(r, []byte("never"), true); err != nil {
		t.Fatal(err)
	}
	mustFail(t, p.a, r, engine.ErrBackend)
	notes(t, p.b, 0)

	// The connection is as good as before.
	if err := unix.Ftruncate(p.peer.fd, 1<<20); err != nil {
		t.Fatal(err)
	}
	if _, err := p.a.Post(r, nil, false); err != nil {
		t.Fatal(err)
	}
	mustSucceed(t, p.a, r)
	wantBytes(t, p.peer.data, p.local.data)
}

// TestLocalFault: local memory that its owner unmapped fails the request, not the process.
func TestLocalFault(t *testing.T) {
	for _, kind := range kinds {
		for _, op := range []engine.Op{engine.Write, engine.Read} {
			t.Run(kind.name+"/"+[]string{"read", "write"}[op], func(t *testing.T) {
				p := newPair(t, kind, 1<<20)
				r := transfer(t, p.a, p.spec(t, op, 64<<10))
				if err := unix.Mprotect(p.local.data[512<<10:], unix.PROT_NONE); err != nil {
					t.Fatal(err)
				}
				if _, err := p.a.Post(r, nil, false); err != nil {
					wantErr(t, err, engine.ErrBackend)
				}
				mustFail(t, p.a, r, engine.ErrBackend, errFault)
				if err := unix.Mprotect(p.local.data[512<<10:], unix.PROT_READ|unix.PROT_WRITE); err != nil {
					t.Fatal(err)
				}
				fill(p.local.data, 1)
				if _, err := p.a.Post(r, nil, false); err != nil {
					t.Fatal(err)
				}
				mustSucceed(t, p.a, r)
				wantBytes(t, p.peer.data, p.local.data)
			})
		}
	}
}
