package control

import (
	"errors"
	"testing"

	"github.com/nixlkv/nixlkv"
)

func TestNewEndpoint(t *testing.T) {
	for _, tc := range []struct {
		ip   string
		port int
		want string // empty: refused
	}{
		{"10.0.0.1", 5000, "tcp://10.0.0.1:5000"},
		{"127.0.0.1", 1, "tcp://127.0.0.1:1"},
		{"::1", 65535, "tcp://[::1]:65535"},
		{"[::1]", 5000, "tcp://[::1]:5000"},
		{"0:0:0:0:0:0:0:1", 5000, "tcp://[::1]:5000"},
		{"::ffff:10.0.0.1", 5000, "tcp://10.0.0.1:5000"},
		{"fe80::1%eth0", 5000, "tcp://[fe80::1%eth0]:5000"},
		{"10.0.0.1", 0, ""},
		{"10.0.0.1", 65536, ""},
		{"10.0.0.1", -1, ""},
		{"", 5000, ""},
		{"[10.0.0.1]", 5000, ""},
		{"[::1", 5000, ""},
		{"::1]", 5000, ""},
		{"prefill-0.svc", 5000, ""},
		{"localhost", 5000, ""},
		{"*", 5000, ""},
		{"10.0.0.1;inproc://x", 5000, ""},
		{"0.0.0.0", 5000, ""},
		{"::", 5000, ""},
		{"224.0.0.1", 5000, ""},
		{"ff02::1", 5000, ""},
		{"fe80::1%a\x00b", 5000, ""},
		{"fe80::1%a]:1", 5000, ""},
	} {
		e, err := NewEndpoint(tc.ip, tc.port)
		if tc.want == "" {
			if !errors.Is(err, nixlkv.ErrMalformed) || e.IsValid() {
				t.Errorf("%q, %d: %v, %v", tc.ip, tc.port, e, err)
			}
			continue
		}
		if err != nil || e.String() != tc.want {
			t.Errorf("%q, %d: %v, %v", tc.ip, tc.port, e, err)
		}
		if back, err := ParseEndpoint(tc.want); err != nil || back != e {
			t.Errorf("%q: parsed as %v, %v", tc.want, back, err)
		}
	}
}

func TestParseEndpointRefuses(t *testing.T) {
	for _, s := range []string{
		"", "tcp://", "10.0.0.1:5000", "ipc:///tmp/x", "tcp://10.0.0.1", "tcp://10.0.0.1:", "tcp://10.0.0.1:x",
		"tcp://::1:5000", "tcp://[::1]", "tcp://*:5000", "tcp://10.0.0.1:+5", "tcp://10.0.0.1:70000", "tcp://:5000",
	} {
		if e, err := ParseEndpoint(s); !errors.Is(err, nixlkv.ErrMalformed) {
			t.Errorf("%q: %v, %v", s, e, err)
		}
	}
}

func FuzzParseEndpoint(f *testing.F) {
	for _, s := range []string{"tcp://10.0.0.1:5000", "tcp://[::1]:5000", "tcp://[fe80::1%eth0]:1", "tcp://[::ffff:1.2.3.4]:9", "tcp://*:*"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		e, err := ParseEndpoint(s)
		if err != nil {
			if !errors.Is(err, nixlkv.ErrMalformed) || e.IsValid() {
				t.Fatalf("%v, %v", e, err)
			}
			return
		}
		text := e.String()
		for i := range len(text) {
			if text[i] <= ' ' || text[i] >= 0x7f {
				t.Fatalf("%q has byte %#x", text, text[i])
			}
		}
		if back, err := ParseEndpoint(text); err != nil || back != e {
			t.Fatalf("%q became %q: %v", s, text, err)
		}
		a := e.AddrPort()
		if again, err := NewEndpoint(a.Addr().String(), int(a.Port())); err != nil || again != e {
			t.Fatalf("%v became %v: %v", e, again, err)
		}
	})
}
