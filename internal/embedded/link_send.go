package embedded

import (
	"encoding/binary"
	"fmt"
	"slices"
	"time"

	"github.com/nixlkv/nixlkv/internal/engine"
)

const (
	// maxQueued bounds the notifications without a transfer that a peer has not
	// acknowledged, in bytes with their cost.
	maxQueued = 4 << 20
)

// outgoing is what the writer sends: the part of a request that needs the connection, or
// a notification of its own (r is nil). cost is that of its notification, 0 without one.
type outgoing struct {
	r    *request
	msg  []byte
	cost int
}

// queueSend hands the writer what is left of a request after copying.
func (p *peer) queueSend(r *request) {
	o := outgoing{r: r}
	if r.hasNotif {
		o.msg, o.cost = r.notif, cost(r.notif)
	}
	p.mu.Lock()
	err := p.err
	if err == nil {
		p.sends.push(o)
		p.wake.Signal()
	}
	p.mu.Unlock()
	if err != nil {
		r.settle(err)
	}
}

// queueRead hands the writer a read that needs the connection.
func (p *peer) queueRead(r *request) {
	p.mu.Lock()
	err := p.err
	if err == nil {
		p.reads.push(r)
		p.wake.Signal()
	}
	p.mu.Unlock()
	if err != nil {
		r.settle(err)
	}
}

// Notify implements engine.Agent. It connects first if need be, and waits while the peer
// has not acknowledged a few MiB of earlier ones, up to the connect timeout. Without an
// error the notification is queued on a living connection; whether it arrived is not
// told. A peer that is lost before shows in CheckRemote.
func (a *Agent) Notify(h engine.Remote, msg []byte) error {
	p, err := a.usablePeer(h)
	if err == nil {
		err = p.notify(msg)
	}
	if err != nil {
		return fmt.Errorf("embedded: notify: %w", err)
	}
	return nil
}

func (p *peer) notify(msg []byte) error {
	if err := checkNotification(msg); err != nil {
		return err
	}
	if err := p.connect(); err != nil {
		return err
	}
	o := outgoing{msg: slices.Clone(msg), cost: cost(msg)}
	var deadline *time.Timer
	for {
		p.mu.Lock()
		if p.err != nil {
			defer p.mu.Unlock()
			return p.unusable()
		}
		if p.queued+o.cost <= maxQueued {
			p.queued += o.cost
			p.sends.push(o)
			p.wake.Signal()
			p.mu.Unlock()
			return nil
		}
		if p.room == nil {
			p.room = make(chan struct{})
		}
		room := p.room
		p.mu.Unlock()
		if deadline == nil {
			deadline = time.NewTimer(p.a.settings.connectTimeout)
			defer deadline.Stop()
		}
		select {
		case <-room:
		case <-deadline.C:
			return fmt.Errorf("peer %q has taken no notifications for %v: %w", p.name, p.a.settings.connectTimeout, engine.ErrBackend)
		}
	}
}

// makeRoom wakes who waits in notify. p.mu is held.
func (p *peer) makeRoom() {
	if p.room != nil {
		close(p.room)
		p.room = nil
	}
}

func checkNotification(msg []byte) error {
	if len(msg) > MaxNotification {
		return fmt.Errorf("notification of %d bytes, the most is %d: %w", len(msg), MaxNotification, engine.ErrInvalidParam)
	}
	return nil
}

// linkWriter writes everything that goes to the target. Small frames are gathered.
type linkWriter struct {
	p     *peer
	out   *frameWriter
	batch [maxParts]item
}

// work is what the writer took from the queues.
type work struct {
	send   outgoing
	number uint64 // of send; 0 if there is none
	read   bool   // p.reading can ask for bytes
}

func (j work) none() bool { return j.number == 0 && !j.read }

func (w *linkWriter) run() error {
	w.out.buf = hello{from: w.p.a.id, to: w.p.id, name: w.p.a.name}.append(w.out.buf)
	for {
		job, err := w.next()
		if err != nil {
			return err
		}
		if job.read {
			w.askRead()
		}
		if job.number != 0 {
			if err := w.send(job.number, job.send); err != nil {
				return err
			}
		}
		if job.none() || len(w.out.buf) >= flushBytes {
			if err := w.out.flush(); err != nil {
				return err
			}
		}
	}
}

