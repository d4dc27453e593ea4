package bootstrap

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/nixlkv/nixlkv"
)

func hasIPv6(t *testing.T) {
	t.Helper()
	ln, err := net.Listen("tcp6", "[::1]:0")
	if err != nil {
		t.Skipf("skip: no IPv6 loopback: %v", err)
	}
	_ = ln.Close()
}

func listen(t *testing.T, addr string, opts ...ServerOption) *Server {
	t.Helper()
	s, err := Listen(addr, opts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	})
	return s
}

func newClient(t *testing.T, addr string, opts ...ClientOption) *Client {
	t.Helper()
	c, err := NewClient(addr, opts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

// useServer goes through everything that a client can ask for.
func useServer(t *testing.T, c *Client) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	check(c.Health(ctx))
	rank := RankInfo{AttnTPSize: 2, AttnDPSize: 2, RankIP: "10.0.0.7", PageSize: 64, KVCacheDtype: "auto",
		LoadBalanceMethod: "round_robin"}
	for dp := range 2 {
		for tp := range 2 {
			rank.AttnDPRank, rank.AttnTPRank, rank.RankPort = dp, tp, 100+10*dp+tp
			check(c.Register(ctx, rank))
		}
	}
	topo, err := c.Topology(ctx)
	check(err)
	if topo.AttnTPSize != 2 || topo.DPSize != 2 || topo.PageSize != 64 || topo.FollowBootstrapRoom {
		t.Errorf("topology %+v", topo)
	}
	e, err := c.Rank(ctx, RankID{DP: 1, TP: 1})
	check(err)
	if e != (Endpoint{"10.0.0.7", 111}) {
		t.Errorf("rank at %v", e)
	}
	if _, err := c.Rank(ctx, RankID{DP: 2}); !errors.Is(err, nixlkv.ErrNoSuchRank) {
		t.Errorf("DP rank 2 of 2: %v", err)
	}
	check(c.RegisterDPRank(ctx, 7, 1))
	found, err := c.QueryDPRanks(ctx, []nixlkv.Room{6, 7, 8})
	check(err)
	if len(found) != 1 || found[7] != 1 {
		t.Errorf("DP ranks %v", found)
	}
}

func TestListen(t *testing.T) {
	for _, tc := range []struct{ listen, reach string }{
		{"127.0.0.1:0", "127.0.0.1"}, {"0.0.0.0:0", "127.0.0.1"}, {"[::1]:0", "::1"}, {"[::]:0", "::1"},
	} {
		t.Run(tc.listen, func(t *testing.T) {
			if strings.HasPrefix(tc.listen, "[") {
				hasIPv6(t)
			}
			s := listen(t, tc.listen)
			if e := s.Endpoint(); e.Host != tc.reach || e.Port == 0 {
				t.Errorf("endpoint %v", e)
			}
			c := newClient(t, s.Endpoint().String())
			if c.Addr() != s.Endpoint().String() {
				t.Errorf("client of %s", c.Addr())
			}
			useServer(t, c)
			// An address as it is bound reaches the server, too.
			if err := newClient(t, s.Addr().String()).Health(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestCloseAtOnce(t *testing.T) {
	for range 100 { // whether or not Serve has begun
		s, err := Listen("127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		if conn, err := net.Dial("tcp", s.Addr().String()); err == nil {
			_ = conn.Close()
			t.Fatal("still listening after Close")
		}
	}
}

// A wildcard opens its own family alone, as SGLang's does.
func TestListenOneFamily(t *testing.T) {
	hasIPv6(t)
	for _, tc := range []struct{ listen, other string }{{"0.0.0.0:0", "::1"}, {"[::]:0", "127.0.0.1"}} {
		s := listen(t, tc.listen)
		other := Endpoint{Host: tc.other, Port: s.Endpoint().Port}
		if conn, err := net.DialTimeout("tcp", other.String(), time.Second); err == nil {
			_ = conn.Close()
			t.Errorf("a server at %s answers at %s", tc.listen, other)
		}
	}
}

func TestListenRefuses(t *testing.T) {
	for _, addr := range []string{"", "127.0.0.1", "::1:8998"} {
		if _, err := Listen(addr); !errors.Is(err, nixlkv.ErrMalformed) {
			t.Errorf("%q: %v", addr, err)
		}
	}
	s := listen(t, "127.0.0.1:0")
	if _, err := Listen(s.Addr().String()); err == nil {
		t.Error("a port that is in use")
	}
}

func TestTLS(t *testing.T) {
	cert := httptest.NewTLSServer(http.NotFoundHandler()) // for its certificate
	defer cert.Close()
	roots := x509.NewCertPool()
	roots.AddCert(cert.Certificate())

	s := listen(t, "127.0.0.1:0", WithTLS(&tls.Config{Certificates: cert.TLS.Certificates}), WithToken("secret"))
	addr := s.Endpoint().String()
	useServer(t, newClient(t, addr, WithClientTLS(&tls.Config{RootCAs: roots}), WithClientToken("secret")))

	// What will not get better is not asked for again: these return long before the deadline.
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var status *StatusError
	_, err := newClient(t, addr, WithClientTLS(&tls.Config{RootCAs: roots})).Topology(ctx)
	if !errors.As(err, &status) || status.Code != http.StatusUnauthorized {
		t.Errorf("without the token: %v", err)
	}
	var untrusted *tls.CertificateVerificationError
	_, err = newClient(t, addr, WithClientTLS(&tls.Config{})).Topology(ctx)
	if !errors.As(err, &untrusted) || ctx.Err() != nil {
		t.Errorf("with an unknown certificate: %v", err)
	}
}

func TestServeAndClose(t *testing.T) {
	s := NewServer()
	if s.Addr() != nil || s.Endpoint() != (Endpoint{}) {
		t.Errorf("listening at %v before Serve", s.Addr())
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- s.Serve(ln) }()
	c := newClient(t, ln.Addr().String())
	if err := c.Health(t.Context()); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if err := s.Shutdown(ctx); err != nil {
		t.Errorf("Shutdown: %v", err)
	}
	if err := <-ended; err != nil {
		t.Errorf("Serve: %v", err)
	}
	for range 2 {
		if err := s.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	}
	again, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Serve(again); !errors.Is(err, nixlkv.ErrClosed) {
		t.Errorf("Serve after Close: %v", err)
	}
	if err := c.Health(ctx); !errors.Is(err, nixlkv.ErrPeerLost) {
		t.Errorf("Health after Close: %v", err)
	}
	// The handler itself still works for whoever embeds it.
	expect(t, s, "GET", "/health", "", 200, "OK")
}

// Shutdown ends at its deadline even while a request hangs.
func TestShutdownDeadline(t *testing.T) {
	s := listen(t, "127.0.0.1:0")
	conn, err := net.Dial("tcp", s.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := conn.Write([]byte("PUT /route HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\nExpect: 100-continue\r\n\r\n")); err != nil {
		t.Fatal(err)
	}
	// The server asks for the body, so the request is in progress.
	if _, err := conn.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.Shutdown(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("Shutdown: %v", err)
	}
}

// failingListener stands for a socket that the system takes away.
type failingListener struct{ net.Listener }

func (failingListener) Accept() (net.Conn, error) { return nil, errors.New("gone") }

func TestServeFails(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := NewServer()
	if err := s.Serve(failingListener{ln}); err == nil || !strings.Contains(err.Error(), "gone") {
		t.Errorf("Serve: %v", err)
	}
}
