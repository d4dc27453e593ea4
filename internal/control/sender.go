//go:build linux && cgo

package control

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	zmq "github.com/pebbe/zmq4"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/nixlkv/nixlkv"
)

// sender owns the PUSH sockets. Callers hand it commands through a mailbox; its goroutine never
// makes a call that blocks, so an answer to a command is prompt.
type sender struct {
	cfg      *Config
	zctx     *zmq.Context
	log      *zap.Logger
	counters *counters
	notify   *notifier
	poll     *poller
	done     chan struct{}

	mu      sync.Mutex
	mailbox []command
	awake   bool // nobody needs to wake the owner
	closed  bool // no more messages
	stopped bool // no more commands

	troubleMu sync.Mutex
	troubles  map[Endpoint]error // of endpoints in the table, why there is no connection

	// Of the owner's goroutine alone.
	now                 time.Time
	peers               map[Endpoint]*peer
	watched             map[uint64]*peer // by poller token: even for the monitor, odd for the PUSH socket
	timers              timers
	strangers           int       // peers that are
	waiting             int       // peers that messages wait for
	queued, queuedBytes int       // what waits for all peers
	most                float64   // no peer had a larger share
	mostUntil           time.Time // until when that counts
	serial              uint64    // of sockets made, names monitors and tokens
	generation          uint64
	closing             bool
	flushUntil          time.Time
}

type commandKind uint8

const (
	cmdSend   commandKind = iota // message
	cmdCancel                    // message; cause
	cmdDrop                      // endpoint
	cmdTold                      // peer: the observer has returned from an event of it
	cmdClose                     // until
)

type command struct {
	kind     commandKind
	message  *outgoing
	cause    error
	endpoint Endpoint
	peer     *peer
	until    time.Time
}

// post hands a command to the owner; false if it runs no more.
func (s *sender) post(c command) bool {
	s.mu.Lock()
	if s.stopped || (s.closed && c.kind == cmdSend) {
		s.mu.Unlock()
		return false
	}
	s.mailbox = append(s.mailbox, c)
	wake := !s.awake
	s.awake = true
	if c.kind == cmdClose {
		s.closed = true
	}
	s.mu.Unlock()
	if wake {
		s.poll.wake()
	}
	return true
}

// submit takes a message, or says why not.
func (s *sender) submit(m Message, o *outgoing) error {
	size, err := s.cfg.Limits.size(m)
	if err != nil {
		s.counters.sendsRefused.Add(1)
		return err
	}
	o.to, o.frames, o.bytes = m.To, m.Frames, size
	o.generation, o.deadline, o.stranger = m.Generation, m.Deadline, m.Stranger
	if o.deadline.IsZero() {
		o.deadline = time.Now().Add(s.cfg.SendTimeout)
	}
	n, bytes := s.counters.pending.Add(1), s.counters.pendingBytes.Add(int64(size))
	if l := &s.cfg.Limits; n > int64(l.Pending) || bytes > int64(l.PendingBytes) {
		o.stranger = false // not counted yet
		s.settle(o)
		s.counters.sendsRefused.Add(1)
		return fmt.Errorf("%w: %s: %w: %d messages, %d bytes wait for all endpoints",
			nixlkv.ErrSendBlocked, m.To, nixlkv.ErrLimit, n-1, bytes-int64(size))
	}
	if o.stranger && s.counters.strangers.Add(1) > int64(s.cfg.Limits.Strangers) {
		s.settle(o)
		s.counters.sendsRefused.Add(1)
		return fmt.Errorf("%w: %s: %w: %d messages to strangers wait", nixlkv.ErrSendBlocked, m.To, nixlkv.ErrLimit, s.cfg.Limits.Strangers)
	}
	if !s.post(command{kind: cmdSend, message: o}) {
		s.settle(o)
		s.counters.sendsClosed.Add(1)
		return fmt.Errorf("%w: %s: %w", nixlkv.ErrSendBlocked, m.To, nixlkv.ErrClosed)
	}
	return nil
}

