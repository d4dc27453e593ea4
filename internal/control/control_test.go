//go:build linux && cgo

package control

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	"pgregory.net/rapid"

	"github.com/nixlkv/nixlkv"
)

func TestRoundTrip(t *testing.T) {
	in := newInbox()
	to := endpoint(t, start(t, Config{Handler: in.handle}))
	c := start(t, Config{})
	for name, want := range map[string][][]byte{
		"one":          frames("KV_STATUS"),
		"status":       frames("KV_STATUS", "7", "4", "0", ""),
		"empty":        frames(""),
		"all empty":    frames("", "", ""),
		"registration": slices.Repeat(frames("NixlMsgGuard"), 25),
		"at the limit": slices.Repeat(frames("x"), 128),
		"large":        {bytes.Repeat([]byte{0xff}, 16<<20), {}, bytes.Repeat([]byte{1}, 16<<20)},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := c.Send(within(t, patience), Message{To: to, Frames: want}); err != nil {
				t.Fatal(err)
			}
			if got := in.next(t); !slices.EqualFunc(got, want, bytes.Equal) {
				t.Fatalf("got %d frames that differ from the %d sent", len(got), len(want))
			}
		})
	}
}

func TestRoundTripProperty(t *testing.T) {
	in := newInbox()
	to := endpoint(t, start(t, Config{Handler: in.handle}))
	c := start(t, Config{})
	rapid.Check(t, func(rt *rapid.T) {
		want := rapid.SliceOfN(rapid.SliceOfN(rapid.Byte(), 0, 300), 1, 40).Draw(rt, "frames")
		if _, err := c.Send(within(t, patience), Message{To: to, Frames: want}); err != nil {
			rt.Fatal(err)
		}
		if got := in.next(t); !slices.EqualFunc(got, want, bytes.Equal) {
			rt.Fatalf("got %q", got)
		}
	})
}

// Many goroutines, sync and async: nothing is lost or doubled, and each one's order is kept.
func TestConcurrentSendersKeepOrder(t *testing.T) {
	const senders, each = 8, 400
	in := newInbox()
	to := endpoint(t, start(t, Config{Handler: in.handle}))
	c := start(t, Config{})
	var wg sync.WaitGroup
	for s := range senders {
		wg.Go(func() {
			var sent sync.WaitGroup
			for i := range each {
				m := Message{To: to, Frames: frames(strconv.Itoa(s), strconv.Itoa(i))}
				if s%2 == 0 {
					if _, err := c.Send(within(t, patience), m); err != nil {
						t.Error(err)
					}
					continue
				}
				sent.Add(1)
				if err := c.SendAsync(m, func(g uint64, err error) {
					if err != nil || g == 0 {
						t.Errorf("generation %d, %v", g, err)
					}
					sent.Done()
				}); err != nil {
					t.Error(err)
					sent.Done()
				}
			}
			sent.Wait()
		})
	}
	next := make([]int, senders)
	for range senders * each {
		f := in.next(t)
		s, _ := strconv.Atoi(string(f[0]))
		if want := strconv.Itoa(next[s]); string(f[1]) != want {
			t.Fatalf("sender %d: got message %s, want %s", s, f[1], want)
		}
		next[s]++
	}
	wg.Wait()
	eventually(t, "nothing pending", func() bool { return c.Stats().Pending == 0 })
	if s := c.Stats(); s.MessagesOut != senders*each || s.PendingBytes != 0 {
		t.Errorf("stats %+v", s)
	}
}

func TestIPv6(t *testing.T) {
	if l, err := net.Listen("tcp6", "[::1]:0"); err != nil {
		t.Skip("skip: no IPv6 loopback:", err)
	} else {
		l.Close()
	}
	in := newInbox()
	c := start(t, Config{Host: "::1", Handler: in.handle})
	if !c.Addr().Addr().Is6() {
		t.Fatalf("bound to %s", c.Addr())
	}
	mustSend(t, start(t, Config{}), endpoint(t, c), "over IPv6")
	if got := in.text(t); got != "over IPv6" {
		t.Fatalf("got %q", got)
	}
}

