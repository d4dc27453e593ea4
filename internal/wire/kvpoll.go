package wire

import (
	"strconv"

	"github.com/nixlkv/nixlkv"
)

// KVPoll is a room's status as it is numbered on the wire (KVPoll in SGLang's
// disaggregation/base/conn.py).
type KVPoll uint8

// The numbers of the wire. They differ from those of [nixlkv.Status], whose zero value is
// Bootstrapping.
const (
	PollFailed KVPoll = iota
	PollBootstrapping
	PollWaitingForInput
	PollTransferring
	PollSuccess
)

var pollStatuses = [...]nixlkv.Status{
	PollFailed:          nixlkv.Failed,
	PollBootstrapping:   nixlkv.Bootstrapping,
	PollWaitingForInput: nixlkv.WaitingForInput,
	PollTransferring:    nixlkv.Transferring,
	PollSuccess:         nixlkv.Success,
}

// PollOf gives the wire's number of a status; false if s is none of the named ones.
func PollOf(s nixlkv.Status) (KVPoll, bool) {
	for p, known := range pollStatuses {
		if known == s {
			return KVPoll(p), true
		}
	}
	return 0, false
}

// Status gives the status of a number of the wire; false if p is not one of them.
func (p KVPoll) Status() (nixlkv.Status, bool) {
	if int(p) >= len(pollStatuses) {
		return 0, false
	}
	return pollStatuses[p], true
}

// String gives SGLang's name.
func (p KVPoll) String() string {
	if s, ok := p.Status(); ok {
		return s.String()
	}
	return "KVPoll(" + strconv.Itoa(int(p)) + ")"
}
