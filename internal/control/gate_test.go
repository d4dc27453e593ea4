//go:build linux && cgo

package control

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	zmq "github.com/pebbe/zmq4"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/internal/trust"
)

func allowed(t testing.TB, networks ...string) trust.List {
	t.Helper()
	var p []netip.Prefix
	for _, s := range networks {
		p = append(p, netip.MustParsePrefix(s))
	}
	l, err := trust.NewList(p...)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// Two sides with a pair each, that know each other's public key.
func TestCurveOfTwoSides(t *testing.T) {
	prefill, decode := curveKeys(t), curveKeys(t)
	prefill.ServerKey, decode.ServerKey = decode.PublicKey, prefill.PublicKey
	in := newInbox()
	a := start(t, Config{Handler: in.handle, Curve: prefill})
	b := start(t, Config{Handler: in.handle, Curve: decode})
	mustSend(t, b, endpoint(t, a), "to the prefill")
	mustSend(t, a, endpoint(t, b), "to the decode")
	for range 2 {
		in.next(t)
	}
	// Of the same side: it would have to be told.
	c := start(t, Config{Curve: prefill, Linger: -1})
	if _, err := c.Send(within(t, time.Second), Message{To: endpoint(t, a), Frames: frames("x")}); !errors.Is(err, nixlkv.ErrSendBlocked) {
		t.Error(err)
	}
}

// A pair that was drawn without libzmq is one of libzmq's.
func TestNewCurve(t *testing.T) {
	k, err := nixlkv.NewCurve()
	if err != nil {
		t.Fatal(err)
	}
	if err := checkCurve(&k); err != nil {
		t.Fatal(err)
	}
	if public, err := zmq.AuthCurvePublic(k.SecretKey); err != nil || public != k.PublicKey {
		t.Fatal(public, err)
	}
}

func TestAllowedNetworks(t *testing.T) {
	in := newInbox()
	inside := start(t, Config{Handler: in.handle, Allowed: allowed(t, "10.0.0.0/8", "127.0.0.0/8")})
	outside := start(t, Config{Handler: in.handle, Allowed: allowed(t, "10.0.0.0/8")})
	c := start(t, Config{Linger: -1})
	mustSend(t, c, endpoint(t, inside), "from an allowed network")
	if got := in.text(t); got != "from an allowed network" {
		t.Fatal(got)
	}
	if _, err := c.Send(within(t, time.Second), Message{To: endpoint(t, outside), Frames: frames("x")}); !errors.Is(err, nixlkv.ErrSendBlocked) {
		t.Fatal(err)
	}
	if s := outside.Stats(); s.PeersRefused == 0 || s.MessagesIn != 0 || len(in) > 0 {
		t.Fatalf("heard from another network: %+v", s)
	}
	// ZMTP 1.0 has no handshake to refuse it in, and is closed at once even from an allowed one.
	conn, err := net.Dial("tcp", inside.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := conn.Write([]byte{1, 0, 6, 0, 'A', 'B', 'O', 'R', 'T'}); err != nil {
		t.Fatal(err)
	}
	_, _ = io.Copy(io.Discard, conn)
	if len(in) > 0 {
		t.Fatal("heard over ZMTP 1.0")
	}
	mustSend(t, c, endpoint(t, inside), "still")
	in.next(t)
}

func TestAllowedNetworksIPv6(t *testing.T) {
	in := newInbox()
	inside := start(t, Config{Host: "::1", Handler: in.handle, Allowed: allowed(t, "::1/128")})
	outside := start(t, Config{Host: "::1", Handler: in.handle, Allowed: allowed(t, "0.0.0.0/0")})
	c := start(t, Config{Linger: -1})
	mustSend(t, c, endpoint(t, inside), "x")
	in.next(t)
	if _, err := c.Send(within(t, time.Second), Message{To: endpoint(t, outside), Frames: frames("x")}); !errors.Is(err, nixlkv.ErrSendBlocked) {
		t.Fatal(err)
	}
}

// With CURVE and networks both have to fit.
func TestAllowedNetworksAndCurve(t *testing.T) {
	keys := curveKeys(t)
	in := newInbox()
	inside := start(t, Config{Handler: in.handle, Curve: keys, Allowed: allowed(t, "127.0.0.0/8")})
	outside := start(t, Config{Handler: in.handle, Curve: keys, Allowed: allowed(t, "10.0.0.0/8")})
	c := start(t, Config{Curve: keys, Linger: -1})
	mustSend(t, c, endpoint(t, inside), "x")
	in.next(t)
	if _, err := c.Send(within(t, time.Second), Message{To: endpoint(t, outside), Frames: frames("x")}); !errors.Is(err, nixlkv.ErrSendBlocked) {
		t.Fatal(err)
	}
}

// Many Controls of one process keep their gates apart.
func TestGatesAreApart(t *testing.T) {
	in := newInbox()
	var open []*Control
	for range 4 {
		open = append(open, start(t, Config{Handler: in.handle, Allowed: allowed(t, "127.0.0.0/8")}))
	}
	closeControl(t, start(t, Config{Handler: in.handle, Allowed: allowed(t, "10.0.0.0/8")}))
	c := start(t, Config{})
	for _, o := range open {
		mustSend(t, c, endpoint(t, o), "x")
		in.next(t)
	}
}

func TestParseGateRequest(t *testing.T) {
	key := string(make([]byte, 32))
	for name, c := range map[string]struct {
		frames []string
		ok     bool
	}{
		"none":         {nil, false},
		"short":        {[]string{"1.0", "1", "d", "127.0.0.1", ""}, false},
		"version":      {[]string{"2.0", "1", "d", "127.0.0.1", "", "NULL"}, false},
		"NULL":         {[]string{"1.0", "1", "d", "127.0.0.1", "", "NULL"}, true},
		"CURVE":        {[]string{"1.0", "1", "d", "127.0.0.1", "", "CURVE", key}, true},
		"no key":       {[]string{"1.0", "1", "d", "127.0.0.1", "", "CURVE"}, false},
		"short key":    {[]string{"1.0", "1", "d", "127.0.0.1", "", "CURVE", key[1:]}, false},
		"unknown mech": {[]string{"1.0", "1", "d", "127.0.0.1", "", "PLAIN", "u", "p"}, true},
	} {
		q, err := parseGateRequest(frames(c.frames...))
		if (err == nil) != c.ok || err != nil && !errors.Is(err, nixlkv.ErrMalformed) {
			t.Errorf("%s: %+v, %v", name, q, err)
		}
	}
	cfg := Config{Curve: &Curve{ServerKey: zmq.Z85encode(key)}}
	for _, mechanism := range []string{"NULL", "PLAIN"} {
		if err := cfg.admits(gateRequest{address: "127.0.0.1", mechanism: mechanism}); !errors.Is(err, nixlkv.ErrNotAllowed) {
			t.Errorf("%s passes for CURVE: %v", mechanism, err)
		}
	}
	cfg = Config{Allowed: allowed(t, "0.0.0.0/0", "::/0")}
	if err := cfg.admits(gateRequest{address: "?", mechanism: "NULL"}); !errors.Is(err, nixlkv.ErrNotAllowed) {
		t.Errorf("an address that is none is everywhere: %v", err)
	}
}

func FuzzParseGateRequest(f *testing.F) {
	f.Add("1.0", "127.0.0.1", "CURVE", string(make([]byte, 32)), 7)
	f.Add("1.0", "::ffff:10.0.0.1", "NULL", "", 6)
	f.Fuzz(func(t *testing.T, version, address, mechanism, key string, n int) {
		all := frames(version, "1", "d", address, "", mechanism, key, "more")
		q, err := parseGateRequest(all[:max(0, min(n, len(all)))])
		if err != nil {
			return
		}
		keys := curveKeys(t)
		cfg := Config{Curve: keys, Allowed: allowed(t, "10.0.0.0/8")}
		if cfg.admits(q) == nil {
			t.Fatalf("%+v may connect", q)
		}
	})
}

func TestSource(t *testing.T) {
	for _, host := range []string{"127.0.0.1", "::1"} {
		t.Run(host, func(t *testing.T) {
			type message struct {
				source netip.Addr
				frames [][]byte
			}
			got := make(chan message, 8)
			rx := start(t, Config{Host: host, HandlerFrom: func(a netip.Addr, f [][]byte) { got <- message{a, f} }})
			c := start(t, Config{})
			for _, parts := range [][]string{{"one"}, {"", "two"}, {"KV_STATUS", "1", "4", "0", ""}} {
				mustSend(t, c, endpoint(t, rx), parts...)
				m := receive(t, got, "a message")
				if m.source != netip.MustParseAddr(host) || len(m.frames) != len(parts) || string(m.frames[0]) != parts[0] {
					t.Errorf("%+v of %q", m, parts)
				}
			}
		})
	}
	for text, want := range map[string]string{"": "invalid IP", "x": "invalid IP", "::ffff:10.0.0.1": "10.0.0.1", "fe80::1%eth0": "fe80::1%eth0"} {
		if got := parseSource(text).String(); got != want {
			t.Errorf("%q: %s", text, got)
		}
	}
}
