package embedded

import (
	"errors"

	"golang.org/x/sys/unix"
)

// reply is a frame for the initiator, or a read to be answered.
type reply struct {
	typ    frameType
	number uint64
	result result

	region *localRegion // of a grant, or nil; a use of it
	grant  uint64
	table  parts // of a read, which frameReadDone ends
}

// done gives up what a reply that is not written any more, or was, keeps in use.
func (r reply) done() {
	if r.region != nil {
		r.region.uses.release()
	}
}

func (in *inbound) reply(r reply) {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.replyLocked(r)
}

// replyLocked queues a reply. in.mu is held.
func (in *inbound) replyLocked(r reply) {
	if in.stopped {
		r.done()
		return
	}
	in.replies = append(in.replies, r)
	in.wake.Broadcast()
}

// inboundWriter writes everything that goes to the initiator.
type inboundWriter struct {
	in   *inbound
	out  *frameWriter
	take []reply
	from partPlaces // where the bytes of a read come from
}

// run ends when the connection does.
func (w *inboundWriter) run() {
	for w.next() {
		for i, r := range w.take {
			err := w.write(r)
			r.done()
			if err != nil {
				for _, rest := range w.take[i+1:] {
					rest.done()
				}
				return
			}
		}
		clear(w.take)
	}
}

// next takes all replies. What is gathered is flushed before it waits for some.
func (w *inboundWriter) next() bool {
	in := w.in
	in.mu.Lock()
	defer in.mu.Unlock()
	for {
		if in.stopped {
			return false
		}
		if len(in.replies) > 0 {
			w.take, in.replies = in.replies, w.take[:0]
			in.wake.Broadcast() // there is room
			return true
		}
		if len(w.out.buf) > 0 {
			in.mu.Unlock()
			err := w.out.flush()
			in.mu.Lock()
			if err != nil {
				return false
			}
			continue
		}
		in.wake.Wait()
	}
}

func (w *inboundWriter) write(r reply) error {
	switch r.typ {
	case frameWelcome:
		w.out.buf = appendWelcome(w.out.buf, w.in.a.id)
	case frameRegion:
		return w.writeRegion(r)
	case frameUnmap:
		w.out.buf = appendHeader(w.out.buf, frameUnmap, 0, r.number, 0)
	case frameReadDone:
		return w.writeRead(r)
	case frameDone:
		w.out.buf = appendResult(w.out.buf, frameDone, r.number, r.result)
	}
	return w.out.flushIfMuch()
}

// writeRegion answers a map, with the region's descriptor if it is granted.
func (w *inboundWriter) writeRegion(r reply) error {
	answer := regionAnswer{code: r.result.code}
	if r.region == nil {
		w.out.buf = answer.append(w.out.buf, r.number)
		return w.out.flushIfMuch()
	}
	if err := w.out.flush(); err != nil {
		return err
	}
	answer.grant, answer.off = r.grant, r.region.off
	answer.dev, answer.inode = r.region.dev, r.region.inode
	w.out.buf = answer.append(w.out.buf, r.number)
	err := writeFD(w.in.conn.unix, w.out.buf, r.region.fd)
	if errors.Is(err, unix.ETOOMANYREFS) {
		// Too many descriptors of this user are on their way. Without one, the peer will
		// go through the connection.
		return w.out.flush()
	}
	w.out.clear()
	return err
}

// writeRead sends the bytes of a read, if all of them are registered.
func (w *inboundWriter) writeRead(r reply) error {
	w.from.start(r.table)
	left := w.from.check()
	for left > 0 && w.from.outcome.code == codeOK {
		n := min(left, maxPayload)
		w.out.buf = appendHeader(w.out.buf, frameData, 0, r.number, int(n))
		if err := w.out.payload(&w.from, n); err != nil {
			return err
		}
		left -= n
	}
	// Before the answer, because the next read may follow it at once.
	w.in.mu.Lock()
	w.in.reading = false
	w.in.mu.Unlock()
	w.out.buf = appendResult(w.out.buf, frameReadDone, r.number, w.from.outcome)
	return w.out.flushIfMuch()
}
