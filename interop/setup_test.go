package interop

import (
	"fmt"
	"regexp"
	"time"
)

// setup is a prefill and a decode, rank by rank, and the cases that they are put through, one
// after another. What the cases have in common they share: starting a rank takes seconds.
type setup struct {
	name    string
	prefill []rankConfig
	decode  []rankConfig
	cases   []testCase

	// since and until are the first and the last release whose own pair can do it, 0 if all can;
	// why says what keeps the others. This library's prefill must do it with all decodes: the right
	// answer is then that of the nearest release. With alone, a decode of another release cannot do
	// it either.
	since, until int
	alone        bool
	why          string
	prefillOnly  bool // it is about this library's prefill
	// golden is another setup, which has the right answers. sglang names prefill ranks that are
	// SGLang's beside this library's; without, SGLang's prefill cannot do it, and why says so.
	golden string
	sglang []int
	// alike: the answers are those of a setup with one decode rank, and all ranks get the same.
	alike bool
}

// of says whether a release's own pair can do it.
func (s *setup) of(r release) bool {
	return s.own() && r.Minor >= s.since && (s.until == 0 || r.Minor <= s.until)
}

// obstacle says what keeps a prefill and a decode from it, or nothing.
func (s *setup) obstacle(prefill, decode impl) string {
	within := func(i impl) bool { return i.sglang == nil || s.nearest(*i.sglang) == *i.sglang }
	switch {
	case prefill.sglang != nil && (!s.own() || !within(prefill)), s.alone && !within(decode):
		return s.why
	}
	return ""
}

// nearest gives the release that is nearest to one and whose own pair can do it.
func (s *setup) nearest(r release) release {
	r.Minor = max(r.Minor, s.since)
	if s.until != 0 {
		r.Minor = min(r.Minor, s.until)
	}
	return r
}

// own says whether the setup has right answers of its own: all its ranks may be SGLang's.
func (s *setup) own() bool { return s.golden == "" }

// right is what is right for the setup, of the answers that golden has.
func (s *setup) right(answers result) result {
	for s.alike && len(answers.Decode) < len(s.decode) {
		answers.Decode = append(answers.Decode, answers.Decode[0])
	}
	return answers
}

// slots are those that indices of a state component name: the tail of compressed keys is named by a
// row and what of it is in use.
func (s *setup) slots(component int, indices []int32) []int32 {
	if s.decode[0].KV.State[component].Type == "dsa_tail" && len(indices) > 0 {
		return indices[:1]
	}
	return indices
}

// answers names the setup that has the right answers.
func (s *setup) answers() string {
	if s.golden != "" {
		return s.golden
	}
	return s.name
}

// testCase is some rooms, side by side.
type testCase struct {
	name  string
	rooms []room
	// foreign are messages that the control sockets of prefill and decode get first. SGLang's
	// prefill does not survive them, so all of its ranks are spared.
	foreign, foreignAtDecode [][]string
	// want says what is right where it is not what SGLang does; such a case is for this
	// library's prefill alone.
	want func(decode release) want
}

// isSGLangs says whether SGLang's prefill does what is right.
func (c *testCase) isSGLangs() bool { return c.want == nil }

// room is a request.
type room struct {
	number uint64
	// send are the prefill's pages, a chunk each; nil if the prefill never opens the room.
	send [][]int32
	aux  int
	// to are the decode's pages, and toRank those of each decode rank where they differ.
	to     []int32
	toRank [][]int32
	toAux  int
	// prefix is what the decode has already, in tokens.
	prefix int
	// tokens is how many tokens a chunk holds, where the prefill must know.
	tokens int
	// sendState and toState are the slots of each state component at either side.
	sendState, toState [][]int32
	// prefillOnly: the decode never opens it.
	prefillOnly bool
	// gap is between the chunks, and after the last.
	gap time.Duration
	// abort says which side gives up, "prefill" or "decode", once they have met.
	abort string
}

// pagesAt gives the destination pages of a decode rank.
func (r *room) pagesAt(rank int) []int32 {
	if r.toRank != nil {
		return r.toRank[rank]
	}
	return r.to
}

// want is how a room must end on either side, where that is not for SGLang to say.
type want struct {
	prefill, decode string // statuses; "": the side does not open the room
	// prefillReason and decodeReason match the messages of a failure.
	prefillReason, decodeReason string
}

// outcome is what comes of a room at one rank. A prefill has no digests.
type outcome struct {
	Status string   `json:"status"`
	KV     string   `json:"kv,omitempty"`
	Aux    string   `json:"aux,omitempty"`
	State  []string `json:"state,omitempty"`

	message string
}

// result is what comes of a case: the outcome of each room at each rank.
type result struct {
	Prefill [][]outcome `json:"prefill"` // by rank, then by room
	Decode  [][]outcome `json:"decode"`
}

// against lists in what a result differs from the right one.
func (got result) against(right result) []string {
	return append(differences("prefill", got.Prefill, right.Prefill), differences("decode", got.Decode, right.Decode)...)
}

func differences(side string, got, right [][]outcome) (diff []string) {
	if len(got) != len(right) {
		return []string{fmt.Sprintf("%d %s ranks, want %d", len(got), side, len(right))}
	}
	for rank := range got {
		if len(got[rank]) != len(right[rank]) {
			diff = append(diff, fmt.Sprintf("%s rank %d: %d rooms, want %d", side, rank, len(got[rank]), len(right[rank])))
			continue
		}
		for i, g := range got[rank] {
			if w := right[rank][i]; g.key() != w.key() {
				diff = append(diff, fmt.Sprintf("%s rank %d, room %d of the case: %s %s, want %s", side, rank, i, g.key(), g.message, w.key()))
			}
		}
	}
	return diff
}

func (o outcome) key() string {
	return fmt.Sprint(o.Status, " KV ", o.KV, " aux ", o.Aux, " state ", o.State)
}

// against lists where a result differs from what a case wants.
func (w want) against(got result) (diff []string) {
	for side, x := range map[string]struct {
		ranks          [][]outcome
		status, reason string
	}{"prefill": {got.Prefill, w.prefill, w.prefillReason}, "decode": {got.Decode, w.decode, w.decodeReason}} {
		reason := regexp.MustCompile(x.reason)
		for rank, rooms := range x.ranks {
			for i, o := range rooms {
				if o.Status != x.status || !reason.MatchString(o.message) {
					diff = append(diff, fmt.Sprintf("%s rank %d, room %d of the case: %q %s, want %q /%s/", side, rank, i, o.Status, o.message, x.status, x.reason))
				}
			}
		}
	}
	return diff
}
