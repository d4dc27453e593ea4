//go:build linux && cgo

package control

import (
	"bytes"
	"context"
	"errors"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/nixlkv/nixlkv"
)

// observed makes an observer that keeps what it is told.
func observed() (chan Event, func(Event)) {
	events := make(chan Event, 1024)
	return events, func(e Event) { events <- e }
}

func expect(t *testing.T, events chan Event, want Event) {
	t.Helper()
	if got := receive(t, events, want.Kind.String()); got != want {
		t.Fatalf("got %+v, want %+v", got, want)
	}
}

func line(t *testing.T, ch *child, want string) {
	t.Helper()
	if got := receive(t, ch.lines, "a line of the child"); got != want {
		t.Fatalf("the child received %q, want %q", got, want)
	}
}

// A killed receiver is noticed, once; a new one at its port is another generation, and nothing
// that was meant for the old one reaches it.
func TestPeerKilledAndRestarted(t *testing.T) {
	events, observer := observed()
	c := start(t, Config{Observer: observer, ReconnectMin: 5 * time.Millisecond, ReconnectMax: 20 * time.Millisecond})
	old := startChild(t, 0)
	to := loopback(t, old.port)
	if g := mustSend(t, c, to, "registration"); g != 1 {
		t.Fatalf("generation %d", g)
	}
	line(t, old, "registration")
	expect(t, events, Event{to, Connected, 1})

	old.kill(t)
	expect(t, events, Event{to, Disconnected, 1})
	_, err := c.Send(within(t, patience), Message{To: to, Frames: frames("metadata"), Generation: 1})
	if !errors.Is(err, nixlkv.ErrPeerLost) {
		t.Fatalf("sent to generation 1 after its end: %v", err)
	}
	eventually(t, "reconnecting fails", func() bool { return c.Stats().ConnectFailures > 3 })

	restarted := startChild(t, old.port)
	expect(t, events, Event{to, Connected, 2}) // without anything sent
	if _, err := c.Send(within(t, patience), Message{To: to, Frames: frames("metadata"), Generation: 1}); !errors.Is(err, nixlkv.ErrPeerLost) {
		t.Fatalf("sent to generation 1 on generation 2: %v", err)
	}
	g, err := c.Send(within(t, patience), Message{To: to, Frames: frames("registration"), Generation: 2})
	if err != nil || g != 2 {
		t.Fatalf("generation %d, %v", g, err)
	}
	line(t, restarted, "registration")
	if len(events) > 0 {
		t.Fatalf("unexpected %+v", <-events)
	}
	if s := c.Stats(); s.Connects != 2 || s.Disconnects != 1 || s.SendsLost != 2 {
		t.Fatalf("stats %+v", s)
	}
}

// fill sends to a stopped peer until libzmq and TCP take no more, and gives how many they took.
// Twice in a row blocked is full: once can be a busy machine.
func fill(t *testing.T, c *Control, to Endpoint, payload []byte) int {
	t.Helper()
	taken := 0
	for blocked := 0; blocked < 2; {
		ctx, cancel := context.WithTimeout(context.Background(), 300*time.Millisecond)
		_, err := c.Send(ctx, Message{To: to, Frames: [][]byte{[]byte(strconv.Itoa(taken)), payload}})
		cancel()
		switch {
		case err == nil:
			taken++
			blocked = 0
		case errors.Is(err, nixlkv.ErrSendBlocked):
			blocked++
		default:
			t.Fatal(err)
		}
	}
	return taken
}

