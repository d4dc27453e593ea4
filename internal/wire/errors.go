package wire

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/nixlkv/nixlkv"
)

// Sentinels for messages that are dropped as a whole. A receiver counts them apart.
var (
	// ErrUnknown: the first frame names no message of this socket, or a notification's tag
	// names no kind.
	ErrUnknown = fmt.Errorf("%w: unknown message", nixlkv.ErrMalformed)
	// ErrTruncated: a message has fewer frames, or a frame fewer bytes, than it says.
	ErrTruncated = fmt.Errorf("%w: truncated", nixlkv.ErrMalformed)
	// ErrStaging: a message of SGLang's staging buffers, which this library does not have.
	ErrStaging = fmt.Errorf("%w: staging message", nixlkv.ErrUnsupported)
)

// FrameError says which frame of which message was refused, and why. Err wraps
// [nixlkv.ErrMalformed], [nixlkv.ErrLimit] or a sentinel that tells more.
//
// What could be read of the sender and the room is kept, so that a prefill can fail that
// peer's rooms, or that room, with the reason.
type FrameError struct {
	Message string // "registration", "room metadata", "KV_STATUS", …
	Frame   int    // counted from 0, the first frame included; negative: the message as a whole
	Field   string // what the frame holds
	Err     error

	Room    nixlkv.Room // the room, if HasRoom
	HasRoom bool
	From    Endpoint // where the sender listens; zero if unreadable
	Agent   string   // its agent name; empty if unreadable
}

// Error names message, frame and field before the cause.
func (e *FrameError) Error() string {
	var b strings.Builder
	b.WriteString(e.Message)
	if e.Frame >= 0 {
		b.WriteString(" frame ")
		b.WriteString(strconv.Itoa(e.Frame))
	}
	if e.Field != "" {
		b.WriteString(" (")
		b.WriteString(e.Field)
		b.WriteByte(')')
	}
	b.WriteString(": ")
	b.WriteString(e.Err.Error())
	return b.String()
}

// Unwrap gives the cause.
func (e *FrameError) Unwrap() error { return e.Err }

// malformed wraps nixlkv.ErrMalformed.
func malformed(format string, args ...any) error {
	return fmt.Errorf("%w: %s", nixlkv.ErrMalformed, fmt.Sprintf(format, args...))
}

// tooMany wraps nixlkv.ErrLimit.
func tooMany[N int | uint32](what string, got N, limit int) error {
	return fmt.Errorf("%w: %d %s, at most %d", nixlkv.ErrLimit, got, what, limit)
}

// quoted gives bytes from outside as a Go string literal, cut to what a log line bears.
func quoted(b []byte) string {
	const most = 32
	if len(b) > most {
		return strconv.Quote(string(b[:most])) + "…"
	}
	return strconv.Quote(string(b))
}

// encodeError is for a message that no peer would take.
func encodeError(message string, room nixlkv.Room, err error) error {
	return &FrameError{Message: message, Frame: -1, Err: err, Room: room, HasRoom: true}
}
