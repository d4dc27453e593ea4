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
	buf  []byte
	take []reply
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
		if len(w.buf) > 0 {
			in.mu.Unlock()
			err := w.flush()
			in.mu.Lock()
			if err != nil {
				return false
			}
			continue
		}
		in.wake.Wait()
	}
}

func (w *inboundWriter) flush() error {
	if len(w.buf) == 0 {
		return nil
	}
	_, err := w.in.conn.Write(w.buf)
	w.buf = w.buf[:0]
	return err
}

func (w *inboundWriter) flushIfMuch() error {
	if len(w.buf) < flushBytes {
		return nil
	}
	return w.flush()
}

func (w *inboundWriter) write(r reply) error {
	switch r.typ {
	case frameWelcome:
		w.buf = appendWelcome(w.buf, w.in.a.id)
	case frameRegion:
		return w.writeRegion(r)
	case frameUnmap:
		w.buf = appendHeader(w.buf, frameUnmap, 0, r.number, 0)
	case frameReadDone:
		return w.writeRead(r)
	case frameDone:
		w.buf = appendResult(w.buf, frameDone, r.number, r.result)
	}
	return w.flushIfMuch()
}

// writeRegion answers a map, with the region's descriptor if it is granted.
func (w *inboundWriter) writeRegion(r reply) error {
	answer := regionAnswer{code: r.result.code}
	if r.region == nil {
		w.buf = answer.append(w.buf, r.number)
		return w.flushIfMuch()
	}
	if err := w.flush(); err != nil {
		return err
	}
	answer.grant, answer.off = r.grant, r.region.off
	answer.dev, answer.inode = r.region.dev, r.region.inode
	w.buf = answer.append(w.buf, r.number)
	err := writeFD(w.in.conn, w.buf, r.region.fd)
	if errors.Is(err, unix.ETOOMANYREFS) {
		// Too many descriptors of this user are on their way. Without one, the peer will
		// go through the connection.
		return w.flush()
	}
	w.buf = w.buf[:0]
	return err
}

// writeRead sends the bytes of a read, as far as they are registered.
func (w *inboundWriter) writeRead(r reply) error {
	var outcome result
	for i := range r.table.len() {
		pt := r.table.at(i)
		for pt.n > 0 && outcome.code == codeOK {
			piece := pt
			piece.n = min(pt.n, maxPayload)
			start := len(w.buf)
			w.buf = appendHeader(w.buf, frameData, 0, r.number, int(piece.n))
			outcome = w.in.a.withPart(piece, func(mem []byte) { w.buf = append(w.buf, mem...) })
			if outcome.code != codeOK {
				w.buf = w.buf[:start]
				break
			}
			if err := w.flushIfMuch(); err != nil {
				return err
			}
			pt.off += piece.n
			pt.n -= piece.n
		}
	}
	// Before the answer, because the next read may follow it at once.
	w.in.mu.Lock()
	w.in.reading = false
	w.in.mu.Unlock()
	w.buf = appendResult(w.buf, frameReadDone, r.number, outcome)
	return w.flushIfMuch()
}
