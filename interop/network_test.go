package interop

import (
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// network is two network namespaces with a cable between them, which stand for two hosts. They
// have no names: whatever ends this process ends them too.
type network struct{ near, far string } // processes in them

// nearIP and farIP are the ends of the cable; nothing else is in these namespaces.
const (
	nearIP = "10.214.0.1"
	farIP  = "10.214.0.2"
	cable  = "cable"
)

func newNetwork(t *testing.T) *network {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("skip: needs root, to make network namespaces")
	}
	for _, tool := range []string{"ip", "nsenter", "unshare"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skipf("skip: needs %s (iproute2, util-linux), to make network namespaces", tool)
		}
	}
	n := &network{near: newNamespace(t), far: newNamespace(t)}
	run(t, "ip", "link", "add", cable, "netns", n.near, "type", "veth", "peer", "name", cable, "netns", n.far)
	for where, ip := range map[string]string{n.near: nearIP, n.far: farIP} {
		in(t, where, "ip", "addr", "add", ip+"/24", "dev", cable)
		in(t, where, "ip", "link", "set", cable, "up")
		in(t, where, "ip", "link", "set", "lo", "up")
	}
	for _, where := range []string{n.near, n.far} {
		waitUp(t, where)
	}
	return n
}

// waitUp waits until the cable works, which is a moment after both ends were set up.
func waitUp(t *testing.T, where string) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for end := time.After(patience); ; {
		out, err := exec.Command("nsenter", "-t", where, "--net", "ip", "link", "show", "dev", cable).CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		if strings.Contains(string(out), "state UP") {
			return
		}
		select {
		case <-tick.C:
		case <-end:
			t.Fatalf("the cable does not work: %s", out)
		}
	}
}

// newNamespace makes a namespace, with a process in it that waits for this one to end.
func newNamespace(t *testing.T) (pid string) {
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
	return strconv.Itoa(holder.Process.Pid)
}

func run(t *testing.T, args ...string) {
	t.Helper()
	if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v: %s", strings.Join(args, " "), err, out)
	}
}

// in runs a command in a namespace.
func in(t *testing.T, where string, args ...string) {
	t.Helper()
	run(t, append([]string{"nsenter", "-t", where, "--net"}, args...)...)
}

// cut takes the far end off the cable: what is sent is lost, and nobody is told. mend puts it back.
func (n *network) cut(t *testing.T) {
	t.Helper()
	in(t, n.far, "ip", "addr", "del", farIP+"/24", "dev", cable)
}

func (n *network) mend(t *testing.T) {
	t.Helper()
	in(t, n.far, "ip", "addr", "add", farIP+"/24", "dev", cable)
}
