//go:build !linux || !cgo

package control

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	"github.com/nixlkv/nixlkv"
)

// Control is one rank's control sockets. In this build there are none.
type Control struct{}

func unsupported() error {
	return fmt.Errorf("%w: control sockets use libzmq, which needs Linux and cgo: build with CGO_ENABLED=1, a C compiler, "+
		"pkg-config and libzmq's headers (libzmq3-dev)", nixlkv.ErrUnsupported)
}

// New fails with an error that wraps ErrUnsupported, or ErrConfig for a bad configuration.
func New(cfg Config) (*Control, error) {
	if _, err := cfg.complete(); err != nil {
		return nil, err
	}
	return nil, unsupported()
}

// Addr gives no address.
func (*Control) Addr() netip.AddrPort { return netip.AddrPort{} }

// Port gives no port.
func (*Control) Port() int { return 0 }

// Send fails with ErrUnsupported.
func (*Control) Send(context.Context, Message) (uint64, error) { return 0, unsupported() }

// SendAsync fails with ErrUnsupported.
func (*Control) SendAsync(Message, func(uint64, error)) error { return unsupported() }

// Drop has nothing to close.
func (*Control) Drop(Endpoint) {}

// Trouble knows of none.
func (*Control) Trouble(Endpoint) error { return nil }

// Refused knows of none.
func (*Control) Refused(netip.Addr, time.Time) error { return nil }

// Stats are all zero.
func (*Control) Stats() Stats { return Stats{} }

// Close has nothing to close.
func (*Control) Close(context.Context) error { return nil }
