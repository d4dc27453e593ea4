package nixlkv

import (
	"strconv"
	"strings"
)

// RankState is what one rank of the other side told about a room.
type RankState uint8

// A rank is silent until it tells something or its connection is seen to be gone.
const (
	RankSilent RankState = iota // told nothing
	RankDone                    // told that its part is complete
	RankFailed                  // told that its part failed
	RankLost                    // connection or process gone
)

var rankStateNames = [...]string{"silent", "done", "failed", "lost"}

// String gives the state in a word.
func (s RankState) String() string {
	if int(s) < len(rankStateNames) {
		return rankStateNames[s]
	}
	return "RankState(" + strconv.Itoa(int(s)) + ")"
}

// RankReport is what one rank told about a room.
type RankReport struct {
	Rank   int    // the number it goes by on the wire (prefill_rank), or the decode's engine rank
	Peer   string // its address or agent name, where known
	State  RankState
	Reason string // what it told, if it failed
}

// KVTransferError is how every failed room ends, on either side. It carries the first
// cause that was recorded; later ones are consequences.
//
// errors.Is and errors.As look through Cause, which wraps one of this package's sentinels
// (ErrAborted, ErrTimeout, …), a nixl.Status, or both.
type KVTransferError struct {
	Room   Room
	Reason string // for people; sent to the other side as it is
	// FromAnotherRank: nothing local explains the failure, another rank failed.
	FromAnotherRank bool
	Peer            string       // the peer this is about, where there is one
	Ranks           []RankReport // what each rank of the other side had told by then
	Cause           error
}

// Error gives SGLang's text: KVTransferError(bootstrap_room=R): reason.
func (e *KVTransferError) Error() string {
	var b strings.Builder
	b.WriteString("KVTransferError(bootstrap_room=")
	b.WriteString(e.Room.String())
	b.WriteString("): ")
	reason := e.Reason
	if reason == "" && e.Cause != nil {
		reason = e.Cause.Error()
	}
	b.WriteString(reason)
	if e.Peer != "" && !strings.Contains(reason, e.Peer) {
		b.WriteString(" (peer ")
		b.WriteString(e.Peer)
		b.WriteByte(')')
	}
	if s := e.rankSummary(); s != "" {
		b.WriteString(" [")
		b.WriteString(s)
		b.WriteByte(']')
	}
	return b.String()
}

// Unwrap gives the cause.
func (e *KVTransferError) Unwrap() error { return e.Cause }

// rankSummary names the ranks only when they tell apart what happened: a single rank's
// state is already in the reason.
func (e *KVTransferError) rankSummary() string {
	if len(e.Ranks) < 2 {
		return ""
	}
	parts := make([]string, len(e.Ranks))
	for i, r := range e.Ranks {
		parts[i] = "rank " + strconv.Itoa(r.Rank) + " " + r.State.String()
	}
	return strings.Join(parts, ", ")
}
