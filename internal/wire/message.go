package wire

import "fmt"

// The first frames of messages.
const (
	tagGuard      = "NixlMsgGuard" // registration and room metadata, told apart by frame 1
	tagAbort      = "ABORT"
	tagAbortAck   = "ABORT_ACK"
	tagKVStatus   = "KV_STATUS"
	tagBootstrap  = "BOOTSTRAP"
	tagStagingReq = "STAGING_REQ"
	tagStagingRsp = "STAGING_RSP"
	tagWatermark  = "WATERMARK"
	tagChunkReady = "CHUNK_READY"

	noRoom = "None" // frame 1 of a registration
)

// Message is one of *[Registration], *[Metadata], *[Abort], *[Bootstrap] (decode to
// prefill), *[KVStatus], *[AbortAck] (prefill to decode).
type Message interface{ message() }

func (*Registration) message() {}
func (*Metadata) message()     {}
func (*Abort) message()        {}
func (*Bootstrap) message()    {}
func (*KVStatus) message()     {}
func (*AbortAck) message()     {}

// ParseAtPrefill parses a message that came to a prefill's socket: *[Registration],
// *[Metadata], *[Abort] or *[Bootstrap].
//
// The error is a *[FrameError] that wraps [ErrUnknown], [ErrStaging], [ErrTruncated],
// nixlkv.ErrLimit or nixlkv.ErrMalformed, or, where the form is right and the geometry is
// not, what [Registration.Validate] says. Frames that a later release may add at the end
// are ignored and counted.
func ParseAtPrefill(frames [][]byte, limits Limits) (Message, error) {
	r := reader{name: "message", frames: frames, limits: limits.withDefaults()}
	var m Message
	switch first := r.frame(0); string(first) {
	case tagGuard:
		if string(r.frame(1)) == noRoom {
			m = parseRegistration(&r)
		} else {
			m = parseMetadata(&r)
		}
	case tagAbort:
		m = parseAbort(&r)
	case tagBootstrap:
		m = parseBootstrap(&r)
	default:
		r.unknown(first)
	}
	if r.err != nil {
		return nil, r.err
	}
	return m, nil
}

// ParseAtDecode parses a message that came to a decode's socket: *[KVStatus] or
// *[AbortAck]. Errors are those of [ParseAtPrefill].
func ParseAtDecode(frames [][]byte, limits Limits) (Message, error) {
	r := reader{name: "message", frames: frames, limits: limits.withDefaults()}
	var m Message
	switch first := r.frame(0); string(first) {
	case tagKVStatus:
		m = parseKVStatus(&r)
	case tagAbortAck:
		m = parseAbortAck(&r)
	default:
		r.unknown(first)
	}
	if r.err != nil {
		return nil, r.err
	}
	return m, nil
}

// unknown fails a message whose first frame is none of this socket's.
func (r *reader) unknown(first []byte) {
	switch string(first) {
	case tagStagingReq, tagStagingRsp, tagWatermark, tagChunkReady:
		r.fail(0, fmt.Errorf("%w: %s", ErrStaging, first))
	default:
		r.fail(0, fmt.Errorf("%w: %s", ErrUnknown, quoted(first)))
	}
}
