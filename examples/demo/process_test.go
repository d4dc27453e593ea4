package main

import (
	"bufio"
	"bytes"
	"errors"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// process is a running program.
type process struct {
	t      *testing.T
	cmd    *exec.Cmd
	stdout bytes.Buffer

	mu     sync.Mutex
	stderr strings.Builder
	lines  chan string   // of stderr
	closed chan struct{} // nobody holds stderr any more: the program's children are gone too
}

// patience is longer than any of these runs takes on a healthy machine.
const patience = 60 * time.Second

// start runs the program. env holds NAME=value.
func start(t *testing.T, env []string, args ...string) *process {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	p := &process{t: t, cmd: exec.Command(exe, args...), lines: make(chan string, 1<<16), closed: make(chan struct{})}
	p.cmd.Env = append(append(os.Environ(), envProgram+"=1"), env...)
	p.cmd.Stdout = &p.stdout
	// Not cmd.StderrPipe, which Wait closes while a child may still write to it.
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	p.cmd.Stderr = w
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	w.Close()
	go func() {
		defer close(p.closed)
		defer r.Close()
		for s := bufio.NewScanner(r); s.Scan(); {
			p.mu.Lock()
			p.stderr.WriteString(s.Text() + "\n")
			p.mu.Unlock()
			select {
			case p.lines <- s.Text():
			default: // a test that waits for a line does so before there are so many
			}
		}
	}()
	t.Cleanup(func() {
		if p.cmd.ProcessState == nil {
			_ = p.cmd.Process.Kill()
			_ = p.cmd.Wait() // killed: that is all it can say
		}
		<-p.closed
	})
	return p
}

func (p *process) errors() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.stderr.String()
}

// until waits for a line on stderr and gives it.
func (p *process) until(part string) string {
	p.t.Helper()
	timeout := time.After(patience)
	for {
		select {
		case line := <-p.lines:
			if strings.Contains(line, part) {
				return line
			}
		case <-p.closed:
			p.t.Fatalf("ended without %q on stderr:\n%s", part, p.errors())
		case <-timeout:
			p.t.Fatalf("no %q on stderr:\n%s", part, p.errors())
		}
	}
}

func (p *process) signal(s syscall.Signal) {
	p.t.Helper()
	if err := p.cmd.Process.Signal(s); err != nil {
		p.t.Fatal(err)
	}
}

// wait waits for the end of the program and of all that it started, and gives the exit
// code: minus the number of a signal that ended it.
func (p *process) wait() int {
	p.t.Helper()
	done := make(chan error, 1)
	go func() { done <- p.cmd.Wait() }()
	timeout := time.After(patience)
	select {
	case err := <-done:
		if err != nil && !errors.As(err, new(*exec.ExitError)) {
			p.t.Fatal(err)
		}
	case <-timeout:
		_ = p.cmd.Process.Kill()
		<-done
		p.t.Fatalf("hangs; stderr:\n%s", p.errors())
	}
	select {
	case <-p.closed:
	case <-timeout:
		p.t.Fatalf("left a process behind; stderr:\n%s", p.errors())
	}
	if s := p.cmd.ProcessState.Sys().(syscall.WaitStatus); s.Signaled() {
		return -int(s.Signal())
	}
	return p.cmd.ProcessState.ExitCode()
}

// ends waits, and wants an exit code and parts of what was written.
func (p *process) ends(code int, stderr ...string) {
	p.t.Helper()
	if got := p.wait(); got != code {
		p.t.Errorf("exit code %d, want %d", got, code)
	}
	for _, part := range stderr {
		if !strings.Contains(p.errors(), part) {
			p.t.Errorf("no %q on stderr", part)
		}
	}
	if p.t.Failed() {
		p.t.Logf("stdout:\n%s\nstderr:\n%s", p.stdout.String(), p.errors())
	}
}
