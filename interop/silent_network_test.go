package interop

import (
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/nixlkv/nixlkv/nixl"
)

// silentNetwork is two hosts that meet at a switch in a third namespace. What is lost there, or
// sent to an Ethernet address that nobody has, is lost without a sign: both ends keep their links,
// their addresses and routes, and know each other's Ethernet addresses for good, so that no
// address resolution fails either.
type silentNetwork struct {
	network
	between string // a process in the namespace of the switch
}

const (
	nearMAC   = "02:00:00:00:00:01"
	farMAC    = "02:00:00:00:00:02"
	nobodyMAC = "02:00:00:00:00:99"
)

func newSilentNetwork(t *testing.T) *silentNetwork {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("skip: needs root, to make network namespaces")
	}
	for _, tool := range []string{"ip", "nsenter", "unshare"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skipf("skip: needs %s (iproute2, util-linux), to make network namespaces", tool)
		}
	}
	n := &silentNetwork{network{newNamespace(t), newNamespace(t)}, newNamespace(t)}
	if out, err := exec.Command("nsenter", "-t", n.between, "--net", "ip", "link", "add", "name", "switch", "type", "bridge").CombinedOutput(); err != nil {
		t.Skipf("skip: needs a kernel that has Ethernet bridges: %v: %s", err, out)
	}
	in(t, n.between, "ip", "link", "set", "switch", "up")
	for _, end := range []struct{ where, port, ip, mac string }{{n.near, "near", nearIP, nearMAC}, {n.far, "far", farIP, farMAC}} {
		run(t, "ip", "link", "add", cable, "netns", end.where, "type", "veth", "peer", "name", end.port, "netns", n.between)
		in(t, n.between, "ip", "link", "set", end.port, "master", "switch")
		in(t, n.between, "ip", "link", "set", end.port, "up")
		in(t, end.where, "ip", "link", "set", cable, "address", end.mac)
		in(t, end.where, "ip", "addr", "add", end.ip+"/24", "dev", cable)
		in(t, end.where, "ip", "link", "set", cable, "up")
		in(t, end.where, "ip", "link", "set", "lo", "up")
	}
	for _, where := range []string{n.near, n.far} {
		waitUp(t, where)
	}
	n.findNear(t, nearMAC)
	n.findFar(t, farMAC)
	return n
}

// findNear says where what the far host sends goes, and findFar where what the near one does.
func (n *silentNetwork) findNear(t *testing.T, mac string) { neighbour(t, n.far, nearIP, mac) }
func (n *silentNetwork) findFar(t *testing.T, mac string)  { neighbour(t, n.near, farIP, mac) }

func neighbour(t *testing.T, where, ip, mac string) {
	t.Helper()
	in(t, where, "ip", "neigh", "replace", ip, "lladdr", mac, "dev", cable, "nud", "permanent")
}

// loss is a way to lose packets.
type loss struct {
	name      string
	cut, mend func(*testing.T, *silentNetwork)
}

func losses() []loss {
	return []loss{
		{"in the middle",
			func(t *testing.T, n *silentNetwork) { in(t, n.between, "ip", "link", "set", "far", "nomaster") },
			func(t *testing.T, n *silentNetwork) { in(t, n.between, "ip", "link", "set", "far", "master", "switch") }},
		{"from the decode",
			func(t *testing.T, n *silentNetwork) { n.findNear(t, nobodyMAC) },
			func(t *testing.T, n *silentNetwork) { n.findNear(t, nearMAC) }},
		{"to the decode",
			func(t *testing.T, n *silentNetwork) { n.findFar(t, nobodyMAC) },
			func(t *testing.T, n *silentNetwork) { n.findFar(t, farMAC) }},
		{"the far link is down",
			func(t *testing.T, n *silentNetwork) { in(t, n.far, "ip", "link", "set", cable, "down") },
			func(t *testing.T, n *silentNetwork) {
				in(t, n.far, "ip", "link", "set", cable, "up")
				n.findNear(t, nearMAC) // which went with the link
			}},
	}
}

// newPairs starts a prefill, a decode far away and one beside it, and has a room at each.
func (n *silentNetwork) newPairs(t *testing.T, engine nixl.Kind, params, heartbeat string) (far, near *pair) {
	t.Helper()
	env, by := needEngine(t, engine), golang(engine)
	at := func(where, ip string) []rankConfig {
		c := rankConfig{KV: regions(2, 128<<10)} // more than a packet
		c.network, c.Host, c.HostIP = where, ip, ip
		return oneRank(c.env(envNIXLParams, strings.ReplaceAll(params, "IP", ip)).env(envHeartbeat, heartbeat).env(envReleaseTimeout, "2").
			env("UCX_TLS", "tcp").env("UCX_NET_DEVICES", cable)) // they share a host, and with it memory
	}
	s := &setup{name: "far", prefill: at(n.near, nearIP), decode: at(n.far, farIP)}
	far = startPair(t, env, s, by, by)
	near = far.prefill.startDecode(t, &setup{name: "near", prefill: s.prefill, decode: at(n.near, nearIP)}, by)
	far.succeeds(t, aRoom(1, 0, 0))
	near.succeeds(t, aRoom(2, 0, 0))
	return far, near
}

// TestShortLoss: packets are lost in the middle of a room, for less than the bounds by which either
// side would give the other up. Nobody notices: TCP sends them again.
func TestShortLoss(t *testing.T) {
	for engine, params := range map[nixl.Kind]string{nixl.Embedded: `{"tcp_listen": "IP:0", "tcp_timeout": "30s"}`, nixl.Native: "{}"} {
		t.Run(engine.String(), func(t *testing.T) {
			n := newSilentNetwork(t)
			p, q := n.newPairs(t, engine, params, "60")
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
			n := newSilentNetwork(t)
			p, q := n.newPairs(t, c.engine, c.params, "2")
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
func testLoss(t *testing.T, n *silentNetwork, l loss, p, q *pair, engine nixl.Kind, first uint64) {
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
		if got.Status != "Failed" || !strings.Contains(got.message, "lost connection") {
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
