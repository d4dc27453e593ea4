package kvsender

import (
	"context"
	"errors"
	"slices"
	"testing"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/internal/control"
	"github.com/nixlkv/nixlkv/internal/wire"
	"github.com/nixlkv/nixlkv/nixl"
	"github.com/nixlkv/nixlkv/registry"
)

// another makes a decode beside the pair's own and has it registered. It ends with the test at
// the latest.
func (p *pairUp) another(t *testing.T, e *nixl.Engine, port int) *decode {
	t.Helper()
	d := &decode{t: t, mem: newKitMemory(t, 4), frames: 25, came: make(chan struct{}, 1), port: port}
	d.start(e, p.m)
	t.Cleanup(func() {
		d.close()
		d.mem.free(t)
	})
	d.register(d.registration())
	p.d.until("the decode to be taken up", func() bool {
		return slices.ContainsFunc(p.m.Stats().Peers, func(x registry.PeerInfo) bool { return x.Agent == d.agent.Name() && x.Phase == registry.Live })
	})
	return d
}

// bootstrapped opens a room that a decode has told its pages of, and gives it none.
func (p *pairUp) bootstrapped(t *testing.T, id nixlkv.Room, d *decode) *Sender {
	t.Helper()
	s := open(t, p.m, id)
	d.tell(id, []int32{5}, 2)
	_, err := s.WaitBootstrapped(within(t))
	ok(t, err)
	ok(t, s.Begin(Plan{Pages: 1, Aux: Aux(2)}))
	return s
}

// agents are the decodes that the prefill knows.
func (p *pairUp) agents() (names []string) {
	for _, x := range p.m.Stats().Peers {
		names = append(names, x.Agent)
	}
	return names
}

func (p *pairUp) knowsOnly(t *testing.T, decodes ...*decode) {
	t.Helper()
	var want []string
	for _, d := range decodes {
		want = append(want, d.agent.Name())
	}
	slices.Sort(want)
	p.d.until("the table of decodes to shrink", func() bool { return slices.Equal(p.agents(), want) })
}

// A decode whose socket is gone, and which its engine does not reach, is gone: its rooms fail at
// once, whatever they wait for, others go on, and nothing is kept of it.
func TestDecodeGone(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *nixl.Engine) {
		p := newPair(t, e, 25)
		p.d.register(p.d.registration())
		d := p.another(t, e, 0)
		s := p.bootstrapped(t, 1, d)
		ok(t, s.Finish([]int32{3}, nil))
		ok(t, s.Wait(within(t)))
		ok(t, s.Close())
		d.status(1)
		mine, hers := p.bootstrapped(t, 2, p.d), p.bootstrapped(t, 3, d)
		d.tell(4, []int32{6}, 3) // never opened
		p.d.until("the announcement", func() bool { return p.m.Stats().Rooms == 3 })
		d.close()
		wantFailure(t, hers, nil, nixlkv.ErrPeerLost, "Lost connection with decode")
		wantFailure(t, open(t, p.m, 4), nil, nixlkv.ErrPeerLost, "Lost connection with decode")
		p.knowsOnly(t, p.d)
		ok(t, mine.Finish([]int32{4}, nil))
		ok(t, mine.Wait(within(t)))
		ok(t, mine.Close())
		p.d.until("nothing to be left", func() bool {
			s := p.m.Stats()
			return s.Rooms == 0 && s.Agent.Remotes == 1 && s.Control.Endpoints == 1
		})
	})
}

// A decode that starts anew at the address of one that is gone takes its place.
func TestDecodeRestartsAtItsAddress(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *nixl.Engine) {
		p := newPair(t, e, 25)
		p.d.register(p.d.registration())
		d := p.another(t, e, 0)
		s := p.bootstrapped(t, 1, d) // nothing was told to it: there is no socket to see its end by
		d.close()
		again := p.another(t, e, d.ctl.Port())
		wantFailure(t, s, nil, nixlkv.ErrPeerLost, "Lost connection with decode")
		p.knowsOnly(t, p.d, again)
		s = p.bootstrapped(t, 1, again)
		ok(t, s.Finish([]int32{3}, nil))
		ok(t, s.Wait(within(t)))
		ok(t, s.Close())
		if x := again.status(1); x.Status != wire.PollSuccess {
			t.Errorf("told %+v", x)
		}
		again.compare(p.src, []int32{3}, []int32{5}, 2, 2)
	})
}

