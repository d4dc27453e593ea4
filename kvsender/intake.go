package kvsender

import (
	"net/netip"
	"sync"
	"time"

	"github.com/nixlkv/nixlkv/internal/trust"
)

// intake bounds how many new decodes one address may have taken up in a minute: each costs the
// loader up to seconds, and a name costs nothing. It is a bucket for each address, that holds
// as many as a minute's, and fills evenly.
type intake struct {
	each float64

	mu      sync.Mutex
	buckets map[netip.Prefix]*bucket
}

type bucket struct {
	left float64
	at   time.Time // when that was
}

const (
	intakePeriod = time.Minute
	// maxSources bounds the buckets. Addresses beyond share one.
	maxSources = 4096
)

func newIntake(each int) *intake {
	return &intake{each: float64(each), buckets: map[netip.Prefix]*bucket{}}
}

// take says whether an address may have one more taken up.
func (i *intake) take(source netip.Addr, now time.Time) bool {
	key := networkOf(source)
	i.mu.Lock()
	defer i.mu.Unlock()
	b := i.buckets[key]
	if b == nil {
		if len(i.buckets) >= maxSources && !i.sweep(now) {
			key = netip.Prefix{}
		}
		if b = i.buckets[key]; b == nil {
			b = &bucket{i.each, now}
			i.buckets[key] = b
		}
	}
	b.left, b.at = i.fill(b, now), now
	if b.left < 1 {
		return false
	}
	b.left--
	return true
}

// fill gives what is in a bucket now.
func (i *intake) fill(b *bucket, now time.Time) float64 {
	return min(i.each, b.left+i.each*max(0, now.Sub(b.at).Seconds())/intakePeriod.Seconds())
}

// sweep forgets the buckets that are full again, and says whether there were any.
func (i *intake) sweep(now time.Time) bool {
	before := len(i.buckets)
	for key, b := range i.buckets {
		if i.fill(b, now) >= i.each {
			delete(i.buckets, key)
		}
	}
	return len(i.buckets) < before
}

// networkOf gives what counts as one address: of IPv6 a /64, for whoever has one has all of it.
func networkOf(a netip.Addr) netip.Prefix {
	bits := 64
	if a = trust.Canonical(a); a.Is4() {
		bits = 32
	}
	p, _ := a.Prefix(bits) // of the zero Addr it is the zero Prefix
	return p
}
