package embedded

import (
	"fmt"
	"slices"
	"sync"

	"github.com/nixlkv/nixlkv/internal/engine"
)

// recordSize is what one notification takes in engine.Notifications.
func recordSize(name, msg int) int { return 8 + name + msg }

// inbox keeps notifications until the agent's owner drains them. What does not fit is
// parked, unacknowledged, so that its sender holds back; each sender may have only a
// window of unacknowledged notifications, which bounds what is parked. Parking instead of
// not reading keeps a connection's other frames going: a receiver that never drains can
// still deregister its memory.
type inbox struct {
	limit int

	mu     sync.Mutex
	queue  engine.Notifications
	parked []parked
}

type parked struct {
	in     *inbound
	number uint64 // of the transfer
	msg    []byte
}

func cost(msg []byte) int { return notificationCost + len(msg) }

// deliver queues a notification and says whether it may be acknowledged now. It copies
// msg. in.parked is guarded by the inbox.
func (b *inbox) deliver(in *inbound, number uint64, msg []byte) (accepted bool, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	// Behind parked ones, or a sender's order would change.
	if len(b.parked) == 0 && b.fits(in.name, msg) {
		b.queue.Append(in.name, msg)
		return true, nil
	}
	if in.parked+cost(msg) > notificationWindow {
		return false, fmt.Errorf("%w: more than %d bytes of notifications not waiting for an answer", errProtocol, notificationWindow)
	}
	in.parked += cost(msg)
	b.parked = append(b.parked, parked{in, number, slices.Clone(msg)})
	return false, nil
}

func (b *inbox) fits(name string, msg []byte) bool {
	return len(b.queue.Records)+recordSize(len(name), len(msg)) <= b.limit
}

// drain swaps what is queued into dst, then queues what was parked and now fits, and
// gives those that are to be acknowledged.
func (b *inbox) drain(dst *engine.Notifications) []parked {
	const keep = 4 << 20
	dst.Reset()
	if cap(dst.Records) > keep {
		dst.Records = nil
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.queue, *dst = *dst, b.queue
	n := 0
	for _, p := range b.parked {
		if !b.fits(p.in.name, p.msg) {
			break
		}
		b.queue.Append(p.in.name, p.msg)
		p.in.parked -= cost(p.msg)
		n++
	}
	if n == 0 {
		return nil
	}
	accepted := slices.Clone(b.parked[:n])
	b.parked = slices.Delete(b.parked, 0, n)
	return accepted
}

// forget drops what a lost connection had parked: none of it was acknowledged.
func (b *inbox) forget(in *inbound) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.parked = slices.DeleteFunc(b.parked, func(p parked) bool { return p.in == in })
	in.parked = 0
}
