package control

import (
	"fmt"
	"net/netip"
	"sync"
	"time"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/internal/trust"
)

// maxRefusedSources bounds the addresses that a refusedSources keeps.
const maxRefusedSources = 256

// refusedSources keeps, by address, why the last connection from there was refused.
type refusedSources struct {
	mu      sync.Mutex
	sources map[netip.Addr]refusedSource
}

type refusedSource struct {
	at  time.Time
	why string
}

// note keeps a refusal. Where there are too many addresses it replaces the one that was refused
// longest ago.
func (r *refusedSources) note(source netip.Addr, why string, now time.Time) {
	if source = trust.Canonical(source); !source.IsValid() {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.sources == nil {
		r.sources = map[netip.Addr]refusedSource{}
	}
	if _, known := r.sources[source]; !known && len(r.sources) >= maxRefusedSources {
		var oldest netip.Addr
		for a, s := range r.sources {
			if !oldest.IsValid() || s.at.Before(r.sources[oldest].at) {
				oldest = a
			}
		}
		delete(r.sources, oldest)
	}
	r.sources[source] = refusedSource{now, why}
}

// since gives the refusal of an address since a time, nil if there was none.
func (r *refusedSources) since(source netip.Addr, since time.Time) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	s, known := r.sources[trust.Canonical(source)]
	if !known || s.at.Before(since) {
		return nil
	}
	return fmt.Errorf("%w: a connection from %s was refused in its handshake: %s", nixlkv.ErrNotAllowed, source, s.why)
}
