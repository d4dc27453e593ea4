package kvreceiver

import (
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/nixl"
)

// longReason is a reason as nobody should give it, within what a frame may hold.
var longReason = strings.Repeat("gone\x00\xff\x1b页", 1<<20)

// checkReason checks that a text is bounded, fit to be read, and says that it was cut.
func checkReason(t *testing.T, text string) {
	t.Helper()
	if len(text) > 5<<10 || !utf8.ValidString(text) || strings.ContainsAny(text, "\x00\x1b") || !strings.Contains(text, "cut, of ") {
		t.Errorf("%d bytes, UTF-8 %v: %.100q", len(text), utf8.ValidString(text), text)
	}
}

// A reason is kept within bounds, whether the caller gives it or a prefill tells it.
func TestReasonsAreBounded(t *testing.T) {
	q := newPair(t, openEngine(t, nixl.Embedded), shape{})
	r := q.open(1)
	r.Abort(longReason)
	checkReason(t, checkFailed(t, r, nixlkv.ErrAborted, "gone").Reason)
	checkReason(t, r.Err().Error())
	ok(t, r.Close())

	r = q.open(2)
	r.FailedElsewhere([]nixlkv.RankReport{{Rank: 1, Peer: longReason, Reason: longReason}})
	e := checkFailed(t, r, nixlkv.ErrAnotherRank, failedByOther)
	checkReason(t, e.Ranks[0].Peer)
	checkReason(t, e.Ranks[0].Reason)
	ok(t, r.Close())

	r, _ = q.published(3)
	q.p.ranks[0].raw(q.m.self, "KV_STATUS", "3", "0", "0", longReason)
	e = checkFailed(t, r, nixlkv.ErrPeerFailed, "gone")
	checkReason(t, e.Reason)
	checkReason(t, e.Ranks[0].Reason)
	ok(t, r.Released(within(t)))
	ok(t, r.Close())
}
