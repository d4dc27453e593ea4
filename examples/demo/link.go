package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"go.uber.org/zap"
)

const (
	maxLine     = 16 << 20               // of a message
	sendTimeout = 5 * time.Second        // for a peer that does not read
	dialPause   = 100 * time.Millisecond // between two tries to reach a prefill that is not there yet
)

// address is where the prefill listens: a TCP port of this machine or a Unix socket.
type address struct{ network, addr string }

// parseAddress reads HOST:PORT, of a loopback host, unix:PATH or, for a name that is not in
// the file system, unix:@NAME.
func parseAddress(s string) (address, error) {
	if path, ok := strings.CutPrefix(s, "unix:"); ok {
		if path == "" || path == "@" {
			return address{}, fmt.Errorf("address %q: want unix:PATH", s)
		}
		return address{"unix", path}, nil
	}
	host, port, err := net.SplitHostPort(s)
	if err != nil {
		return address{}, fmt.Errorf("address %q: want HOST:PORT or unix:PATH", s)
	}
	if ip, err := netip.ParseAddr(host); host != "localhost" && (err != nil || !ip.IsLoopback()) {
		return address{}, fmt.Errorf("address %q: want a loopback host (127.0.0.1, ::1 or localhost): the link is open to whoever reaches it", s)
	}
	return address{"tcp", net.JoinHostPort(host, port)}, nil
}

// String gives what parseAddress reads.
func (a address) String() string {
	if a.network == "unix" {
		return "unix:" + a.addr
	}
	return a.addr
}

// accept waits for the one connection that there will be, and closes the listener.
func accept(ctx context.Context, ln net.Listener) (net.Conn, error) {
	defer context.AfterFunc(ctx, func() { ln.Close() })()
	defer ln.Close()
	conn, err := ln.Accept()
	if ctx.Err() != nil {
		if err == nil {
			conn.Close()
		}
		err = context.Cause(ctx)
	}
	if err != nil {
		return nil, fmt.Errorf("waiting for the decode to connect: %w", err)
	}
	return conn, nil
}

// dial connects to the prefill, which may be started after the decode.
func dial(ctx context.Context, a address, log *zap.Logger) (net.Conn, error) {
	var d net.Dialer
	for {
		conn, err := d.DialContext(ctx, a.network, a.addr)
		switch {
		case err == nil:
			return conn, nil
		case ctx.Err() != nil:
			return nil, fmt.Errorf("waiting for a prefill at %v: %w", a, context.Cause(ctx))
		case !errors.Is(err, syscall.ECONNREFUSED) && !errors.Is(err, syscall.ENOENT):
			return nil, fmt.Errorf("connecting to the prefill: %w", err)
		}
		log.Debug("no prefill yet", zap.Stringer("address", a))
		select {
		case <-time.After(dialPause):
		case <-ctx.Done():
		}
	}
}

// lostError: the other process is gone, or closed the link before the end.
type lostError struct {
	peer string // prefill or decode
	err  error
}

func (e *lostError) Error() string { return fmt.Sprintf("the %s is gone (%v)", e.peer, e.err) }
func (e *lostError) Unwrap() error { return e.err }

// failedError: the other process told why it gives up.
type failedError struct{ peer, reason string }

func (e *failedError) Error() string { return fmt.Sprintf("the %s failed: %s", e.peer, e.reason) }

// link is the connection between the two processes, for everything but the KV cache. It is
// read all the time, so that the end of the other process is noticed whatever this one is
// doing: the run's context then ends.
type link struct {
	conn  net.Conn
	peer  string // who is at the other end
	in    chan message
	done  chan struct{} // closed when the other end is
	over  atomic.Bool   // the other end may close
	fail  context.CancelCauseFunc
	why   func() error // how the other process ended, where that can be known
	lines *bufio.Scanner
}

// newLink takes a connection over. why may be nil; it is asked when the connection is lost,
// and may give nil.
func newLink(conn net.Conn, peer string, fail context.CancelCauseFunc, why func() error) *link {
	l := &link{
		conn: conn, peer: peer, fail: fail, why: why,
		// The two take turns, so that there is never more than one message to keep.
		in:    make(chan message, 1),
		done:  make(chan struct{}),
		lines: bufio.NewScanner(conn),
	}
	l.lines.Buffer(nil, maxLine)
	go l.read()
	return l
}

func (l *link) read() {
	defer close(l.done)
	for l.lines.Scan() {
		m, err := parseMessage(l.lines.Bytes())
		if err != nil {
			l.fail(fmt.Errorf("from the %s: %w", l.peer, err))
			return
		}
		if m.Failed != "" {
			l.fail(&failedError{l.peer, m.Failed})
			return
		}
		select {
		case l.in <- m:
		default:
			l.fail(fmt.Errorf("the %s sent a message out of turn", l.peer))
			return
		}
	}
	if l.over.Load() {
		return
	}
	var err error
	if l.why != nil {
		err = l.why()
	}
	if err == nil {
		err = l.lines.Err()
	}
	if err == nil {
		err = errors.New("it closed the link")
	}
	l.fail(&lostError{l.peer, err})
}

// parseMessage reads a line.
func parseMessage(line []byte) (message, error) {
	d := json.NewDecoder(bytes.NewReader(line))
	d.DisallowUnknownFields()
	var m message
	if err := d.Decode(&m); err != nil {
		return message{}, fmt.Errorf("message: %w", err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return message{}, errors.New("message: more than one object in a line")
	}
	set := 0
	for _, is := range [...]bool{m.Plan != nil, m.Ready != nil, m.Report != nil, m.Bye, m.Failed != ""} {
		if is {
			set++
		}
	}
	if set != 1 {
		return message{}, fmt.Errorf("message: %d things at once", set)
	}
	return m, nil
}

// send writes a message.
func (l *link) send(m message) error {
	line, err := json.Marshal(m)
	if err != nil {
		return err
	}
	if err := l.conn.SetWriteDeadline(time.Now().Add(sendTimeout)); err != nil {
		return &lostError{l.peer, err}
	}
	if _, err := l.conn.Write(append(line, '\n')); err != nil {
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return fmt.Errorf("the %s does not read: %w", l.peer, err)
		}
		return &lostError{l.peer, err}
	}
	return nil
}

// receive waits for a message; what says which one.
func (l *link) receive(ctx context.Context, what string) (message, error) {
	select {
	case m := <-l.in:
		return m, nil
	case <-ctx.Done():
		return message{}, fmt.Errorf("waiting for the %s's %s: %w", l.peer, what, context.Cause(ctx))
	}
}

// bye tells the other end that this one is through with it, and waits until it is gone.
func (l *link) bye(ctx context.Context) error {
	l.over.Store(true)
	if err := l.send(message{Bye: true}); err != nil {
		return err
	}
	select {
	case <-l.done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("waiting for the %s to end: %w", l.peer, context.Cause(ctx))
	}
}

// close ends the connection. With an error it tells the other end first, if there still is
// one. It waits for the reader, which the closing ends.
func (l *link) close(err error) {
	l.over.Store(true)
	var failed *failedError
	var lost *lostError
	if err != nil && !errors.As(err, &failed) && !errors.As(err, &lost) {
		_ = l.send(message{Failed: err.Error()}) // the caller has an error to report already
	}
	l.conn.Close()
	<-l.done
}
