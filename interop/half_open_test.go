package interop

import (
	"strings"
	"testing"
	"time"

	"github.com/nixlkv/nixlkv/internal/testkit/netns"
	"github.com/nixlkv/nixlkv/nixl"
)

// TestHalfOpen: the network to a decode on another host loses everything in the middle of a room.
// No connection ends by that. The decode finds out by its heartbeat, and the embedded engine by what
// is not acknowledged, at the prefill. UCX does not for as long as TCP goes on trying: the write
// stays in flight, and the decode is not told that its pages are free. The decode beside the prefill
// goes on, and the far one again when the network does.
func TestHalfOpen(t *testing.T) {
	t.Run(nixl.Embedded.String(), func(t *testing.T) {
		testHalfOpen(t, nixl.Embedded, `{"tcp_listen": "IP:0", "tcp_timeout": "2s"}`)
	})
	t.Run(nixl.Native.String(), func(t *testing.T) { testHalfOpen(t, nixl.Native, "{}") })
}

func testHalfOpen(t *testing.T, engine nixl.Kind, params string) {
	env, by := needEngine(t, engine), golang(engine)
	n := netns.New(t, "unshare")
	at := func(c rankConfig, h *netns.Host) rankConfig {
		c.host, c.Host, c.HostIP = h, h.IP, h.IP
		return c.env(envNIXLParams, strings.ReplaceAll(params, "IP", h.IP)).env(envHeartbeat, "2").env(envReleaseTimeout, "2").
			env("UCX_TLS", "tcp").env("UCX_NET_DEVICES", netns.Device) // they share a host, and with it memory
	}
	base := plain().prefill[0]
	far := &setup{name: "far", prefill: oneRank(at(base, n.Near)), decode: oneRank(at(base, n.Far))}
	near := &setup{name: "near", prefill: far.prefill, decode: oneRank(at(base, n.Near))}
	p := startPair(t, env, far, by, by)
	q := p.prefill.startDecode(t, near, by)
	p.succeeds(t, aRoom(1, 0, 0))
	q.succeeds(t, aRoom(2, 0, 0))
	ctx := deadline(t)
	lost := aRoom(3, 10, 500*time.Millisecond)
	p.begin(t, lost)
	p.bootstrapped(t, ctx, &lost.rooms[0])
	n.Far.RemoveIP(t)
	for i := range 10 {
		q.succeeds(t, aRoom(uint64(100+i), int32(10+2*i), 0))
	}
	notices := p.decode
	if engine == nixl.Embedded {
		notices = p.ranks()
	}
	for _, x := range notices {
		got := done(t, ctx, x, 3)
		if got.Status != "Failed" || !strings.Contains(got.message, "peer gone") {
			t.Errorf("%s: %s %s", x.name, got.Status, got.message)
		}
	}
	released, err := p.decode[0].takeOf(ctx, "released", &lost.rooms[0].number)
	if err != nil || released.Confirmed {
		t.Errorf("the release of pages that nobody can answer for: %+v, %v", released, err)
	}
	q.succeeds(t, aRoom(200, 40, 0))
	n.Far.AddIP(t)
	// The first rooms may meet what is left of the broken connections.
	for number := uint64(300); ; number++ {
		c := aRoom(number, 20, 0)
		p.begin(t, c)
		got := p.finish(t, c)
		if got.Decode[0][0].Status == "Success" && got.Prefill[0][0].Status == "Success" {
			break
		}
		if number == 330 {
			t.Fatalf("the decode does not come back with the network: %v", got)
		}
	}
	p.succeeds(t, aRoom(400, 30, 0))
	q.stopDecode(t)
	if engine == nixl.Embedded { // else the write may be in flight yet
		p.stop(t)
	}
}
