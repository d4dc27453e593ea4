package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"time"
)

const (
	// exitTime is what the decode process may take to end when it is told to.
	exitTime = 2 * time.Second
	// noticeTime is how much later than the library the end of the process may be noticed.
	noticeTime = time.Second
)

// child is the decode process that the prefill has started.
type child struct {
	cmd    *exec.Cmd
	report bytes.Buffer  // what it wrote to its standard output; read after done
	done   chan struct{} // closed when it has ended
	err    error         // how; read after done
}

// startDecode starts this program again, as the decode. If it fails, so does the run.
func startDecode(args []string, stderr *os.File, fail context.CancelCauseFunc) (*child, error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("starting the decode: %w", err)
	}
	d := &child{done: make(chan struct{})}
	d.cmd = exec.Command(exe, args...)
	d.cmd.Stdout, d.cmd.Stderr = &d.report, stderr
	d.cmd.SysProcAttr = &syscall.SysProcAttr{
		Setpgid:   true,            // an interrupt at the terminal is for this process alone, which ends the other
		Pdeathsig: syscall.SIGKILL, // and if this one cannot, the kernel does
	}
	started := make(chan error)
	go func() {
		// The kernel sends Pdeathsig when the thread that started the child ends.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := d.cmd.Start()
		started <- err
		if err != nil {
			return
		}
		if err := d.cmd.Wait(); err != nil {
			d.err = &endedError{err}
			fail(d.err)
		}
		close(d.done)
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("starting the decode: %w", err)
	}
	return d, nil
}

// endedError: the decode process has failed, and has said why if it could.
type endedError struct{ err error }

func (e *endedError) Error() string {
	why := ""
	var exit *exec.ExitError
	if errors.As(e.err, &exit) {
		if s, ok := exit.Sys().(syscall.WaitStatus); ok && s.Signaled() && s.Signal() == syscall.SIGKILL {
			why = ", perhaps by the kernel for want of memory"
		}
	}
	return fmt.Sprintf("the decode has failed: %v%s", e.err, why)
}

func (e *endedError) Unwrap() error { return e.err }

// wait waits for the end of the process, if there is one, and gives its report.
func (d *child) wait(ctx context.Context) (string, error) {
	if d == nil {
		return "", nil
	}
	select {
	case <-d.done:
		return d.report.String(), d.err
	case <-ctx.Done():
		return "", fmt.Errorf("waiting for the decode to end: %w", context.Cause(ctx))
	}
}

// notice gives the process, if there is one, the time to be seen to be gone: a room may fail
// of it before.
func (d *child) notice() {
	if d == nil {
		return
	}
	select {
	case <-d.done:
	case <-time.After(noticeTime):
	}
}

// stop sees to it that the process, if there is one, is gone.
func (d *child) stop() {
	if d == nil {
		return
	}
	_ = d.cmd.Process.Signal(syscall.SIGTERM) // it may have ended by now, which done will tell
	select {
	case <-d.done:
	case <-time.After(exitTime):
		_ = d.cmd.Process.Kill()
		<-d.done
	}
}
