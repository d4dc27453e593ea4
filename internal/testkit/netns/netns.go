// Package netns gives tests two hosts on one machine: network namespaces with a cable between
// them, which a test can cut.
package netns

import (
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// Network is two hosts with a cable between them, and nothing else. The namespaces have no
// names: whatever ends the test's process ends them too.
type Network struct{ Near, Far *Host }

// Host is an end of the cable.
type Host struct {
	IP  string
	pid string // of a process in the namespace
}

// Device is the name of the network device at either end of the cable.
const Device = "cable"

// upTimeout bounds the wait for the cable.
const upTimeout = 20 * time.Second

// New makes a network for the time of a test. The test is skipped where that cannot be, which
// needs root, the programs ip and nsenter, and the further tools that the caller names.
func New(t testing.TB, tools ...string) *Network {
	t.Helper()
	need(t, tools)
	n := &Network{Near: newHost(t, "10.213.0.1"), Far: newHost(t, "10.213.0.2")}
	run(t, exec.Command("ip", "link", "add", Device, "netns", n.Near.pid, "type", "veth", "peer", "name", Device, "netns", n.Far.pid))
	n.Near.up(t)
	n.Far.up(t)
	n.Near.waitUp(t)
	n.Far.waitUp(t)
	return n
}

// need skips the test where namespaces, or the tools to make and use them, cannot be had.
func need(t testing.TB, tools []string) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("skip: needs root, to make network namespaces")
	}
	for _, tool := range append([]string{"ip", "nsenter"}, tools...) {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skipf("skip: needs %s (iproute2, util-linux), to make network namespaces", tool)
		}
	}
}

// up brings the host's devices up.
func (h *Host) up(t testing.TB) {
	t.Helper()
	h.AddIP(t)
	h.LinkUp(t)
	h.run(t, "ip", "link", "set", "lo", "up")
}

// newHost makes a namespace, with a process in it that waits for this one to end.
func newHost(t testing.TB, ip string) *Host {
	t.Helper()
	holder := exec.Command("cat")
	holder.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
	stdin, err := holder.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := holder.Start(); err != nil {
		t.Skipf("skip: needs the right to make network namespaces: %v", err)
	}
	t.Cleanup(func() {
		_ = stdin.Close()
		_ = holder.Wait() // there is nothing that it could say
	})
	return &Host{IP: ip, pid: strconv.Itoa(holder.Process.Pid)}
}

// waitUp waits until the cable works, which is a moment after both ends were set up.
func (h *Host) waitUp(t testing.TB) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for end := time.After(upTimeout); ; {
		out := h.run(t, "ip", "link", "show", "dev", Device)
		if strings.Contains(out, "state UP") {
			return
		}
		select {
		case <-tick.C:
		case <-end:
			t.Fatalf("the cable does not work: %s", out)
		}
	}
}

// Command gives a command that runs on the host.
func (h *Host) Command(args ...string) *exec.Cmd {
	return exec.Command("nsenter", append([]string{"-t", h.pid, "--net"}, args...)...)
}

// LinkDown pulls the Device, which both ends see at once. LinkUp puts it back.
func (h *Host) LinkDown(t testing.TB) {
	t.Helper()
	h.run(t, "ip", "link", "set", Device, "down")
}

// LinkUp undoes LinkDown.
func (h *Host) LinkUp(t testing.TB) {
	t.Helper()
	h.run(t, "ip", "link", "set", Device, "up")
}

// RemoveIP takes the host off the cable in silence: what is sent to it is lost, and nobody is
// told. AddIP brings it back.
func (h *Host) RemoveIP(t testing.TB) {
	t.Helper()
	h.run(t, "ip", "addr", "del", h.IP+"/24", "dev", Device)
}

// AddIP undoes RemoveIP.
func (h *Host) AddIP(t testing.TB) {
	t.Helper()
	h.run(t, "ip", "addr", "add", h.IP+"/24", "dev", Device)
}

func (h *Host) run(t testing.TB, args ...string) string {
	t.Helper()
	return run(t, h.Command(args...))
}

func run(t testing.TB, cmd *exec.Cmd) string {
	t.Helper()
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %v: %s", cmd, err, out)
	}
	return string(out)
}
