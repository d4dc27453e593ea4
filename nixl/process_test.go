package nixl

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nixlkv/nixlkv/hostmem"
)

// The tests in this file have a peer in another process.

// wiring is a way in which bytes get to the peer.
type wiring struct {
	name    string
	foreign bool
	params  map[string]string
}

func (c engineCase) wirings() []wiring {
	if c.kind == Embedded {
		return []wiring{{name: "memfd"}, {name: "foreign", foreign: true}}
	}
	return []wiring{{name: "default"}, {name: "tcp", params: map[string]string{"engine_config": "TLS=tcp"}}}
}

// slow is the one whose transfers need the peer to run.
func (c engineCase) slow() wiring { return c.wirings()[1] }

func eachWiring(t *testing.T, f func(t *testing.T, c engineCase, w wiring)) {
	eachEngine(t, func(t *testing.T, c engineCase) {
		for _, w := range c.wirings() {
			t.Run(w.name, func(t *testing.T) { f(t, c, w) })
		}
	})
}

func (w wiring) start(t *testing.T, c engineCase, size int) *peer {
	cfg := c.peer(size)
	cfg.Foreign, cfg.Params = w.foreign, w.params
	return startPeer(t, cfg)
}

func (w wiring) agent() AgentOption { return WithBackend(DefaultBackend, w.params) }

// region asks the peer where its memory is.
func (p *peer) region() Desc {
	r := p.do(peerRequest{Cmd: "where"})
	return Desc{Addr: r.Addr, Len: r.Size}
}

func TestTwoProcesses(t *testing.T) {
	const size = 4 << 20
	eachWiring(t, func(t *testing.T, c engineCase, w wiring) {
		e := c.open(t)
		s := newSide(t, e, size, w.agent())
		p := w.start(t, c, size)
		r := must[*Remote](t)(s.a.Load(p.md))
		there := p.region()
		fillPattern(s.buf.Bytes(), 5)
		x := s.a.NewTransfer()
		local, remote := s.list(t, s.desc(0, size)), s.list(t, there)
		check(t, x.Create(Write, local, r, remote, TransferOptions{Post: true, Notif: []byte("w")}))
		wait(t, x)
		if n := p.notifs(1); string(n[0][0]) != s.a.Name() || string(n[0][1]) != "w" {
			t.Errorf("notification %q", n)
		}
		// The notification says that the bytes are there.
		if got, want := p.do(peerRequest{Cmd: "hash", Len: size}).Hash, hash(s.buf.Bytes()); got != want {
			t.Error("the peer holds other bytes than were written")
		}
		check(t, x.Release())
		p.do(peerRequest{Cmd: "fill", Len: size, Seed: 6})
		check(t, x.Create(Read, local, r, remote, TransferOptions{Post: true}))
		wait(t, x)
		if got, want := p.do(peerRequest{Cmd: "hash", Len: size}).Hash, hash(s.buf.Bytes()); got != want {
			t.Error("other bytes were read than the peer holds")
		}
		check(t, x.Release())
	})
}

func hash(b []byte) string {
	h := sha256.Sum256(b)
	return hex.EncodeToString(h[:])
}

