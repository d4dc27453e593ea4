//go:build linux && cgo

package control

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"syscall"
	"time"

	zmq "github.com/pebbe/zmq4"

	"github.com/nixlkv/nixlkv"
)

const (
	resolveTimeout = 5 * time.Second
	listenBacklog  = 1024 // a whole deployment may connect at once

	// TCP keepalive as SGLang's prefill sets it: a host that is gone is noticed after 45 s.
	keepaliveIdle     = 30
	keepaliveInterval = 5
	keepaliveCount    = 3
	// Keepalive does not run while data is unacknowledged, or while the peer's window is shut:
	// this bounds both alike, so a stopped process with full buffers is cut off as well.
	unackedTimeout = (keepaliveIdle + keepaliveInterval*keepaliveCount) * time.Second

	socketsPerEndpoint = 3 // PUSH, the monitor's end, ours
)

// errno gives libzmq's error as a syscall.Errno where it is one, so that callers can compare.
func errno(err error) error {
	var e zmq.Errno
	if errors.As(err, &e) && e < zmq.EFSM {
		return syscall.Errno(e)
	}
	return err
}

func isErrno(err error, want syscall.Errno) bool {
	return err != nil && zmq.AsErrno(err) == zmq.Errno(want)
}

// checkCurve finds keys that would otherwise fail every handshake.
func checkCurve(k *Curve) error {
	if !zmq.HasCurve() {
		return fmt.Errorf("%w: control: libzmq was built without CURVE", nixlkv.ErrUnsupported)
	}
	if public, err := zmq.AuthCurvePublic(k.SecretKey); err != nil || public != k.PublicKey {
		return fmt.Errorf("%w: the CURVE public key is not that of the secret key", ErrConfig)
	}
	return nil
}

// newContext makes the context of one Control.
func newContext(endpoints int) (*zmq.Context, error) {
	if major, minor, patch := zmq.Version(); major != 4 || minor < 3 {
		return nil, fmt.Errorf("control: libzmq %d.%d.%d is too old, 4.3 is needed", major, minor, patch)
	}
	zctx, err := zmq.NewContext()
	if err != nil {
		return nil, fmt.Errorf("control: zmq context: %w", errno(err))
	}
	// A socket that lingers keeps its place, hence the quarter on top.
	sockets := socketsPerEndpoint*endpoints*5/4 + 16
	if err := errors.Join(zctx.SetMaxSockets(sockets), zctx.SetBlocky(false)); err != nil {
		return nil, errors.Join(fmt.Errorf("control: zmq context: %w", errno(err)), zctx.Term())
	}
	return zctx, nil
}

// newPull makes and binds the PULL socket, with a monitor that sees all connections from the first
// on, and gives the address it is bound to.
func newPull(zctx *zmq.Context, cfg *Config) (pull, monitor *zmq.Socket, bound netip.AddrPort, err error) {
	host, err := resolve(cfg.Host)
	if err != nil {
		return nil, nil, netip.AddrPort{}, err
	}
	s, err := zctx.NewSocket(zmq.PULL)
	if err != nil {
		return nil, nil, netip.AddrPort{}, fmt.Errorf("control: PULL socket: %w", errno(err))
	}
	monitor, err = zctx.NewSocket(zmq.PAIR)
	if err != nil {
		return nil, nil, netip.AddrPort{}, errors.Join(fmt.Errorf("control: monitor socket: %w", errno(err)), s.Close())
	}
	at := netip.AddrPortFrom(host, uint16(cfg.Port))
	err = errors.Join(
		s.SetLinger(0),
		s.SetIpv6(host.Is6()),
		s.SetRcvhwm(cfg.Limits.RecvHWM),
		s.SetMaxmsgsize(int64(cfg.Limits.FrameBytes)),
		s.SetBacklog(listenBacklog),
		s.SetHandshakeIvl(cfg.ConnectTimeout),
		setKeepalive(s),
	)
	if err == nil && cfg.gated() {
		err = s.SetZapDomain(gateDomain)
	}
	if err == nil && cfg.Curve != nil {
		err = errors.Join(s.SetCurveServer(1), s.SetCurveSecretkey(cfg.Curve.SecretKey))
	}
	if err == nil {
		const events = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | handshakeEvents
		err = follow(s, monitor, "inproc://incoming", events)
	}
	if err == nil {
		err = s.Bind(bindAddress(at))
	}
	if err == nil {
		at, err = boundTo(s, host)
	}
	if err != nil {
		return nil, nil, netip.AddrPort{}, errors.Join(fmt.Errorf("control: bind %s: %w", at, errno(err)), closePull(s), monitor.Close())
	}
	return s, monitor, at, nil
}

