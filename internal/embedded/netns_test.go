package embedded

import (
	"encoding/hex"
	"fmt"
	"hash/crc32"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// twoNetworks are two network namespaces with a cable between them, which stand for two
// hosts. They have no names: whatever ends this process ends them too.
type twoNetworks struct {
	t         testing.TB
	near, far string // processes in the namespaces
}

// nearIP and farIP are the ends of the cable; nothing else is in these namespaces.
const (
	nearIP = "10.213.0.1"
	farIP  = "10.213.0.2"
	cable  = "cable"
)

func newTwoNetworks(t testing.TB) *twoNetworks {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("skip: needs root, to make network namespaces")
	}
	for _, tool := range []string{"ip", "nsenter"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skipf("skip: needs %s (iproute2, util-linux), to make network namespaces", tool)
		}
	}
	n := &twoNetworks{t: t, near: newNetwork(t), far: newNetwork(t)}
	n.run("ip", "link", "add", cable, "netns", n.near, "type", "veth", "peer", "name", cable, "netns", n.far)
	for network, ip := range map[string]string{n.near: nearIP, n.far: farIP} {
		n.in(network, "ip", "addr", "add", ip+"/24", "dev", cable)
		n.in(network, "ip", "link", "set", cable, "up")
		n.in(network, "ip", "link", "set", "lo", "up")
	}
	return n
}

// newNetwork makes a namespace, with a process in it that waits for this one to end.
func newNetwork(t testing.TB) (pid string) {
	t.Helper()
	holder := exec.Command("cat")
	holder.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
	in, err := holder.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := holder.Start(); err != nil {
		t.Skipf("skip: needs the right to make network namespaces: %v", err)
	}
	t.Cleanup(func() {
		in.Close()
		holder.Wait()
	})
	return strconv.Itoa(holder.Process.Pid)
}

func (n *twoNetworks) run(args ...string) {
	n.t.Helper()
	if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
		n.t.Fatalf("%s: %v: %s", strings.Join(args, " "), err, out)
	}
}

func enter(network string) []string { return []string{"nsenter", "-t", network, "--net"} }

// in runs a command in a namespace.
func (n *twoNetworks) in(network string, args ...string) {
	n.t.Helper()
	n.run(append(enter(network), args...)...)
}

// child starts an agent in a namespace.
func (n *twoNetworks) child(network, name string, params map[string]string) *child {
	n.t.Helper()
	return startChild(n.t, name, params, enter(network)...)
}

// lossTimeout is the agents' tcp_timeout in these tests. A peer whose network is gone is
// lost within it and the second until the next probe.
const (
	lossTimeout = 2 * time.Second
	lossBound   = lossTimeout + time.Second
	// schedule is what a loaded machine may add.
	schedule = 5 * time.Second
)

func farParams() map[string]string {
	return map[string]string{ParamListen: farIP + ":0", ParamTimeout: lossTimeout.String()}
}

// TestTwoNetworks moves memory between two processes that have nothing but a network in
// common, and says why it cannot if they have not even that.
func TestTwoNetworks(t *testing.T) {
	const size, page = 4 << 20, 32 << 10
	n := newTwoNetworks(t)
	writer := n.child(n.near, "writer", nil)
	writer.do("memory", "foreign", size)
	for _, kind := range []string{"memfd", "foreign"} {
		t.Run(kind, func(t *testing.T) {
			far := n.child(n.far, "far "+kind, farParams())
			addr := far.number("memory", kind, size)
			writer.do("peer", kind)
			writer.do("load", hex.EncodeToString(far.metadata()))
			writer.do("fill", 3)
			if why := writer.do("write", addr, page); why != "" {
				t.Fatal(why)
			}
			if got := far.do("notes", 1); !strings.HasSuffix(got, "writer:written") {
				t.Fatalf("notification %q", got)
			}
			if got, want := far.number("sum"), writer.number("sum"); got != want {
				t.Fatalf("checksum %d, want %d", got, want)
			}
			far.do("fill", 4)
			if why := writer.do("read", addr, page); why != "" {
				t.Fatal(why)
			}
			want := make([]byte, size)
			fill(want, 4)
			if got := writer.number("sum"); got != uint64(crc32.ChecksumIEEE(want)) {
				t.Fatalf("checksum %d of what was read", got)
			}
			far.do("deregister")
			if why := writer.do("write", addr, page); why != "not registered" {
				t.Fatalf("write after deregistration: %q", why)
			}
			far.do("destroy")
			writer.do("lost")
		})
	}
	t.Run("no TCP", func(t *testing.T) {
		hidden := n.child(n.far, "hidden", nil)
		hidden.do("memory", "memfd", page)
		writer.send("load", hex.EncodeToString(hidden.metadata()))
		line, err := writer.out.ReadString('\n')
		if err != nil || !strings.HasPrefix(line, "error ") || !strings.Contains(line, "another network namespace") || !strings.Contains(line, ParamListen) {
			t.Fatalf("answer %q, %v", line, err)
		}
	})
}

