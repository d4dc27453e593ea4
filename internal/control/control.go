//go:build linux && cgo

package control

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"time"

	zmq "github.com/pebbe/zmq4"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/internal/ratelog"
)

// Control is one rank's control sockets. Its methods may be called from any goroutine.
type Control struct {
	addr     netip.AddrPort
	zctx     *zmq.Context
	counters counters
	receiver *receiver
	sender   *sender
	notifier *notifier
	gate     *gate

	linger   time.Duration
	closing  sync.Once
	closed   chan struct{}
	closeErr error // once closed
}

// New binds the PULL socket and starts receiving. The caller must Close the result. Errors
// wrap ErrConfig for a bad configuration, and the system's error if the address cannot be bound.
func New(cfg Config) (*Control, error) {
	cfg, err := cfg.complete()
	if err != nil {
		return nil, err
	}
	if cfg.Curve != nil {
		if err := checkCurve(cfg.Curve); err != nil {
			return nil, err
		}
	}
	recvPoll, err := newPoller()
	if err != nil {
		return nil, err
	}
	sendPoll, err := newPoller()
	if err != nil {
		return nil, errors.Join(err, recvPoll.close())
	}
	undo := func(err error) error { return errors.Join(err, recvPoll.close(), sendPoll.close()) }
	zctx, err := newContext(cfg.Limits.Endpoints)
	if err != nil {
		return nil, undo(err)
	}
	log := ratelog.Sampled(cfg.Logger)
	c := &Control{zctx: zctx, linger: cfg.Linger, closed: make(chan struct{})}
	if c.gate, err = newGate(zctx, &cfg, log, &c.counters); err != nil {
		return nil, undo(errors.Join(err, zctx.Term()))
	}
	pull, monitor, addr, err := newPull(zctx, &cfg)
	if err != nil {
		return nil, undo(errors.Join(err, c.gate.close(), zctx.Term()))
	}
	c.addr = addr
	fd, err := pull.GetFd()
	if err = errors.Join(err, c.gate.follow(monitor, addr.Port())); err == nil {
		err = recvPoll.watch(fd, wakeToken+1)
	}
	if err != nil {
		return nil, undo(errors.Join(errno(err), closePull(pull), c.gate.close(), zctx.Term()))
	}

	c.receiver = &receiver{
		cfg: &cfg, log: log, counters: &c.counters, pull: pull, poll: recvPoll, done: make(chan struct{}),
	}
	c.notifier = &notifier{
		observer: cfg.Observer, log: log, counters: &c.counters,
		ready: make(chan struct{}, 1), done: make(chan struct{}),
	}
	c.sender = &sender{
		cfg: &cfg, zctx: zctx, log: log, counters: &c.counters, notify: c.notifier, poll: sendPoll,
		done: make(chan struct{}), peers: make(map[Endpoint]*peer), watched: make(map[uint64]*peer),
		troubles: make(map[Endpoint]error),
	}
	c.notifier.told = func(p *peer) { c.sender.post(command{kind: cmdTold, peer: p}) }
	c.notifier.settled = c.sender.settle
	c.gate.start()
	go c.receiver.run()
	go c.sender.run()
	go c.notifier.run()
	return c, nil
}

// Addr is the address that the PULL socket is bound to, its port the actual one. It is
// unspecified if all interfaces were asked for.
func (c *Control) Addr() netip.AddrPort { return c.addr }

// Port is the port of Addr.
func (c *Control) Port() int { return int(c.addr.Port()) }

// Send sends one message and returns once libzmq has taken it for an established connection,
// whose generation it gives, or at the earliest of the message's deadline, ctx's deadline and
// ctx's end. Messages to one endpoint are sent in the order of the calls. Frames are the
// caller's again on return.
//
// Errors wrap ErrSendBlocked with context.DeadlineExceeded or ctx's cause, and then with what
// Trouble says; with ErrLimit if too much waits already, or with ErrClosed; ErrPeerLost if the connection ended; ErrLimit or
// ErrMalformed for a message over Limits or without frames.
func (c *Control) Send(ctx context.Context, m Message) (generation uint64, err error) {
	return c.sender.send(ctx, m)
}

