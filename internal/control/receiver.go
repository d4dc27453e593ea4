//go:build linux && cgo

package control

import (
	"net/netip"
	"sync/atomic"
	"syscall"
	"time"

	zmq "github.com/pebbe/zmq4"
	"go.uber.org/zap"
)

// receiver owns the PULL socket and calls the handler.
type receiver struct {
	cfg      *Config
	log      *zap.Logger
	counters *counters
	pull     *zmq.Socket
	poll     *poller
	stopping atomic.Bool
	done     chan struct{}
	sources  sourceCache
}

// errorPause keeps a PULL socket that fails from taking a core.
const errorPause = 100 * time.Millisecond

// stop ends run after the message that is being handled.
func (r *receiver) stop() {
	r.stopping.Store(true)
	r.poll.wake()
}

// run is the owner's goroutine. Nothing that a peer sends ends it.
func (r *receiver) run() {
	defer close(r.done)
	for !r.stopping.Load() {
		var until time.Time
		if err := r.receiveAll(); err != nil {
			r.counters.receiveErrors.Add(1)
			r.log.Error("control: receive", zap.Error(errno(err)))
			until = time.Now().Add(errorPause)
		}
		if _, err := r.poll.wait(until); err != nil {
			r.log.Error("control: receiver stops", zap.Error(err))
			break
		}
	}
	if err := closePull(r.pull); err != nil {
		r.log.Error("control: close PULL socket", zap.Error(errno(err)))
	}
}

// receiveAll handles what has arrived, and leaves the socket's descriptor armed: it is reset
// only by asking for the socket's events.
func (r *receiver) receiveAll() error {
	for !r.stopping.Load() {
		state, err := r.pull.GetEvents()
		if err != nil || state&zmq.POLLIN == 0 {
			return err
		}
		for !r.stopping.Load() {
			source, frames, err := r.receive()
			if isErrno(err, syscall.EAGAIN) {
				break
			} else if err != nil {
				return err
			}
			if frames != nil {
				r.handle(source, frames)
			}
		}
	}
	return nil
}

// handle calls the handler.
func (r *receiver) handle(source netip.Addr, frames [][]byte) {
	value := guard("handler", r.log, r.counters, func() { r.cfg.handle(source, frames) })
	if value != nil && r.cfg.Panicked != nil {
		guard("what follows a panic", r.log, r.counters, func() { r.cfg.Panicked(source, frames, value) })
	}
}

// receive takes one message; nil frames mean that it was over a limit, and dropped. libzmq
// gives a message out only when all of it is there, so it never waits halfway.
func (r *receiver) receive() (source netip.Addr, frames [][]byte, err error) {
	var (
		n, bytes int
		limits   = &r.cfg.Limits
	)
	frames = make([][]byte, 0, 8) // most messages have fewer
	for more := true; more; n++ {
		var f []byte
		if n == 0 && r.cfg.HandlerFrom != nil {
			f, source, err = r.receiveFirst()
		} else {
			f, err = r.pull.RecvBytes(zmq.DONTWAIT)
		}
		if err != nil {
			return source, nil, err
		}
		if more, err = r.pull.GetRcvmore(); err != nil {
			return source, nil, err
		}
		if bytes += len(f); n >= limits.Frames || bytes > limits.MessageBytes {
			frames = nil // and the rest is read only to be dropped
			continue
		}
		frames = append(frames, f)
	}
	switch {
	case n > limits.Frames:
		r.counters.droppedFrames.Add(1)
	case bytes > limits.MessageBytes:
		r.counters.droppedBytes.Add(1)
	default:
		r.counters.messagesIn.Add(1)
		r.counters.bytesIn.Add(uint64(bytes))
		return source, frames, nil
	}
	r.log.Warn("control: message over the limits dropped", zap.Int("frames", n), zap.Int("bytes", bytes), zap.Stringer("source", source))
	return source, nil, nil
}

// peerAddress is libzmq's name for where a message's connection comes from. Every frame of a
// message has it.
const peerAddress = "Peer-Address"

// receiveFirst takes the first frame of a message, and where it came from.
func (r *receiver) receiveFirst() (f []byte, source netip.Addr, err error) {
	f, properties, err := r.pull.RecvBytesWithMetadata(zmq.DONTWAIT, peerAddress)
	if err != nil {
		return nil, netip.Addr{}, err
	}
	return f, r.sources.parse(properties[peerAddress]), nil
}

// sourceCache keeps the last address parsed: messages come in runs.
type sourceCache struct {
	text string
	addr netip.Addr
}

func (c *sourceCache) parse(text string) netip.Addr {
	if text != c.text {
		c.text, c.addr = text, parseSource(text)
	}
	return c.addr
}

// parseSource reads an address as libzmq gives it; the zero Addr if it is none.
func parseSource(text string) netip.Addr {
	a, err := netip.ParseAddr(text)
	if err != nil {
		return netip.Addr{}
	}
	return a.Unmap()
}

// handle hands a message to whichever handler there is.
func (c *Config) handle(source netip.Addr, frames [][]byte) {
	if c.HandlerFrom != nil {
		c.HandlerFrom(source, frames)
		return
	}
	c.Handler(frames)
}