// closePull closes the PULL socket; its monitor hears nothing more, and can be closed then.
func closePull(pull *zmq.Socket) error { return errors.Join(pull.Monitor("", 0), pull.Close()) }

const handshakeEvents = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL |
	zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH

// follow has a monitor hear a socket's events. The name is one of the context's own.
//
// libzmq writes monitor events blocking, in its I/O thread: a monitor that nobody reads stops
// the whole context.
func follow(s, monitor *zmq.Socket, name string, events zmq.Event) error {
	return errors.Join(monitor.SetLinger(0), s.Monitor(name, events), monitor.Connect(name))
}

func bindAddress(at netip.AddrPort) string {
	s := "tcp://" + at.String()
	if at.Port() == 0 {
		return strings.TrimSuffix(s, "0") + "*"
	}
	return s
}

func boundTo(s *zmq.Socket, host netip.Addr) (netip.AddrPort, error) {
	last, err := s.GetLastEndpoint()
	if err != nil {
		return netip.AddrPort{}, err
	}
	port, err := strconv.ParseUint(last[strings.LastIndexByte(last, ':')+1:], 10, 16)
	if err != nil {
		return netip.AddrPort{}, fmt.Errorf("endpoint %q: %w", last, err)
	}
	return netip.AddrPortFrom(host, uint16(port)), nil
}

// newPush makes a PUSH socket for one connection and starts to connect it, with a monitor that
// sees everything from there on. One connection makes at most a handful of events, far below the
// monitor's high-water mark, and closePush stops the monitor before its reader goes.
func newPush(zctx *zmq.Context, cfg *Config, to Endpoint, serial uint64) (push, monitor *zmq.Socket, err error) {
	push, err = zctx.NewSocket(zmq.PUSH)
	if err != nil {
		return nil, nil, fmt.Errorf("control: PUSH socket: %w", errno(err))
	}
	monitor, err = zctx.NewSocket(zmq.PAIR)
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("control: monitor socket: %w", errno(err)), push.Close())
	}
	err = errors.Join(
		push.SetLinger(0), // set anew when it is closed
		push.SetIpv6(to.addr.Addr().Is6()),
		push.SetSndhwm(cfg.Limits.SendHWM),
		push.SetImmediate(true),
		push.SetReconnectIvl(-1),
		push.SetConnectTimeout(cfg.ConnectTimeout),
		push.SetHandshakeIvl(cfg.ConnectTimeout),
		push.SetTcpMaxrt(unackedTimeout),
		setKeepalive(push),
	)
	if err == nil && cfg.Curve != nil {
		err = errors.Join(
			push.SetCurveServerkey(cfg.Curve.ServerKey),
			push.SetCurvePublickey(cfg.Curve.PublicKey),
			push.SetCurveSecretkey(cfg.Curve.SecretKey),
		)
	}
	if err == nil {
		const events = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_CLOSE_FAILED | handshakeEvents
		if err = follow(push, monitor, "inproc://monitor-"+strconv.FormatUint(serial, 10), events); err == nil {
			err = push.Connect(to.String())
		}
	}
	if err != nil {
		err = fmt.Errorf("control: connect %s: %w", to, errno(err))
		return nil, nil, errors.Join(err, closePush(push, monitor, 0))
	}
	return push, monitor, nil
}

// closePush closes both sockets; what libzmq has taken may take up to linger to leave.
func closePush(push, monitor *zmq.Socket, linger time.Duration) error {
	err := errors.Join(push.Monitor("", 0), monitor.Close(), push.SetLinger(linger), push.Close())
	if err != nil {
		return fmt.Errorf("control: close: %w", errno(err))
	}
	return nil
}

func setKeepalive(s *zmq.Socket) error {
	return errors.Join(
		s.SetTcpKeepalive(1),
		s.SetTcpKeepaliveIdle(keepaliveIdle),
		s.SetTcpKeepaliveIntvl(keepaliveInterval),
		s.SetTcpKeepaliveCnt(keepaliveCount),
	)
}

// resolve gives the address to bind. Names are resolved here and not by libzmq, which would
// not say which address it took.
func resolve(host string) (netip.Addr, error) {
	if inner, ok := strings.CutPrefix(host, "["); ok {
		host = strings.TrimSuffix(inner, "]")
	}
	if a, err := netip.ParseAddr(host); err == nil {
		if !printable(a.Zone()) {
			return netip.Addr{}, fmt.Errorf("%w: host %q", ErrConfig, host)
		}
		return a.Unmap(), nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), resolveTimeout)
	defer cancel()
	addrs, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
	if err != nil {
		return netip.Addr{}, fmt.Errorf("%w: host %q: %w", ErrConfig, host, err)
	}
	for _, a := range addrs {
		if a.Unmap().Is4() {
			return a.Unmap(), nil
		}
	}
	return addrs[0], nil
}
