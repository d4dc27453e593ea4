//go:build linux && cgo

package control

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"slices"
	"strconv"
	"strings"
	"testing"

	zmq "github.com/pebbe/zmq4"
	"pgregory.net/rapid"

	"github.com/nixlkv/nixlkv"
)

// rawPush is a PUSH socket without any of this package's care.
func rawPush(t *testing.T, to Endpoint) *zmq.Socket {
	t.Helper()
	zctx, err := zmq.NewContext()
	if err != nil {
		t.Fatal(err)
	}
	s, err := zctx.NewSocket(zmq.PUSH)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(s.SetLinger(0), s.Close(), zctx.Term()); err != nil {
			t.Error(err)
		}
	})
	if err := s.Connect(to.String()); err != nil {
		t.Fatal(err)
	}
	return s
}

func rawSend(t *testing.T, s *zmq.Socket, message [][]byte) {
	t.Helper()
	if _, err := s.SendMessage(message); err != nil {
		t.Fatal(err)
	}
}

func TestOverlongMessagesAreDropped(t *testing.T) {
	in := newInbox()
	rx := start(t, Config{Handler: in.handle, Limits: Limits{Frames: 10, FrameBytes: 1 << 20, MessageBytes: 2 << 20}})
	s := rawPush(t, endpoint(t, rx))
	mega := make([]byte, 1<<20)
	for i, message := range [][][]byte{
		slices.Repeat(frames("x"), 11),
		slices.Repeat(frames(""), 5000),
		{mega, mega, {1}},
		slices.Repeat([][]byte{mega}, 12), // over both
	} {
		rawSend(t, s, message)
		rawSend(t, s, frames("after", strconv.Itoa(i)))
		if got, want := in.text(t), "after "+strconv.Itoa(i); got != want {
			t.Fatalf("got %q, want %q", got, want)
		}
	}
	rawSend(t, s, [][]byte{mega, mega})
	if got := in.next(t); len(got) != 2 || len(got[0]) != len(mega) {
		t.Fatalf("got %d frames", len(got))
	}
	if s := rx.Stats(); s.DroppedFrames != 3 || s.DroppedBytes != 1 || s.MessagesIn != 5 {
		t.Fatalf("stats %+v", s)
	}
}

// A frame over the limit ends its own connection, and nothing else.
func TestOverlongFrameEndsTheConnection(t *testing.T) {
	in := newInbox()
	rx := start(t, Config{Handler: in.handle, Limits: Limits{FrameBytes: 1 << 20}})
	events, observer := observed()
	tx := start(t, Config{Observer: observer})
	to := endpoint(t, rx)
	other := start(t, Config{})
	mustSend(t, other, to, "before")
	in.next(t)
	if _, err := tx.Send(within(t, patience), Message{To: to, Frames: [][]byte{make([]byte, 1<<20+1)}}); err != nil {
		t.Fatal(err)
	}
	expect(t, events, Event{to, Connected, 1})
	expect(t, events, Event{to, Disconnected, 1})
	if g := mustSend(t, other, to, "after"); g != 1 {
		t.Fatalf("the other connection is of generation %d", g)
	}
	if got := in.text(t); got != "after" {
		t.Fatalf("got %q", got)
	}
}

// greeting opens ZMTP 3.0 with the NULL mechanism, and makes the peer a PUSH socket.
func greeting() []byte {
	b := append([]byte{0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 3, 0}, "NULL"...)
	b = append(b, make([]byte, 64-len(b))...)
	ready := append([]byte{5}, "READY\x0bSocket-Type\x00\x00\x00\x04PUSH"...)
	return append(append(b, 4, byte(len(ready))), ready...)
}

func longFrame(n uint64) []byte { return binary.BigEndian.AppendUint64([]byte{2}, n) }