// TestNetworkGone cuts the network under transfers, and under a connection without any. The
// peer is lost in time at both ends, a peer elsewhere is not, and when the network is there
// again, so is the peer.
func TestNetworkGone(t *testing.T) {
	const size, page = 8 << 20, 32 << 10
	n := newTwoNetworks(t)
	cuts := []struct {
		name      string
		cut, mend []string
	}{
		// The first shows at both ends, the second nowhere: nobody answers.
		{"link down", []string{"ip", "link", "set", cable, "down"}, []string{"ip", "link", "set", cable, "up"}},
		{"silence", []string{"ip", "addr", "del", farIP + "/24", "dev", cable}, []string{"ip", "addr", "add", farIP + "/24", "dev", cable}},
	}
	writer := n.child(n.near, "writer", map[string]string{ParamTimeout: lossTimeout.String()})
	writer.do("memory", "foreign", size)
	// The other peer is in the same namespace, but not on the cable.
	params := farParams()
	params[ParamListen] = "127.0.0.1:0"
	other := n.child(n.near, "other", params)
	otherAddr := other.number("memory", "memfd", size)
	for _, c := range cuts {
		for _, idle := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/idle=%v", c.name, idle), func(t *testing.T) {
				far := n.child(n.far, fmt.Sprintf("far, %s, %v", c.name, idle), farParams())
				addr := far.number("memory", "memfd", size)
				md := hex.EncodeToString(far.metadata())
				far.do("peer", "writer")
				writer.do("peer", "other")
				writer.do("load", hex.EncodeToString(other.metadata()))
				writer.do("flood", otherAddr, page)
				writer.do("peer", "far")
				writer.do("load", md)
				if idle {
					if why := writer.do("write", addr, page); why != "" {
						t.Fatal(why)
					}
				} else {
					writer.do("flood", addr, page)
				}
				n.in(n.far, c.cut...)
				cut := time.Now()
				if idle {
					writer.do("lost")
				} else if why := writer.do("ended"); why != "peer lost<nil>" {
					t.Fatalf("the transfers ended with %q", why)
				}
				took := time.Since(cut)
				t.Logf("lost %v after the cut", took.Round(time.Millisecond))
				if took > lossBound+schedule {
					t.Errorf("lost after %v, want %v and what the machine adds", took, lossBound)
				}
				eventually(t, "loss of the writer", func() bool { return far.do("inbound") == "0" })
				writer.do("peer", "other")
				if why := writer.do("stop"); why != "stopped" {
					t.Fatalf("the other peer's transfers ended with %q", why)
				}
				n.in(n.far, c.mend...)
				writer.do("peer", "far")
				writer.do("load", md)
				eventually(t, "the way back", func() bool { return writer.do("write", addr, page) == "" || reload(writer, md) })
				if got, want := far.number("sum"), writer.number("sum"); got != want {
					t.Fatalf("checksum %d, want %d", got, want)
				}
			})
		}
	}
}

// reload loads a peer again that was lost, and gives false.
func reload(c *child, md string) bool {
	c.do("load", md)
	return false
}
