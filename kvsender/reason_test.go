package kvsender

import (
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/internal/wire"
)

// longReason is a reason as nobody should give it.
var longReason = strings.Repeat("gone\x00\xff\x1b页", 2<<20)

// checkReason checks that a text is bounded, fit to be read, and says that it was cut.
func checkReason(t *testing.T, text string) {
	t.Helper()
	if len(text) > 5<<10 || !utf8.ValidString(text) || strings.ContainsAny(text, "\x00\x1b") || !strings.Contains(text, "cut, of ") {
		t.Errorf("%d bytes, UTF-8 %v: %.100q", len(text), utf8.ValidString(text), text)
	}
}

// A reason that the caller gives is kept and sent within bounds.
func TestReasonsAreBounded(t *testing.T) {
	p := newPair(t, embeddedEngine(t), 25)
	p.d.register(p.d.registration())
	p.transfer(t, 1)
	s := open(t, p.m, 2)
	p.d.tell(2, []int32{1}, 0)
	_, err := s.WaitBootstrapped(within(t))
	ok(t, err)
	s.Abort(longReason)
	wantFailure(t, s, nil, nixlkv.ErrAborted, "gone")
	checkReason(t, s.Err().Error())
	if st := p.d.status(2); st.Status != wire.PollFailed || !strings.HasPrefix(st.Reason, nixlkv.ErrAborted.Error()+": gone") || !strings.HasSuffix(st.Reason, " bytes)") {
		t.Errorf("told %.100q", st.Reason)
	} else {
		checkReason(t, st.Reason)
	}
	ok(t, s.Close())

	s = open(t, p.m, 3)
	s.FailedElsewhere([]nixlkv.RankReport{{Rank: 1, Peer: longReason, Reason: longReason}})
	e := s.r.transferError()
	checkReason(t, e.Ranks[0].Peer)
	checkReason(t, e.Ranks[0].Reason)
	ok(t, s.Close())
}