// 256 MiB in blocks of three sizes, in random order, every byte and notification compared,
// again and again.
func TestBlocks(t *testing.T) {
	const size = 256 << 20
	rounds := map[Kind]int{Native: 100, Embedded: 10}
	if testing.Short() {
		rounds = map[Kind]int{Native: 2, Embedded: 2}
	}
	for _, c := range engineCases() {
		t.Run(c.name, func(t *testing.T) {
			if c.kind == Native {
				needNative(t)
			}
			n := rounds[c.kind]
			if c.calls == "purego" {
				n = (n + 9) / 10 // the same library; only the crossing differs
			}
			e := c.open(t)
			s := newSide(t, e, size)
			p := startPeer(t, c.peer(size))
			r := must[*Remote](t)(s.a.Load(p.md))
			there := p.region()
			fillPattern(s.buf.Bytes(), basePattern)
			for _, block := range []int{4 << 10, 64 << 10, 1 << 20} {
				local := must[*Prepared](t)(s.a.Prepare(blockList(t, s.a, uint64(s.buf.Addr()), block, size/block)))
				remote := must[*Prepared](t)(r.Prepare(blockList(t, s.a, there.Addr, block, size/block)))
				rng := rand.New(rand.NewPCG(uint64(block), 0))
				x := s.a.NewTransfer()
				for round := range n {
					seed := uint64(round + 1)
					stampBlocks(s.buf.Bytes(), block, seed)
					p.do(peerRequest{Cmd: "clear", Len: size})
					order := indices(rng, size/block, size/block)
					tag := fmt.Sprintf("%d_kv_%d_1_0", block, round)
					check(t, x.CreateIndexed(Write, local, order, remote, order, TransferOptions{Post: true, Notif: []byte(tag)}))
					wait(t, x)
					if got := p.notifs(1); len(got) != 1 || string(got[0][1]) != tag {
						t.Fatalf("notifications %q, want %q", got, tag)
					}
					if bad := p.do(peerRequest{Cmd: "verify", Block: block, Seed: seed}).Bad; bad != 0 {
						t.Fatalf("round %d: %d of %d blocks are wrong", round, bad, size/block)
					}
					check(t, x.Release())
				}
				check(t, local.Free())
				check(t, remote.Free())
				// What this size stamped is base pattern again for the next one.
				fillPattern(s.buf.Bytes(), basePattern)
				p.do(peerRequest{Cmd: "forget"})
			}
		})
	}
}

// blockList lists count blocks that lie one behind the other.
func blockList(t testing.TB, a *Agent, addr uint64, block, count int) *List {
	t.Helper()
	l := must[*List](t)(a.NewList(DRAM))
	check(t, l.AppendRuns(Run{Addr: addr, Len: uint64(block), Stride: uint64(block), Count: uint64(count)}))
	return l
}

// lostWithin is how soon a transfer must tell that its peer was killed.
const lostWithin = 2 * time.Second

// A peer killed while it is written to: an error in time, and nobody else notices.
func TestPeerKilled(t *testing.T) {
	const size = 64 << 20
	eachWiring(t, func(t *testing.T, c engineCase, w wiring) {
		e := c.open(t)
		s := newSide(t, e, size, w.agent())
		victim, other := w.start(t, c, size), w.start(t, c, size)
		rv, ro := must[*Remote](t)(s.a.Load(victim.md)), must[*Remote](t)(s.a.Load(other.md))
		tv, to := s.a.NewTransfer(), s.a.NewTransfer()
		check(t, tv.Create(Write, s.list(t, s.desc(0, size)), rv, s.list(t, victim.region()), TransferOptions{Post: true}))
		otherAt := other.region()
		check(t, to.Create(Write, s.list(t, s.desc(0, 4096)), ro, s.list(t, Desc{Addr: otherAt.Addr, Len: 4096}), TransferOptions{Post: true, Notif: []byte("alive")}))
		wait(t, tv) // wired up
		wait(t, to)
		check(t, tv.Post())
		killed := time.Now()
		go victim.Kill() // which waits for its end; the loss may show before
		err := postUntilError(tv, killed.Add(20*time.Second))
		took := time.Since(killed)
		if err == nil || took > lostWithin {
			t.Fatalf("error %v after %v", err, took)
		}
		t.Logf("told after %v: %v", took.Round(time.Millisecond), err)
		if !errors.Is(err, ErrPeerLost) {
			t.Errorf("%v is not ErrPeerLost", err)
		}
		var ne *Error
		if !errors.As(err, &ne) || ne.Peer != rv.Name() {
			t.Errorf("%v does not name the peer", err)
		}
		check(t, tv.Release())
		for range 20 {
			check(t, to.Post())
			wait(t, to)
		}
		other.notifs(21)
		wantErr(t, "check of a lost peer", rv.Check(), ErrPeerLost)
		wantErr(t, "create with a lost peer", tv.Create(Write, s.list(t, s.desc(0, 64)), rv, s.list(t, s.desc(0, 64)), TransferOptions{}), ErrPeerLost)
		check(t, rv.Invalidate())
		check(t, to.Release())

		// A new process takes the place of the old one.
		again := w.start(t, c, size)
		ra := must[*Remote](t)(s.a.Load(again.md))
		check(t, tv.Create(Write, s.list(t, s.desc(0, size)), ra, s.list(t, again.region()), TransferOptions{Post: true, Notif: []byte("again")}))
		wait(t, tv)
		again.notifs(1)
		check(t, tv.Release())
	})
}

