package control

import "strconv"

// EventKind says what happened to a connection.
type EventKind uint8

// Every Connected is followed by exactly one Disconnected or Released of the same
// generation, unless the Control is closed first.
const (
	// Connected: a connection is established, the ZMTP handshake included. What the other
	// side was told over an earlier generation it may have forgotten.
	Connected EventKind = iota + 1
	// Disconnected: the connection was lost. Messages that were waiting have failed;
	// connecting is tried again until the endpoint is dropped or was unused for
	// Config.IdleTimeout.
	Disconnected
	// Released: this side closed the connection, on Drop or because it was idle. It says
	// nothing of the peer, but what becomes of the peer will no longer be seen.
	Released
)

var eventNames = [...]string{"Connected", "Disconnected", "Released"}

// String gives the kind in a word.
func (k EventKind) String() string {
	if i := int(k) - 1; i >= 0 && i < len(eventNames) {
		return eventNames[i]
	}
	return "EventKind(" + strconv.Itoa(int(k)) + ")"
}

// Event is what the observer is told of the connection to one endpoint.
//
// Events and completion callbacks come from one goroutine in the order in which they
// happened: a connection's Connected comes before the completion of any message sent over
// it, and a message that failed with its connection is completed after the Disconnected.
//
// After a loss, messages to the endpoint fail with ErrPeerLost, and it is not connected again,
// until the observer has returned from the Disconnected. So whoever sends under the lock
// under which the observer notes the loss cannot send to a new process unnoticed.
type Event struct {
	Endpoint   Endpoint
	Kind       EventKind
	Generation uint64 // of the connection; rises with every connection of a Control
}