// Whatever comes over TCP, the others are served.
func TestGarbageFromTCP(t *testing.T) {
	in := newInbox()
	rx := start(t, Config{Handler: in.handle})
	tx := start(t, Config{})
	for name, garbage := range map[string][]byte{
		"nothing":             {},
		"HTTP":                []byte("GET /route?prefill_dp_rank=-1 HTTP/1.1\r\nHost: x\r\n\r\n"),
		"TLS":                 {0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3},
		"zeros":               make([]byte, 4096),
		"ones":                bytes.Repeat([]byte{0xff}, 4096),
		"greeting only":       greeting()[:64],
		"half a greeting":     greeting()[:11],
		"huge frame":          append(greeting(), longFrame(1<<62)...),
		"negative frame":      append(greeting(), longFrame(1<<63)...),
		"unknown command":     append(greeting(), 4, 5, 4, 'B', 'O', 'O', 'M'),
		"reserved flags":      append(greeting(), 0xf8, 1, 0),
		"message without end": append(greeting(), bytes.Repeat([]byte{1, 1, 'x'}, 10000)...),
		"ZMTP 1.0 huge frame": append([]byte{1, 0}, binary.BigEndian.AppendUint64([]byte{0xff}, 1<<62)...),
	} {
		t.Run(name, func(t *testing.T) {
			conn, err := net.Dial("tcp", rx.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			_, _ = conn.Write(garbage) // libzmq may have closed it already
			mustSend(t, tx, endpoint(t, rx), name)
			if got := in.text(t); got != name {
				t.Fatalf("got %q", got)
			}
		})
	}
	if s := tx.Stats(); s.Connects != 1 {
		t.Fatalf("stats %+v", s)
	}
}

// Any TCP client can make messages, as the package's documentation warns.
func TestZMTP1ClientIsHeard(t *testing.T) {
	in := newInbox()
	rx := start(t, Config{Handler: in.handle})
	conn, err := net.Dial("tcp", rx.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := conn.Write([]byte{1, 0, 6, 1, 'A', 'B', 'O', 'R', 'T', 3, 0, '1', '2'}); err != nil {
		t.Fatal(err)
	}
	if got := in.text(t); got != "ABORT 12" {
		t.Fatalf("got %q", got)
	}
}

func TestGarbageProperty(t *testing.T) {
	quiet := newInbox()
	rx := start(t, Config{Handler: func(f [][]byte) {
		if string(f[0]) == "genuine" { // garbage can be a ZMTP 1.0 message
			quiet.handle(f)
		}
	}})
	tx := start(t, Config{})
	rapid.Check(t, func(rt *rapid.T) {
		garbage := rapid.SliceOfN(rapid.Byte(), 0, 500).Draw(rt, "garbage")
		if rapid.Bool().Draw(rt, "after a greeting") {
			garbage = append(greeting(), garbage...)
		}
		conn, err := net.Dial("tcp", rx.Addr().String())
		if err != nil {
			rt.Fatal(err)
		}
		_, _ = conn.Write(garbage)
		mustSend(t, tx, endpoint(t, rx), "genuine")
		quiet.next(t)
		conn.Close()
	})
}

// A peer that is not a PULL socket of ZMTP 3 never counts as connected.
func TestServerThatIsNoReceiver(t *testing.T) {
	events, observer := observed()
	c := start(t, Config{Observer: observer, Linger: -1})
	for name, answer := range map[string]string{"HTTP": "HTTP/1.1 400 Bad Request\r\n\r\n", "nothing": ""} {
		t.Run(name, func(t *testing.T) {
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			served := make(chan struct{})
			go func() {
				defer close(served)
				for {
					conn, err := l.Accept()
					if err != nil {
						return
					}
					_, _ = conn.Write([]byte(answer))
					conn.Close()
				}
			}()
			failed := c.Stats().HandshakeFailed
			to := loopback(t, l.Addr().(*net.TCPAddr).Port)
			sent := make(chan error, 1)
			if err := c.SendAsync(Message{To: to, Frames: frames("x")}, func(_ uint64, err error) { sent <- err }); err != nil {
				t.Fatal(err)
			}
			eventually(t, "handshakes fail", func() bool { return c.Stats().HandshakeFailed > failed+1 })
			c.Drop(to)
			if err := receive(t, sent, "the failure"); !errors.Is(err, nixlkv.ErrPeerLost) {
				t.Fatal(err)
			}
			l.Close()
			await(t, served, "the server's end")
		})
	}
	if len(events) > 0 {
		t.Fatalf("unexpected %+v", <-events)
	}
}

func TestCurve(t *testing.T) {
	keys, client, stranger := curveKeys(t), curveKeys(t), curveKeys(t)
	keys.ClientKeys = []string{client.PublicKey}
	in := newInbox()
	rx := start(t, Config{Handler: in.handle, Curve: keys})
	to := endpoint(t, rx)
	mustSend(t, start(t, Config{Curve: keys}), to, "same keys")
	if got := in.text(t); got != "same keys" {
		t.Fatalf("got %q", got)
	}
	client.ServerKey, stranger.ServerKey = keys.PublicKey, keys.PublicKey
	mustSend(t, start(t, Config{Curve: client}), to, "own keys")
	if got := in.text(t); got != "own keys" {
		t.Fatalf("got %q", got)
	}
	for name, cfg := range map[string]Config{
		"no keys": {}, "another server key": {Curve: curveKeys(t)}, "a key that is not listed": {Curve: stranger},
	} {
		t.Run(name, func(t *testing.T) {
			cfg.Linger = -1
			c := start(t, cfg)
			if err := c.SendAsync(Message{To: to, Frames: frames("intruder")}, func(_ uint64, err error) {
				if !errors.Is(err, nixlkv.ErrClosed) {
					t.Errorf("sent: %v", err)
				}
			}); err != nil {
				t.Fatal(err)
			}
			eventually(t, "the handshake fails", func() bool { return c.Stats().HandshakeFailed > 0 })
		})
	}
	if s := rx.Stats(); len(in) > 0 || s.MessagesIn != 2 || s.PeersRefused == 0 {
		t.Fatalf("an intruder was heard, or refused without notice: %+v", s)
	}

	// Nor is ZMTP 1.0, which has no mechanisms, a way around.
	conn, err := net.Dial("tcp", rx.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := conn.Write([]byte{1, 0, 6, 0, 'A', 'B', 'O', 'R', 'T'}); err != nil {
		t.Fatal(err)
	}
	_, _ = io.Copy(io.Discard, conn) // until it is closed
	if len(in) > 0 || rx.Stats().MessagesIn != 2 {
		t.Fatal("an intruder was heard")
	}
}

func TestCurveKeysAreChecked(t *testing.T) {
	keys, other := curveKeys(t), curveKeys(t)
	tilde := strings.Repeat("~", curveKeyLength)
	for name, bad := range map[string]Curve{
		"length":            {PublicKey: "short", SecretKey: keys.SecretKey},
		"secret alphabet":   {PublicKey: keys.PublicKey, SecretKey: tilde},
		"server alphabet":   {PublicKey: keys.PublicKey, SecretKey: keys.SecretKey, ServerKey: tilde},
		"pair of two pairs": {PublicKey: keys.PublicKey, SecretKey: other.SecretKey},
		"swapped":           {PublicKey: keys.SecretKey, SecretKey: keys.PublicKey},
		"overflow":          {PublicKey: strings.Repeat("#", curveKeyLength), SecretKey: keys.SecretKey},
	} {
		if _, err := New(Config{Handler: func([][]byte) {}, Curve: &bad}); !errors.Is(err, ErrConfig) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
