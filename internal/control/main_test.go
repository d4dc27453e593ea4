//go:build linux && cgo

package control

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// patience is how long a test waits for what must happen.
const patience = 30 * time.Second

func TestMain(m *testing.M) {
	if port, ok := os.LookupEnv(childEnv); ok {
		if err := runChild(port); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

// start makes a Control that is closed with the test.
func start(t testing.TB, cfg Config) *Control {
	t.Helper()
	if cfg.Handler == nil && cfg.HandlerFrom == nil {
		cfg.Handler = func([][]byte) {}
	}
	c, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeControl(t, c) })
	return c
}

func closeControl(t testing.TB, c *Control) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := c.Close(ctx); err != nil {
		t.Error(err)
	}
}

func endpoint(t testing.TB, c *Control) Endpoint {
	t.Helper()
	e, err := NewEndpoint(c.Addr().Addr().String(), c.Port())
	if err != nil {
		t.Fatal(err)
	}
	return e
}

func loopback(t testing.TB, port int) Endpoint {
	t.Helper()
	e, err := NewEndpoint("127.0.0.1", port)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

// inbox keeps what a handler is given.
type inbox chan [][]byte

func newInbox() inbox { return make(inbox, 65536) }

func (in inbox) handle(frames [][]byte) { in <- frames }

func (in inbox) next(t testing.TB) [][]byte {
	t.Helper()
	return receive(t, in, "a message")
}

// text is the next message, frames joined by spaces.
func (in inbox) text(t testing.TB) string {
	t.Helper()
	var parts []string
	for _, f := range in.next(t) {
		parts = append(parts, string(f))
	}
	return strings.Join(parts, " ")
}

func receive[T any](t testing.TB, from <-chan T, what string) T {
	t.Helper()
	timeout := time.NewTimer(patience)
	defer timeout.Stop()
	select {
	case v, ok := <-from:
		if !ok {
			t.Fatalf("%s never came", what)
		}
		return v
	case <-timeout.C:
		t.Fatalf("%s never came", what)
	}
	panic("unreachable")
}

// eventually waits for what only a counter shows.
func eventually(t testing.TB, what string, cond func() bool) {
	t.Helper()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	timeout := time.NewTimer(patience)
	defer timeout.Stop()
	for !cond() {
		select {
		case <-tick.C:
		case <-timeout.C:
			t.Fatalf("never happened: %s", what)
		}
	}
}

// await waits for a channel to be closed.
func await(t testing.TB, done <-chan struct{}, what string) {
	t.Helper()
	select {
	case <-done:
	case <-within(t, patience).Done():
		t.Fatalf("%s never came", what)
	}
}

func within(t testing.TB, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

func frames(parts ...string) [][]byte {
	var out [][]byte
	for _, p := range parts {
		out = append(out, []byte(p))
	}
	return out
}

func mustSend(t testing.TB, c *Control, to Endpoint, parts ...string) uint64 {
	t.Helper()
	g, err := c.Send(within(t, patience), Message{To: to, Frames: frames(parts...)})
	if err != nil {
		t.Fatal(err)
	}
	return g
}

// childEnv makes the test binary a receiver on the port it names: it prints its port, then
// the first frame of every message, and ends with its standard input.
const childEnv = "NIXLKV_CONTROL_CHILD_PORT"

func runChild(port string) error {
	n, err := strconv.Atoi(port)
	if err != nil {
		return err
	}
	out := bufio.NewWriter(os.Stdout)
	c, err := New(Config{Port: n, Handler: func(f [][]byte) {
		fmt.Fprintln(out, string(f[0]))
		out.Flush()
	}})
	if err != nil {
		return err
	}
	fmt.Println(c.Port())
	signal.Ignore(syscall.SIGPIPE)
	_, err = io.Copy(io.Discard, os.Stdin)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if closeErr := c.Close(ctx); err == nil {
		err = closeErr
	}
	return err
}

// child is a receiver in another process.
type child struct {
	cmd   *exec.Cmd
	port  int
	lines <-chan string // first frames; closed when the process is gone
}

func startChild(t testing.TB, port int) *child {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe)
	cmd.Env = append(slices.Clone(os.Environ()), childEnv+"="+strconv.Itoa(port))
	return startReceiver(t, cmd)
}

// startReceiver runs a command that behaves like runChild.
func startReceiver(t testing.TB, cmd *exec.Cmd) *child {
	t.Helper()
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := make(chan string, 65536)
	finished := make(chan struct{})
	go func() {
		defer close(finished)
		defer close(lines)
		for scan := bufio.NewScanner(stdout); scan.Scan(); {
			lines <- scan.Text()
		}
	}()
	ch := &child{cmd: cmd, lines: lines}
	t.Cleanup(func() {
		ch.signal(t, syscall.SIGCONT)
		stdin.Close()
		<-finished
		_ = cmd.Wait() // killed or not
	})
	if ch.port, err = strconv.Atoi(receive(t, lines, "the child's port")); err != nil {
		t.Fatal(err)
	}
	return ch
}

func (ch *child) signal(t testing.TB, sig syscall.Signal) {
	t.Helper()
	if err := ch.cmd.Process.Signal(sig); err != nil && err != os.ErrProcessDone {
		t.Error(err)
	}
}

// stop stops the process and waits until it is stopped.
func (ch *child) stop(t testing.TB) {
	t.Helper()
	ch.signal(t, syscall.SIGSTOP)
	eventually(t, "the child stops", func() bool {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", ch.cmd.Process.Pid))
		if err != nil {
			t.Fatal(err)
		}
		_, rest, _ := strings.Cut(string(stat), ") ")
		return strings.HasPrefix(rest, "T")
	})
}

// kill ends the process and waits until its output ends.
func (ch *child) kill(t testing.TB) {
	t.Helper()
	ch.signal(t, syscall.SIGKILL)
	for range ch.lines {
	}
}
