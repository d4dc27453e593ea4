package embedded

import (
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nixlkv/nixlkv/internal/engine"
)

// scripted is an agent with one request at a fake target, which was asked for its memory
// and hands out mem.
type scripted struct {
	a      *Agent
	f      *fakeTarget
	raw    *rawConn
	local  *memory
	mem    *memory
	remote engine.Remote
	r      engine.Request
}

func newScripted(t *testing.T, size int) *scripted {
	t.Helper()
	s := &scripted{a: newTestAgent(t, "a", engine.AgentConfig{}), local: foreign(t, size), mem: shared(t, size), f: newFakeTarget(t, uint64(size))}
	register(t, s.a, s.local)
	fill(s.local.data, 1)
	s.remote = loadBytes(t, s.a, s.f.encode())
	s.r = transfer(t, s.a, engine.Spec{
		Op: engine.Write, Remote: s.remote, Post: true,
		LocalList:  newList(t, s.a, s.local.pages(size)...),
		RemoteList: newList(t, s.a, pagesAt(1<<20, size, size)...),
	})
	s.raw = s.f.accept(t)
	s.raw.send(appendWelcome(nil, s.f.id))
	s.raw.wantFrame(frameMap)
	return s
}

func (s *scripted) grant(t *testing.T, number uint64) {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Fstat(s.mem.fd, &st); err != nil {
		t.Fatal(err)
	}
	answer := regionAnswer{code: codeOK, grant: number, dev: uint64(st.Dev), inode: st.Ino}.append(nil, 5)
	if err := writeFD(s.raw.conn.unix, answer, s.mem.fd); err != nil {
		t.Fatal(err)
	}
}

// TestUnmapThenMap: memory that is taken back while it is copied to is let go when the copy
// ends, and asked for again only after that. A request that comes in between waits.
func TestUnmapThenMap(t *testing.T) {
	s := newScripted(t, 8192)
	s.grant(t, 1)
	mustSucceed(t, s.a, s.r)
	wantBytes(t, s.mem.data, s.local.data)

	p := *s.a.remotes.get(uintptr(s.remote))
	reg := p.index.Load().regs[0]
	held := reg.mapping.Load()
	if !held.acquire() { // as a worker does
		t.Fatal("the mapping is revoked")
	}
	for range 2 {
		s.raw.send(appendHeader(nil, frameUnmap, 0, 1, 0))
	}
	eventually(t, "revocation", held.isRevoked)
	if held.acquire() {
		t.Fatal("a revoked mapping could be held")
	}
	fill(s.local.data, 2)
	if st, err := s.a.Post(s.r, nil, false); st != engine.InProgress || err != nil {
		t.Fatal(st, err)
	}
	if reg.way() != routeLeaving {
		t.Fatalf("route %d", reg.way())
	}
	held.release()
	if h, _ := s.raw.wantFrame(frameUnmapped); h.number != 1 {
		t.Fatalf("end of grant %d", h.number)
	}
	s.raw.wantFrame(frameMap)
	s.grant(t, 2)
	mustSucceed(t, s.a, s.r)
	wantBytes(t, s.mem.data, s.local.data)
}

// TestGoneWhileAsked: newer metadata takes a region away while it is asked for.
func TestGoneWhileAsked(t *testing.T) {
	s := newScripted(t, 8192)
	s.f.regions, s.f.epoch = nil, 2
	loadBytes(t, s.a, s.f.encode())
	s.grant(t, 1)
	mustFail(t, s.a, s.r, engine.ErrNotFound, engine.ErrNotRegistered)
	if h, _ := s.raw.wantFrame(frameUnmapped); h.number != 1 {
		t.Fatalf("end of grant %d", h.number)
	}
	for _, b := range s.mem.data {
		if b != 0 {
			t.Fatal("it was written to")
		}
	}
}

// TestLostWhileLeaving: a request that waits for memory to be let go ends with its peer.
func TestLostWhileLeaving(t *testing.T) {
	s := newScripted(t, 8192)
	s.grant(t, 1)
	mustSucceed(t, s.a, s.r)
	p := *s.a.remotes.get(uintptr(s.remote))
	held := p.index.Load().regs[0].mapping.Load()
	if !held.acquire() {
		t.Fatal("the mapping is revoked")
	}
	s.raw.send(appendHeader(nil, frameUnmap, 0, 1, 0))
	eventually(t, "revocation", held.isRevoked)
	if _, err := s.a.Post(s.r, nil, false); err != nil {
		t.Fatal(err)
	}
	s.raw.conn.Close()
	eventually(t, "loss of the peer", func() bool { return s.a.CheckRemote(s.remote) != nil })
	// The request uses memory as long as somebody may copy.
	if st := poll(s.a, s.r); st != engine.InProgress {
		t.Fatalf("status %v", st)
	}
	held.release()
	mustFail(t, s.a, s.r, engine.ErrBackend, engine.ErrPeerLost)
}

// TestUnreadReplies: who asks and does not read is not listened to, and gets every answer
// once it reads.
func TestUnreadReplies(t *testing.T) {
	const count = 50_000
	b := newTestAgent(t, "b", engine.AgentConfig{})
	raw := greet(t, b)
	sent := make(chan struct{})
	go func() {
		defer close(sent)
		var asks []byte
		for i := range uint64(count) {
			asks = appendHeader(asks, frameMap, 0, 1000+i, 0)
		}
		raw.send(asks)
	}()
	in := b.listInbound()[0]
	waiting := func() int {
		in.mu.Lock()
		defer in.mu.Unlock()
		return len(in.replies)
	}
	eventually(t, "filling of the queue", func() bool { return waiting() >= maxReplies })
	for i := range uint64(count) {
		if h, _ := raw.wantFrame(frameRegion); h.number != 1000+i {
			t.Fatalf("answer %d for region %d", i, h.number)
		}
		if n := waiting(); n > maxReplies {
			t.Fatalf("%d replies are queued", n)
		}
	}
	<-sent
}