// next takes work and encodes control frames. It waits for either if nothing is gathered;
// without work, what is gathered is to be flushed.
func (w *linkWriter) next() (work, error) {
	p := w.p
	p.mu.Lock()
	defer p.mu.Unlock()
	for {
		if p.err != nil {
			return work{}, p.err
		}
		w.takeControlLocked()
		var job work
		if p.reading == nil && p.reads.len() > 0 {
			p.reading = p.reads.pop()
			p.moreRead = true
		}
		if p.moreRead {
			p.moreRead, job.read = false, true
		}
		if p.sends.len() > 0 && p.window+p.sends.peek().cost <= notificationWindow {
			job.send = p.sends.pop()
			p.window += job.send.cost
			p.transfers++
			job.number = p.transfers
			p.sending = job.send.r
		}
		if !job.none() || len(w.out.buf) > 0 {
			return job, nil
		}
		p.wake.Wait()
	}
}

func (w *linkWriter) takeControlLocked() {
	for _, c := range w.p.control {
		w.out.buf = appendHeader(w.out.buf, c.typ, 0, c.number, 0)
	}
	w.p.control = w.p.control[:0]
}

// send writes the foreign part of a transfer, if it has one, and the frame that ends it.
func (w *linkWriter) send(number uint64, o outgoing) error {
	p := w.p
	if r := o.r; r != nil && r.op == engine.Write {
		if err := w.writeForeign(number, r); err != nil {
			return err // the connection's, which ends the request too
		}
		if err := r.failed(); err != nil {
			p.mu.Lock()
			p.sending = nil
			p.window -= o.cost
			p.mu.Unlock()
			r.settle(err)
			return nil
		}
	}
	var flags uint8
	if o.cost > 0 {
		flags = flagNotification
	}
	w.out.buf = appendHeader(w.out.buf, frameCommit, flags, number, len(o.msg))
	w.out.buf = append(w.out.buf, o.msg...)
	// The request is not touched from here on: its answer may come with the next flush.
	p.mu.Lock()
	p.sending = nil
	p.awaiting[number] = o
	p.mu.Unlock()
	return nil
}

// writeForeign writes the items that go through the connection, as many to a frame as fit.
func (w *linkWriter) writeForeign(number uint64, r *request) error {
	from := itemPlaces{r: r}
	for r.failed() == nil {
		at := from.at
		n, total := 0, uint64(0)
		for n < maxParts && total < maxPayload {
			part, ok := r.nextSocket(&at, maxPayload-total)
			if !ok {
				break
			}
			w.batch[n] = part
			n++
			total += part.n
		}
		if n == 0 {
			return nil
		}
		w.out.buf = appendHeader(w.out.buf, frameWrite, 0, number, 4+n*partSize+int(total))
		w.out.buf = r.appendParts(w.out.buf, w.batch[:n])
		// If the memory cannot be read, zeros follow, which are of no use: the request fails,
		// and no commit follows.
		if err := w.out.payload(&from, total); err != nil {
			return err
		}
		// What else the target waits for need not wait for a long transfer.
		w.p.mu.Lock()
		w.takeControlLocked()
		w.p.mu.Unlock()
	}
	return nil
}

// askRead asks for the next bytes of the read.
func (w *linkWriter) askRead() {
	p := w.p
	p.mu.Lock()
	r := p.reading
	p.transfers++
	r.readNumber = p.transfers
	n, at := 0, r.at
	for n < maxParts && r.expected < maxRead {
		part, ok := r.nextSocket(&at, maxRead-r.expected)
		if !ok {
			break
		}
		w.batch[n] = part
		n++
		r.expected += part.n
	}
	if n == 0 {
		p.reading = nil // the foreign items are all empty
		p.mu.Unlock()
		r.readEnded()
		return
	}
	w.out.buf = appendHeader(w.out.buf, frameRead, 0, r.readNumber, 4+n*partSize)
	w.out.buf = r.appendParts(w.out.buf, w.batch[:n])
	p.mu.Unlock()
}

// appendParts appends the table of a write or read.
func (r *request) appendParts(b []byte, items []item) []byte {
	b = binary.LittleEndian.AppendUint32(b, uint32(len(items)))
	for _, it := range items {
		reg := r.regions[it.pos]
		b = appendPart(b, part{region: reg.id, off: it.remote - reg.addr, n: it.n})
	}
	return b
}