// A connection that ends is not the end of the decode: its rooms go on if its engine answers.
// Nor is a registration that names its address.
func TestDecodeLosesItsSocket(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *nixl.Engine) {
		p := newPair(t, e, 25)
		p.connect(t, 1)
		s := p.bootstrapped(t, 2, p.d)
		port := p.d.ctl.Port()
		ok(t, p.d.ctl.Close(context.Background()))
		p.d.until("the loss", func() bool { return p.m.Stats().Control.Disconnects == 1 })
		var err error
		p.d.ctl, err = control.New(control.Config{Handler: p.d.receive, Port: port})
		ok(t, err)
		other := newDecode(t, e, p.m, newKitMemory(t, 4), 25)
		t.Cleanup(func() {
			other.close()
			other.mem.free(t)
		})
		g := other.registration()
		g.From = p.d.endpoint()
		other.register(g)
		p.d.until("the other's registration", func() bool { return len(p.agents()) == 2 })
		looked := make(chan struct{})
		if !p.m.peers.enqueue(func() { close(looked) }) {
			t.Fatal("the loader is full")
		}
		<-looked
		ok(t, s.Finish([]int32{3}, nil))
		ok(t, s.Wait(within(t)))
		ok(t, s.Close())
		p.d.status(2)
	})
}

// A transfer that finds the decode gone fails all its rooms, though no socket has shown anything.
func TestTransferFindsDecodeGone(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *nixl.Engine) {
		p := newPair(t, e, 25)
		p.d.register(p.d.registration())
		d := p.another(t, e, 0)
		s, waits := p.bootstrapped(t, 1, d), p.bootstrapped(t, 2, d)
		mine := p.bootstrapped(t, 3, p.d)
		d.close()
		ok(t, s.Finish([]int32{3}, nil))
		wantFailure(t, s, nil, nixlkv.ErrPeerLost, "")
		wantFailure(t, waits, nil, nixlkv.ErrPeerLost, "Lost connection with decode")
		p.knowsOnly(t, p.d)
		ok(t, mine.Finish([]int32{4}, nil))
		ok(t, mine.Wait(within(t)))
		ok(t, mine.Close())
		p.d.status(3)
	})
}

// A look that has shown nothing fails no room: what else has the decode under its hands then, a
// room that has it taken up above all, decides.
func TestLookThatShowsNothing(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *nixl.Engine) {
		p := newPair(t, e, 25)
		p.connect(t, 9)
		s := p.bootstrapped(t, 1, p.d)
		peers, name, addr := p.m.peers, p.d.agent.Name(), p.d.endpoint().String()
		_, live := peers.Reload(name)
		if !errors.Is(live, registry.ErrNotStale) {
			t.Fatal(live)
		}
		for _, err := range []error{nil, live, registry.ErrPreparing, registry.ErrTooSoon, nixl.ErrBusy, errNoPlace} {
			judged := make(chan bool, 1)
			if !peers.enqueue(func() { peers.judge(name, addr, err, func(known bool) { judged <- known }) }) {
				t.Fatal("the loader is full")
			}
			select {
			case known := <-judged:
				if known {
					t.Errorf("%v: nothing more to be known", err)
				}
			case <-within(t).Done():
				t.Fatal(err)
			}
			if s.Err() != nil {
				t.Fatalf("%v: the room failed: %v", err, s.Err())
			}
		}
		ok(t, s.Finish([]int32{3}, nil))
		ok(t, s.Wait(within(t)))
		ok(t, s.Close())
		p.d.status(1)
	})
}

// Of rooms that find their decode stale together, one has it taken up, and all wait for that.
func TestRoomsReloadTogether(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *nixl.Engine) {
		p := newPair(t, e, 25)
		p.connect(t, 99)
		var rooms []*Sender
		for id := range nixlkv.Room(16) {
			rooms = append(rooms, p.bootstrapped(t, id+1, p.d))
		}
		l, err := p.m.peers.Acquire(p.d.agent.Name())
		ok(t, err)
		if !l.MarkStale(errMade) {
			t.Fatal("was stale")
		}
		l.Release()
		start := make(chan struct{})
		done := make(chan error, len(rooms))
		for _, s := range rooms {
			go func() {
				<-start
				done <- errors.Join(s.Finish([]int32{3}, nil), s.Wait(within(t)), s.Close())
			}()
		}
		close(start)
		for range rooms {
			ok(t, <-done)
		}
	})
}

// A decode that was forgotten while a room of it was open is a stranger from then on: no connection
// to it is kept up for long, for word that reaches nobody.
func TestForgottenDecodeIsAStranger(t *testing.T) {
	e := embeddedEngine(t)
	p := newPair(t, e, 25)
	p.connect(t, 1)
	d := p.another(t, e, 0)
	s := p.bootstrapped(t, 2, d)
	stranger := func() bool {
		s.r.mu.Lock()
		defer s.r.mu.Unlock()
		return s.r.stranger(d.endpoint())
	}
	if stranger() {
		t.Error("a decode that is known is a stranger")
	}
	p.m.peers.Forget(d.agent.Name())
	if !stranger() {
		t.Error("a decode that was forgotten is none")
	}
	ok(t, s.Finish([]int32{3}, nil))
	wantFailure(t, s, d, nixlkv.ErrNotRegistered, d.agent.Name()) // told once more nevertheless
}
