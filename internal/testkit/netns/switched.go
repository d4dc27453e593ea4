package netns

import (
	"os/exec"
	"testing"
)

// Switched is two hosts whose cables meet at a switch on a third. What is lost there, or sent to an
// Ethernet address that nobody has, is lost without a sign: both ends keep their links, addresses
// and routes, and know each other's Ethernet addresses for good, so that no address resolution
// fails either.
type Switched struct {
	Near, Far *Host
	between   *Host
}

// Ethernet addresses of the hosts, and one that neither has.
const (
	NearMAC   = "02:00:00:00:00:01"
	FarMAC    = "02:00:00:00:00:02"
	NobodyMAC = "02:00:00:00:00:99"
)

// NewSwitched makes a network with a switch for the time of a test. The test is skipped where that
// cannot be, as by New, and where the kernel has no bridges.
func NewSwitched(t testing.TB, tools ...string) *Switched {
	t.Helper()
	need(t, tools)
	n := &Switched{Near: newHost(t, "10.213.0.1"), Far: newHost(t, "10.213.0.2"), between: newHost(t, "")}
	if out, err := n.between.Command("ip", "link", "add", "name", "switch", "type", "bridge").CombinedOutput(); err != nil {
		t.Skipf("skip: needs a kernel that has Ethernet bridges: %v: %s", err, out)
	}
	n.between.run(t, "ip", "link", "set", "switch", "up")
	for _, end := range []struct {
		host      *Host
		port, mac string
	}{{n.Near, "near", NearMAC}, {n.Far, "far", FarMAC}} {
		run(t, exec.Command("ip", "link", "add", Device, "netns", end.host.pid, "type", "veth", "peer", "name", end.port, "netns", n.between.pid))
		n.between.run(t, "ip", "link", "set", end.port, "master", "switch")
		n.between.run(t, "ip", "link", "set", end.port, "up")
		end.host.run(t, "ip", "link", "set", Device, "address", end.mac)
		end.host.up(t)
	}
	n.Near.waitUp(t)
	n.Far.waitUp(t)
	n.FindNear(t, NearMAC)
	n.FindFar(t, FarMAC)
	return n
}

// FindNear says where what the far host sends to the near one goes.
func (n *Switched) FindNear(t testing.TB, mac string) { n.Far.neighbour(t, n.Near.IP, mac) }

// FindFar says where what the near host sends to the far one goes.
func (n *Switched) FindFar(t testing.TB, mac string) { n.Near.neighbour(t, n.Far.IP, mac) }

// Unplug takes the far host's cable off the switch. Plug undoes that.
func (n *Switched) Unplug(t testing.TB) {
	t.Helper()
	n.between.run(t, "ip", "link", "set", "far", "nomaster")
}

// Plug undoes Unplug.
func (n *Switched) Plug(t testing.TB) {
	t.Helper()
	n.between.run(t, "ip", "link", "set", "far", "master", "switch")
}

func (h *Host) neighbour(t testing.TB, ip, mac string) {
	t.Helper()
	h.run(t, "ip", "neigh", "replace", ip, "lladdr", mac, "dev", Device, "nud", "permanent")
}