// SendAsync is Send without waiting. If it returns an error the message was not taken.
// Otherwise done is called exactly once, from the goroutine that also calls the observer, with
// what Send would have returned; the frames must not change before. done must not block, as
// further callbacks wait; it may call Send, SendAsync, Drop and Stats.
func (c *Control) SendAsync(m Message, done func(generation uint64, err error)) error {
	if done == nil {
		return fmt.Errorf("%w: no callback", nixlkv.ErrMalformed)
	}
	return c.sender.submit(m, &outgoing{done: done})
}

// Drop closes the connection to an endpoint at once. What waits for it fails with
// ErrPeerLost, what libzmq has not written is lost. The next message makes a new connection.
func (c *Control) Drop(to Endpoint) {
	c.sender.post(command{kind: cmdDrop, endpoint: to})
}

// Trouble says why there is no connection to an endpoint that messages wait for, or that was lost,
// as of the last attempt to connect; nil if there is one, or none was tried. It wraps ErrNotAllowed
// where the peer refuses this side in the handshake, or the two have no CURVE keys in common.
func (c *Control) Trouble(to Endpoint) error { return c.sender.trouble(to) }

// Refused says why the last connection that came from an address after since was refused in its
// handshake, wrapping ErrNotAllowed; nil if none was, or it cannot be told any more.
func (c *Control) Refused(source netip.Addr, since time.Time) error {
	return c.counters.refused.since(source, since)
}

// Stats gives counters and gauges, also after Close.
func (c *Control) Stats() Stats { return c.counters.snapshot() }

// Close stops receiving, gives what waits to be sent Config.Linger to leave, or most of ctx's
// time if that is shorter, fails the rest with ErrClosed, and returns when all callbacks have
// returned and all sockets, descriptors and goroutines are gone.
//
// If ctx ends first, because a handler or callback does not return, Close returns an error that
// wraps ctx's; the rest of it then goes on in the background and can be waited for by another
// call. Calling it from a handler or callback waits for itself that way. Further calls wait for
// the first.
func (c *Control) Close(ctx context.Context) error {
	c.closing.Do(func() {
		flush := c.linger
		if d, ok := ctx.Deadline(); ok {
			flush = min(flush, time.Until(d)*3/4) // the rest is for taking down
		}
		c.receiver.stop()
		c.sender.post(command{kind: cmdClose, until: time.Now().Add(flush)})
		go c.finish()
	})
	select {
	case <-c.closed:
		return c.closeErr
	default:
	}
	select {
	case <-c.closed:
		return c.closeErr
	case <-ctx.Done():
		return fmt.Errorf("control: close: %w: waiting for %s", context.Cause(ctx), c.waitingFor())
	}
}

// finish takes everything down in order: who uses the sockets, then the context, which waits
// for sockets that linger, then the descriptors that wake-ups write to.
func (c *Control) finish() {
	defer close(c.closed)
	<-c.sender.done
	c.notifier.close()
	<-c.notifier.done
	<-c.receiver.done
	gateErr := c.gate.close()
	err := c.zctx.Term()
	if err != nil {
		err = fmt.Errorf("control: terminate zmq context: %w", errno(err))
	}
	c.closeErr = errors.Join(err, gateErr, c.receiver.poll.close(), c.sender.poll.close())
}

func (c *Control) waitingFor() string {
	for _, part := range []struct {
		done <-chan struct{}
		name string
	}{
		{c.sender.done, "messages to leave"},
		{c.notifier.done, "a callback or the observer"},
		{c.receiver.done, "the handler"},
	} {
		select {
		case <-part.done:
		default:
			return part.name
		}
	}
	return "sockets to close"
}
