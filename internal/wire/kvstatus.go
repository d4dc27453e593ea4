package wire

import (
	"strings"
	"unicode/utf8"

	"github.com/nixlkv/nixlkv"
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
	reason := r.frame(4)
	if limit := r.limits.Reason; len(reason)-utf8.UTFMax > limit {
		// A rune more than the limit, so that the last one is not cut in half.
		reason = reason[:limit+utf8.UTFMax]
	}
	return &KVStatus{
		Room:        r.room(1),
		Status:      KVPoll(r.number(2, uint64(PollSuccess))),
		PrefillRank: r.count(3),
		Reason:      cleanReason(string(reason), r.limits.Reason),
		Extra:       r.extra(),
	}
}

// KVStatus encodes a status in 5 frames. The reason is made valid UTF-8 and cut to 4096
// bytes.
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
	e.text(cleanReason(s.Reason, maxReason))
	return e.frames(), nil
}

// cleanReason replaces what is not UTF-8, as SGLang's decode does, and cuts to limit bytes
// at a rune. A failure must never be lost because its reason is long or broken.
func cleanReason(s string, limit int) string {
	s = strings.ToValidUTF8(s, string(utf8.RuneError))
	if len(s) <= limit {
		return s
	}
	for !utf8.RuneStart(s[limit]) {
		limit--
	}
	return s[:limit]
}
