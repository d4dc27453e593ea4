//go:build linux && cgo

package control

import (
	"errors"
	"fmt"
	"net"
	"testing"
	"time"

	"github.com/nixlkv/nixlkv"
)

// blackHoles gives endpoints that take connections and never answer.
func blackHoles(t *testing.T, n int) []Endpoint {
	t.Helper()
	var all []Endpoint
	for range n {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { l.Close() })
		all = append(all, loopback(t, l.Addr().(*net.TCPAddr).Port))
	}
	return all
}

// Endpoints that anybody may name take no place that others need, and are let go.
func TestStrangersAreBounded(t *testing.T) {
	in := newInbox()
	known := endpoint(t, start(t, Config{Handler: in.handle}))
	c := start(t, Config{Linger: -1, Limits: Limits{Endpoints: 8, Strangers: 3, Pending: 16, EndpointPending: 16}})
	holes := blackHoles(t, 20)
	outcomes := make(chan error, len(holes))
	refused := 0
	for _, to := range holes {
		m := Message{To: to, Frames: frames("x"), Stranger: true, Deadline: time.Now().Add(200 * time.Millisecond)}
		if err := c.SendAsync(m, func(_ uint64, err error) { outcomes <- err }); errors.Is(err, nixlkv.ErrLimit) {
			refused++
		} else if err != nil {
			t.Fatal(err)
		}
	}
	if refused != len(holes)-3 {
		t.Fatalf("%d of %d refused", refused, len(holes))
	}
	mustSend(t, c, known, "a known one is not held up")
	in.next(t)
	for range len(holes) - refused {
		if err := receive(t, outcomes, "an outcome"); !errors.Is(err, nixlkv.ErrSendBlocked) {
			t.Fatal(err)
		}
	}
	eventually(t, "the strangers are let go", func() bool { return c.Stats().Endpoints == 1 })

	// There is room again, and one that listens is sent to and let go as well.
	to := endpoint(t, start(t, Config{Handler: in.handle}))
	if _, err := c.Send(within(t, patience), Message{To: to, Frames: frames("y"), Stranger: true}); err != nil {
		t.Fatal(err)
	}
	if got := in.text(t); got != "y" {
		t.Fatal(got)
	}
	eventually(t, "the connection is let go", func() bool { return c.Stats().Endpoints == 1 && c.Stats().Connected == 1 })
}

// One that is known meanwhile is kept, and what waits for it is not given up with the stranger.
func TestStrangerBecomesKnown(t *testing.T) {
	in := newInbox()
	to := endpoint(t, start(t, Config{Handler: in.handle}))
	c := start(t, Config{Limits: Limits{Strangers: 1}})
	if _, err := c.Send(within(t, patience), Message{To: to, Frames: frames("first"), Stranger: true}); err != nil {
		t.Fatal(err)
	}
	g := mustSend(t, c, to, "second")
	in.next(t)
	in.next(t)
	// Its place among the strangers is free.
	other := endpoint(t, start(t, Config{Handler: in.handle}))
	if _, err := c.Send(within(t, patience), Message{To: other, Frames: frames("third"), Stranger: true}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the other is let go", func() bool { return c.Stats().Endpoints == 1 })
	if again := mustSend(t, c, to, "fourth"); again != g {
		t.Errorf("the connection of one that is known was let go: generation %d after %d", again, g)
	}

	hole := blackHoles(t, 1)[0]
	outcome := make(chan error, 2)
	done := func(_ uint64, err error) { outcome <- err }
	soon, late := time.Now().Add(50*time.Millisecond), time.Now().Add(400*time.Millisecond)
	for _, m := range []Message{
		{To: hole, Frames: frames("x"), Stranger: true, Deadline: soon}, {To: hole, Frames: frames("x"), Deadline: late},
	} {
		if err := c.SendAsync(m, done); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 {
		if err := receive(t, outcome, "an outcome"); !errors.Is(err, nixlkv.ErrSendBlocked) {
			t.Error(err)
		}
	}
	if now := time.Now(); now.Before(late) {
		t.Errorf("a message of one that is known was given up %v early", late.Sub(now))
	}
}

// A message that is refused under one limit is not counted under another.
func TestStrangersAreCountedRightly(t *testing.T) {
	c := start(t, Config{Linger: -1, Limits: Limits{Pending: 4, EndpointPending: 4, Strangers: 3}})
	hole := blackHoles(t, 1)[0]
	outcome := make(chan error, 16)
	deadline := time.Now().Add(100 * time.Millisecond)
	taken := 0
	for i := range 16 {
		err := c.SendAsync(Message{To: hole, Frames: frames(fmt.Sprint(i)), Stranger: i%2 == 0, Deadline: deadline},
			func(_ uint64, err error) { outcome <- err })
		if err == nil {
			taken++
		} else if !errors.Is(err, nixlkv.ErrLimit) {
			t.Fatal(err)
		}
	}
	for range taken {
		receive(t, outcome, "an outcome")
	}
	eventually(t, "nothing waits", func() bool { return c.Stats().Pending == 0 })
	if n := c.counters.strangers.Load(); n != 0 {
		t.Errorf("%d messages to strangers are counted", n)
	}
}
