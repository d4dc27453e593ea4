package embedded

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"

	"golang.org/x/sys/unix"
)

const (
	// readBuffer is what a reader asks the socket for between the bytes of large frames:
	// those are read into place, but for the first, which come along with the header.
	readBuffer = 16 << 10
	// flushBytes is how much a writer gathers before it writes.
	flushBytes = 256 << 10
	// copyBytes: the bytes of a frame up to this size are copied and gathered, which costs
	// less than a system call of their own.
	copyBytes = 32 << 10
	// keepBytes is the greatest buffer that a connection keeps for its next frame.
	keepBytes = 64 << 10
)

// frameReader takes frames apart. The bytes of a write or data frame it does not read
// until it is told where they go.
type frameReader struct {
	r    *bufio.Reader
	conn *connection
	head [headerSize]byte
	body []byte
	left uint64 // bytes of the frame at hand that are not read yet

	vec   vector
	dest  places
	drops []byte // where bytes go that are dropped
	step  func(fd uintptr) bool
	n     uint64 // what step read
	err   error
}

// newFrameReader reads from r, which reads from conn. Without a conn there is no receive.
func newFrameReader(r io.Reader, conn *connection) *frameReader {
	f := &frameReader{r: bufio.NewReaderSize(r, readBuffer), conn: conn}
	f.step = f.readSome
	return f
}

// next is header and rest.
func (f *frameReader) next() (header, []byte, error) {
	h, err := f.header()
	if err != nil {
		return header{}, nil, err
	}
	body, err := f.rest(h)
	return h, body, err
}

// header reads the next header. What the last frame had left must have been received.
func (f *frameReader) header() (header, error) {
	if _, err := io.ReadFull(f.r, f.head[:]); err != nil {
		return header{}, err
	}
	return parseHeader(f.head[:])
}

// rest reads the body behind a header; of a write the table only, of a data frame nothing.
// It is valid until the next call.
func (f *frameReader) rest(h header) (body []byte, err error) {
	if cap(f.body) > keepBytes {
		f.body = nil
	}
	f.body, f.left = f.body[:0], 0
	switch h.typ {
	case frameData:
		f.left = uint64(h.length)
	case frameWrite:
		err = f.readTable(h.length)
	default:
		err = f.read(int(h.length))
	}
	return f.body, err
}

// readTable reads the parts of a write frame of this length.
func (f *frameReader) readTable(length uint32) error {
	if length < 4 {
		return fmt.Errorf("%w: write of %d bytes", errProtocol, length)
	}
	if err := f.read(4); err != nil {
		return err
	}
	size, err := tableSize(binary.LittleEndian.Uint32(f.body), length)
	if err != nil {
		return err
	}
	f.left = uint64(length) - 4 - uint64(size)
	return f.read(size)
}

// read appends n bytes to the body.
func (f *frameReader) read(n int) error {
	start := len(f.body)
	f.body = slices.Grow(f.body, n)[:start+n]
	_, err := io.ReadFull(f.r, f.body[start:])
	if err == io.EOF && n > 0 {
		err = io.ErrUnexpectedEOF
	}
	return err
}

// receive reads what is left of the frame into its places. Bytes that have no place are
// dropped; the places know why.
func (f *frameReader) receive(m places) error {
	f.dest = m
	defer func() { f.dest = nil; f.vec.reset() }()
	for f.left > 0 {
		if f.r.Buffered() > 0 {
			f.takeBuffered()
			continue
		}
		if err := f.conn.raw.Read(f.step); err != nil {
			return err
		}
		if f.err != nil {
			return f.err
		}
		f.left -= f.n
	}
	return nil
}

// takeBuffered moves bytes on that were read before.
func (f *frameReader) takeBuffered() {
	b, _ := f.r.Peek(int(min(f.left, uint64(f.r.Buffered()))))
	f.vec.reset()
	n := f.dest.hold(&f.vec, uint64(len(b)))
	if err := f.vec.fill(b); err != nil {
		f.dest.let(0, err)
		return
	}
	f.dest.let(n, nil)
	if n == 0 {
		n = uint64(len(b))
	}
	f.r.Discard(int(n))
	f.left -= n
}

