//go:build linux && cgo

package control

import (
	"sync"

	"go.uber.org/zap"
)

// notifier runs what the caller gave, and what therefore may block or panic, away from the
// sender: completion callbacks and the observer, in the order queued. Its queue is bounded by
// its feeders: a message holds its place under Limits.Pending until its callback returned, and
// an endpoint makes no new connection before the observer knows of the end of the last.
type notifier struct {
	observer func(Event)
	told     func(*peer)     // after the observer returned; called on the notifier's goroutine
	settled  func(*outgoing) // after a callback returned, likewise
	log      *zap.Logger
	counters *counters

	mu     sync.Mutex
	queue  []notification
	closed bool
	ready  chan struct{} // of capacity 1: queue or closed changed
	done   chan struct{}
}

// notification is an event of peer, or the completion of message.
type notification struct {
	peer    *peer
	event   Event
	message *outgoing
	result  sendResult
}

func (n *notifier) push(item notification) {
	n.mu.Lock()
	n.queue = append(n.queue, item)
	n.mu.Unlock()
	n.signal()
}

// close lets run end once the queue is empty. Events that still wait are not delivered.
func (n *notifier) close() {
	n.mu.Lock()
	n.closed = true
	n.mu.Unlock()
	n.signal()
}

func (n *notifier) signal() {
	select {
	case n.ready <- struct{}{}:
	default:
	}
}

func (n *notifier) run() {
	defer close(n.done)
	var batch []notification
	for {
		n.mu.Lock()
		batch, n.queue = n.queue, batch[:0]
		closed := n.closed
		n.mu.Unlock()
		for i := range batch {
			n.deliver(&batch[i])
		}
		if len(batch) == 0 && closed {
			return
		}
		clear(batch)
		if len(batch) == 0 {
			<-n.ready
		}
	}
}

func (n *notifier) deliver(item *notification) {
	if item.message != nil {
		n.guard("completion callback", func() { item.message.done(item.result.generation, item.result.err) })
		n.settled(item.message)
		return
	}
	if !n.isClosed() {
		n.guard("observer", func() { n.observer(item.event) })
	}
	n.told(item.peer)
}

func (n *notifier) isClosed() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.closed
}

func (n *notifier) guard(what string, f func()) { guard(what, n.log, n.counters, f) }

// guard runs f and survives its panic, whose value it gives; nil if there was none.
func guard(what string, log *zap.Logger, c *counters, f func()) (value any) {
	defer func() {
		if value = recover(); value != nil {
			c.panics.Add(1)
			log.Error("control: panic in "+what, zap.Any("panic", value), zap.Stack("stack"))
		}
	}()
	f()
	return nil
}
