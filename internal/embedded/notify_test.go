package embedded

import (
	"bytes"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nixlkv/nixlkv/internal/engine"
)

func TestNotify(t *testing.T) { overEach(t, transports, testNotify) }

func testNotify(t *testing.T, kind wayKind) {
	a, b := kind.agent(t, "a\x00\xff", engine.AgentConfig{}), kind.agent(t, "b", engine.AgentConfig{})
	remote := load(t, a, b)
	if err := a.Connect(remote); err != nil {
		t.Fatal(err)
	}
	msgs := []string{"", "\x00", "text", strings.Repeat("\xfe\x00", MaxNotification/2), ""}
	for _, m := range msgs {
		if err := a.Notify(remote, []byte(m)); err != nil {
			t.Fatal(err)
		}
	}
	wantErr(t, a.Notify(remote, make([]byte, MaxNotification+1)), engine.ErrInvalidParam)
	for i, got := range notes(t, b, len(msgs)) {
		if got != (note{"a\x00\xff", msgs[i]}) {
			t.Fatalf("notification %d is %.20q of %q", i, got.msg, got.from)
		}
	}
	notes(t, b, 0)
}

// TestBackPressure: what the target does not drain stays with its sender, in progress or
// queued; nothing is lost, and the connection goes on serving.
func TestBackPressure(t *testing.T) {
	for _, kind := range kinds {
		t.Run(kind.name, func(t *testing.T) {
			const size, count = 4096, 24
			local, mem := foreign(t, size), kind.get(t, size)
			a := kind.agent(t, "a", engine.AgentConfig{}, WithConnectTimeout(50*time.Millisecond))
			b := kind.agent(t, "b", engine.AgentConfig{}, WithInbox(1))
			register(t, a, local)
			other := kind.get(t, size)
			register(t, b, mem, other)
			remote := load(t, a, b)
			toOther := transfer(t, a, engine.Spec{
				Op: engine.Write, Remote: remote, Post: true,
				LocalList: newList(t, a, local.pages(size)...), RemoteList: newList(t, a, other.pages(size)...),
			})
			mustSucceed(t, a, toOther)
			spec := engine.Spec{
				Op: engine.Write, Remote: remote, HasNotif: true, Post: true,
				LocalList: newList(t, a, local.pages(size)...), RemoteList: newList(t, a, mem.pages(size)...),
			}
			msg := func(i int) []byte { return bytes.Repeat([]byte{byte(i)}, MaxNotification/3) }
			var flying []engine.Request
			for i := range count {
				spec.Notif = msg(i)
				flying = append(flying, transfer(t, a, spec))
			}
			// Three fit into the inbox.
			succeeded := func() (n int) {
				for _, r := range flying {
					if poll(a, r) == engine.Success {
						n++
					}
				}
				return n
			}
			eventually(t, "filling of the inbox", func() bool { return succeeded() == 3 })
			// Memory can go meanwhile: the peer is heard, although it is held back.
			if err := b.Deregister(engine.DRAM, []engine.Region{other.region()}); err != nil {
				t.Fatal(err)
			}
			var sent int
			for err := error(nil); err == nil; sent++ {
				if err = a.Notify(remote, msg(count+sent)); err != nil {
					wantErr(t, err, engine.ErrBackend)
					break
				}
			}
			if bytes := sent * len(msg(0)); bytes > maxQueued || bytes < maxQueued/2 {
				t.Fatalf("%d bytes of notifications were queued", bytes)
			}
			if n := succeeded(); n != 3 {
				t.Fatalf("%d transfers are over, there was room for 3", n)
			}
			// Transfers may pass each other, notifications without one may not.
			seen, last := map[string]bool{}, ""
			for _, n := range notes(t, b, count+sent) {
				if seen[n.msg] || len(n.msg) != len(msg(0)) {
					t.Fatal("a notification came twice, or another one")
				}
				seen[n.msg] = true
				if n.msg >= string(msg(count)) {
					if n.msg < last {
						t.Fatal("notifications are out of order")
					}
					last = n.msg
				}
			}
			for i := range count + sent {
				if !seen[string(msg(i))] {
					t.Fatalf("notification %d is lost", i)
				}
			}
			for _, r := range flying {
				mustSucceed(t, a, r)
			}
		})
	}
}

// TestParkedOfTheDead: what a sender that is gone had not got in is dropped, and room for
// others.
func TestParkedOfTheDead(t *testing.T) { overEach(t, transports, testParkedOfTheDead) }

