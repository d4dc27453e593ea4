package kvsender

import (
	"net/netip"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func TestIntake(t *testing.T) {
	start := time.Now()
	i := newIntake(3)
	at := func(addr string, after time.Duration) bool {
		return i.take(netip.MustParseAddr(addr), start.Add(after))
	}
	for n := range 3 {
		if !at("10.0.0.1", 0) {
			t.Fatalf("take %d refused", n)
		}
	}
	if at("10.0.0.1", 0) || at("::ffff:10.0.0.1", time.Second) {
		t.Error("a fourth was taken")
	}
	if !at("10.0.0.2", 0) {
		t.Error("another address was refused")
	}
	if !at("10.0.0.1", 21*time.Second) || at("10.0.0.1", 22*time.Second) {
		t.Error("it does not fill evenly")
	}
	// Of IPv6 all of a /64 is one address, and the next one another.
	for n := range 3 {
		if !at("2001:db8::"+string(rune('1'+n)), 0) {
			t.Fatalf("take %d refused", n)
		}
	}
	if at("2001:db8::9", 0) || !at("2001:db8:0:1::9", 0) {
		t.Error("not a /64")
	}
	if !i.take(netip.Addr{}, start) {
		t.Error("no address")
	}
}

// Whatever comes, an address gets no more than a bucket and what fills it, and the table is
// bounded.
func TestPropertyIntake(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		each := rapid.IntRange(1, 20).Draw(t, "each")
		i, now := newIntake(each), time.Now()
		start, taken := now, map[byte]int{}
		for range rapid.IntRange(1, 200).Draw(t, "steps") {
			now = now.Add(time.Duration(rapid.IntRange(-1000, 5000).Draw(t, "pause")) * time.Millisecond)
			a := rapid.Byte().Draw(t, "address") % 3
			if i.take(netip.AddrFrom4([4]byte{10, 0, 0, a}), now) {
				taken[a]++
			}
		}
		// The clock may go back, and forth again: what it gives is bounded by its way forth.
		for a, n := range taken {
			if most := each + each*int(200*5*time.Second/intakePeriod+1); n > most {
				t.Fatalf("address %d: %d taken of %d in %v", a, n, each, now.Sub(start))
			}
		}
	})
}

func TestIntakeTableIsBounded(t *testing.T) {
	i, now := newIntake(1), time.Now()
	for n := range maxSources + 1000 {
		i.take(netip.AddrFrom4([4]byte{10, byte(n >> 16), byte(n >> 8), byte(n)}), now)
	}
	if len(i.buckets) > maxSources+1 {
		t.Errorf("%d buckets", len(i.buckets))
	}
	if i.take(netip.MustParseAddr("192.0.2.1"), now) {
		t.Error("those beyond do not share one")
	}
	if !i.take(netip.MustParseAddr("192.0.2.2"), now.Add(2*intakePeriod)) || len(i.buckets) != 1 {
		t.Errorf("%d buckets after a while", len(i.buckets))
	}
}
