//go:build linux && cgo

package control

import (
	"errors"
	"fmt"
	"syscall"

	zmq "github.com/pebbe/zmq4"

	"github.com/nixlkv/nixlkv"
)

// handshakeTrouble says what it means that a handshake with a peer failed. cuts counts the attempts
// in a row, this one included, that the peer has cut off.
//
// A peer that refuses an address or a client key says so. One with another server key cannot: it
// closes the connection, as one that ends at that moment does, but again and again. Where one side
// alone has CURVE both see it, but whichever is quicker closes the connection under the other.
func handshakeTrouble(event zmq.Event, value int, curve bool, cuts int) error {
	switch {
	case event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
		what := "this address is not allowed there"
		if curve {
			what = "this CURVE key, or this address, is not allowed there"
		}
		return fmt.Errorf("%w: the peer refused the handshake: %s", nixlkv.ErrNotAllowed, what)
	case event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL && value == zmtpMechanismMismatch:
		if curve {
			return fmt.Errorf("%w: the handshake failed: the peer has no CURVE", nixlkv.ErrNotAllowed)
		}
		return fmt.Errorf("%w: the handshake failed: the peer asks for CURVE", nixlkv.ErrNotAllowed)
	case event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL && value == zmtpCryptographic:
		return fmt.Errorf("%w: the CURVE handshake failed: the peer has other keys", nixlkv.ErrNotAllowed)
	case event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
		return errors.New("the handshake failed: the peer does not speak ZMTP 3")
	case syscall.Errno(value) == syscall.EAGAIN:
		return errors.New("the peer did not answer in the handshake")
	case curve && cuts > 1:
		return fmt.Errorf("%w: the peer closed the connection in the CURVE handshake, %d times in a row, as one with another server key does",
			nixlkv.ErrNotAllowed, cuts)
	case curve:
		return errors.New("the peer closed the connection in the CURVE handshake: it has another server key, or ended")
	}
	return errors.New("the peer closed the connection in the handshake: it ended, asks for CURVE, or does not speak ZMTP")
}

// errUnreachable: there was no connection for a handshake.
var errUnreachable = errors.New("refused or unreachable")

// errTimedOut: an attempt took too long.
var errTimedOut = errors.New("timed out")

var errNotRead = errors.New("the peer does not read")

// waitsFor says what a message to an endpoint waits for.
func (p *peer) waitsFor() error {
	if p.state == connected {
		return errNotRead
	}
	return p.noConnection()
}

// noConnection says why there is no connection to an endpoint.
func (p *peer) noConnection() error {
	if p.trouble == nil {
		return errors.New("no connection yet")
	}
	return fmt.Errorf("no connection, %d attempts failed: %w", p.failures, p.trouble)
}

// setTrouble notes why there is no connection to an endpoint, nil if there is one or nobody wants
// it any more.
func (s *sender) setTrouble(p *peer, err error) {
	if p.trouble = err; err != nil {
		err = p.noConnection()
	}
	s.troubleMu.Lock()
	defer s.troubleMu.Unlock()
	if err == nil {
		delete(s.troubles, p.endpoint)
	} else {
		s.troubles[p.endpoint] = err
	}
}

func (s *sender) trouble(to Endpoint) error {
	s.troubleMu.Lock()
	defer s.troubleMu.Unlock()
	return s.troubles[to]
}
