package embedded

import (
	"encoding/hex"
	"fmt"
	"hash/crc32"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/nixlkv/nixlkv/internal/testkit/netns"
)

// childOn starts an agent on a host of a network.
func childOn(t testing.TB, h *netns.Host, name string, params map[string]string) *child {
	t.Helper()
	return startChild(t, h.Command(os.Args[0]), name, params)
}

// lossTimeout is the agents' tcp_timeout in these tests. A peer whose network is gone is
// lost within it and the second until the next probe.
const (
	lossTimeout = 2 * time.Second
	lossBound   = lossTimeout + time.Second
	// schedule is what a loaded machine may add.
	schedule = 5 * time.Second
)

func farParams(h *netns.Host) map[string]string {
	return map[string]string{ParamListen: h.IP + ":0", ParamTimeout: lossTimeout.String()}
}

// TestTwoNetworks moves memory between two processes that have nothing but a network in
// common, and says why it cannot if they have not even that.
func TestTwoNetworks(t *testing.T) {
	const size, page = 4 << 20, 32 << 10
	n := netns.New(t)
	writer := childOn(t, n.Near, "writer", nil)
	writer.do("memory", "foreign", size)
	for _, kind := range []string{"memfd", "foreign"} {
		t.Run(kind, func(t *testing.T) {
			far := childOn(t, n.Far, "far "+kind, farParams(n.Far))
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
		hidden := childOn(t, n.Far, "hidden", nil)
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
	n := netns.New(t)
	cuts := []struct {
		name      string
		cut, mend func(testing.TB)
	}{
		{"link down", n.Far.LinkDown, n.Far.LinkUp},
		{"silence", n.Far.RemoveIP, n.Far.AddIP},
	}
	writer := childOn(t, n.Near, "writer", map[string]string{ParamTimeout: lossTimeout.String()})
	writer.do("memory", "foreign", size)
	// The other peer is in the same namespace, but not on the cable.
	params := farParams(n.Far)
	params[ParamListen] = "127.0.0.1:0"
	other := childOn(t, n.Near, "other", params)
	otherAddr := other.number("memory", "memfd", size)
	for _, c := range cuts {
		for _, idle := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/idle=%v", c.name, idle), func(t *testing.T) {
				far := childOn(t, n.Far, fmt.Sprintf("far, %s, %v", c.name, idle), farParams(n.Far))
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
				c.cut(t)
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
				c.mend(t)
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
