package bootstrap

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"testing"
	"time"

	"github.com/nixlkv/nixlkv"
)

func networks(texts ...string) (out []netip.Prefix) {
	for _, s := range texts {
		out = append(out, netip.MustParsePrefix(s))
	}
	return out
}

func TestAllowedClients(t *testing.T) {
	for _, c := range []struct {
		allowed []netip.Prefix
		remote  string
		path    string
		want    int
	}{
		{nil, "192.0.2.1:99", "/route", http.StatusBadRequest},
		{networks("192.0.2.0/24"), "192.0.2.1:99", "/route", http.StatusBadRequest},
		{networks("192.0.2.0/24"), "[::ffff:192.0.2.1]:99", "/route", http.StatusBadRequest},
		{networks("10.0.0.0/8", "fd00::/8"), "[fd00::1]:99", "/route", http.StatusBadRequest},
		{networks("192.0.2.0/24"), "192.0.3.1:99", "/route", http.StatusForbidden},
		{networks("192.0.2.0/24"), "192.0.3.1:99", "/register_dp_rank", http.StatusForbidden},
		{networks("192.0.2.0/24"), "192.0.3.1:99", "/health", http.StatusOK},
		{networks("0.0.0.0/0"), "", "/route", http.StatusForbidden},
		{networks("0.0.0.0/0"), "@", "/route", http.StatusForbidden},
		{[]netip.Prefix{{}}, "192.0.2.1:99", "/route", http.StatusForbidden},
	} {
		s := NewServer(WithAllowedClients(c.allowed...))
		r := httptest.NewRequest(http.MethodGet, c.path, nil)
		r.RemoteAddr = c.remote
		// What a client says of itself counts for nothing.
		r.Header.Set("X-Forwarded-For", "192.0.2.1")
		w := httptest.NewRecorder()
		s.ServeHTTP(w, r)
		if w.Code != c.want {
			t.Errorf("%v: %s from %q: %d, want %d", c.allowed, c.path, c.remote, w.Code, c.want)
		}
	}
	// A token is asked for besides.
	s := NewServer(WithAllowedClients(networks("192.0.2.0/24")...), WithToken("secret"))
	r := httptest.NewRequest(http.MethodGet, "/route", nil)
	r.RemoteAddr = "192.0.2.1:99"
	w := httptest.NewRecorder()
	if s.ServeHTTP(w, r); w.Code != http.StatusUnauthorized {
		t.Errorf("without a token: %d", w.Code)
	}
}

// A server elsewhere is not connected to, nor asked again.
func TestAllowedServers(t *testing.T) {
	s, err := Listen("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	for _, addr := range []string{s.Endpoint().String(), Endpoint{Host: "localhost", Port: s.Endpoint().Port}.String()} {
		c, err := NewClient(addr, WithAllowedServers(networks("127.0.0.1/32")...))
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Health(t.Context()); err != nil {
			t.Errorf("%s: %v", addr, err)
		}
		c.Close()
		if c, err = NewClient(addr, WithAllowedServers(networks("10.0.0.0/8")...), WithReadyTimeout(time.Hour)); err != nil {
			t.Fatal(err)
		}
		if _, err := c.Topology(t.Context()); !errors.Is(err, nixlkv.ErrNotAllowed) {
			t.Errorf("%s: %v", addr, err)
		}
		c.Close()
	}
	if _, err := NewClient("127.0.0.1:1", WithAllowedServers(netip.Prefix{})); !errors.Is(err, nixlkv.ErrMalformed) {
		t.Error(err)
	}
}
