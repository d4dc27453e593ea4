package bootstrap

import (
	"errors"
	"net/netip"
	"testing"

	"github.com/nixlkv/nixlkv"
	"pgregory.net/rapid"
)

func TestParseEndpoint(t *testing.T) {
	for _, tc := range []struct {
		in        string
		want      Endpoint
		reachable string
		tcp       string
		url       string
		network   string
	}{
		{"10.0.0.7:8998", Endpoint{"10.0.0.7", 8998}, "10.0.0.7:8998", "tcp://10.0.0.7:8998", "http://10.0.0.7:8998", "tcp4"},
		{"[::1]:8998", Endpoint{"::1", 8998}, "[::1]:8998", "tcp://[::1]:8998", "http://[::1]:8998", "tcp6"},
		{"0.0.0.0:1", Endpoint{"0.0.0.0", 1}, "127.0.0.1:1", "tcp://0.0.0.0:1", "http://0.0.0.0:1", "tcp4"},
		{"[::]:65535", Endpoint{"::", 65535}, "[::1]:65535", "tcp://[::]:65535", "http://[::]:65535", "tcp6"},
		{"[::ffff:0.0.0.0]:5", Endpoint{"::ffff:0.0.0.0", 5}, "127.0.0.1:5", "tcp://[::ffff:0.0.0.0]:5",
			"http://[::ffff:0.0.0.0]:5", "tcp4"},
		{"[fe80::1%eth0]:9", Endpoint{"fe80::1%eth0", 9}, "[fe80::1%eth0]:9", "tcp://[fe80::1%eth0]:9",
			"http://[fe80::1%25eth0]:9", "tcp6"},
		{"prefill-0.svc:8998", Endpoint{"prefill-0.svc", 8998}, "prefill-0.svc:8998", "tcp://prefill-0.svc:8998",
			"http://prefill-0.svc:8998", "tcp"},
	} {
		got, err := ParseEndpoint(tc.in)
		if err != nil || got != tc.want {
			t.Errorf("ParseEndpoint(%q) = %+v, %v, want %+v", tc.in, got, err, tc.want)
			continue
		}
		u := got.url("http")
		for _, x := range []struct{ what, got, want string }{
			{"String", got.String(), tc.in}, {"Reachable", got.Reachable().String(), tc.reachable},
			{"TCP", got.TCP(), tc.tcp}, {"url", u.String(), tc.url}, {"network", got.network(), tc.network},
		} {
			if x.got != x.want {
				t.Errorf("%s of %q is %q, want %q", x.what, tc.in, x.got, x.want)
			}
		}
	}
}

func TestParseEndpointRefuses(t *testing.T) {
	for _, in := range []string{
		"", ":", ":8998", "10.0.0.7", "10.0.0.7:", "10.0.0.7:0", "10.0.0.7:65536", "10.0.0.7:-1", "10.0.0.7:http",
		"::1:8998", "[::1]", "[::1]8998", "[::1", "a/b:1", "a b:1", "user@host:1", "h?x:1", "h#x:1", "[fe80::1%a/b]:1",
		"http://host:1", "host:1/path", "hést:1",
	} {
		if e, err := ParseEndpoint(in); !errors.Is(err, nixlkv.ErrMalformed) {
			t.Errorf("ParseEndpoint(%q) = %+v, %v, want ErrMalformed", in, e, err)
		}
	}
}

func TestEndpointRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var host string
		if rapid.Bool().Draw(t, "v6") {
			host = netip.AddrFrom16([16]byte(rapid.SliceOfN(rapid.Byte(), 16, 16).Draw(t, "ip"))).String()
		} else {
			host = netip.AddrFrom4([4]byte(rapid.SliceOfN(rapid.Byte(), 4, 4).Draw(t, "ip"))).String()
		}
		e := Endpoint{Host: host, Port: rapid.IntRange(1, maxPort).Draw(t, "port")}
		got, err := ParseEndpoint(e.String())
		if err != nil || got != e {
			t.Fatalf("ParseEndpoint(%q) = %+v, %v", e, got, err)
		}
		if r := e.Reachable(); r.Reachable() != r {
			t.Fatalf("Reachable of %+v changes when repeated", e)
		}
	})
}
