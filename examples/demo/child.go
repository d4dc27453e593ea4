package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"time"
)

// exitTime is what the decode process may take to end after the link to it has.
const exitTime = 2 * time.Second

// listenForChild listens on a Unix socket with a random name that is not in the file
// system: nothing has to be removed afterwards.
func listenForChild() (net.Listener, address, error) {
	a := address{"unix", "@nixlkv-demo-" + rand.Text()}
	ln, err := net.Listen(a.network, a.addr)
	return ln, a, err
}

// child is the decode process that the prefill has started.
type child struct {
	cmd  *exec.Cmd
	done chan struct{} // closed when it has ended
	err  error         // how; read after done
}

// startDecode starts this program again, as the decode. If it fails, so does the run.
func startDecode(c config, a address, stderr *os.File, fail context.CancelCauseFunc) (*child, error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("starting the decode: %w", err)
	}
	d := &child{done: make(chan struct{})}
	d.cmd = exec.Command(exe, "-role", roleDecode, "-connect", a.String(),
		"-timeout", c.timeout.String(), "-nixl-log", c.nixlLog, fmt.Sprintf("-v=%t", c.verbose))
	d.cmd.Stderr = stderr
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
		d.err = ended(d.cmd.Wait())
		close(d.done)
		if d.err != nil {
			fail(&lostError{roleDecode, d.err})
		}
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("starting the decode: %w", err)
	}
	return d, nil
}

// ended explains how a process ended.
func ended(err error) error {
	var e *exec.ExitError
	if errors.As(err, &e) {
		if s, ok := e.Sys().(syscall.WaitStatus); ok && s.Signaled() && s.Signal() == syscall.SIGKILL {
			return fmt.Errorf("%w, perhaps by the kernel for want of memory", err)
		}
	}
	return err
}

// exit says how the process ended, once the link to it has. It is nil if the process goes
// on, and if there is none.
func (d *child) exit() error {
	if d == nil {
		return nil
	}
	select {
	case <-d.done:
		return d.err
	case <-time.After(exitTime):
		return nil
	}
}

// end sees to it that the process, if there is one, is gone. It should be about to end.
func (d *child) end() error {
	if d == nil {
		return nil
	}
	select {
	case <-d.done:
	case <-time.After(exitTime):
		_ = d.cmd.Process.Kill() // it may have ended by now, which done will tell
		<-d.done
	}
	if d.err != nil {
		return &lostError{roleDecode, d.err}
	}
	return nil
}
