//go:build linux && cgo

package control

import (
	"errors"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	zmq "github.com/pebbe/zmq4"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/nixlkv/nixlkv"
)

// logged looks for a line about a connection that was not let in.
func logged(logs *observer.ObservedLogs, port string, reason string) bool {
	for _, e := range logs.All() {
		var source, why string
		for _, f := range e.Context {
			switch {
			case f.Key == "source":
				source = f.String
			case f.Key == "reason":
				why = f.String
			case f.Type == zapcore.ErrorType:
				why = f.Interface.(error).Error()
			}
		}
		host, at, _ := net.SplitHostPort(source)
		if (source == "127.0.0.1" || host == "127.0.0.1") && (port == "" || port == at) && strings.Contains(why, reason) {
			return true
		}
	}
	return false
}

// Both sides say who was refused, and why.
func TestRefusedHandshakes(t *testing.T) {
	keys, other, client := curveKeys(t), curveKeys(t), curveKeys(t)
	unlisted := *client
	unlisted.ServerKey = keys.PublicKey
	for name, c := range map[string]struct {
		server, client *Curve
		networks       []string
		gate           bool   // it is the gate that refuses
		here, there    string // why, at the listening and at the connecting side
	}{
		"another server key":     {server: keys, client: other, here: "another server key", there: "as one with another server key does"},
		"a key that is unlisted": {server: keys, client: &unlisted, gate: true, here: "CURVE key " + client.PublicKey, there: "CURVE key"},
		"no CURVE here":          {client: keys, here: "CURVE on one side alone", there: "the peer has no CURVE"},
		"no CURVE there":         {server: keys, here: "CURVE on one side alone", there: "the peer asks for CURVE"},
		"network":                {networks: []string{"10.0.0.0/8"}, gate: true, here: "not in an allowed network", there: "this address is not allowed"},
		"network with CURVE": {server: keys, client: keys, networks: []string{"10.0.0.0/8"}, gate: true,
			here: "not in an allowed network", there: "or this address, is not allowed"},
	} {
		t.Run(name, func(t *testing.T) {
			begin := time.Now()
			core, logs := observer.New(zap.WarnLevel)
			in := newInbox()
			cfg := Config{Handler: in.handle, Curve: c.server, Logger: zap.New(core)}
			if c.networks != nil {
				cfg.Allowed = allowed(t, c.networks...)
			}
			rx := start(t, cfg)
			tx := start(t, Config{Curve: c.client, Linger: -1, ReconnectMin: 5 * time.Millisecond, ReconnectMax: 50 * time.Millisecond})
			to := endpoint(t, rx)
			sent := make(chan error, 1)
			if err := tx.SendAsync(Message{To: to, Frames: frames("x")}, func(_ uint64, err error) { sent <- err }); err != nil {
				t.Fatal(err)
			}
			told := func(err error) bool {
				return errors.Is(err, nixlkv.ErrNotAllowed) && strings.Contains(err.Error(), c.there)
			}
			eventually(t, "trouble", func() bool { return told(tx.Trouble(to)) })
			_, err := tx.Send(within(t, 100*time.Millisecond), Message{To: to, Frames: frames("x")})
			if !errors.Is(err, nixlkv.ErrSendBlocked) || !told(err) {
				t.Errorf("the connecting side was told %v", err)
			}
			tx.Drop(to)
			if err := receive(t, sent, "the dropped message"); !errors.Is(err, nixlkv.ErrPeerLost) {
				t.Error(err)
			}
			eventually(t, "no trouble", func() bool { return tx.Trouble(to) == nil })
			eventually(t, "the log", func() bool { return logged(logs, "", c.here) })
			if err := rx.Refused(netip.MustParseAddr("127.0.0.1"), begin); !errors.Is(err, nixlkv.ErrNotAllowed) || !strings.Contains(err.Error(), c.here) {
				t.Errorf("the listening side says %v", err)
			}
			s := rx.Stats()
			if (s.PeersRefused > 0) != c.gate || (s.HandshakesRefused > 0) == c.gate || s.MessagesIn != 0 || len(in) > 0 {
				t.Errorf("stats %+v", s)
			}
		})
	}
}