// readSome makes one read, and gives false if there is nothing to read.
func (f *frameReader) readSome(fd uintptr) bool {
	f.n, f.err = 0, nil
	f.vec.reset()
	dropping := f.dest.hold(&f.vec, f.left) == 0
	if dropping {
		if f.drops == nil {
			f.drops = make([]byte, readBuffer)
		}
		f.vec.add(f.drops[:min(f.left, readBuffer)])
	}
	n, err := f.vec.read(fd)
	var fault error
	switch {
	case err == nil && n == 0:
		f.err = io.ErrUnexpectedEOF
	case err == nil:
		f.n = n
	case errors.Is(err, unix.EFAULT) && !dropping:
		fault = errFault
	case !errors.Is(err, unix.EAGAIN):
		f.err = err
	}
	if dropping {
		n = 0
	}
	f.dest.let(n, fault)
	return !errors.Is(err, unix.EAGAIN)
}

// frameWriter gathers frames and writes them.
type frameWriter struct {
	conn *connection
	buf  []byte // encoded, not written yet

	vec  vector
	head []byte // of buf, during payload
	from places
	left uint64 // bytes of memory that are not written yet
	step func(fd uintptr) bool
	err  error
}

func newFrameWriter(conn *connection) *frameWriter {
	w := &frameWriter{conn: conn}
	w.step = w.writeSome
	return w
}

func (w *frameWriter) flush() error {
	if len(w.buf) == 0 {
		return nil
	}
	_, err := w.conn.Write(w.buf)
	w.clear()
	return err
}

func (w *frameWriter) clear() {
	if cap(w.buf) > flushBytes+MaxNotification {
		w.buf = nil
	}
	w.buf = w.buf[:0]
}

func (w *frameWriter) flushIfMuch() error {
	if len(w.buf) < flushBytes {
		return nil
	}
	return w.flush()
}

// payload writes n bytes of memory behind what was gathered, which ends with the header
// that promises them. Where the memory fails them zeros are written; the places know why.
// Few bytes are copied and gathered. More go from where they are, and then all is written
// when it returns.
func (w *frameWriter) payload(m places, n uint64) error {
	w.from, w.left = m, n
	defer func() { w.from = nil; w.vec.reset() }()
	if n <= copyBytes {
		w.gather()
		return w.flushIfMuch()
	}
	w.head = w.buf
	for len(w.head) > 0 || w.left > 0 {
		if err := w.conn.raw.Write(w.step); err != nil {
			return err
		}
		if w.err != nil {
			return w.err
		}
	}
	w.clear()
	return nil
}

func (w *frameWriter) gather() {
	for w.left > 0 {
		w.vec.reset()
		n := w.from.hold(&w.vec, w.left)
		if n == 0 {
			w.from.let(0, nil)
			w.buf = append(w.buf, zeros[:w.left]...)
			return
		}
		buf, err := w.vec.appendTo(w.buf)
		if err != nil {
			w.from.let(0, err)
			continue
		}
		w.buf = buf
		w.from.let(n, nil)
		w.left -= n
	}
}

// writeSome makes one write, and gives false if there is no room for it.
func (w *frameWriter) writeSome(fd uintptr) bool {
	w.err = nil
	w.vec.reset()
	w.vec.add(w.head)
	holding := w.left > 0
	var memory uint64
	if holding {
		if memory = w.from.hold(&w.vec, w.left); memory == 0 {
			w.vec.add(zeros[:min(w.left, uint64(len(zeros)))])
		}
	}
	n, err := w.vec.write(fd)
	ofHead := min(n, uint64(len(w.head)))
	w.head = w.head[ofHead:]
	n -= ofHead
	w.left -= n
	var fault error
	switch {
	case errors.Is(err, unix.EFAULT) && memory > 0:
		fault = errFault
	case err != nil && !errors.Is(err, unix.EAGAIN):
		w.err = err
	}
	if holding {
		w.from.let(min(n, memory), fault)
	}
	return !errors.Is(err, unix.EAGAIN)
}

// zeros stand for memory that is not there.
var zeros [copyBytes]byte
