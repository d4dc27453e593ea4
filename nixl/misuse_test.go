package nixl

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/nixlkv/nixlkv/hostmem"
)

func TestRegionGivenTwice(t *testing.T) {
	eachEngine(t, func(t *testing.T, c engineCase) {
		e := c.open(t)
		a, b := newAgent(t, e), alloc(t, 8192)
		_, err := a.Register(Host(b), Host(b))
		wantErr(t, "twice in one call", err, ErrBadDescriptor)
		one := must[*Registration](t)(a.Register(Host(b)))
		two := must[*Registration](t)(a.Register(Host(b)))
		over := must[*Registration](t)(a.Register(HostRange(b, 0, 4096), HostRange(b, 1024, 4096)))
		check(t, errors.Join(one.Deregister(), over.Deregister(), two.Deregister()))
		check(t, b.Free())
		_, err = a.Register(Host(b))
		wantErr(t, "freed", err, ErrBadDescriptor)
	})
}

// A failure is told by every way of asking, however many ask.
func TestFailureIsNeverSuccess(t *testing.T) {
	eachEngine(t, func(t *testing.T, c engineCase) {
		e := c.open(t)
		p, d := newSide(t, e, 1<<20), newSide(t, e, 1<<20)
		r := p.load(t, d)
		ll, rl := p.list(t, p.desc(0, 4096)), p.list(t, d.desc(0, 4096))
		x := p.a.NewTransfer()
		check(t, x.Create(Write, ll, r, rl, TransferOptions{Post: true}))
		wait(t, x)
		check(t, x.Release())
		// What was before says nothing of a transfer that could not be created.
		if err := x.Create(Write, ll, r, p.list(t, Desc{Addr: 1 << 40, Len: 4096}), TransferOptions{}); err == nil {
			t.Fatal("created")
		}
		if st, err := x.Status(); st != StatusNotPosted || !errors.Is(err, ErrNotCreated) {
			t.Errorf("status %v, %v", st, err)
		}
		wantErr(t, "wait for nothing", x.Wait(t.Context()), ErrNotCreated)

		check(t, x.Create(Write, ll, r, rl, TransferOptions{}))
		check(t, d.a.Close())
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		// A transport may take a small write before it has seen that the peer is gone; soon none
		// does.
		var err error
		for err == nil && ctx.Err() == nil {
			if err = x.Post(); err == nil {
				err = x.Wait(ctx)
			}
		}
		if err == nil {
			t.Fatal("transfers to a closed agent go on succeeding")
		}
		var wg sync.WaitGroup
		for range 8 {
			wg.Add(1)
			go func() {
				defer wg.Done()
				for range 500 {
					if err := x.Wait(ctx); err == nil {
						t.Error("a failed transfer was waited for without an error")
						return
					}
				}
			}()
		}
		wg.Wait()
		if x.Err() == nil {
			t.Error("no error")
		}
		check(t, x.Release())
		wantErr(t, "status of a released transfer", x.Wait(ctx), ErrNotCreated)
	})
}

func TestTruncatedMetadataSpoilsNothing(t *testing.T) {
	eachEngine(t, func(t *testing.T, c engineCase) {
		e := c.open(t)
		p, d := newSide(t, e, 4096), newSide(t, e, 4096)
		md := must[[]byte](t)(d.a.LocalMetadata())
		r := p.load(t, d)
		for n := range md {
			if _, err := p.a.Load(md[:n]); err == nil {
				t.Fatalf("%d of %d bytes were loaded", n, len(md))
			}
		}
		check(t, r.Check())
		check(t, r.Notify([]byte("still there")))
		check(t, must[*Remote](t)(p.a.Load(md)).Notify([]byte("and again")))
		drained(t, d.a, 2)
	})
}

// The replaced Remote's transfers count as well.
func TestInvalidateAfterLoadingAgain(t *testing.T) {
	eachEngine(t, func(t *testing.T, c engineCase) {
		e := c.open(t)
		p, d := newSide(t, e, 4096), newSide(t, e, 4096)
		old := p.load(t, d)
		x := p.a.NewTransfer()
		check(t, x.Create(Write, p.list(t, p.desc(0, 64)), old, p.list(t, d.desc(0, 64)), TransferOptions{}))
		r := p.load(t, d)
		wantErr(t, "invalidate", r.Invalidate(), ErrInUse)
		wantErr(t, "create with the replaced one", p.a.NewTransfer().Create(Write, p.list(t, p.desc(0, 8)), old, p.list(t, d.desc(0, 8)), TransferOptions{}), ErrStale)
		check(t, x.Release())
		check(t, r.Invalidate())
		check(t, old.Invalidate())
		if s := p.a.Stats(); s.Remotes != 0 {
			t.Errorf("%d remotes left", s.Remotes)
		}
	})
}