func TestBind(t *testing.T) {
	c := start(t, Config{})
	if !c.Addr().Addr().IsLoopback() || c.Port() == 0 {
		t.Fatalf("bound to %s by default", c.Addr())
	}
	if _, err := New(Config{Port: c.Port(), Handler: func([][]byte) {}}); !errors.Is(err, syscall.EADDRINUSE) {
		t.Fatalf("bound a port twice: %v", err)
	}
	if _, err := New(Config{Host: "192.0.2.1", Handler: func([][]byte) {}}); !errors.Is(err, syscall.EADDRNOTAVAIL) &&
		!errors.Is(err, syscall.ENODEV) {
		t.Fatalf("bound an address of another machine: %v", err)
	}
	if got := start(t, Config{Host: "localhost"}).Addr(); !got.Addr().IsLoopback() {
		t.Fatalf("localhost is %s", got)
	}
	if got := start(t, Config{Host: "0.0.0.0"}).Addr(); !got.Addr().IsUnspecified() || got.Port() == 0 {
		t.Fatalf("all interfaces are %s", got)
	}
}

func TestRefusedMessages(t *testing.T) {
	c := start(t, Config{Limits: Limits{Frames: 3, FrameBytes: 10, MessageBytes: 20}})
	to := loopback(t, 1)
	for name, tc := range map[string]struct {
		m    Message
		want error
	}{
		"no endpoint":      {Message{Frames: frames("x")}, nixlkv.ErrMalformed},
		"no frames":        {Message{To: to}, nixlkv.ErrMalformed},
		"too many frames":  {Message{To: to, Frames: frames("", "", "", "")}, nixlkv.ErrLimit},
		"frame too long":   {Message{To: to, Frames: frames("12345678901")}, nixlkv.ErrLimit},
		"message too long": {Message{To: to, Frames: frames("1234567890", "1234567890", "1")}, nixlkv.ErrLimit},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := c.Send(within(t, patience), tc.m); !errors.Is(err, tc.want) {
				t.Errorf("Send: %v", err)
			}
			if err := c.SendAsync(tc.m, func(uint64, error) { t.Error("called back") }); !errors.Is(err, tc.want) {
				t.Errorf("SendAsync: %v", err)
			}
		})
	}
	if err := c.SendAsync(Message{To: to, Frames: frames("x")}, nil); !errors.Is(err, nixlkv.ErrMalformed) {
		t.Errorf("no callback: %v", err)
	}
}

// Nobody listens yet: the message waits, and leaves when somebody does.
func TestSendBeforeReceiver(t *testing.T) {
	events := make(chan Event, 16)
	c := start(t, Config{Observer: func(e Event) { events <- e }, ReconnectMin: 5 * time.Millisecond})
	first := start(t, Config{})
	port := first.Port()
	closeControl(t, first)
	to := loopback(t, port)

	short, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	_, err := c.Send(short, Message{To: to, Frames: frames("early")})
	if !errors.Is(err, nixlkv.ErrSendBlocked) || !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), to.String()) {
		t.Fatalf("sent to nobody: %v", err)
	}
	sent := make(chan error, 1)
	if err := c.SendAsync(Message{To: to, Frames: frames("waits")}, func(_ uint64, err error) { sent <- err }); err != nil {
		t.Fatal(err)
	}
	eventually(t, "an attempt fails", func() bool { return c.Stats().ConnectFailures > 0 })

	in := newInbox()
	start(t, Config{Port: port, Handler: in.handle})
	if got := in.text(t); got != "waits" {
		t.Fatalf("got %q", got)
	}
	if err := receive(t, sent, "the completion"); err != nil {
		t.Fatal(err)
	}
	if e := receive(t, events, "the event"); e != (Event{to, Connected, 1}) {
		t.Fatalf("got %+v", e)
	}
}

// A caller that gives up gets its frames back and leaves nothing behind.
func TestSendCancelled(t *testing.T) {
	c := start(t, Config{})
	silent, err := net.Listen("tcp", "127.0.0.1:0") // accepts, and never speaks
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	to := loopback(t, silent.Addr().(*net.TCPAddr).Port)
	cause := errors.New("room closed")
	ctx, cancel := context.WithCancelCause(context.Background())
	failed := make(chan error, 1)
	go func() {
		_, err := c.Send(ctx, Message{To: to, Frames: frames("x")})
		failed <- err
	}()
	eventually(t, "the message waits", func() bool { return c.Stats().Pending == 1 })
	cancel(cause)
	if err := receive(t, failed, "the result"); !errors.Is(err, nixlkv.ErrSendBlocked) || !errors.Is(err, cause) {
		t.Fatal(err)
	}
	if _, err := c.Send(ctx, Message{To: to, Frames: frames("x")}); !errors.Is(err, cause) {
		t.Fatal(err)
	}
	if s := c.Stats(); s.Pending != 0 || s.SendsCancelled != 2 {
		t.Fatalf("stats %+v", s)
	}
}

