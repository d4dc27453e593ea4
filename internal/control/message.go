package control

import "time"

// Message is one multipart message to one endpoint.
type Message struct {
	To Endpoint
	// Frames are sent as they are; a frame may be empty, the message may not. They must not
	// change until the message is completed, and are free again then.
	Frames [][]byte
	// Deadline is when to give up. Zero means Config.SendTimeout from now.
	Deadline time.Time
	// Generation, if not zero, restricts the message to one connection, as reported by an
	// Event or by an earlier send: it fails with ErrPeerLost if that is not, or no longer,
	// the current one.
	Generation uint64
	// Stranger: anybody may have named this endpoint. Only Limits.Strangers such messages may
	// wait, to as many endpoints, which are let go as soon as nothing waits for them. They
	// take no place that others need.
	Stranger bool
}