// postUntilError keeps a transfer going until it fails.
func postUntilError(x *Transfer, deadline time.Time) error {
	ctx, cancel := context.WithDeadline(context.Background(), deadline)
	defer cancel()
	for time.Now().Before(deadline) {
		if err := x.Wait(ctx); err != nil {
			return err
		}
		if err := x.Post(); err != nil {
			return err
		}
	}
	return nil
}

// The same with 64 goroutines on one agent.
func TestPeerKilledUnderManyGoroutines(t *testing.T) {
	const goroutines, size = 64, 256 << 10
	eachEngine(t, func(t *testing.T, c engineCase) {
		e := c.open(t)
		s := newSide(t, e, size*goroutines)
		w := c.wirings()[0]
		victim, other := w.start(t, c, size*goroutines), w.start(t, c, size*goroutines)
		remotes := []*Remote{must[*Remote](t)(s.a.Load(victim.md)), must[*Remote](t)(s.a.Load(other.md))}
		at := []Desc{victim.region(), other.region()}
		ts := make([]*Transfer, goroutines)
		for i := range ts {
			ts[i] = s.a.NewTransfer()
			check(t, ts[i].Create(Write, s.list(t, s.desc(i*size, size)), remotes[i%2],
				s.list(t, Desc{Addr: at[i%2].Addr + uint64(i*size), Len: size}), TransferOptions{Post: true}))
			wait(t, ts[i])
		}
		var killed time.Time
		var first atomic.Int64 // the earliest error
		first.Store(int64(time.Hour))
		var started, done sync.WaitGroup
		stop, isKilled := make(chan struct{}), make(chan struct{})
		for i, x := range ts {
			started.Add(1)
			done.Add(1)
			go func() {
				defer done.Done()
				for n := 0; ; n++ {
					err := x.Post()
					if err == nil {
						ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
						err = x.Wait(ctx)
						cancel()
					}
					if n == 0 {
						started.Done()
					}
					if i%2 == 0 { // to the victim
						if err != nil {
							<-isKilled
							took := time.Since(killed)
							if !errors.Is(err, ErrPeerLost) {
								t.Errorf("goroutine %d: %v after %v", i, err, took)
							}
							for f := first.Load(); took < time.Duration(f) && !first.CompareAndSwap(f, int64(took)); f = first.Load() {
							}
							return
						}
						continue
					}
					if err != nil {
						t.Errorf("goroutine %d, whose peer lives: %v", i, err)
						return
					}
					select {
					case <-stop:
						return
					default:
					}
				}
			}()
		}
		started.Wait()
		killed = time.Now()
		go victim.Kill() // which waits for its end; the loss may show before
		close(isKilled)
		time.AfterFunc(lostWithin+500*time.Millisecond, func() { close(stop) })
		done.Wait()
		if took := time.Duration(first.Load()); took > lostWithin {
			t.Errorf("the first error came after %v", took)
		}
		for _, x := range ts {
			check(t, x.Release())
		}
	})
}

// Closing while a peer does not take what was written to it.
func TestCloseWhileInFlight(t *testing.T) {
	const size = 64 << 20
	eachEngine(t, func(t *testing.T, c engineCase) {
		w := c.slow()
		e := c.open(t)
		s := newSide(t, e, size, w.agent())
		p := w.start(t, c, size)
		r := must[*Remote](t)(s.a.Load(p.md))
		there := p.region()
		x := s.a.NewTransfer()
		check(t, x.Create(Write, s.list(t, s.desc(0, size)), r, s.list(t, there), TransferOptions{Post: true}))
		wait(t, x)
		p.Stop(t)
		fillPattern(s.buf.Bytes(), 8)
		check(t, x.PostNotif([]byte("late")))
		wantErr(t, "release in progress", x.Release(), ErrInProgress)
		wantErr(t, "post in progress", x.Post(), ErrInProgress)
		wantErr(t, "invalidate in progress", r.Invalidate(), ErrInUse)
		wantErr(t, "deregister in progress", s.reg.Deregister(), ErrInUse)

		ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
		defer cancel()
		err := s.a.Shutdown(ctx)
		wantErr(t, "close", err, ErrStillInFlight)
		var inf *InFlightError
		if !errors.As(err, &inf) || inf.Transfers != 1 {
			t.Errorf("close: %v", err)
		}
		if st := s.a.Stats(); st.InFlight != 1 || st.RegisteredBytes != size {
			t.Errorf("in quarantine: %+v", st)
		}
		if st := e.Stats(); st.Quarantined != 1 {
			t.Errorf("engine: %+v", st)
		}
		wantErr(t, "free memory in quarantine", s.buf.Free(), hostmem.ErrInUse)
		p.Continue(t)
		check(t, s.a.Close())
		check(t, s.buf.Free())
		p.notifs(1)
	})
}

