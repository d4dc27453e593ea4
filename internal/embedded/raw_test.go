package embedded

import (
	"errors"
	"io"
	"net"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// rawConn is a connection whose other end is driven frame by frame.
type rawConn struct {
	t      testing.TB
	conn   *net.UnixConn
	fds    *fdReader
	frames *frameReader
}

func newRawConn(t testing.TB, conn *net.UnixConn) *rawConn {
	t.Cleanup(func() { conn.Close() })
	conn.SetDeadline(time.Now().Add(patience))
	fds := newFDReader(conn)
	t.Cleanup(fds.close)
	return &rawConn{t: t, conn: conn, fds: fds, frames: newFrameReader(fds)}
}

// dialRaw connects to an agent and says nothing.
func dialRaw(t testing.TB, a *Agent) *rawConn {
	t.Helper()
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: a.address, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	return newRawConn(t, conn)
}

// greet is dialRaw, hello and welcome.
func greet(t testing.TB, a *Agent) *rawConn {
	t.Helper()
	c := dialRaw(t, a)
	c.send(hello{to: a.id, name: "raw"}.append(nil))
	if h, body := c.next(); h.typ != frameWelcome || agentID(body) != a.id {
		t.Fatalf("welcome %+v", h)
	}
	return c
}

func (c *rawConn) send(b []byte) {
	c.t.Helper()
	if _, err := c.conn.Write(b); err != nil && !errors.Is(err, unix.EPIPE) && !errors.Is(err, unix.ECONNRESET) {
		c.t.Fatal(err)
	}
}

func (c *rawConn) next() (header, []byte) {
	c.t.Helper()
	h, body, err := c.frames.next()
	if err != nil {
		c.t.Fatal(err)
	}
	return h, body
}

// wantFrame reads until a frame of the type comes.
func (c *rawConn) wantFrame(typ frameType) (header, []byte) {
	c.t.Helper()
	h, body := c.next()
	if h.typ != typ {
		c.t.Fatalf("frame %+v, want type %d", h, typ)
	}
	return h, body
}

// wantClosed reads until the other end closes.
func (c *rawConn) wantClosed() {
	c.t.Helper()
	for {
		_, _, err := c.frames.next()
		if errors.Is(err, os.ErrDeadlineExceeded) {
			c.t.Fatal("the connection was not closed")
		}
		if err != nil {
			return
		}
	}
}

// fakeTarget is an agent that is driven frame by frame. Its metadata has one region.
type fakeTarget struct {
	*metadata
	l *net.UnixListener
}

func newFakeTarget(t testing.TB, n uint64) *fakeTarget {
	t.Helper()
	l, address, err := listen()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	host, err := readHost()
	if err != nil {
		t.Fatal(err)
	}
	return &fakeTarget{l: l, metadata: &metadata{
		id: agentID{1}, epoch: 1, host: host, name: "fake", address: address,
		regions: []regionInfo{{id: 5, addr: 1 << 20, n: n, shared: true}},
	}}
}

// accept takes the initiator's connection and hears its hello.
func (f *fakeTarget) accept(t testing.TB) *rawConn {
	t.Helper()
	f.l.SetDeadline(time.Now().Add(patience))
	conn, err := f.l.AcceptUnix()
	if err != nil {
		t.Fatal(err)
	}
	c := newRawConn(t, conn)
	h, body := c.wantFrame(frameHello)
	greeting, err := parseHello(body)
	if err != nil || greeting.to != f.id {
		t.Fatalf("hello %+v %+v, %v", h, greeting, err)
	}
	return c
}

// drain reads and drops what comes, so that nobody waits to write.
func (c *rawConn) drain() { io.Copy(io.Discard, c.conn) }
