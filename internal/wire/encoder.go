package wire

import "strconv"

// Encoder builds messages in memory that it reuses. The frames of a message are valid until
// the next one is built; an encoder that is let go leaves them to the caller. The zero value
// is ready. Not for concurrent use.
type Encoder struct {
	buf  []byte   // all frames, one after the other
	ends []int    // where each ends
	out  [][]byte // handed out
}

// begin starts a message with its first frame.
func (e *Encoder) begin(tag string) {
	e.buf, e.ends = e.buf[:0], e.ends[:0]
	e.text(tag)
}

// end takes the buffer with a frame appended to it.
func (e *Encoder) end(buf []byte) {
	e.buf = buf
	e.ends = append(e.ends, len(buf))
}

func (e *Encoder) text(s string)   { e.end(append(e.buf, s...)) }
func (e *Encoder) bytes(b []byte)  { e.end(append(e.buf, b...)) }
func (e *Encoder) number(n uint64) { e.end(strconv.AppendUint(e.buf, n, 10)) }

func (e *Encoder) endpoint(p Endpoint) {
	e.text(p.IP)
	e.number(uint64(p.Port))
}

// frames cuts the buffer. Each frame's capacity ends with it, so that appending to one
// does not write into the next.
func (e *Encoder) frames() [][]byte {
	e.out = e.out[:0]
	start := 0
	for _, end := range e.ends {
		e.out = append(e.out, e.buf[start:end:end])
		start = end
	}
	return e.out
}
