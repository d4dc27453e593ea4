package control

// Stats is a snapshot of a Control's counters and gauges. Fields are read one by one, so
// they may differ by what happened meanwhile.
type Stats struct {
	// Received and sent: messages, and the bytes in their frames. Sent means taken by libzmq
	// for an established connection.
	MessagesIn, BytesIn   uint64
	MessagesOut, BytesOut uint64

	DroppedFrames uint64 // messages received and dropped: more frames than Limits.Frames
	DroppedBytes  uint64 // messages received and dropped: more bytes than Limits.MessageBytes
	ReceiveErrors uint64 // failed calls of libzmq on the PULL socket
	Panics        uint64 // recovered, in the handler, the observer and callbacks

	// Messages that were not sent, by reason.
	SendsExpired   uint64 // the deadline passed
	SendsCancelled uint64 // the caller's context ended
	SendsLost      uint64 // the connection ended, was dropped, or was of another generation
	SendsRefused   uint64 // a limit was reached
	SendsClosed    uint64 // the Control was closed

	Connects        uint64 // connections established
	Disconnects     uint64 // connections lost
	ConnectFailures uint64 // attempts to connect that failed
	HandshakeFailed uint64 // of these, in the handshake: not ZMTP 3, other CURVE keys
	PeersRefused    uint64 // incoming connections refused: address not allowed, other CURVE keys
	Endpoints       int    // in the table
	Connected       int    // endpoints with a connection
	Blocked         int    // connected endpoints that messages wait for
	Pending         int    // messages and bytes waiting, callbacks not yet
	PendingBytes    int    // returned included
}