// A stopped peer with full buffers holds up nobody else; its own messages expire one by one, at
// their own deadlines, and the rest arrive in order once it runs again.
func TestStoppedPeer(t *testing.T) {
	in := newInbox()
	other := endpoint(t, start(t, Config{Handler: in.handle}))
	c := start(t, Config{})
	ch := startChild(t, 0)
	to := loopback(t, ch.port)
	mustSend(t, c, to, "hello")
	line(t, ch, "hello")
	ch.stop(t)
	payload := make([]byte, 256<<10)
	taken := fill(t, c, to, payload)
	if taken == 0 {
		t.Fatal("libzmq took nothing")
	}

	// Interleaved deadlines: the odd ones expire, the even ones stay.
	const waiting = 20
	type outcome struct {
		i   int
		err error
	}
	outcomes := make(chan outcome, waiting)
	soon, late := time.Now().Add(50*time.Millisecond), time.Now().Add(patience)
	for i := range waiting {
		m := Message{To: to, Frames: frames("late " + strconv.Itoa(i)), Deadline: late}
		if i%2 == 1 {
			m.Deadline = soon
		}
		if err := c.SendAsync(m, func(_ uint64, err error) { outcomes <- outcome{i, err} }); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 500 {
		mustSend(t, c, other, strconv.Itoa(i))
		if got := in.text(t); got != strconv.Itoa(i) {
			t.Fatalf("the other peer got %q", got)
		}
	}
	for range waiting / 2 {
		if o := receive(t, outcomes, "an expiry"); o.i%2 != 1 || !errors.Is(o.err, nixlkv.ErrSendBlocked) {
			t.Fatalf("message %d: %v", o.i, o.err)
		}
	}
	if s := c.Stats(); s.Blocked != 1 || s.Pending != waiting/2 || s.Connected != 2 {
		t.Fatalf("stats %+v", s)
	}

	ch.signal(t, syscall.SIGCONT)
	for i := range taken {
		line(t, ch, strconv.Itoa(i))
	}
	for i := 0; i < waiting; i += 2 {
		line(t, ch, "late "+strconv.Itoa(i))
		if o := receive(t, outcomes, "a completion"); o.i != i || o.err != nil {
			t.Fatalf("message %d: %v", o.i, o.err)
		}
	}
	eventually(t, "nothing blocked", func() bool { return c.Stats().Blocked == 0 })
}

// What waits behind a peer that dies fails at once, and with the loss, not at its deadline.
func TestKilledWhileBlocked(t *testing.T) {
	events, observer := observed()
	c := start(t, Config{Observer: observer})
	ch := startChild(t, 0)
	to := loopback(t, ch.port)
	mustSend(t, c, to, "hello")
	expect(t, events, Event{to, Connected, 1})
	ch.stop(t)
	fill(t, c, to, make([]byte, 256<<10))
	failed := make(chan error, 10)
	for range 10 {
		err := c.SendAsync(Message{To: to, Frames: frames("x"), Deadline: time.Now().Add(time.Hour)}, func(g uint64, err error) {
			if len(events) != 1 {
				t.Error("completed before the observer was told")
			}
			failed <- err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	ch.signal(t, syscall.SIGKILL)
	for range 10 {
		if err := receive(t, failed, "the failure"); !errors.Is(err, nixlkv.ErrPeerLost) {
			t.Fatal(err)
		}
	}
	expect(t, events, Event{to, Disconnected, 1})
}

// Close does not wait for a peer that reads nothing.
func TestCloseWithBlockedPeer(t *testing.T) {
	c := start(t, Config{Linger: 50 * time.Millisecond})
	ch := startChild(t, 0)
	to := loopback(t, ch.port)
	mustSend(t, c, to, "hello")
	ch.stop(t)
	fill(t, c, to, make([]byte, 256<<10))
	failed := make(chan error, 1)
	err := c.SendAsync(Message{To: to, Frames: frames("x"), Deadline: time.Now().Add(time.Hour)}, func(_ uint64, err error) { failed <- err })
	if err != nil {
		t.Fatal(err)
	}
	closeControl(t, c)
	if err := receive(t, failed, "the failure"); !errors.Is(err, nixlkv.ErrClosed) {
		t.Fatal(err)
	}
}

func TestPendingLimits(t *testing.T) {
	wait := func(t *testing.T, c *Control, to Endpoint, bytes int) chan error {
		t.Helper()
		failed := make(chan error, 1)
		err := c.SendAsync(Message{To: to, Frames: [][]byte{make([]byte, bytes)}, Deadline: time.Now().Add(time.Hour)},
			func(_ uint64, err error) { failed <- err })
		if err != nil {
			failed <- err
		}
		return failed
	}
	refused := func(t *testing.T, failed chan error) {
		t.Helper()
		if err := receive(t, failed, "the refusal"); !errors.Is(err, nixlkv.ErrSendBlocked) || !errors.Is(err, nixlkv.ErrLimit) {
			t.Fatal(err)
		}
	}
	a, b := loopback(t, 1), loopback(t, 2)
	for name, tc := range map[string]struct {
		limits      Limits
		bytes       int
		first, next Endpoint // the first message fits, the next does not
	}{
		"messages":          {Limits{Pending: 1, EndpointPending: 1}, 0, a, b},
		"bytes":             {Limits{PendingBytes: 10, EndpointPendingBytes: 10, MessageBytes: 10}, 6, a, b},
		"endpoint messages": {Limits{EndpointPending: 1}, 0, a, a},
		"endpoint bytes":    {Limits{EndpointPendingBytes: 10, MessageBytes: 10}, 6, a, a},
		"endpoints":         {Limits{Endpoints: 1}, 0, a, b},
	} {
		t.Run(name, func(t *testing.T) {
			c := start(t, Config{Limits: tc.limits, Linger: -1})
			first := wait(t, c, tc.first, tc.bytes)
			refused(t, wait(t, c, tc.next, tc.bytes))
			// Room again once the first is gone.
			c.Drop(tc.first)
			if err := receive(t, first, "the dropped message"); !errors.Is(err, nixlkv.ErrPeerLost) {
				t.Fatal(err)
			}
			eventually(t, "the place is free", func() bool { s := c.Stats(); return s.Pending == 0 && s.Endpoints == 0 })
			last := wait(t, c, tc.next, tc.bytes)
			eventually(t, "it waits", func() bool { return c.Stats().Pending == 1 })
			c.Drop(tc.next)
			if err := receive(t, last, "the dropped message"); !errors.Is(err, nixlkv.ErrPeerLost) {
				t.Fatal(err)
			}
			if s := c.Stats(); s.SendsRefused != 1 || s.SendsLost != 2 {
				t.Fatalf("stats %+v", s)
			}
		})
	}
}

func TestDropMakesAFreshConnection(t *testing.T) {
	events, observer := observed()
	in := newInbox()
	c := start(t, Config{Observer: observer})
	to := endpoint(t, start(t, Config{Handler: in.handle}))
	for g := uint64(1); g < 20; g++ {
		if got := mustSend(t, c, to, "x"); got != g {
			t.Fatalf("generation %d, want %d", got, g)
		}
		in.next(t)
		expect(t, events, Event{to, Connected, g})
		c.Drop(to)
		if g%2 == 0 { // otherwise the next message is there before the event was delivered
			expect(t, events, Event{to, Released, g})
			continue
		}
		if _, err := c.Send(within(t, patience), Message{To: to, Frames: frames("pinned"), Generation: g}); !errors.Is(err, nixlkv.ErrPeerLost) {
			t.Fatal(err)
		}
		expect(t, events, Event{to, Released, g})
	}
	c.Drop(to)
	c.Drop(loopback(t, 1))
	eventually(t, "the table is empty", func() bool { return c.Stats().Endpoints == 0 })
}

func TestIdleEndpointsAreReleased(t *testing.T) {
	events, observer := observed()
	in := newInbox()
	c := start(t, Config{Observer: observer, IdleTimeout: time.Millisecond})
	to := endpoint(t, start(t, Config{Handler: in.handle}))
	large := bytes.Repeat([]byte{7}, 8<<20)
	if _, err := c.Send(within(t, patience), Message{To: to, Frames: [][]byte{large}}); err != nil {
		t.Fatal(err)
	}
	expect(t, events, Event{to, Connected, 1})
	expect(t, events, Event{to, Released, 1})
	if got := in.next(t); !bytes.Equal(got[0], large) { // it lingered
		t.Fatal("another message")
	}
	eventually(t, "the table is empty", func() bool { s := c.Stats(); return s.Endpoints == 0 && s.Connected == 0 })
	if s := c.Stats(); s.Disconnects != 0 {
		t.Fatalf("stats %+v", s)
	}
}

// A lost endpoint is not connected again, and takes no messages, before the observer has
// returned: whoever notes the loss there cannot be late.
func TestObserverIsToldBeforeReconnect(t *testing.T) {
	told, release := make(chan Event, 1), make(chan struct{})
	events := make(chan Event, 16)
	c := start(t, Config{ReconnectMin: time.Millisecond, Observer: func(e Event) {
		if e.Kind == Disconnected {
			told <- e
			<-release
		}
		events <- e
	}})
	first := start(t, Config{})
	to := endpoint(t, first)
	mustSend(t, c, to, "x")
	expect(t, events, Event{to, Connected, 1})
	closeControl(t, first)
	receive(t, told, "the loss")
	in := newInbox()
	start(t, Config{Port: int(to.AddrPort().Port()), Handler: in.handle})
	for range 10 {
		if _, err := c.Send(within(t, patience), Message{To: to, Frames: frames("late")}); !errors.Is(err, nixlkv.ErrPeerLost) {
			t.Fatalf("sent before the observer knew: %v", err)
		}
	}
	if s := c.Stats(); s.Connects != 1 {
		t.Fatalf("stats %+v", s)
	}
	close(release)
	expect(t, events, Event{to, Disconnected, 1})
	expect(t, events, Event{to, Connected, 2})
	mustSend(t, c, to, "registration")
	if got := in.text(t); got != "registration" {
		t.Fatalf("got %q", got)
	}
}

// Not so after a release: the observer itself may send to the endpoint, and its events wait.
func TestObserverMaySendAfterRelease(t *testing.T) {
	var c *Control
	var peer Endpoint
	in := newInbox()
	again := make(chan uint64, 16)
	made := make(chan struct{})
	c = start(t, Config{Observer: func(e Event) {
		<-made
		if e.Kind == Released {
			again <- mustSend(t, c, peer, "after "+strconv.FormatUint(e.Generation, 10))
		}
	}})
	peer = endpoint(t, start(t, Config{Handler: in.handle}))
	close(made)
	mustSend(t, c, peer, "x")
	in.next(t)
	for g := range uint64(10) {
		c.Drop(peer)
		if got := receive(t, again, "the send in the observer"); got != g+2 {
			t.Fatalf("generation %d, want %d", got, g+2)
		}
		if got, want := in.text(t), "after "+strconv.FormatUint(g+1, 10); got != want {
			t.Fatalf("got %q, want %q", got, want)
		}
	}
	// An observer that is stuck bounds what is kept for it.
	block, stuck := make(chan struct{}), make(chan struct{})
	lazy := start(t, Config{Observer: func(e Event) {
		if e.Generation == 1 && e.Kind == Connected {
			close(stuck)
			<-block
		}
	}, SendTimeout: 100 * time.Millisecond})
	refused := 0
	for range 10 {
		if _, err := lazy.Send(context.Background(), Message{To: peer, Frames: frames("x")}); errors.Is(err, nixlkv.ErrSendBlocked) {
			refused++
		} else if err != nil {
			t.Fatal(err)
		}
		lazy.Drop(peer)
	}
	await(t, stuck, "the stuck observer")
	if n := lazy.Stats().Connects; n > maxUntold || refused == 0 {
		t.Fatalf("%d connections while the observer was stuck, %d sends refused", n, refused)
	}
	close(block)
}

// Peers come and go under load: every message is completed once, and what arrived did so in
// order.
func TestChurn(t *testing.T) {
	const rounds, each = 15, 50
	in := newInbox()
	events, observer := observed()
	c := start(t, Config{Observer: observer, ReconnectMin: time.Millisecond, ReconnectMax: 5 * time.Millisecond})
	rx := start(t, Config{Handler: in.handle})
	to := endpoint(t, rx)
	var completed, arrived int
	results := make(chan error, rounds*each)
	for r := range rounds {
		for i := range each {
			n := r*each + i
			err := c.SendAsync(Message{To: to, Frames: frames(strconv.Itoa(n))}, func(_ uint64, err error) { results <- err })
			if err != nil {
				t.Fatal(err)
			}
		}
		closeControl(t, rx)
		rx = start(t, Config{Port: int(to.AddrPort().Port()), Handler: in.handle})
	}
	for ; completed < rounds*each; completed++ {
		if err := receive(t, results, "a completion"); err == nil {
			arrived++
		} else if !errors.Is(err, nixlkv.ErrPeerLost) {
			t.Fatal(err)
		}
	}
	mustSend(t, c, to, "end")
	last := -1
	for got := in.text(t); got != "end"; got = in.text(t) {
		n, err := strconv.Atoi(got)
		if err != nil || n <= last {
			t.Fatalf("got %q after %d", got, last)
		}
		last = n
		arrived--
	}
	if arrived < 0 {
		t.Fatalf("%d messages arrived that had failed", -arrived)
	}
	up := false
	for e := (Event{}); len(events) > 0; {
		prev := e
		e = <-events
		if (e.Kind == Connected) == up || e.Generation < prev.Generation {
			t.Fatalf("%+v after %+v", e, prev)
		}
		up = e.Kind == Connected
	}
}
