package embedded

import (
	"encoding/hex"
	"fmt"
	"hash/crc32"
	"maps"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nixlkv/nixlkv/internal/engine"
)

// withChild gives an agent here and one in another process, each with memory.
func withChild(t *testing.T, kind wayKind, size int, opts ...Option) (a *Agent, local *memory, c *child, remote engine.Remote, addr uint64) {
	t.Helper()
	c = kind.child(t, "child")
	local = foreign(t, size)
	a = kind.agent(t, "parent", engine.AgentConfig{}, opts...)
	register(t, a, local)
	addr = c.number("memory", kind.name, size)
	return a, local, c, loadBytes(t, a, c.metadata()), addr
}

func TestTwoProcesses(t *testing.T) {
	for _, kind := range kinds {
		t.Run(kind.name, func(t *testing.T) {
			const size, page = 4 << 20, 32 << 10
			a, local, c, remote, addr := withChild(t, kind, size)
			fill(local.data, 1)
			spec := engine.Spec{
				Op: engine.Write, Remote: remote, NoMerge: true,
				Notif: []byte("pages"), HasNotif: true, Post: true,
				LocalList:  newList(t, a, local.pages(page)...),
				RemoteList: newList(t, a, pagesAt(addr, size, page)...),
			}
			r := transfer(t, a, spec)
			if got := c.do("notes", 1); got != "parent:pages" {
				t.Fatalf("notifications %q", got)
			}
			if got, want := c.number("sum"), uint64(crc32.ChecksumIEEE(local.data)); got != want {
				t.Fatalf("checksum %d, want %d", got, want)
			}
			mustSucceed(t, a, r)

			c.do("fill", 7)
			spec.Op, spec.HasNotif = engine.Read, false
			mustSucceed(t, a, transfer(t, a, spec))
			if got, want := c.number("sum"), uint64(crc32.ChecksumIEEE(local.data)); got != want {
				t.Fatalf("checksum %d, want %d", got, want)
			}
			if err := a.Notify(remote, []byte("bye")); err != nil {
				t.Fatal(err)
			}
			if got := c.do("notes", 1); got != "parent:bye" {
				t.Fatalf("notifications %q", got)
			}
			c.do("destroy")
			eventually(t, "loss of the peer", func() bool { return a.CheckRemote(remote) != nil })
		})
	}
}

// TestKill kills the target while requests of all sorts are in progress: waiting for a
// worker, for the connection, for an answer. Another peer does not notice, and a new
// process of the same name can be loaded.
func TestKill(t *testing.T) {
	for _, kind := range kinds {
		t.Run(kind.name, func(t *testing.T) {
			const size, page, count = 8 << 20, 64 << 10, 24
			a, local, c, remote, addr := withChild(t, kind, size)
			other := kind.agent(t, "other", engine.AgentConfig{})
			mem := shared(t, size)
			register(t, other, mem)
			fill(local.data, 1)

			// The child's inbox takes what comes; stopped, it answers nothing more.
			here := newList(t, a, local.pages(page)...)
			spec := engine.Spec{
				Op: engine.Write, Remote: remote, NoMerge: true, HasNotif: true, Post: true,
				LocalList: here, RemoteList: newList(t, a, pagesAt(addr, size, page)...),
			}
			mustSucceed(t, a, transfer(t, a, spec))
			c.Stop(t)
			var flying []engine.Request
			for i := range count {
				s := spec
				if i%2 == 1 && kind.name != "memfd" {
					s.Op = engine.Read
				}
				flying = append(flying, transfer(t, a, s))
			}
			for _, r := range flying {
				if st := poll(a, r); st != engine.InProgress {
					t.Fatalf("status %v while the peer is stopped: %v", st, a.Reason(r))
				}
			}
			// Neither workers nor other peers wait for the one that is stopped.
			toOther := engine.Spec{
				Op: engine.Write, Remote: load(t, a, other), NoMerge: true, HasNotif: true, Post: true,
				LocalList: here, RemoteList: newList(t, a, mem.pages(page)...),
			}
			mustSucceed(t, a, transfer(t, a, toOther))
			wantBytes(t, mem.data, local.data)

			c.Kill()
			for _, r := range flying {
				mustFail(t, a, r, engine.ErrBackend, engine.ErrPeerLost)
			}
			wantErr(t, a.CheckRemote(remote), engine.ErrNotFound, engine.ErrPeerLost)
			_, err := a.Post(flying[0], nil, false)
			wantErr(t, err, engine.ErrNotFound, engine.ErrPeerLost)
			wantErr(t, a.Notify(remote, nil), engine.ErrNotFound, engine.ErrPeerLost)
			mustSucceed(t, a, transfer(t, a, toOther))

			again := kind.child(t, "child")
			addr = again.number("memory", kind.name, size)
			spec.Remote = loadBytes(t, a, again.metadata())
			spec.RemoteList = newList(t, a, pagesAt(addr, size, page)...)
			mustSucceed(t, a, transfer(t, a, spec))
			if got, want := again.number("sum"), uint64(crc32.ChecksumIEEE(local.data)); got != want {
				t.Fatalf("checksum %d, want %d", got, want)
			}
			wantErr(t, a.CheckRemote(remote), engine.ErrNotFound)
		})
	}
}