// settle gives back a message's place under the limits.
func (s *sender) settle(o *outgoing) {
	s.counters.pending.Add(-1)
	s.counters.pendingBytes.Add(-int64(o.bytes))
	if o.stranger {
		s.counters.strangers.Add(-1)
	}
}

// send waits for the message to be completed. Once ctx ends the owner is asked to give it
// back, so that the frames are the caller's again on return.
func (s *sender) send(ctx context.Context, m Message) (uint64, error) {
	if err := ctx.Err(); err != nil {
		s.counters.sendsCancelled.Add(1)
		return 0, fmt.Errorf("%w: %s: %w", nixlkv.ErrSendBlocked, m.To, context.Cause(ctx))
	}
	if d, ok := ctx.Deadline(); ok && (m.Deadline.IsZero() || d.Before(m.Deadline)) {
		m.Deadline = d
	}
	o := &outgoing{result: make(chan sendResult, 1)}
	if err := s.submit(m, o); err != nil {
		return 0, err
	}
	select {
	case r := <-o.result:
		return r.generation, r.err
	case <-ctx.Done():
		s.post(command{kind: cmdCancel, message: o, cause: context.Cause(ctx)})
		r := <-o.result
		return r.generation, r.err
	}
}

// run is the owner's goroutine.
func (s *sender) run() {
	defer close(s.done)
	var batch []command
	for {
		s.mu.Lock()
		batch, s.mailbox = s.mailbox, batch[:0]
		s.awake = len(batch) > 0
		s.mu.Unlock()

		s.now = time.Now()
		for i := range batch {
			s.obey(&batch[i])
		}
		clear(batch)
		for t := s.timers.due(s.now); t != nil; t = s.timers.due(s.now) {
			s.alarm(t)
		}
		if s.closing && s.flushed() {
			s.stop()
			return
		}
		var ready []unix.EpollEvent
		var err error
		if len(batch) > 0 {
			ready, err = s.poll.peek() // more may have come meanwhile, which is cheaper than to be woken
		} else {
			ready, err = s.poll.wait(s.next())
		}
		if err != nil {
			// Not seen to happen; without descriptors there is nothing to serve.
			s.log.Error("control: sender stops", zap.Error(err))
			s.closing, s.flushUntil = true, s.now
			continue
		}
		s.now = time.Now()
		for _, ev := range ready {
			if p := s.watched[token(ev)]; p != nil {
				s.ready(p, token(ev))
			}
		}
	}
}

func (s *sender) next() time.Time {
	next := s.timers.next()
	if s.closing && (next.IsZero() || s.flushUntil.Before(next)) {
		return s.flushUntil
	}
	return next
}

func (s *sender) obey(c *command) {
	switch c.kind {
	case cmdSend:
		s.enqueue(c.message)
	case cmdCancel:
		switch o := c.message; {
		case o.queue == nil: // completed meanwhile
		case errors.Is(c.cause, context.DeadlineExceeded):
			s.expire(o)
		default:
			s.counters.sendsCancelled.Add(1)
			s.giveUp(o, fmt.Errorf("%w: %s: %w: %w", nixlkv.ErrSendBlocked, o.to, c.cause, s.peers[o.to].waitsFor()))
		}
	case cmdDrop:
		if p := s.peers[c.endpoint]; p != nil {
			s.drop(p)
		}
	case cmdTold:
		s.toldOf(c.peer)
	case cmdClose:
		s.closing, s.flushUntil = true, c.until
	}
}

func (s *sender) alarm(t *timer) {
	switch owner := t.owner.(type) {
	case *outgoing:
		s.expire(owner)
	case *peer:
		s.peerAlarm(owner)
	}
}

