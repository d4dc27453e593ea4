// Demo moves the KV cache of some requests from a prefill to a decode process, as in
// disaggregated LLM serving, with packages kvsender and kvreceiver. Each process has the cache
// of a Llama-3-8B in its own memory. They meet over a bootstrap server, the decode tells over
// control sockets where the pages of each request go, and the prefill writes them there chunk
// by chunk, the metadata with the first token behind. The decode verifies every byte.
//
//	go run ./examples/demo
//
// starts both. In two terminals, or with other addresses and -host on two hosts:
//
//	go run ./examples/demo -role prefill -bootstrap 127.0.0.1:7000
//	go run ./examples/demo -role decode -bootstrap 127.0.0.1:7000
//
// Read prefill.go, decode.go and worker.go for how the packages are used; plan.go and pages.go
// decide what goes where; the rest is what a program needs around it.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

const (
	exitFailed = 1
	exitUsage  = 2
	exitSignal = 128 // plus the number of the signal

	// cleanupTime is what a run that was ended from outside may take to clean up.
	cleanupTime = 10 * time.Second
	// closeTimeout bounds the closing of a manager; transfers to a dead peer settle sooner.
	closeTimeout = 5 * time.Second
)

func main() { os.Exit(run(os.Args[1:], os.Stdout, os.Stderr)) }

// run is the program; it gives the exit code.
func run(args []string, stdout, stderr *os.File) int {
	c, err := parseFlags(args)
	var help *helpError
	switch {
	case errors.As(err, &help):
		fmt.Fprint(stdout, help.text)
		return 0
	case err != nil:
		fmt.Fprintf(stderr, "demo: %v (-h lists the flags)\n", err)
		return exitUsage
	}

	ctx, fail := context.WithCancelCause(context.Background())
	defer fail(nil)
	timer := time.AfterFunc(c.timeout, func() { fail(&timeoutError{c.timeout}) })
	defer timer.Stop()
	defer failOnSignal(fail)()

	p := program{config: c, stdout: stdout, stderr: stderr, log: newLogger(stderr, c), fail: fail}
	if err := p.within(ctx); err != nil {
		p.complain(err)
		return exitCode(err)
	}
	return 0
}

// program is what both roles share.
type program struct {
	config
	stdout io.Writer
	stderr *os.File
	log    *zap.Logger
	fail   context.CancelCauseFunc // ends the run
}

// patience is for what waits for the other side: the run's own timeout ends it before.
func (p *program) patience() time.Duration { return 2 * p.timeout }

// within runs the role. A native call cannot be cancelled: should one hang after the run
// has been ended, the process ends without it.
func (p *program) within(ctx context.Context) error {
	done := make(chan error, 1)
	go func() {
		if p.role == roleDecode {
			d := decode{program: p}
			done <- d.run(ctx)
		} else {
			f := prefill{program: p}
			done <- f.run(ctx)
		}
	}()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
	}
	select {
	case err := <-done:
		return err
	case <-time.After(cleanupTime):
		return fmt.Errorf("%w (and cleaning up did not end within %v)", context.Cause(ctx), cleanupTime)
	}
}

// complain says on standard error why the run failed.
func (p *program) complain(err error) {
	who := "demo"
	if p.role != roleBoth {
		who = "demo: " + p.role
	}
	text := err.Error()
	var missing *noLibraryError
	if errors.As(err, &missing) && !p.verbose {
		text = brief(text) + "\n" + noLibraryHelp
	}
	for line := range strings.Lines(text) {
		fmt.Fprintf(p.stderr, "%s: %s\n", who, strings.TrimRight(line, "\n"))
	}
}

// brief cuts down an error that goes on with a list of places, a line each. A single one
// joins the first line.
func brief(text string) string {
	lines := strings.Split(text, "\n")
	switch len(lines) {
	case 1:
		return text
	case 2:
		return lines[0] + " " + strings.TrimSpace(lines[1])
	}
	return fmt.Sprintf("%s %d places (-v lists them)", lines[0], len(lines)-1)
}

// noLibraryError is an engine that was asked for and is not there.
type noLibraryError struct{ err error }

func (e *noLibraryError) Error() string { return e.err.Error() }
func (e *noLibraryError) Unwrap() error { return e.err }

const noLibraryHelp = "make demo fetches NIXL; or name libnixl_capi.so in NIXLKV_NIXL_LIB, or use -engine embedded"

// timeoutError: the run took longer than -timeout.
type timeoutError struct{ after time.Duration }

func (e *timeoutError) Error() string { return fmt.Sprintf("timed out after %v (-timeout)", e.after) }

// signalError: the run was interrupted.
type signalError struct{ signal syscall.Signal }

func (e *signalError) Error() string { return "ended by a signal: " + e.signal.String() }

// failOnSignal ends the run on an interrupt. A second one ends the process at once.
func failOnSignal(fail context.CancelCauseFunc) (stop func()) {
	c, done := make(chan os.Signal, 1), make(chan struct{})
	signal.Notify(c, syscall.SIGINT, syscall.SIGTERM)
	go func() {
		select {
		case s := <-c:
			signal.Stop(c)
			fail(&signalError{s.(syscall.Signal)})
		case <-done:
		}
	}()
	return func() {
		signal.Stop(c)
		close(done)
	}
}

func exitCode(err error) int {
	var s *signalError
	if errors.As(err, &s) {
		return exitSignal + int(s.signal)
	}
	return exitFailed
}

// explain puts why the run has ended before what failed because of it.
func explain(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); err != nil && cause != nil && !errors.Is(err, cause) {
		return fmt.Errorf("%w (%w)", cause, err)
	}
	return err
}

// newLogger logs to standard error if the flags say so.
func newLogger(stderr *os.File, c config) *zap.Logger {
	if !c.verbose {
		return zap.NewNop()
	}
	role := c.role
	if role == roleBoth {
		role = rolePrefill
	}
	e := zap.NewDevelopmentEncoderConfig()
	e.EncodeTime = zapcore.TimeEncoderOfLayout("15:04:05.000000")
	e.CallerKey = zapcore.OmitKey
	return zap.New(zapcore.NewCore(zapcore.NewConsoleEncoder(e), zapcore.Lock(stderr), zap.DebugLevel)).Named(role)
}
