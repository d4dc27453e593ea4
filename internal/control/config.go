package control

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"go.uber.org/zap"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/internal/trust"
)

// ErrConfig: New was given a configuration that cannot work.
var ErrConfig = errors.New("control: invalid configuration")

// Config configures a Control. Only a handler is required; zero fields get the defaults named
// with them.
type Config struct {
	// Host is the address to bind the PULL socket to: an IP address, or a name that is
	// resolved once (the first IPv4 address, or else the first). Default 127.0.0.1. All
	// interfaces only if asked for with 0.0.0.0, or :: for both families.
	Host string
	// Port to bind; 0 lets the system choose.
	Port int

	// Handler is called with every message received, from one goroutine, one at a time; the
	// messages of one connection come in the order sent. Frames and their memory are the handler's to
	// keep. While it runs nothing is received: libzmq queues up to RecvHWM messages per
	// connection, then TCP holds up the senders. A panic is recovered, counted and logged with its
	// stack.
	Handler func(frames [][]byte)
	// HandlerFrom is a Handler that is also given the address that the message's connection
	// comes from; the zero Addr if libzmq does not know it. Set this or Handler.
	HandlerFrom func(source netip.Addr, frames [][]byte)
	// Panicked, if set, is called after a panic of the handler, on its goroutine, with what the
	// handler was given and what it panicked with: whoever waits for what the message was about
	// has to be told. The frames may be half taken. A panic of it is recovered too.
	Panicked func(source netip.Addr, frames [][]byte, value any)
	// Observer, if set, is told of connections to endpoints that were sent to. It runs on
	// the goroutine of completion callbacks and must not block: they wait, and so does the
	// reconnect that its event is about. It may call Send, SendAsync, Drop and Stats.
	Observer func(Event)
	// Logger; default none. What peers can cause is logged a few times a second at most.
	Logger *zap.Logger
	// Curve, if set, encrypts and authenticates both directions. A peer that does not have the
	// secret key of its ServerKey, or of one of its ClientKeys, is refused in the handshake.
	Curve *Curve
	// Allowed are the networks that connections may come from; the zero List is everywhere.
	// Others are refused in the handshake.
	Allowed trust.List

	// SendTimeout is the deadline of messages without one. Default 30 s, as SGLang's prefill.
	SendTimeout time.Duration
	// Linger bounds what Close waits for messages to leave, and how long a connection that
	// was idle may go on writing. Default 1 s. Negative: none, as SGLang.
	Linger time.Duration
	// ConnectTimeout bounds one attempt to connect, the ZMTP handshake included. Default 5 s.
	ConnectTimeout time.Duration
	// ReconnectMin and ReconnectMax bound the exponential, jittered pause between attempts.
	// A new message to an endpoint shortens the pause to ReconnectMin. Default 100 ms and 5 s.
	ReconnectMin, ReconnectMax time.Duration
	// IdleTimeout is when an endpoint that nothing is sent to is let go. It must be longer than
	// a room may wait for its peer, since the loss of an endpoint let go is not seen.
	// Default 15 min, three times SGLang's bootstrap and waiting timeouts.
	IdleTimeout time.Duration

	Limits Limits
}

// Limits bound what peers and callers can make a Control hold.
type Limits struct {
	// Frames, FrameBytes and MessageBytes bound one message, in either direction. Defaults 128
	// (SGLang's longest message has 25), 16 MiB and 32 MiB.
	Frames, FrameBytes, MessageBytes int
	// RecvHWM bounds the messages that libzmq queues per incoming connection. Default 1000.
	RecvHWM int
	// SendHWM bounds the messages that libzmq queues per outgoing connection, which count as
	// sent. Default 128.
	SendHWM int
	// Pending and PendingBytes bound what waits here for all endpoints together, callbacks
	// not yet returned included. Three quarters are for what waits for a connection, or for
	// room in one; when they are used up, the endpoint that most waits for gives up its newest
	// message for one to another. Defaults 16384 and 256 MiB.
	Pending, PendingBytes int
	// EndpointPending and EndpointPendingBytes bound what waits here for one endpoint.
	// Defaults 2048 and 64 MiB.
	EndpointPending, EndpointPendingBytes int
	// Endpoints bounds the table of endpoints. A full table refuses newcomers with ErrLimit.
	// An endpoint takes four file descriptors. Default 4096, at most 16384.
	Endpoints int
	// Strangers bounds, of these, what only messages to a Stranger were sent to, and such
	// messages that wait. Default a sixteenth of Endpoints.
	Strangers int
}