// enqueue puts a new message behind what waits for its endpoint, and sends what can be sent.
func (s *sender) enqueue(o *outgoing) {
	p := s.peers[o.to]
	if p == nil {
		if p = s.newPeer(o.to, o.stranger); p == nil {
			s.counters.sendsRefused.Add(1)
			s.finish(o, 0, fmt.Errorf("%w: %s: %w: %d endpoints in use, %d of strangers",
				nixlkv.ErrSendBlocked, o.to, nixlkv.ErrLimit, len(s.peers), s.strangers))
			return
		}
	} else if !o.stranger {
		s.befriend(p)
	}
	p.lastUsed = s.now
	switch l := &s.cfg.Limits; {
	case p.lossUntold:
		s.counters.sendsLost.Add(1)
		s.finish(o, 0, p.lostError("connection lost, observer not told yet"))
		return
	case o.generation != 0 && (p.state != connected || o.generation != p.generation):
		s.counters.sendsLost.Add(1)
		s.finish(o, 0, p.lostError("connection is not of generation "+formatGeneration(o.generation)))
		return
	case p.queue.n >= l.EndpointPending || p.queue.bytes+o.bytes > l.EndpointPendingBytes:
		s.counters.sendsRefused.Add(1)
		s.finish(o, 0, fmt.Errorf("%w: %s: %w: %d messages, %d bytes wait",
			nixlkv.ErrSendBlocked, o.to, nixlkv.ErrLimit, p.queue.n, p.queue.bytes))
		return
	}
	if err := s.makeRoom(p, o); err != nil {
		s.counters.sendsRefused.Add(1)
		s.finish(o, 0, fmt.Errorf("%w: %s: %w", nixlkv.ErrSendBlocked, o.to, err))
		return
	}
	s.queue(p, o)
	if p.state == connected {
		if p.queue.n == 1 { // else the first in the queue is known to be blocked
			s.flush(p)
		}
	} else {
		s.hasten(p)
	}
	if o.queue != nil {
		s.timers.set(&o.timer, o, o.deadline)
	}
}

// expire gives up a message whose deadline has passed.
func (s *sender) expire(o *outgoing) {
	p := s.peers[o.to]
	why := p.waitsFor()
	s.counters.sendsExpired.Add(1)
	s.log.Warn("control: message not sent in time", zap.String("endpoint", p.name), zap.NamedError("reason", why))
	s.giveUp(o, fmt.Errorf("%w: %s: %w: %w", nixlkv.ErrSendBlocked, o.to, context.DeadlineExceeded, why))
}

// giveUp takes a message that waits out of its queue.
func (s *sender) giveUp(o *outgoing, err error) {
	p := s.peers[o.to]
	s.unqueue(p, o)
	s.finish(o, 0, err)
	s.drained(p)
	if p.stranger && p.queue.n == 0 && p.state != connected {
		s.release(p, 0)
	}
}

// finish completes a message that is in no queue.
func (s *sender) finish(o *outgoing, generation uint64, err error) {
	r := sendResult{generation, err}
	o.frames = nil
	if o.result != nil {
		s.settle(o)
		o.result <- r
		return
	}
	s.notify.push(notification{message: o, result: r})
}

// flushed says whether nothing is left that Close should wait for.
func (s *sender) flushed() bool {
	if !s.now.Before(s.flushUntil) {
		return true
	}
	for _, p := range s.peers {
		if p.queue.n > 0 {
			return false
		}
	}
	return true
}

// stop ends all connections. What libzmq has taken has until flushUntil to leave.
func (s *sender) stop() {
	for _, p := range s.peers {
		s.abandon(p, &s.counters.sendsClosed, fmt.Errorf("%w: %s: %w", nixlkv.ErrSendBlocked, p.name, nixlkv.ErrClosed))
		s.closeSockets(p, max(0, s.flushUntil.Sub(s.now)))
		s.timers.stop(&p.timer)
	}
	clear(s.peers)
	s.mu.Lock()
	s.closed, s.stopped = true, true
	rest := s.mailbox
	s.mailbox = nil
	s.mu.Unlock()
	for _, c := range rest {
		if c.kind == cmdSend {
			s.counters.sendsClosed.Add(1)
			s.finish(c.message, 0, fmt.Errorf("%w: %s: %w", nixlkv.ErrSendBlocked, c.message.to, nixlkv.ErrClosed))
		}
	}
	s.counters.endpoints.Store(0)
}
