package trust

import (
	"errors"
	"net/netip"
	"testing"

	"github.com/nixlkv/nixlkv"
	"pgregory.net/rapid"
)

func list(t *testing.T, networks ...string) List {
	t.Helper()
	var p []netip.Prefix
	for _, s := range networks {
		p = append(p, netip.MustParsePrefix(s))
	}
	l, err := NewList(p...)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func TestAllows(t *testing.T) {
	l := list(t, "10.1.0.0/16", "192.0.2.7/32", "fd00::/8", "fe80::/10", "::ffff:198.51.100.0/120")
	for s, want := range map[string]bool{
		"10.1.2.3": true, "::ffff:10.1.2.3": true, "10.2.0.1": false,
		"192.0.2.7": true, "192.0.2.8": false, "198.51.100.9": true, "198.51.101.9": false,
		"fd12::1": true, "2001:db8::1": false, "fe80::1%eth0": true, "::1": false, "127.0.0.1": false,
	} {
		if got := l.Allows(netip.MustParseAddr(s)); got != want {
			t.Errorf("%s: %v", s, got)
		}
	}
	if l.Allows(netip.Addr{}) {
		t.Error("nobody is in a network")
	}
	if zero := (List{}); !zero.Everywhere() || !zero.Allows(netip.MustParseAddr("203.0.113.1")) || !zero.Allows(netip.Addr{}) {
		t.Error("the zero List leaves somebody out")
	}
	// All of IPv4 is none of IPv6, and the other way round.
	if l := list(t, "0.0.0.0/0"); l.Everywhere() || l.Allows(netip.IPv6Loopback()) || !l.Allows(netip.MustParseAddr("::ffff:8.8.8.8")) {
		t.Error("0.0.0.0/0 is not all of IPv4")
	}
	if l := list(t, "::/0"); l.Allows(netip.MustParseAddr("8.8.8.8")) || !l.Allows(netip.IPv6Loopback()) {
		t.Error("::/0 is not all of IPv6")
	}
	if _, err := NewList(netip.Prefix{}); !errors.Is(err, nixlkv.ErrMalformed) {
		t.Error(err)
	}
}

func TestCheck(t *testing.T) {
	source := netip.MustParseAddr("::ffff:10.1.2.3")
	for _, c := range []struct {
		p     Policy
		named string
		ok    bool
	}{
		{Policy{}, "worker-7.example", true},
		{Policy{}, "203.0.113.1", true},
		{Policy{MatchSource: true}, "10.1.2.3", true},
		{Policy{MatchSource: true}, "10.1.2.4", false},
		{Policy{MatchSource: true}, "worker-7.example", false},
		{Policy{Allowed: list(t, "10.0.0.0/8")}, "10.9.9.9", true},
		{Policy{Allowed: list(t, "10.0.0.0/8")}, "worker-7.example", false},
		{Policy{Allowed: list(t, "10.0.0.0/8")}, "11.9.9.9", false},
		{Policy{list(t, "10.0.0.0/8"), true}, "10.9.9.9", false},
		{Policy{list(t, "10.0.0.0/8"), true}, "10.1.2.3", true},
	} {
		if err := c.p.Check(c.named, source); (err == nil) != c.ok || err != nil && !errors.Is(err, nixlkv.ErrNotAllowed) {
			t.Errorf("%+v, %s: %v", c.p, c.named, err)
		}
	}
	// A source that is not known matches nothing.
	if err := (Policy{MatchSource: true}).Check("10.1.2.3", netip.Addr{}); !errors.Is(err, nixlkv.ErrNotAllowed) {
		t.Error(err)
	}
}

// An address is allowed exactly if one of the networks contains it, whichever way either is
// written.
func TestPropertyAllows(t *testing.T) {
	addr := rapid.Custom(func(t *rapid.T) netip.Addr {
		if rapid.Bool().Draw(t, "four") {
			a := netip.AddrFrom4([4]byte(rapid.SliceOfN(rapid.SampledFrom([]byte{0, 1, 10, 255}), 4, 4).Draw(t, "bytes")))
			if rapid.Bool().Draw(t, "as six") {
				return netip.AddrFrom16(a.As16())
			}
			return a
		}
		return netip.AddrFrom16([16]byte(rapid.SliceOfN(rapid.SampledFrom([]byte{0, 1, 0xfd}), 16, 16).Draw(t, "bytes")))
	})
	rapid.Check(t, func(t *rapid.T) {
		var networks []netip.Prefix
		for range rapid.IntRange(1, 4).Draw(t, "networks") {
			a := addr.Draw(t, "network")
			networks = append(networks, netip.PrefixFrom(a, rapid.IntRange(0, a.BitLen()).Draw(t, "bits")))
		}
		l, err := NewList(networks...)
		if err != nil {
			t.Fatal(err)
		}
		a := addr.Draw(t, "address")
		want := false
		for _, p := range networks {
			if p.Addr().Is4In6() {
				if p.Bits() < 96 {
					continue // a network of IPv6, which a's IPv4 form is not in
				}
				p = netip.PrefixFrom(p.Addr().Unmap(), p.Bits()-96)
			}
			want = want || p.Contains(a.Unmap())
		}
		for _, p := range networks { // networks of IPv6 proper that were left out above
			want = want || p.Addr().Is4In6() && p.Bits() < 96 && !a.Is4In6() && p.Masked().Contains(a)
		}
		if got := l.Allows(a); got != want {
			t.Fatalf("%v in %v: %v", a, networks, got)
		}
	})
}
