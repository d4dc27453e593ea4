package control

import (
	"errors"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/nixlkv/nixlkv"
)

func TestRefusedSources(t *testing.T) {
	var r refusedSources
	first := netip.MustParseAddr("192.0.2.1")
	begin := time.Now()
	r.note(netip.Addr{}, "nobody's", begin)
	if r.since(first, time.Time{}) != nil || r.since(netip.Addr{}, time.Time{}) != nil {
		t.Error("refused from the beginning")
	}
	r.note(first, "old", begin)
	r.note(first, "a reason", begin.Add(time.Second))
	if err := r.since(netip.MustParseAddr("::ffff:192.0.2.1"), begin); !errors.Is(err, nixlkv.ErrNotAllowed) || !strings.Contains(err.Error(), "a reason") {
		t.Error(err)
	}
	if err := r.since(first, begin.Add(2*time.Second)); err != nil {
		t.Error(err)
	}
	a := netip.MustParseAddr("10.0.0.0")
	for i := range 2 * maxRefusedSources {
		a = a.Next()
		r.note(a, "flood", begin.Add(time.Duration(i+2)*time.Second))
	}
	if len(r.sources) != maxRefusedSources || r.since(first, begin) != nil || r.since(a, begin) == nil {
		t.Errorf("%d sources are kept, of the first %v, of the last %v", len(r.sources), r.since(first, begin), r.since(a, begin))
	}
}
