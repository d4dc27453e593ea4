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

	// Incoming connections that came to nothing, by reason. They are logged with the peer's address,
	// as far as it can be told.
	PeersRefused      uint64 // address not allowed, or a CURVE key that is not known
	HandshakesRefused uint64 // meant for another CURVE server key, CURVE on one side alone, not ZMTP 3
	HandshakesCut     uint64 // the peer closed it before its handshake was over, or did not go on with it

	Endpoints    int // in the table
	Connected    int // endpoints with a connection
	Blocked      int // connected endpoints that messages wait for
	Incoming     int // connections that came in, those in their handshake included
	Pending      int // messages and bytes waiting, callbacks not yet
	PendingBytes int // returned included
}
