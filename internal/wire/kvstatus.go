package wire

import (
	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/internal/reasons"
)

var kvStatusFields = [...]string{fieldTag, fieldRoom, "status", fieldRank, "reason"}

// KVStatus tells a decode how a prefill rank's part of a room ended, or, under
// prefill_complete, that the prefill is done computing
// (CommonKVManager._encode_kv_status_message from 0.5.20). It goes to every endpoint of the
// room that is not a dummy, [PollSuccess] only to peers of [DialectStatus].
type KVStatus struct {
	Room        nixlkv.Room
	Status      KVPoll
	PrefillRank int    // see PrefillPosition
	Reason      string // why it failed; empty otherwise

	Extra int // frames that were ignored; not encoded
}

func parseKVStatus(r *reader) *KVStatus {
	r.open(tagKVStatus, kvStatusFields[:], len(kvStatusFields))
	return &KVStatus{
		Room:        r.room(1),
		Status:      KVPoll(r.number(2, uint64(PollSuccess))),
		PrefillRank: r.count(3),
		Reason:      reasons.Bound(r.frame(4), r.limits.Reason),
		Extra:       r.extra(),
	}
}

// KVStatus encodes a status in 5 frames. The reason is bounded to 4096 bytes: a failure must
// not be lost because its reason is long or broken.
func (e *Encoder) KVStatus(s *KVStatus) ([][]byte, error) {
	err := checkRoom(s.Room)
	if err == nil {
		err = checkRank(s.PrefillRank)
	}
	if _, ok := s.Status.Status(); err == nil && !ok {
		err = malformed("status %d", s.Status)
	}
	if err != nil {
		return nil, encodeError(tagKVStatus, s.Room, err)
	}
	e.begin(tagKVStatus)
	e.number(uint64(s.Room))
	e.number(uint64(s.Status))
	e.number(uint64(s.PrefillRank))
	e.text(reasons.Bound(s.Reason, reasons.Sent))
	return e.frames(), nil
}