func TestPanicsAreContained(t *testing.T) {
	in := newInbox()
	bad := func(f [][]byte) {
		if string(f[0]) == "bad" {
			panic("handler")
		}
		in.handle(f)
	}
	core, logs := observer.New(zap.ErrorLevel)
	told := make(chan string, 1)
	rx := start(t, Config{Handler: bad, Logger: zap.New(core), Panicked: func(source netip.Addr, f [][]byte, value any) {
		told <- fmt.Sprint(string(f[0]), value)
		panic("again")
	}})
	c := start(t, Config{Observer: func(Event) { panic("observer") }})
	to := endpoint(t, rx)
	if err := c.SendAsync(Message{To: to, Frames: frames("bad")}, func(uint64, error) { panic("callback") }); err != nil {
		t.Fatal(err)
	}
	mustSend(t, c, to, "good")
	if got := in.text(t); got != "good" {
		t.Fatalf("got %q", got)
	}
	eventually(t, "the panics are counted", func() bool { return rx.Stats().Panics == 2 && c.Stats().Panics == 2 })
	if got := receive(t, told, "what follows the panic"); got != "bad"+"handler" {
		t.Errorf("told of %q", got)
	}
	if all := logs.FilterMessage("control: panic in handler").All(); len(all) != 1 ||
		!strings.Contains(all[0].ContextMap()["stack"].(string), "TestPanicsAreContained") {
		t.Errorf("logged %+v", all)
	}
}

// Everything a callback is allowed to do.
func TestCallbacksMaySend(t *testing.T) {
	in := newInbox()
	to := endpoint(t, start(t, Config{Handler: in.handle}))
	var c *Control
	made := make(chan struct{})
	c = start(t, Config{
		Handler: func(f [][]byte) { mustSend(t, c, to, "from the handler") },
		Observer: func(e Event) {
			<-made
			if e.Kind == Connected && e.Endpoint == to {
				mustSend(t, c, to, "from the observer")
			}
		},
	})
	close(made)
	self := endpoint(t, c)
	done := make(chan struct{})
	err := c.SendAsync(Message{To: to, Frames: frames("first")}, func(uint64, error) {
		mustSend(t, c, to, "from the callback")
		if err := c.SendAsync(Message{To: self, Frames: frames("to myself")}, func(uint64, error) { close(done) }); err != nil {
			t.Error(err)
		}
		c.Drop(loopback(t, 1))
	})
	if err != nil {
		t.Fatal(err)
	}
	await(t, done, "the last callback")
	var got []string
	for range 4 {
		got = append(got, in.text(t))
	}
	want := []string{"first", "from the observer", "from the callback", "from the handler"}
	if !slices.Equal(got, want) {
		t.Fatalf("got %q", got)
	}
}

func TestCloseFlushes(t *testing.T) {
	const n = 200
	in := newInbox()
	to := endpoint(t, start(t, Config{Handler: in.handle}))
	for round := range 5 {
		c := start(t, Config{Linger: patience})
		results := make(chan error, n)
		for i := range n { // the first of them before there is a connection
			err := c.SendAsync(Message{To: to, Frames: frames(fmt.Sprint(round, i))}, func(_ uint64, err error) { results <- err })
			if err != nil {
				t.Fatal(err)
			}
		}
		closeControl(t, c)
		for i := range n {
			if err := <-results; err != nil {
				t.Fatal(err)
			}
			if got, want := in.text(t), fmt.Sprint(round, i); got != want {
				t.Fatalf("got %q, want %q", got, want)
			}
		}
	}
}

