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
	conn   *connection
	fds    *fdReader
	frames *frameReader
}

func newRawConn(t testing.TB, c net.Conn) *rawConn {
	t.Helper()
	conn, err := newConnection(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	conn.SetDeadline(time.Now().Add(patience))
	if conn.overTCP() {
		return &rawConn{t: t, conn: conn, frames: newFrameReader(conn, conn)}
	}
	fds := newFDReader(conn.unix)
	t.Cleanup(fds.close)
	return &rawConn{t: t, conn: conn, fds: fds, frames: newFrameReader(fds, conn)}
}

// dialRaw connects to an agent and says nothing; over TCP if the agent uses nothing else.
func dialRaw(t testing.TB, a *Agent) *rawConn {
	t.Helper()
	network, address := "unix", a.address
	if a.tcp.transport == transportTCP {
		network, address = "tcp", a.advertised[0]
	}
	conn, err := net.Dial(network, address)
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

// payload reads the bytes of the write or data frame that next gave.
func (c *rawConn) payload() []byte {
	c.t.Helper()
	b, err := payload(c.frames)
	if err != nil {
		c.t.Fatal(err)
	}
	return b
}

// payload is receive into a buffer.
func payload(f *frameReader) ([]byte, error) {
	b := make([]byte, f.left)
	_, err := io.ReadFull(f.r, b)
	f.left = 0
	return b, err
}

// closeWrite ends what is sent.
func (c *rawConn) closeWrite() error {
	return c.conn.Conn.(interface{ CloseWrite() error }).CloseWrite()
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
		if err == nil {
			_, err = payload(c.frames)
		}
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
	l net.Listener
}

func newFakeTarget(t testing.TB, n uint64) *fakeTarget {
	t.Helper()
	l, address, err := listenUnix()
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

// newFakeTargetTCP is newFakeTarget on a TCP address.
func newFakeTargetTCP(t testing.TB, n uint64) *fakeTarget {
	t.Helper()
	f := newFakeTarget(t, n)
	l, err := listenTCP("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	f.l, f.tcp = l, []string{l.Addr().String()}
	return f
}

// fakeTarget makes one that is reached this way.
func (k wayKind) fakeTarget(t testing.TB, n uint64) *fakeTarget {
	t.Helper()
	if k.params[ParamTransport] == "tcp" {
		return newFakeTargetTCP(t, n)
	}
	return newFakeTarget(t, n)
}

// accept takes the initiator's connection and hears its hello.
func (f *fakeTarget) accept(t testing.TB) *rawConn {
	t.Helper()
	f.l.(interface{ SetDeadline(time.Time) error }).SetDeadline(time.Now().Add(patience))
	conn, err := f.l.Accept()
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