// Memory that a peer has deregistered is out of reach once the peer was loaded anew.
func TestDeregisteredMemoryIsOutOfReach(t *testing.T) {
	eachEngine(t, func(t *testing.T, c engineCase) {
		e := c.open(t)
		p, d := newSide(t, e, 4096), newSide(t, e, 4096)
		more := alloc(t, 4096)
		reg := must[*Registration](t)(d.a.Register(Host(more)))
		there := Desc{Addr: uint64(more.Addr()), Len: 64}
		x := p.a.NewTransfer()
		check(t, x.Create(Write, p.list(t, p.desc(0, 64)), p.load(t, d), p.list(t, there), TransferOptions{Post: true}))
		wait(t, x)
		check(t, x.Release())
		check(t, reg.Deregister())
		r := p.load(t, d)
		if _, err := r.Prepare(p.list(t, there)); err == nil {
			t.Error("memory was prepared that is not registered any more")
		}
		if err := x.Create(Write, p.list(t, p.desc(0, 64)), r, p.list(t, there), TransferOptions{Post: true}); err == nil {
			t.Error("memory was written that is not registered any more")
			wait(t, x)
		}
		check(t, x.Create(Write, p.list(t, p.desc(0, 64)), r, p.list(t, d.desc(0, 64)), TransferOptions{Post: true}))
		wait(t, x)
		check(t, x.Release())
	})
}

func TestStatsDuringClose(t *testing.T) {
	eachEngine(t, func(t *testing.T, c engineCase) {
		e := c.open(t)
		a := newAgent(t, e)
		for range 500 {
			must[*List](t)(a.NewList(DRAM))
		}
		done := make(chan error)
		go func() { done <- a.Close() }()
		for {
			_ = a.Stats()
			select {
			case err := <-done:
				check(t, err)
				return
			default:
			}
		}
	})
}

func TestNilArguments(t *testing.T) {
	eachEngine(t, func(t *testing.T, c engineCase) {
		e := c.open(t)
		p, d := newSide(t, e, 4096), newSide(t, e, 4096)
		r := p.load(t, d)
		ll, rl := p.list(t, p.desc(0, 64)), p.list(t, d.desc(0, 64))
		pl := must[*Prepared](t)(p.a.Prepare(ll))
		x := p.a.NewTransfer()
		o := TransferOptions{}
		one := []int32{0}
		for what, err := range map[string]error{
			"local list":      x.Create(Write, nil, r, rl, o),
			"remote":          x.Create(Write, ll, nil, rl, o),
			"remote list":     x.Create(Write, ll, r, nil, o),
			"same list":       x.Create(Write, ll, r, ll, o),
			"operation":       x.Create(Op(7), ll, r, rl, o),
			"local prepared":  x.CreateIndexed(Write, nil, one, pl, one, o),
			"remote prepared": x.CreateIndexed(Write, pl, one, nil, one, o),
			"notifications":   p.a.Notifications(nil),
			"poll":            p.a.Poll([]*Transfer{x, nil}, make([]Status, 2)),
		} {
			wantErr(t, what, err, StatusInvalidParam)
		}
		_, err := p.a.Prepare(nil)
		wantErr(t, "prepare", err, StatusInvalidParam)
		_, err = r.Prepare(nil)
		wantErr(t, "prepare", err, StatusInvalidParam)
		_, err = p.a.Register(Host(nil))
		wantErr(t, "register", err, ErrBadDescriptor)
		_, err = p.a.CreateBackend("NOPE\x00", nil)
		wantErr(t, "backend", err, StatusInvalidParam)
		_, err = e.NewAgent(uniqueName("sync"), WithSync(99))
		wantErr(t, "sync mode", err, StatusInvalidParam)
		wantErr(t, "lists of unequal lengths", x.Create(Write, ll, r, p.list(t, d.desc(0, 65)), o), ErrBadDescriptor)
		wantErr(t, "foreign", d.a.Poll([]*Transfer{x}, make([]Status, 1)), ErrForeign)
	})
	if s := (&Error{}).Error(); s == "" {
		t.Error("no text")
	}
	var b hostmem.Buffer
	if err := b.Free(); !errors.Is(err, hostmem.ErrFreed) {
		t.Errorf("zero buffer: %v", err)
	}
}
