//go:build linux && cgo

package control

import (
	"fmt"
	"time"

	"github.com/nixlkv/nixlkv"
)

// outgoing is a message on its way to libzmq. Past its construction it belongs to the sender's
// goroutine.
type outgoing struct {
	to         Endpoint
	frames     [][]byte
	bytes      int
	generation uint64
	deadline   time.Time
	stranger   bool

	// One of the two is set, and is called or filled exactly once.
	done   func(generation uint64, err error)
	result chan sendResult // of capacity 1

	timer      timer
	queue      *messageQueue // that it is in
	prev, next *outgoing
}

type sendResult struct {
	generation uint64
	err        error
}

// messageQueue is the messages waiting for one endpoint, in order. It is a linked list
// because deadlines take messages out of the middle.
type messageQueue struct {
	head, tail *outgoing
	n, bytes   int
}

func (q *messageQueue) push(o *outgoing) {
	o.queue, o.prev = q, q.tail
	if q.tail == nil {
		q.head = o
	} else {
		q.tail.next = o
	}
	q.tail = o
	q.n++
	q.bytes += o.bytes
}

func (q *messageQueue) remove(o *outgoing) {
	if o.prev == nil {
		q.head = o.next
	} else {
		o.prev.next = o.next
	}
	if o.next == nil {
		q.tail = o.prev
	} else {
		o.next.prev = o.prev
	}
	o.queue, o.prev, o.next = nil, nil, nil
	q.n--
	q.bytes -= o.bytes
}

// size gives the bytes of a message that this side may send, or an error that wraps
// ErrMalformed or ErrLimit.
func (l Limits) size(m Message) (int, error) {
	if !m.To.IsValid() {
		return 0, fmt.Errorf("%w: message without an endpoint", nixlkv.ErrMalformed)
	}
	if len(m.Frames) == 0 {
		return 0, fmt.Errorf("%w: message to %s without frames", nixlkv.ErrMalformed, m.To)
	}
	if len(m.Frames) > l.Frames {
		return 0, fmt.Errorf("%w: message to %s of %d frames, at most %d", nixlkv.ErrLimit, m.To, len(m.Frames), l.Frames)
	}
	total := 0
	for i, f := range m.Frames {
		if len(f) > l.FrameBytes {
			return 0, fmt.Errorf("%w: frame %d to %s of %d bytes, at most %d", nixlkv.ErrLimit, i, m.To, len(f), l.FrameBytes)
		}
		total += len(f)
	}
	if total > l.MessageBytes {
		return 0, fmt.Errorf("%w: message to %s of %d bytes, at most %d", nixlkv.ErrLimit, m.To, total, l.MessageBytes)
	}
	return total, nil
}
