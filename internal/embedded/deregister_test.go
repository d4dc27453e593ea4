package embedded

import (
	"bytes"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/nixlkv/nixlkv/internal/engine"
)

// TestDeregisterOwn: memory of a request in progress stays registered.
func TestDeregisterOwn(t *testing.T) { overEach(t, transports, testDeregisterOwn) }

func testDeregisterOwn(t *testing.T, kind wayKind) {
	p := newPair(t, kind, 4096, WithInbox(1), WithReleaseTimeout(50*time.Millisecond))
	full := bytes.Repeat([]byte("x"), MaxNotification)
	if err := p.a.Notify(p.remote, full); err != nil {
		t.Fatal(err)
	}
	spec := p.spec(t, engine.Write, 4096)
	spec.Notif, spec.HasNotif, spec.Post = full, true, true
	r := transfer(t, p.a, spec)
	regions := []engine.Region{p.local.region()}
	err := p.a.Deregister(engine.DRAM, regions)
	wantErr(t, err, engine.ErrBusy)
	if !strings.Contains(err.Error(), "a transfer of this agent") {
		t.Fatalf("the error does not say who: %v", err)
	}
	notes(t, p.b, 2)
	mustSucceed(t, p.a, r)
	// It is registered as before.
	if _, err := p.a.Post(r, nil, true); err != nil {
		t.Fatal(err)
	}
	mustSucceed(t, p.a, r)
	if err := p.a.Deregister(engine.DRAM, regions); err != nil {
		t.Fatal(err)
	}
	_, err = p.a.Post(r, nil, true)
	wantErr(t, err, engine.ErrNotRegistered, engine.ErrNotFound)
	mustFail(t, p.a, r, engine.ErrNotFound, engine.ErrNotRegistered)
}

// TestDeregisterHeld uses a peer that does not answer: all regions of the call stay, and
// the error names the peer; the end of its connection is an answer.
func TestDeregisterHeld(t *testing.T) {
	held, idle := shared(t, 4096), shared(t, 4096)
	b := newTestAgent(t, "b", engine.AgentConfig{}, WithReleaseTimeout(50*time.Millisecond))
	register(t, b, held, idle)
	raw := greet(t, b)
	raw.send(appendHeader(nil, frameMap, 0, 1, 0))
	_, body := raw.wantFrame(frameRegion)
	answer, err := parseRegion(body)
	if err != nil || answer.code != codeOK || raw.fds.take(answer.dev, answer.inode) < 0 {
		t.Fatalf("answer %+v, %v", answer, err)
	}
	both := []engine.Region{idle.region(), held.region()}
	for range 2 {
		err = b.Deregister(engine.DRAM, both)
		wantErr(t, err, engine.ErrBusy)
		if !strings.Contains(err.Error(), `"raw"`) {
			t.Fatalf("the error does not name the peer: %v", err)
		}
	}
	if n := b.Stats().Regions; n != 2 {
		t.Fatalf("%d regions", n)
	}
	// Asked once, and late is not too late: a wrong grant is none.
	raw.wantFrame(frameUnmap)
	raw.send(appendHeader(nil, frameUnmapped, 0, answer.grant+1, 0))
	wantErr(t, b.Deregister(engine.DRAM, both), engine.ErrBusy)
	raw.conn.Close()
	eventually(t, "deregistration", func() bool { return b.Deregister(engine.DRAM, both) == nil })
}

// TestDeregisterTwice: of two calls at once, one takes the region away.
func TestDeregisterTwice(t *testing.T) {
	mem := shared(t, 4096)
	b := newTestAgent(t, "b", engine.AgentConfig{}, WithReleaseTimeout(patience))
	register(t, b, mem)
	raw := greet(t, b)
	raw.send(appendHeader(nil, frameMap, 0, 1, 0))
	raw.wantFrame(frameRegion)
	regions := []engine.Region{mem.region()}
	first := make(chan error, 1)
	go func() { first <- b.Deregister(engine.DRAM, regions) }()
	h, _ := raw.wantFrame(frameUnmap)
	wantErr(t, b.Deregister(engine.DRAM, regions), engine.ErrBusy)
	// Nobody gets at it meanwhile.
	raw.send(frame(frameWrite, 0, 1, partsBody(1, 1, part{1, 0, 1})))
	raw.send(frame(frameCommit, 0, 1, nil))
	if _, body := raw.wantFrame(frameDone); body[0] != byte(codeNotRegistered) {
		t.Fatalf("answer % x", body)
	}
	raw.send(appendHeader(nil, frameUnmapped, 0, h.number, 0))
	if err := <-first; err != nil {
		t.Fatal(err)
	}
	wantErr(t, b.Deregister(engine.DRAM, regions), engine.ErrNotRegistered)
}