// Trouble ends with the reason for it.
func TestTroubleEnds(t *testing.T) {
	keys := curveKeys(t)
	in := newInbox()
	rx := start(t, Config{Handler: in.handle, Curve: curveKeys(t)})
	to := endpoint(t, rx)
	tx := start(t, Config{Curve: keys, ReconnectMin: time.Millisecond, ReconnectMax: 5 * time.Millisecond})
	sent := make(chan error, 1)
	if err := tx.SendAsync(Message{To: to, Frames: frames("x")}, func(_ uint64, err error) { sent <- err }); err != nil {
		t.Fatal(err)
	}
	eventually(t, "trouble", func() bool { return errors.Is(tx.Trouble(to), nixlkv.ErrNotAllowed) })
	closeControl(t, rx)
	eventually(t, "other trouble", func() bool { err := tx.Trouble(to); return err != nil && !errors.Is(err, nixlkv.ErrNotAllowed) })
	start(t, Config{Port: int(to.AddrPort().Port()), Handler: in.handle, Curve: keys})
	if err := receive(t, sent, "the message"); err != nil {
		t.Fatal(err)
	}
	if err := tx.Trouble(to); err != nil {
		t.Error(err)
	}
}

// What comes over TCP and is not let in is counted, and logged with its address.
func TestGarbageIsCounted(t *testing.T) {
	curve := Config{Curve: curveKeys(t)}
	networks := Config{Allowed: allowed(t, "127.0.0.0/8")}
	http := []byte("GET / HTTP/1.1\r\nHost: x\r\n\r\n")
	for name, c := range map[string]struct {
		cfg     Config
		garbage []byte
		close   bool
		cut     bool
		reason  string
	}{
		"HTTP to CURVE":             {cfg: curve, garbage: http, reason: "no handshake of ZMTP 3"},
		"HTTP to networks":          {cfg: networks, garbage: http, reason: "no handshake of ZMTP 3"},
		"ZMTP 1.0 to CURVE":         {cfg: curve, garbage: []byte{1, 0, 6, 0, 'A', 'B', 'O', 'R', 'T'}, reason: "no handshake of ZMTP 3"},
		"another mechanism":         {cfg: curve, garbage: greeting(), reason: "CURVE on one side alone"},
		"an unreadable command":     {garbage: append(greeting()[:64], 4, 3, 2, 'X', 'X'), reason: "not the handshake of ZMTP 3"},
		"nothing, and silence":      {cut: true, reason: "did not go on"},
		"half a greeting and ended": {garbage: greeting()[:11], close: true, cut: true, reason: "the peer closed it"},
	} {
		t.Run(name, func(t *testing.T) {
			core, logs := observer.New(zap.InfoLevel)
			c.cfg.Logger, c.cfg.ConnectTimeout = zap.New(core), 300*time.Millisecond
			rx := start(t, c.cfg)
			conn, err := net.Dial("tcp", rx.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			_, port, _ := net.SplitHostPort(conn.LocalAddr().String())
			// Until it is accepted it has no descriptor to ask for its address.
			eventually(t, "the connection", func() bool { return rx.Stats().Incoming == 1 })
			if _, err := conn.Write(c.garbage); err != nil {
				t.Fatal(err)
			}
			if c.close {
				conn.Close()
			}
			eventually(t, "the log", func() bool { return logged(logs, port, c.reason) })
			s := rx.Stats()
			if want := (map[bool][2]uint64{false: {1, 0}, true: {0, 1}})[c.cut]; want != [2]uint64{s.HandshakesRefused, s.HandshakesCut} {
				t.Errorf("%d refused, %d cut", s.HandshakesRefused, s.HandshakesCut)
			}
		})
	}
}

// Connections that are let in are not counted, however they end.
func TestGoodConnectionsAreNotCounted(t *testing.T) {
	keys := curveKeys(t)
	for _, cfg := range []Config{{}, {Curve: keys}, {Allowed: allowed(t, "127.0.0.0/8")}} {
		in := newInbox()
		rx := start(t, Config{Handler: in.handle, Curve: cfg.Curve, Allowed: cfg.Allowed})
		tx := start(t, Config{Curve: cfg.Curve})
		for range 20 {
			mustSend(t, tx, endpoint(t, rx), "x")
			in.next(t)
			tx.Drop(endpoint(t, rx))
		}
		ch := start(t, Config{Curve: cfg.Curve})
		mustSend(t, ch, endpoint(t, rx), "x")
		in.next(t)
		closeControl(t, ch)
		eventually(t, "all have ended", func() bool { return rx.Stats().Incoming == 0 })
		if s := rx.Stats(); s.PeersRefused != 0 || s.HandshakesRefused != 0 || s.HandshakesCut != 0 {
			t.Errorf("stats %+v", s)
		}
	}
}

// The order of events says whose a failure is, and an address that may be another's is not told.
func TestIncomingEvents(t *testing.T) {
	type e struct {
		event zmq.Event
		value int
	}
	const a, b = 7, 8
	accepted := func(fd int) e { return e{zmq.EVENT_ACCEPTED, fd} }
	ended := func(fd int) e { return e{zmq.EVENT_DISCONNECTED, fd} }
	wrongKey, passed := e{zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmtpCryptographic}, e{zmq.EVENT_HANDSHAKE_SUCCEEDED, 0}
	gate, cut := e{zmq.EVENT_HANDSHAKE_FAILED_AUTH, 400}, e{zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, 32}
	for name, c := range map[string]struct {
		events       []e
		refused, cut uint64
		sources      []string
	}{
		"a failure":                  {[]e{accepted(a), accepted(b), wrongKey, ended(a)}, 1, 0, []string{"peer 7"}},
		"of the later one":           {[]e{accepted(a), accepted(b), wrongKey, ended(b)}, 1, 0, []string{"peer 8"}},
		"cut":                        {[]e{accepted(a), cut, ended(a)}, 0, 1, []string{"peer 7"}},
		"nothing told":               {[]e{accepted(a), ended(a)}, 1, 0, []string{"peer 7"}},
		"passed":                     {[]e{accepted(a), passed, ended(a)}, 0, 0, nil},
		"refused by the gate":        {[]e{accepted(a), gate, ended(a)}, 0, 0, nil},
		"one of two passed":          {[]e{accepted(a), accepted(b), passed, ended(b), ended(a)}, 0, 0, nil},
		"a second one at its place":  {[]e{accepted(a), wrongKey, ended(a), accepted(a), passed}, 1, 0, []string{"unknown"}},
		"not seen to begin":          {[]e{wrongKey, ended(a)}, 1, 0, []string{"unknown"}},
		"not seen to begin, no more": {[]e{ended(a)}, 0, 0, nil},
		"two":                        {[]e{accepted(a), accepted(b), cut, ended(b), wrongKey, ended(a)}, 1, 1, []string{"peer 8", "peer 7"}},
	} {
		t.Run(name, func(t *testing.T) {
			core, logs := observer.New(zap.InfoLevel)
			cs := &counters{}
			in := newIncoming(zap.New(core), cs, true, 1)
			in.peerOf = func(fd int) string { return "peer " + string(rune('0'+fd)) }
			for _, e := range c.events {
				in.event(e.event, e.value)
			}
			in.settle()
			in.settle()
			var sources []string
			for _, l := range logs.All() {
				sources = append(sources, l.ContextMap()["source"].(string))
			}
			if strings.Join(sources, ", ") != strings.Join(c.sources, ", ") || cs.handshakesRefused.Load() != c.refused || cs.handshakesCut.Load() != c.cut {
				t.Errorf("refused %d, cut %d, sources %q", cs.handshakesRefused.Load(), cs.handshakesCut.Load(), sources)
			}
		})
	}
}

// Only a connection to the port itself has an address to tell.
func TestPeerOfDescriptor(t *testing.T) {
	for _, host := range []string{"127.0.0.1:0", "[::1]:0"} {
		l, err := net.Listen("tcp", host)
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		there, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer there.Close()
		here, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		defer here.Close()
		raw, err := here.(*net.TCPConn).SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		in := newIncoming(zap.NewNop(), &counters{}, true, netip.MustParseAddrPort(l.Addr().String()).Port())
		err = raw.Control(func(fd uintptr) {
			if got := in.peer(int(fd)); got != there.LocalAddr().String() {
				t.Errorf("peer %q, want %s", got, there.LocalAddr())
			}
			in.port++
			if got := in.peer(int(fd)); got != "" {
				t.Errorf("of another port: %q", got)
			}
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	in := newIncoming(zap.NewNop(), &counters{}, true, 0)
	for _, fd := range []int{-1, 0, 1 << 20} {
		if got := in.peer(fd); got != "" {
			t.Errorf("descriptor %d: %q", fd, got)
		}
	}
}

func TestHandshakeTrouble(t *testing.T) {
	for name, c := range map[string]struct {
		event   zmq.Event
		value   int
		curve   bool
		cuts    int
		allowed bool
		want    string
	}{
		"cut once":        {zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, 32, true, 1, true, "or ended"},
		"cut again":       {zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, 32, true, 2, false, "2 times in a row"},
		"without CURVE":   {zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, 104, false, 9, true, "does not speak ZMTP"},
		"silence":         {zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, 11, true, 9, true, "did not answer"},
		"not ZMTP":        {zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, 0x10000001, true, 0, true, "does not speak ZMTP 3"},
		"decryption":      {zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmtpCryptographic, true, 0, false, "other keys"},
		"refused address": {zmq.EVENT_HANDSHAKE_FAILED_AUTH, 400, false, 0, false, "this address"},
	} {
		err := handshakeTrouble(c.event, c.value, c.curve, c.cuts)
		if errors.Is(err, nixlkv.ErrNotAllowed) == c.allowed || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