// TestStop: requests to a peer that is stopped wait for it, however far it got.
func TestStop(t *testing.T) {
	for _, kind := range kinds {
		for _, connected := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s/connected=%v", kind.name, connected), func(t *testing.T) {
				const size, page = 8 << 20, 64 << 10
				a, local, c, remote, addr := withChild(t, kind, size, WithConnectTimeout(50*time.Millisecond))
				fill(local.data, 1)
				if connected {
					if err := a.Connect(remote); err != nil {
						t.Fatal(err)
					}
				}
				c.Stop(t)
				r := transfer(t, a, engine.Spec{
					Op: engine.Write, Remote: remote, NoMerge: true, HasNotif: true, Post: true,
					LocalList:  newList(t, a, local.pages(page)...),
					RemoteList: newList(t, a, pagesAt(addr, size, page)...),
				})
				if !connected {
					wantErr(t, a.Connect(remote), engine.ErrBackend)
				}
				if st := poll(a, r); st != engine.InProgress {
					t.Fatalf("status %v: %v", st, a.Reason(r))
				}
				c.Continue(t)
				mustSucceed(t, a, r)
				if got, want := c.number("sum"), uint64(crc32.ChecksumIEEE(local.data)); got != want {
					t.Fatalf("checksum %d, want %d", got, want)
				}
			})
		}
	}
}

// TestStoppedWriter: memory that a stopped process has mapped cannot be deregistered, and
// nothing is given up by trying; memory that it only writes to through the connection can.
func TestStoppedWriter(t *testing.T) {
	for _, kind := range kinds {
		t.Run(kind.name, func(t *testing.T) {
			const size, page = 2 << 20, 64 << 10
			c := kind.child(t, "writer")
			mem := kind.get(t, size)
			a := kind.agent(t, "target", engine.AgentConfig{}, WithReleaseTimeout(100*time.Millisecond))
			register(t, a, mem)
			md, err := a.LocalMetadata()
			if err != nil {
				t.Fatal(err)
			}
			c.do("memory", "foreign", size)
			c.do("fill", 1)
			c.do("load", hex.EncodeToString(md))
			if why := c.do("write", mem.addr(), page); why != "" {
				t.Fatal(why)
			}
			c.Stop(t)
			regions := []engine.Region{mem.region()}
			err = a.Deregister(engine.DRAM, regions)
			if kind.name != "memfd" {
				if err != nil {
					t.Fatal(err)
				}
				register(t, a, mem) // for Deregister below; the writer does not know it
				c.Continue(t)
				if why := c.do("write", mem.addr(), page); why != "not registered" {
					t.Fatalf("write after deregistration: %q", why)
				}
			} else {
				wantErr(t, err, engine.ErrBusy)
				if a.Stats().Regions != 1 {
					t.Fatal("the region is gone")
				}
				wantErr(t, a.Destroy(), engine.ErrBusy)
				c.Continue(t)
				// As if nothing had been asked, but for a transfer that the question met.
				why := c.do("write", mem.addr(), page)
				if why == "not registered" {
					why = c.do("write", mem.addr(), page)
				}
				if why != "" {
					t.Fatal(why)
				}
			}
			eventually(t, "deregistration", func() bool { return a.Deregister(engine.DRAM, regions) == nil })
			if why := c.do("write", mem.addr(), page); why != "not registered" {
				t.Fatalf("write after deregistration: %q", why)
			}
			notes(t, a, map[string]int{"memfd": 2, "foreign": 1, "tcp": 1}[kind.name])
		})
	}
}

