//go:build linux && cgo

package control

import (
	"fmt"
	"net/netip"
	"syscall"
	"time"

	zmq "github.com/pebbe/zmq4"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"
)

// incoming follows the connections to the PULL socket through their handshakes, by what its
// monitor tells, and notes those that come to nothing. What the gate refuses is left to the gate.
//
// libzmq names no peer in these events, only the descriptor of a connection that it has accepted,
// and that of one that has ended. They come from its one I/O thread in the order of what happened
// there: the event that a handshake failed is followed at once by that of the connection's end. A
// success, or a refusal of the gate, names nobody.
type incoming struct {
	log      *zap.Logger
	counters *counters
	gated    bool                // what has no handshake is not let in
	port     uint16              // that the socket is bound to
	conns    map[int]accepted    // by descriptor, which bounds them
	peerOf   func(fd int) string // a test's own

	verdicts uint64 // handshakes that succeeded, or that the gate refused
	failed   string // why the handshake failed of the connection whose end comes next
	cut      bool   // it ended without being refused
	noted    []refusal
}

// accepted is a connection that has not ended.
type accepted struct {
	peer     string
	verdicts uint64 // until then
}

// refusal is a connection that came to nothing.
type refusal struct {
	fd     int
	peer   string // empty if it is not known
	reason string
	cut    bool
}

// What libzmq says of a handshake that failed (zmq.h, ZMQ_PROTOCOL_ERROR_ZMTP_…).
const (
	zmtpCryptographic     = 0x11000001
	zmtpMechanismMismatch = 0x11000002
)

func newIncoming(log *zap.Logger, c *counters, gated bool, port uint16) *incoming {
	in := &incoming{log: log, counters: c, gated: gated, port: port, conns: map[int]accepted{}}
	in.peerOf = in.peer
	return in
}

// event takes one event, in the order told.
func (in *incoming) event(event zmq.Event, value int) {
	switch event {
	case zmq.EVENT_ACCEPTED:
		// One that has ended since may have left its descriptor to this one, and been asked for
		// this one's peer.
		for i := range in.noted {
			if in.noted[i].fd == value {
				in.noted[i].peer = ""
			}
		}
		in.conns[value] = accepted{in.peerOf(value), in.verdicts}
		in.counters.incoming.Store(int64(len(in.conns)))
	case zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_HANDSHAKE_FAILED_AUTH:
		in.verdicts++
	case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
		switch value {
		case zmtpCryptographic:
			in.failed = "it was made for another server key"
		case zmtpMechanismMismatch:
			in.failed = "CURVE on one side alone"
		default:
			in.failed = fmt.Sprintf("not the handshake of ZMTP 3 (%#x)", value)
		}
	case zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
		in.cut = true
		in.failed = "the peer closed it"
		if syscall.Errno(value) == syscall.EAGAIN {
			in.failed = "the peer did not go on"
		}
	case zmq.EVENT_DISCONNECTED:
		in.ended(value)
	}
}

// ended takes the end of a connection.
func (in *incoming) ended(fd int) {
	c, known := in.conns[fd]
	delete(in.conns, fd)
	in.counters.incoming.Store(int64(len(in.conns)))
	why, cut := in.failed, in.cut
	in.failed, in.cut = "", false
	if why == "" {
		if !in.gated || !known || c.verdicts != in.verdicts {
			return // it may have passed, or the gate has it
		}
		why = "no handshake of ZMTP 3" // an older one, or not ZMTP
	}
	in.noted = append(in.noted, refusal{fd, c.peer, why, cut})
}

// settle counts and logs what was noted, once there are no more events for now.
func (in *incoming) settle() {
	for _, r := range in.noted {
		peer := r.peer
		if peer == "" {
			peer = "unknown"
		}
		if r.cut {
			in.counters.handshakesCut.Add(1)
			in.log.Info("control: an incoming connection ended in its handshake", zap.String("source", peer), zap.String("reason", r.reason))
			continue
		}
		in.counters.handshakesRefused.Add(1)
		if at, err := netip.ParseAddrPort(r.peer); err == nil {
			in.counters.refused.note(at.Addr(), r.reason, time.Now())
		}
		in.log.Warn("control: an incoming connection was refused in its handshake", zap.String("source", peer), zap.String("reason", r.reason))
	}
	in.noted = in.noted[:0]
}

// peer gives the address that a descriptor is connected to, empty if that cannot be told. The
// descriptor is libzmq's: it may be closed by now, and even be another connection's.
func (in *incoming) peer(fd int) string {
	local, err := unix.Getsockname(fd)
	if err != nil {
		return ""
	}
	if at, ok := addrPort(local); !ok || at.Port() != in.port {
		return ""
	}
	remote, err := unix.Getpeername(fd)
	if err != nil {
		return ""
	}
	at, ok := addrPort(remote)
	if !ok {
		return ""
	}
	return at.String()
}

func addrPort(a unix.Sockaddr) (netip.AddrPort, bool) {
	switch a := a.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(a.Addr), uint16(a.Port)), true
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(a.Addr).Unmap(), uint16(a.Port)), true
	}
	return netip.AddrPort{}, false
}
