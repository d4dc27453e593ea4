package embedded

import (
	"context"
	"fmt"
	"net"
	"time"

	"golang.org/x/sys/unix"
)

// keepAliveEvery is how often a connection without traffic is probed. The other end's
// kernel answers, whether or not its process runs.
const keepAliveEvery = time.Second

// keepAlive: the count does not matter, because TCP_USER_TIMEOUT takes its place
// (tcp(7)).
var keepAlive = net.KeepAliveConfig{Enable: true, Idle: keepAliveEvery, Interval: keepAliveEvery, Count: 10}

// listenTCP opens a TCP socket. Multipath TCP, which Go would ask for, keeps some of the
// options below from working.
func listenTCP(address string) (*net.TCPListener, error) {
	c := net.ListenConfig{KeepAliveConfig: keepAlive}
	c.SetMultipathTCP(false)
	l, err := c.Listen(context.Background(), "tcp", address)
	if err != nil {
		return nil, err
	}
	return l.(*net.TCPListener), nil
}

// dialTCP connects to an agent within the timeout.
func dialTCP(ctx context.Context, address string, timeout time.Duration) (*connection, error) {
	d := net.Dialer{Timeout: timeout, KeepAliveConfig: keepAlive}
	d.SetMultipathTCP(false)
	c, err := d.DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	conn, err := newConnection(c)
	if err != nil {
		return nil, err
	}
	if err := conn.giveUpAfter(timeout); err != nil {
		return nil, err
	}
	return conn, nil
}

// giveUpAfter makes the kernel end the connection when the other end has acknowledged
// nothing of what was sent, or has had no room for it, for this long (TCP_USER_TIMEOUT); a
// connection without traffic, when its probes went unanswered for this long. It closes the
// connection on an error.
func (c *connection) giveUpAfter(d time.Duration) error {
	var set error
	err := c.raw.Control(func(fd uintptr) {
		set = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(d.Milliseconds()))
	})
	if err == nil {
		err = set
	}
	if err != nil {
		c.Close()
		return fmt.Errorf("set TCP_USER_TIMEOUT: %w", err)
	}
	return nil
}
