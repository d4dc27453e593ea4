package interop

import (
	"strings"
	"testing"
	"time"

	"github.com/nixlkv/nixlkv/internal/testkit/netns"
	"github.com/nixlkv/nixlkv/nixl"
)

// loss is a way to lose packets.
type loss struct {
	name      string
	cut, mend func(*testing.T, *netns.Switched)
}

func losses() []loss {
	return []loss{
		{"in the middle",
			func(t *testing.T, n *netns.Switched) { n.Unplug(t) },
			func(t *testing.T, n *netns.Switched) { n.Plug(t) }},
		{"from the decode",
			func(t *testing.T, n *netns.Switched) { n.FindNear(t, netns.NobodyMAC) },
			func(t *testing.T, n *netns.Switched) { n.FindNear(t, netns.NearMAC) }},
		{"to the decode",
			func(t *testing.T, n *netns.Switched) { n.FindFar(t, netns.NobodyMAC) },
			func(t *testing.T, n *netns.Switched) { n.FindFar(t, netns.FarMAC) }},
		{"the far link is down",
			func(t *testing.T, n *netns.Switched) { n.Far.LinkDown(t) },
			func(t *testing.T, n *netns.Switched) {
				n.Far.LinkUp(t)
				n.FindNear(t, netns.NearMAC) // which went with the link
			}},
	}
}

// newPairs starts a prefill, a decode far away and one beside it, and has a room at each.
func newPairs(t *testing.T, n *netns.Switched, engine nixl.Kind, params, heartbeat string) (far, near *pair) {
	t.Helper()
	env, by := needEngine(t, engine), golang(engine)
	at := func(h *netns.Host) []rankConfig {
		c := rankConfig{KV: regions(2, 128<<10)} // more than a packet
		c.host, c.Host, c.HostIP = h, h.IP, h.IP
		return oneRank(c.env(envNIXLParams, strings.ReplaceAll(params, "IP", h.IP)).env(envHeartbeat, heartbeat).env(envReleaseTimeout, "2").
			env("UCX_TLS", "tcp").env("UCX_NET_DEVICES", netns.Device)) // they share a host, and with it memory
	}
	s := &setup{name: "far", prefill: at(n.Near), decode: at(n.Far)}
	far = startPair(t, env, s, by, by)
	near = far.prefill.startDecode(t, &setup{name: "near", prefill: s.prefill, decode: at(n.Near)}, by)
	far.succeeds(t, aRoom(1, 0, 0))
	near.succeeds(t, aRoom(2, 0, 0))
	return far, near
}

// TestShortLoss: packets are lost in the middle of a room, for less than the bounds by which either
// side would give the other up. Nobody notices: TCP sends them again.
func TestShortLoss(t *testing.T) {
	for engine, params := range map[nixl.Kind]string{nixl.Embedded: `{"tcp_listen": "IP:0", "tcp_timeout": "30s"}`, nixl.Native: "{}"} {
		t.Run(engine.String(), func(t *testing.T) {
			n := netns.NewSwitched(t, "unshare")
			p, q := newPairs(t, n, engine, params, "60")
			for i, l := range losses() {
				c := aRoom(uint64(10*(i+1)), 10, 500*time.Millisecond)
				p.begin(t, c)
				p.bootstrapped(t, deadline(t), &c.rooms[0])
				l.cut(t, n)
				q.succeeds(t, aRoom(uint64(10*(i+1)+1), 10, 600*time.Millisecond)) // its second chunk comes after the other's
				l.mend(t, n)
				checkRooms(t, p, c)
				if t.Failed() {
					t.Fatalf("loss %s", l.name)
				}
			}
			q.stopDecode(t)
			p.stop(t)
		})
	}
}

// TestSilentLoss: between two hosts packets are lost in the middle of a room, in both directions or
// in one, and neither end is told. The decode fails the room by its heartbeat, and the prefill on
// the embedded engine by what is not acknowledged; UCX does not settle the write, and the room
// stays. The decode beside the prefill goes on all the time, and the far one again when nothing is
// lost any more.
func TestSilentLoss(t *testing.T) {
	for _, c := range []struct {
		engine nixl.Kind
		params string
		losses []loss
	}{
		{nixl.Embedded, `{"tcp_listen": "IP:0", "tcp_timeout": "2s"}`, losses()},
		{nixl.Native, "{}", losses()[:2]}, // it does nothing about any, and takes long to come back
	} {
		t.Run(c.engine.String(), func(t *testing.T) {
			n := netns.NewSwitched(t, "unshare")
			p, q := newPairs(t, n, c.engine, c.params, "2")
			for i, l := range c.losses {
				if !t.Run(l.name, func(t *testing.T) { testLoss(t, n, l, p, q, c.engine, uint64(1000*(i+1))) }) {
					return
				}
			}
			q.stopDecode(t)
			if c.engine == nixl.Embedded { // else a write may be in flight yet
				p.stop(t)
			}
		})
	}
}

// testLoss loses packets to and from the decode of p, far away, in the middle of a room. q is the
// decode that is not affected. The numbers of rooms begin with first.
func testLoss(t *testing.T, n *netns.Switched, l loss, p, q *pair, engine nixl.Kind, first uint64) {
	ctx := deadline(t)
	lost := aRoom(first, 20, 500*time.Millisecond)
	p.begin(t, lost)
	p.bootstrapped(t, ctx, &lost.rooms[0])
	l.cut(t, n)
	cut := time.Now()
	for i := range 5 {
		q.succeeds(t, aRoom(first+1+uint64(i), int32(20+2*i), 0))
	}
	notices := p.decode
	if engine == nixl.Embedded {
		notices = p.ranks()
	}
	for _, x := range notices {
		got := done(t, ctx, x, first)
		t.Logf("%s: %s after %v", x.name, got.Status, time.Since(cut).Round(time.Millisecond))
		if got.Status != "Failed" || !strings.Contains(got.message, "peer gone") {
			t.Errorf("%s: %s %s", x.name, got.Status, got.message)
		}
	}
	q.succeeds(t, aRoom(first+10, 40, 0))
	l.mend(t, n)
	// The first rooms may meet what is left of the broken connections.
	for number := first + 20; ; number++ {
		c := aRoom(number, 30, 0)
		p.begin(t, c)
		got := p.finish(t, c)
		if got.Decode[0][0].Status == "Success" && got.Prefill[0][0].Status == "Success" {
			break
		}
		if number == first+50 {
			t.Fatalf("the decode does not come back with the network: %v", got)
		}
	}
	p.succeeds(t, aRoom(first+100, 32, 0))
	q.succeeds(t, aRoom(first+101, 44, 0))
}
