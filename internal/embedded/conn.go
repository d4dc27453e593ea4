package embedded

import (
	"context"
	"errors"
	"fmt"
	"net"
	"syscall"
	"time"
)

// longAgo as a deadline wakes whoever reads or writes a connection.
var longAgo = time.Unix(1, 0)

// connection is a stream between two agents.
type connection struct {
	net.Conn
	raw  syscall.RawConn
	unix *net.UnixConn // nil over TCP
}

// newConnection takes over a *net.UnixConn or *net.TCPConn. It closes it on an error.
func newConnection(c net.Conn) (*connection, error) {
	conn := &connection{Conn: c}
	conn.unix, _ = c.(*net.UnixConn)
	sc, ok := c.(syscall.Conn)
	if !ok {
		c.Close()
		return nil, fmt.Errorf("a %T has no descriptor", c)
	}
	var err error
	if conn.raw, err = sc.SyscallConn(); err != nil {
		c.Close()
		return nil, err
	}
	return conn, nil
}

// overTCP says that the other end may be on another host: no descriptors can be handed
// over, and nothing is known of its user.
func (c *connection) overTCP() bool { return c.unix == nil }

// abort closes the connection and takes back what the other end has not got yet: bytes of
// transfers that have failed.
func (c *connection) abort() {
	if tcp, ok := c.Conn.(*net.TCPConn); ok {
		tcp.SetLinger(0)
	}
	c.Close()
}

// addresses are the ways to an agent, as its metadata tells them and the transport allows.
type addresses struct {
	unix string   // empty if it is not on this host
	tcp  []string // host:port, in the order in which they are tried
}

// reach says how an agent with this metadata can be reached, or why it cannot. a.mu is
// held.
func (a *Agent) reach(m *metadata) (addresses, error) {
	var to addresses
	why := a.host.differs(m.host)
	if why == "" && a.tcp.transport != transportTCP {
		to.unix = m.address
	}
	if a.tcp.transport != transportUnix {
		to.tcp = m.tcp
	}
	switch {
	case to.unix != "" || len(to.tcp) > 0:
		return to, nil
	case len(m.tcp) > 0:
		return to, fmt.Errorf("%s, and this agent does not use TCP (parameter %s): %w", why, ParamTransport, ErrOtherHost)
	case why == "":
		why = "this agent uses TCP only"
	}
	return to, fmt.Errorf("%s, and it offers no TCP address (parameter %s): %w", why, ParamListen, ErrOtherHost)
}

// dial connects by the first way that works. The Unix socket is the first: over it memory
// is mapped. That nobody listens there may also mean that the other host only looks like
// this one, as the copies of a virtual machine do.
func (a *Agent) dial(ctx context.Context, to addresses) (*connection, error) {
	var errs []error
	if to.unix != "" {
		conn, err := dialUnix(ctx, to.unix)
		if err == nil {
			return conn, nil
		}
		errs = append(errs, err)
	}
	for _, address := range to.tcp {
		if ctx.Err() != nil {
			errs = append(errs, ctx.Err())
			break
		}
		conn, err := dialTCP(ctx, address, a.tcp.timeout)
		if err == nil {
			return conn, nil
		}
		errs = append(errs, err)
	}
	return nil, errors.Join(errs...)
}