func testParkedOfTheDead(t *testing.T, kind wayKind) {
	b := kind.agent(t, "b", engine.AgentConfig{}, WithInbox(1))
	dead, other := kind.agent(t, "dead", engine.AgentConfig{}), kind.agent(t, "other", engine.AgentConfig{})
	fromDead, fromOther := load(t, dead, b), load(t, other, b)
	full := make([]byte, MaxNotification)
	for range 3 {
		if err := dead.Notify(fromDead, full); err != nil {
			t.Fatal(err)
		}
	}
	parkedCount := func() int {
		b.inbox.mu.Lock()
		defer b.inbox.mu.Unlock()
		return len(b.inbox.parked)
	}
	eventually(t, "parking", func() bool { return parkedCount() > 0 })
	if err := dead.Destroy(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "forgetting", func() bool { return parkedCount() == 0 && b.Stats().Inbound == 0 })
	if err := other.Notify(fromOther, []byte("alive")); err != nil {
		t.Fatal(err)
	}
	got := notes(t, b, 2)
	if got[0].from != "dead" || got[1] != (note{"other", "alive"}) {
		t.Fatalf("notifications of %q and %q", got[0].from, got[1].from)
	}
}

// TestManyPeers has several initiators, goroutines and requests at one target at once.
func TestManyPeers(t *testing.T) {
	const size, page, peers, rounds = 1 << 20, 16 << 10, 6, 10
	b := tcpKind.agent(t, "b", engine.AgentConfig{})
	var wg sync.WaitGroup
	var names []string
	for i := range peers {
		name := fmt.Sprintf("peer %d", i)
		names = append(names, name)
		kind := kinds[i%len(kinds)]
		local, mem := foreign(t, size), kind.get(t, size)
		a := kind.agent(t, name, engine.AgentConfig{})
		register(t, a, local)
		register(t, b, mem)
		remote := load(t, a, b)
		fill(local.data, uint64(i))
		for half := range 2 {
			here, there := local.pages(page), mem.pages(page)
			n := len(here) / 2
			spec := engine.Spec{
				Op: engine.Write, Remote: remote, NoMerge: true, HasNotif: true, Notif: []byte{byte(half)},
				LocalList:  newList(t, a, here[half*n:][:n]...),
				RemoteList: newList(t, a, there[half*n:][:n]...),
			}
			r := transfer(t, a, spec)
			wg.Go(func() {
				for range rounds {
					if _, err := a.Post(r, nil, false); err != nil {
						t.Error(err)
						return
					}
					if err := spin("the end", func() bool { return poll(a, r) != engine.InProgress }); err != nil {
						t.Error(err)
						return
					}
					if st := poll(a, r); st != engine.Success {
						t.Error(st, a.Reason(r))
						return
					}
				}
			})
		}
		t.Cleanup(func() { wantBytes(t, mem.data, local.data) })
	}
	counts := map[string]int{}
	for _, n := range notes(t, b, peers*2*rounds) {
		counts[n.from]++
	}
	wg.Wait()
	for _, name := range names {
		if counts[name] != 2*rounds {
			t.Fatalf("%d notifications of %s, want %d", counts[name], name, 2*rounds)
		}
	}
}

// TestPostInProgress: a request that is not over can be neither posted nor released.
func TestPostInProgress(t *testing.T) { overEach(t, transports, testPostInProgress) }

func testPostInProgress(t *testing.T, kind wayKind) {
	p := newPair(t, kind, 4096, WithInbox(1))
	full := bytes.Repeat([]byte("x"), MaxNotification)
	if err := p.a.Notify(p.remote, full); err != nil {
		t.Fatal(err)
	}
	spec := p.spec(t, engine.Write, 4096)
	spec.Notif, spec.HasNotif, spec.Post = full, true, true
	r := transfer(t, p.a, spec)
	for range 2 {
		st, err := p.a.Post(r, []byte("other"), true)
		wantErr(t, err, engine.ErrInvalidState)
		if st != engine.ErrInvalidState {
			t.Fatal(st)
		}
		wantErr(t, p.a.Release(r), engine.ErrInvalidState)
		wantErr(t, p.a.Destroy(), engine.ErrInvalidState)
		if err := p.a.Reason(r); err != nil {
			t.Fatal(err)
		}
	}
	if got := notes(t, p.b, 2); got[1].msg != string(full) {
		t.Fatal("the notification was replaced")
	}
	mustSucceed(t, p.a, r)
}
