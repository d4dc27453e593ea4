package nixlkv

import "strconv"

// Status is how far a room has come. The zero value is Bootstrapping. The numbers are this
// package's own; those of the wire are in internal/wire.
type Status uint8

// A room goes through these in order and ends in Success or Failed.
const (
	// Bootstrapping: the two sides are finding each other.
	Bootstrapping Status = iota
	// WaitingForInput: they have; the prefill may send, the decode has told its pages.
	WaitingForInput
	// Transferring: pages are on their way.
	Transferring
	// Success: everything is there.
	Success
	// Failed: it never will be; the room's error says why.
	Failed
)

var statusNames = [...]string{"Bootstrapping", "WaitingForInput", "Transferring", "Success", "Failed"}

// String gives SGLang's name of the status (KVPoll).
func (s Status) String() string {
	if int(s) < len(statusNames) {
		return statusNames[s]
	}
	return "Status(" + strconv.Itoa(int(s)) + ")"
}

// Ended says whether the status is final.
func (s Status) Ended() bool { return s == Success || s == Failed }