// Curve are the keys of CurveZMQ.
type Curve = nixlkv.Curve

const (
	maxEndpoints   = 16384
	curveKeyLength = 40
	z85            = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
)

// complete gives a copy with defaults filled in, or an error that wraps ErrConfig.
func (c Config) complete() (Config, error) {
	if (c.Handler == nil) == (c.HandlerFrom == nil) {
		return c, fmt.Errorf("%w: no handler, or two", ErrConfig)
	}
	if c.Logger == nil {
		c.Logger = zap.NewNop()
	}
	if c.Port < 0 || c.Port > 65535 {
		return c, fmt.Errorf("%w: port %d", ErrConfig, c.Port)
	}
	c.Host = cmp.Or(c.Host, "127.0.0.1")
	if c.Curve != nil {
		k := *c.Curve
		k.ServerKey = cmp.Or(k.ServerKey, k.PublicKey)
		for name, keys := range map[string][]string{
			"public": {k.PublicKey}, "secret": {k.SecretKey}, "server": {k.ServerKey}, "client": k.ClientKeys,
		} {
			for _, key := range keys {
				if len(key) != curveKeyLength || strings.Trim(key, z85) != "" {
					return c, fmt.Errorf("%w: CURVE %s key is not %d characters of Z85", ErrConfig, name, curveKeyLength)
				}
			}
		}
		c.Curve = &k
	}

	c.SendTimeout = cmp.Or(c.SendTimeout, 30*time.Second)
	c.Linger = max(0, cmp.Or(c.Linger, time.Second))
	c.ConnectTimeout = cmp.Or(c.ConnectTimeout, 5*time.Second)
	c.ReconnectMin = cmp.Or(c.ReconnectMin, 100*time.Millisecond)
	c.ReconnectMax = cmp.Or(c.ReconnectMax, max(5*time.Second, c.ReconnectMin))
	c.IdleTimeout = cmp.Or(c.IdleTimeout, 15*time.Minute)
	for name, d := range map[string]time.Duration{
		"SendTimeout": c.SendTimeout, "ConnectTimeout": c.ConnectTimeout, "ReconnectMin": c.ReconnectMin,
		"ReconnectMax": c.ReconnectMax - c.ReconnectMin + 1, "IdleTimeout": c.IdleTimeout,
	} {
		if d <= 0 {
			return c, fmt.Errorf("%w: %s out of range", ErrConfig, name)
		}
	}
	l, err := c.Limits.complete()
	c.Limits = l
	return c, err
}

func (l Limits) complete() (Limits, error) {
	l.MessageBytes = cmp.Or(l.MessageBytes, max(32<<20, l.FrameBytes))
	l.EndpointPendingBytes = cmp.Or(l.EndpointPendingBytes, max(64<<20, l.MessageBytes))
	l.EndpointPending = cmp.Or(l.EndpointPending, 2048)
	l = Limits{
		Frames:               cmp.Or(l.Frames, 128),
		FrameBytes:           cmp.Or(l.FrameBytes, min(16<<20, l.MessageBytes)),
		MessageBytes:         l.MessageBytes,
		RecvHWM:              cmp.Or(l.RecvHWM, 1000),
		SendHWM:              cmp.Or(l.SendHWM, 128),
		Pending:              cmp.Or(l.Pending, max(16384, l.EndpointPending)),
		PendingBytes:         cmp.Or(l.PendingBytes, max(256<<20, l.EndpointPendingBytes)),
		EndpointPending:      l.EndpointPending,
		EndpointPendingBytes: l.EndpointPendingBytes,
		Endpoints:            cmp.Or(l.Endpoints, 4096),
		Strangers:            l.Strangers,
	}
	l.Strangers = cmp.Or(l.Strangers, max(1, l.Endpoints/16))
	lowest := min(l.Frames, l.FrameBytes, l.RecvHWM, l.SendHWM, l.EndpointPending, l.Endpoints, l.Strangers)
	ordered := l.FrameBytes <= l.MessageBytes && l.MessageBytes <= l.EndpointPendingBytes &&
		l.EndpointPendingBytes <= l.PendingBytes && l.EndpointPending <= l.Pending
	if lowest < 1 || !ordered || l.Endpoints > maxEndpoints {
		return l, fmt.Errorf("%w: limits out of range: %+v", ErrConfig, l)
	}
	return l, nil
}
