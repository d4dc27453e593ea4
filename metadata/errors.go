package metadata

import (
	"errors"
	"fmt"

	"github.com/nixlkv/nixlkv"
)

var (
	// ErrNotWritten: the slot's room is zero, nobody has written it yet.
	ErrNotWritten = errors.New("metadata: slot not written yet")
	// ErrOptions: options that no server of the release can have.
	ErrOptions = errors.New("metadata: invalid options")
	// ErrBuffer: memory that is not what the layout asks for: a buffer missing or one too
	// many, or of another length.
	ErrBuffer = errors.New("metadata: buffer does not fit the layout")
	// ErrValue: a value that the slot has no place for, or that contradicts another.
	ErrValue = errors.New("metadata: value does not fit the slot")
	// ErrAmbiguous: more than one layout fits.
	ErrAmbiguous = errors.New("metadata: ambiguous layout")
)

// LayoutError: item lengths that differ from the layout's. It wraps nixlkv.ErrMismatch.
type LayoutError struct {
	Index  int    // position in the list
	Buffer string // the layout's name of it; empty if the layout ends before
	Want   uint64 // item length of the layout in bytes; 0 if it ends before
	Got    uint64 // item length that was given; 0 if the list ends before
	Count  int    // how many item lengths were given
}

// Error names the first buffer that differs.
func (e *LayoutError) Error() string {
	switch {
	case e.Buffer == "":
		return fmt.Sprintf("metadata: a buffer %d too many, with item length %d (of %d buffers): %v",
			e.Index, e.Got, e.Count, nixlkv.ErrMismatch)
	case e.Index >= e.Count:
		return fmt.Sprintf("metadata: buffer %d (%s) missing, want item length %d: %v",
			e.Index, e.Buffer, e.Want, nixlkv.ErrMismatch)
	}
	return fmt.Sprintf("metadata: buffer %d (%s): want item length %d, got %d: %v",
		e.Index, e.Buffer, e.Want, e.Got, nixlkv.ErrMismatch)
}

// Unwrap gives nixlkv.ErrMismatch.
func (e *LayoutError) Unwrap() error { return nixlkv.ErrMismatch }

// BufferError: a buffer of the caller's that has another length than the layout asks for.
// It wraps ErrBuffer.
type BufferError struct {
	Index  int
	Buffer string
	Want   uint64 // bytes
	Got    uint64
}

// Error names the buffer and both lengths.
func (e *BufferError) Error() string {
	return fmt.Sprintf("%v: buffer %d (%s): want %d bytes, got %d", ErrBuffer, e.Index, e.Buffer, e.Want, e.Got)
}

// Unwrap gives ErrBuffer.
func (e *BufferError) Unwrap() error { return ErrBuffer }

// ValueError: a value of a Record or a Want that does not fit. It wraps ErrValue.
type ValueError struct {
	Buffer string // SGLang's name of the buffer the value is for
	Reason string
}

// Error names the buffer and says why.
func (e *ValueError) Error() string {
	return fmt.Sprintf("%v: %s: %s", ErrValue, e.Buffer, e.Reason)
}

// Unwrap gives ErrValue.
func (e *ValueError) Unwrap() error { return ErrValue }

func valueErrorf(f field, format string, args ...any) error {
	return &ValueError{Buffer: f.String(), Reason: fmt.Sprintf(format, args...)}
}

// RoomError: a slot that holds another room than the one it was asked for: two requests were
// given one slot, or the slot was used again too early. SGLang's decode aborts the request
// (DecodeTransferQueue._commit_transfer_to_req: "Metadata corruption detected"). It wraps
// nixlkv.ErrCorruptMetadata.
type RoomError struct {
	Want nixlkv.Room
	Got  uint64 // as found in the slot; may be more than a Room can be
}

// Error names both rooms.
func (e *RoomError) Error() string {
	return fmt.Sprintf("%v: slot holds room %d, want room %d", nixlkv.ErrCorruptMetadata, e.Got, e.Want)
}

// Unwrap gives nixlkv.ErrCorruptMetadata.
func (e *RoomError) Unwrap() error { return nixlkv.ErrCorruptMetadata }