// TestDeregisterWhileWritten takes memory away from a process that writes to it without
// pause. After that not one byte changes.
func TestDeregisterWhileWritten(t *testing.T) {
	for _, kind := range kinds {
		t.Run(kind.name, func(t *testing.T) {
			const size, page = 4 << 20, 32 << 10
			c := kind.child(t, "writer")
			mem := kind.get(t, size)
			a := kind.agent(t, "target", engine.AgentConfig{}, WithReleaseTimeout(patience))
			register(t, a, mem)
			md, err := a.LocalMetadata()
			if err != nil {
				t.Fatal(err)
			}
			c.do("memory", "foreign", size)
			c.do("fill", 1)
			c.do("load", hex.EncodeToString(md))
			c.do("flood", mem.addr(), page)
			if err := a.Deregister(engine.DRAM, []engine.Region{mem.region()}); err != nil {
				t.Fatal(err)
			}
			clear(mem.data)
			if why := c.do("ended"); why != "not registered<nil>" {
				t.Fatalf("the writer ended with %q", why)
			}
			for i, b := range mem.data {
				if b != 0 {
					t.Fatalf("byte %d was written after deregistration", i)
				}
			}
		})
	}
}

// TestWriterDies: a process that is killed while it writes holds nothing.
func TestWriterDies(t *testing.T) {
	const size, page = 4 << 20, 32 << 10
	c := memfdKind.child(t, "writer")
	mem := shared(t, size)
	a := newTestAgent(t, "target", engine.AgentConfig{}, WithReleaseTimeout(patience))
	register(t, a, mem)
	md, err := a.LocalMetadata()
	if err != nil {
		t.Fatal(err)
	}
	c.do("memory", "foreign", size)
	c.do("load", hex.EncodeToString(md))
	c.do("flood", mem.addr(), page)
	c.Kill()
	if err := a.Deregister(engine.DRAM, []engine.Region{mem.region()}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "end of the connection", func() bool { return a.Stats().Inbound == 0 })
}

// TestStoppedTaker: over TCP, a peer that is stopped and leaves bytes untaken is lost after
// the timeout. One that has all that it was sent is waited for.
func TestStoppedTaker(t *testing.T) {
	const size, page = 32 << 20, 64 << 10
	impatient := tcpKind
	impatient.params = maps.Clone(tcpKind.params)
	impatient.params[ParamTimeout] = "1s"
	local := foreign(t, size)
	a := impatient.agent(t, "a", engine.AgentConfig{})
	register(t, a, local)
	fill(local.data, 1)
	type stopped struct {
		c      *child
		spec   engine.Spec
		remote engine.Remote
	}
	stop := func(name string, n int) stopped {
		c := impatient.child(t, name)
		addr := c.number("memory", "foreign", size)
		s := stopped{c: c, remote: loadBytes(t, a, c.metadata())}
		s.spec = engine.Spec{
			Op: engine.Write, Remote: s.remote, NoMerge: true, Post: true, HasNotif: true,
			LocalList:  newList(t, a, pagesAt(local.addr(), n, page)...),
			RemoteList: newList(t, a, pagesAt(addr, n, page)...),
		}
		mustSucceed(t, a, transfer(t, a, s.spec))
		c.Stop(t)
		return s
	}
	much, little := stop("much", size), stop("little", 4096)
	waits, fails := transfer(t, a, little.spec), transfer(t, a, much.spec)
	// More than the sockets hold.
	mustFail(t, a, fails, engine.ErrBackend, engine.ErrPeerLost, unix.ETIMEDOUT)
	if st := poll(a, waits); st != engine.InProgress {
		t.Fatalf("status %v of the other: %v", st, a.Reason(waits))
	}
	little.c.Continue(t)
	mustSucceed(t, a, waits)
	if err := a.CheckRemote(little.remote); err != nil {
		t.Fatal(err)
	}
}
