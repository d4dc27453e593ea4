// Package spawn starts programs that a test talks to over pipes. None outlives the test.
package spawn

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"
)

// Process is a running program. Its methods may be called from many goroutines.
type Process struct {
	Stdin  io.WriteCloser
	Stdout io.Reader       // can be read to its end after the program has ended, too
	Exited <-chan struct{} // closed when the program has ended
	cmd    *exec.Cmd
}

// Start starts a command. Its standard error is the test's, unless it is set. When the test
// ends the program is killed; when the test's process does, in whatever way, the system kills it.
func Start(t testing.TB, cmd *exec.Cmd) *Process {
	t.Helper()
	if cmd.Stderr == nil {
		cmd.Stderr = os.Stderr
	}
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	// Not cmd.StdoutPipe, which Wait closes with what was not read.
	stdout, out, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stdout = out
	started, exited := make(chan error), make(chan struct{})
	go func() {
		// The system sends Pdeathsig when the thread ends that has started the program.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		defer close(exited)
		err := cmd.Start()
		started <- err
		if err == nil {
			_ = cmd.Wait() // ProcessState says how it ended
		}
	}()
	err = <-started
	_ = out.Close()
	if err != nil {
		_ = stdout.Close()
		t.Fatal(err)
	}
	p := &Process{Stdin: stdin, Stdout: stdout, Exited: exited, cmd: cmd}
	t.Cleanup(func() {
		p.Kill()
		_ = stdout.Close()
	})
	return p
}

// Limit has the program killed after a time, and so ends whatever waits for its answer.
func (p *Process) Limit(t testing.TB, d time.Duration) {
	limit := time.AfterFunc(d, p.Kill)
	t.Cleanup(func() { limit.Stop() })
}

// Kill ends the program without asking it.
func (p *Process) Kill() {
	_ = p.cmd.Process.Kill() // fails if it has ended
	<-p.Exited
}

// Finish closes the program's standard input and waits until it has exited by itself, which it
// has to do in time and with code 0.
func (p *Process) Finish(t testing.TB, limit time.Duration) {
	t.Helper()
	_ = p.Stdin.Close()
	select {
	case <-p.Exited:
		if !p.State().Success() {
			t.Errorf("%s: %v", p.cmd.Path, p.State())
		}
	case <-time.After(limit):
		t.Errorf("%s has not exited after %v", p.cmd.Path, limit)
	}
}

// State says how the program ended. It must have.
func (p *Process) State() *os.ProcessState {
	<-p.Exited
	return p.cmd.ProcessState
}

// Stop stops the program where it is, and returns when it stands still.
func (p *Process) Stop(t testing.TB) {
	t.Helper()
	p.signal(t, syscall.SIGSTOP)
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for end := time.After(stopTimeout); ; {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.cmd.Process.Pid))
		if err != nil {
			t.Fatal(err)
		}
		// pid (name) state …; the name may hold anything.
		if strings.HasPrefix(string(stat[strings.LastIndexByte(string(stat), ')')+1:]), " T") {
			return
		}
		select {
		case <-tick.C:
		case <-end:
			t.Fatalf("%s does not stop", p.cmd.Path)
		}
	}
}

// stopTimeout bounds Stop; a program in a system call stops when that is over.
const stopTimeout = 20 * time.Second

// Continue undoes Stop.
func (p *Process) Continue(t testing.TB) {
	t.Helper()
	p.signal(t, syscall.SIGCONT)
}

func (p *Process) signal(t testing.TB, s syscall.Signal) {
	t.Helper()
	if err := p.cmd.Process.Signal(s); err != nil {
		t.Fatal(err)
	}
}