func TestCloseFailsTheRest(t *testing.T) {
	c := start(t, Config{Linger: -1})
	failed := make(chan error, 1)
	go func() {
		_, err := c.Send(within(t, patience), Message{To: loopback(t, 1), Frames: frames("x")})
		failed <- err
	}()
	eventually(t, "the message waits", func() bool { return c.Stats().Pending == 1 })
	closeControl(t, c)
	closeControl(t, c)
	if err := receive(t, failed, "the result"); !errors.Is(err, nixlkv.ErrClosed) || !errors.Is(err, nixlkv.ErrSendBlocked) {
		t.Fatal(err)
	}
	if _, err := c.Send(within(t, patience), Message{To: loopback(t, 1), Frames: frames("x")}); !errors.Is(err, nixlkv.ErrClosed) {
		t.Fatal(err)
	}
	if err := c.SendAsync(Message{To: loopback(t, 1), Frames: frames("x")}, func(uint64, error) {}); !errors.Is(err, nixlkv.ErrClosed) {
		t.Fatal(err)
	}
	c.Drop(loopback(t, 1))
	if s := c.Stats(); s.Pending != 0 || s.PendingBytes != 0 || s.Endpoints != 0 {
		t.Fatalf("stats %+v", s)
	}
}

// A handler that does not return holds Close up to its deadline, and no longer.
func TestCloseWithStuckHandler(t *testing.T) {
	entered, release := make(chan struct{}), make(chan struct{})
	rx := start(t, Config{Handler: func([][]byte) {
		close(entered)
		<-release
	}})
	mustSend(t, start(t, Config{}), endpoint(t, rx), "x")
	await(t, entered, "the handler's call")
	ctx, cancel := context.WithCancelCause(context.Background())
	cause := errors.New("shutdown takes too long")
	cancel(cause)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			if err := rx.Close(ctx); !errors.Is(err, cause) {
				t.Errorf("Close: %v", err)
			}
		})
	}
	wg.Wait()
	close(release)
	closeControl(t, rx)
}

func TestGoroutinesDoNotGrowWithPeers(t *testing.T) {
	in := newInbox()
	var peers []Endpoint
	for range 20 {
		peers = append(peers, endpoint(t, start(t, Config{Handler: in.handle})))
	}
	before := runtime.NumGoroutine()
	c := start(t, Config{})
	for _, to := range peers {
		mustSend(t, c, to, "x")
	}
	for range peers {
		in.next(t)
	}
	if s := c.Stats(); s.Endpoints != len(peers) || s.Connected != len(peers) {
		t.Fatalf("stats %+v", s)
	}
	if n := runtime.NumGoroutine() - before; n > 4 {
		t.Fatalf("%d goroutines for %d peers", n, len(peers))
	}
}

func TestLogsOfPeersMakingAreLimited(t *testing.T) {
	core, logs := observer.New(zap.DebugLevel)
	in := newInbox()
	rx := start(t, Config{Handler: in.handle, Logger: zap.New(core), Limits: Limits{Frames: 5}})
	s := rawPush(t, endpoint(t, rx))
	for range 2000 {
		rawSend(t, s, frames("", "", "", "", "", ""))
	}
	rawSend(t, s, frames("end"))
	in.next(t)
	if n := rx.Stats().DroppedFrames; n != 2000 {
		t.Fatalf("%d dropped", n)
	}
	if n := logs.Len(); n == 0 || n > 200 {
		t.Fatalf("%d log entries", n)
	}
}

func TestDescriptorsComeBack(t *testing.T) {
	count := func() int {
		entries, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(entries)
	}
	once := func() {
		in := newInbox()
		rx := start(t, Config{Handler: in.handle})
		c := start(t, Config{ReconnectMin: time.Millisecond, Linger: 20 * time.Millisecond})
		mustSend(t, c, endpoint(t, rx), "x")
		in.next(t)
		if err := c.SendAsync(Message{To: loopback(t, 1), Frames: frames("x")}, func(uint64, error) {}); err != nil {
			t.Fatal(err)
		}
		eventually(t, "some attempts fail", func() bool { return c.Stats().ConnectFailures > 2 })
		if _, err := New(Config{Port: rx.Port(), Handler: in.handle}); err == nil {
			t.Fatal("bound a port twice")
		}
		c.Drop(endpoint(t, rx))
		closeControl(t, c)
		closeControl(t, rx)
	}
	once() // what the runtime opens once and keeps
	before := count()
	for range 3 {
		once()
	}
	if after := count(); after > before {
		t.Errorf("%d descriptors before, %d after", before, after)
	}
}
