package wire

import (
	"fmt"
	"slices"

	"github.com/nixlkv/nixlkv"
)

// What frames hold, where more than one message has them or the reader looks for them.
const (
	fieldTag   = "tag"
	fieldRoom  = "room"
	fieldIP    = "IP"
	fieldPort  = "port"
	fieldAgent = "agent name"
	fieldRank  = "prefill rank"
)

// reader reads the frames of one message. The first fault sticks: from then on every
// method gives a zero value, so that a parser reads straight through and looks once.
type reader struct {
	name   string   // of the message
	fields []string // what its frames hold, in order
	frames [][]byte
	limits Limits
	err    error
}

// open names the message and checks what does not depend on what is in its frames.
func (r *reader) open(name string, fields []string, required int) {
	r.name, r.fields = name, fields
	switch n := len(r.frames); {
	case n < required:
		r.fail(-1, fmt.Errorf("%w: %d frames, at least %d", ErrTruncated, n, required))
	case n > r.limits.Frames:
		r.fail(-1, tooMany("frames", n, r.limits.Frames))
	}
	for i, f := range r.frames {
		if r.err == nil && len(f) > r.limits.FrameSize {
			r.fail(i, tooMany("bytes", len(f), r.limits.FrameSize))
		}
	}
}

// extra counts the frames beyond those that are known.
func (r *reader) extra() int { return max(0, len(r.frames)-len(r.fields)) }

// fail keeps the first error, with what can be read of the sender.
func (r *reader) fail(frame int, err error) {
	if r.err != nil || err == nil {
		return
	}
	e := &FrameError{Message: r.name, Frame: frame, Err: err}
	if frame >= 0 && frame < len(r.fields) {
		e.Field = r.fields[frame]
	}
	if n, fault := parseDecimal(r.named(fieldRoom), uint64(nixlkv.MaxRoom)); fault == decimalOK {
		e.Room, e.HasRoom = nixlkv.Room(n), true
	}
	ip := r.named(fieldIP)
	if port, fault := parseDecimal(r.named(fieldPort), maxPort); fault == decimalOK && port > 0 && checkHost(ip) == nil {
		e.From = Endpoint{IP: string(ip), Port: int(port)}
	}
	if name := r.named(fieldAgent); checkAgent(name, r.limits.AgentName) == nil {
		e.Agent = string(name)
	}
	r.err = e
}

// named gives the frame that holds a field, nil if there is none.
func (r *reader) named(field string) []byte {
	return r.frame(slices.Index(r.fields, field))
}

// frame gives a frame; nil if absent.
func (r *reader) frame(i int) []byte {
	if i < 0 || i >= len(r.frames) {
		return nil
	}
	return r.frames[i]
}

// number reads a decimal, at most limit.
func (r *reader) number(i int, limit uint64) uint64 {
	b := r.frame(i)
	n, fault := parseDecimal(b, limit)
	if fault != decimalOK {
		r.fail(i, fault.err(b, limit))
		return 0
	}
	return n
}

// numberOr reads a decimal, or gives absent where the frame is absent or empty.
func (r *reader) numberOr(i int, limit, absent uint64) uint64 {
	if len(r.frame(i)) == 0 {
		return absent
	}
	return r.number(i, limit)
}

// count reads a decimal that is a count or a rank.
func (r *reader) count(i int) int { return int(r.number(i, maxInt)) }

func (r *reader) room(i int) nixlkv.Room {
	return nixlkv.Room(r.number(i, uint64(nixlkv.MaxRoom)))
}

// endpoint reads the IP in frame i and the port in frame i+1.
func (r *reader) endpoint(i int) Endpoint {
	ip := r.frame(i)
	r.fail(i, checkHost(ip))
	port := r.count(i + 1)
	r.fail(i+1, checkPort(port))
	if r.err != nil {
		return Endpoint{}
	}
	return Endpoint{IP: string(ip), Port: port}
}

func (r *reader) agent(i int) string {
	name := r.frame(i)
	r.fail(i, checkAgent(name, r.limits.AgentName))
	if r.err != nil {
		return ""
	}
	return string(name)
}

// words reads a packed array of at most limit entries.
func words[T word](r *reader, i, limit int) []T {
	if r.err != nil {
		return nil
	}
	out, err := unpack[T](r.frame(i), limit)
	r.fail(i, err)
	return out
}

// lists reads a list of packed arrays, one a state component, each of at most limit
// entries.
func lists[T word](r *reader, i, limit int) [][]T {
	if r.err != nil {
		return nil
	}
	out, err := unpackLists[T](r.frame(i), r.limits.StateComponents, limit)
	r.fail(i, err)
	return out
}