// UCX must not take Go's signal handlers, whatever the environment says.
func TestSignalHandlersStayGos(t *testing.T) {
	needNative(t)
	c := puregoCase
	for _, v := range []string{"bt", "freeze", "debug", ""} {
		t.Run("UCX_HANDLE_ERRORS="+v, func(t *testing.T) {
			p := startPeer(t, c.peer(4096), "UCX_HANDLE_ERRORS="+v)
			p.do(peerRequest{Cmd: "fault"})
		})
	}
}

// Everything at once on one agent, and then Close in the middle of it.
func TestConcurrentUse(t *testing.T) {
	const goroutines, size = 16, 4096
	eachEngine(t, func(t *testing.T, c engineCase) {
		e := c.open(t)
		p, d := newSide(t, e, goroutines*size), newSide(t, e, goroutines*size)
		r := p.load(t, d)
		fillPattern(p.buf.Bytes(), 1)
		var wg sync.WaitGroup
		var posted sync.WaitGroup
		posted.Add(goroutines)
		for i := range goroutines {
			wg.Add(1)
			go func() {
				defer wg.Done()
				x := p.a.NewTransfer()
				ll, rl := p.list(t, p.desc(i*size, size)), p.list(t, d.desc(i*size, size))
				for n := 0; ; n++ {
					err := x.Create(Write, ll, r, rl, TransferOptions{Post: true, Notif: []byte("n")})
					for err == nil {
						var st Status
						if st, err = x.Status(); st != InProgress {
							break
						}
						_ = p.a.Stats()
						runtime.Gosched()
					}
					if err == nil {
						err = x.Release()
					}
					if n == 20 {
						posted.Done()
					}
					if err != nil {
						if !errors.Is(err, ErrClosed) {
							t.Errorf("goroutine %d: %v", i, err)
						}
						return
					}
				}
			}()
		}
		posted.Wait()
		check(t, p.a.Close())
		wg.Wait()
		if !bytes.Equal(p.buf.Bytes(), d.buf.Bytes()) {
			t.Error("wrong bytes")
		}
		var buf Notifications
		check(t, d.a.Notifications(&buf))
		for from := range buf.All() {
			if string(from) != p.a.Name() {
				t.Errorf("notification of %q", from)
			}
		}
	})
}

// A list or transfer in two goroutines at once is refused, not corrupted.
func TestListsUsedByOneAtATime(t *testing.T) {
	eachEngine(t, func(t *testing.T, c engineCase) {
		e := c.open(t)
		s := newSide(t, e, 1<<20)
		l := must[*List](t)(s.a.NewList(DRAM))
		run := []Run{{Addr: uint64(s.buf.Addr()), Len: 16, Stride: 16, Count: 1 << 10}}
		var wg sync.WaitGroup
		var mu sync.Mutex
		added := 0
		for range 8 {
			wg.Add(1)
			go func() {
				defer wg.Done()
				for range 50 {
					err := l.AppendRuns(run...)
					if err == nil {
						mu.Lock()
						added++
						mu.Unlock()
					} else if !errors.Is(err, ErrInUse) {
						t.Error(err)
					}
				}
			}()
		}
		wg.Wait()
		if l.Len() != added<<10 {
			t.Errorf("%d descriptors after %d appends", l.Len(), added)
		}
		if added == 0 {
			t.Error("nothing was added")
		}
	})
}