// TestDeregisterInVain takes memory away from a writer again and again, and gives it back
// because another peer does not answer. The writer's transfers fail or succeed, and its
// connection stays.
func TestDeregisterInVain(t *testing.T) {
	p := newPair(t, memfdKind, 1<<20, WithReleaseTimeout(5*time.Millisecond))
	silent := greet(t, p.b)
	silent.send(appendHeader(nil, frameMap, 0, 1, 0))
	silent.wantFrame(frameRegion)
	spec := p.spec(t, engine.Write, 4096)
	spec.NoMerge = true
	requests := []engine.Request{transfer(t, p.a, spec), transfer(t, p.a, spec), transfer(t, p.a, spec)}
	stop, ended := make(chan struct{}), make(chan error, len(requests))
	for _, r := range requests {
		go func() {
			for {
				select {
				case <-stop:
					ended <- nil
					return
				default:
				}
				if _, err := p.a.Post(r, nil, false); err != nil {
					ended <- err
					return
				}
				if err := spin("the end", func() bool { return poll(p.a, r) != engine.InProgress }); err != nil {
					ended <- err
					return
				}
				if err := p.a.Reason(r); err != nil && !errors.Is(err, engine.ErrNotRegistered) {
					ended <- err
					return
				}
			}
		}()
	}
	for range 50 {
		wantErr(t, p.b.Deregister(engine.DRAM, []engine.Region{p.peer.region()}), engine.ErrBusy)
	}
	close(stop)
	for range requests {
		if err := <-ended; err != nil {
			t.Fatal(err)
		}
	}
	fill(p.local.data, 1)
	if _, err := p.a.Post(requests[0], nil, false); err != nil {
		t.Fatal(err)
	}
	mustSucceed(t, p.a, requests[0])
	wantBytes(t, p.peer.data, p.local.data)
	silent.conn.Close()
	eventually(t, "deregistration", func() bool {
		return p.b.Deregister(engine.DRAM, []engine.Region{p.peer.region()}) == nil
	})
}

// resources counts what the kernel holds for this process.
func resources(t *testing.T) (fds, maps int) {
	t.Helper()
	dir, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	return len(dir), strings.Count(string(text), "memfd:embedded-test")
}

// TestNothingLeft: after Destroy no goroutine, descriptor or mapping is left, even if the
// caller left registrations, loaded peers and connections behind.
func TestNothingLeft(t *testing.T) { overEach(t, transports, testNothingLeft) }

func testNothingLeft(t *testing.T, kind wayKind) {
	// What the runtime keeps once networking was used is not counted.
	warm := kind.agent(t, "warm", engine.AgentConfig{})
	if err := warm.Destroy(); err != nil {
		t.Fatal(err)
	}
	const size, page = 1 << 20, 64 << 10
	mems := []*memory{foreign(t, size), shared(t, size), shared(t, size), foreign(t, size)}
	before := goleak.IgnoreCurrent() // other tests' and the parent's
	fds, maps := resources(t)
	for round := range 3 {
		var agents []*Agent
		for _, name := range []string{"a", "b"} {
			made, err := New().NewAgent(name, engine.AgentConfig{})
			if err != nil {
				t.Fatal(err)
			}
			if _, err := made.CreateBackend("UCX", kind.params); err != nil {
				t.Fatal(err)
			}
			agents = append(agents, made.(*Agent))
		}
		a, b := agents[0], agents[1]
		register(t, a, mems[0], mems[2])
		register(t, b, mems[1], mems[3])
		for _, x := range [][2]*Agent{{a, b}, {b, a}} {
			md, err := x[1].LocalMetadata()
			if err != nil {
				t.Fatal(err)
			}
			remote, _, err := x[0].LoadRemote(md)
			if err != nil {
				t.Fatal(err)
			}
			local, peer := mems[:1], []*memory{mems[1], mems[3]}
			if x[0] == b {
				local, peer = mems[1:2], []*memory{mems[0], mems[2]}
			}
			for _, m := range peer {
				var lists [2]engine.List
				for i, l := range [][]engine.Desc{local[0].pages(page), m.pages(page)} {
					if lists[i], err = x[0].NewList(engine.DRAM); err != nil {
						t.Fatal(err)
					}
					if err := x[0].Append(lists[i], l); err != nil {
						t.Fatal(err)
					}
				}
				r, _, err := x[0].Create(&engine.Spec{Op: engine.Write, Remote: remote, LocalList: lists[0], RemoteList: lists[1], HasNotif: true, Post: true})
				if err != nil {
					t.Fatal(err)
				}
				mustSucceed(t, x[0], r)
				if err := x[0].Release(r); err != nil {
					t.Fatal(err)
				}
				x[0].FreeList(lists[0])
				x[0].FreeList(lists[1])
			}
			if round > 0 {
				x[0].FreeRemote(remote)
			}
		}
		for _, x := range agents {
			if err := x.Destroy(); err != nil {
				t.Fatal(err)
			}
		}
		if n := a.Stats().Handles; n != map[bool]int{true: 1, false: 0}[round == 0] {
			t.Fatalf("%d handles left", n)
		}
		if nowFDs, nowMaps := resources(t); nowFDs != fds || nowMaps != maps {
			t.Fatalf("round %d: %d descriptors and %d mappings, had %d and %d", round, nowFDs, nowMaps, fds, maps)
		}
	}
	if err := goleak.Find(before); err != nil {
		t.Fatal(err)
	}
}
