package interop

import (
	"fmt"
	"slices"
	"strings"
	"testing"
)

// TestCases checks the tables themselves: that a case can tell right from wrong.
func TestCases(t *testing.T) {
	names := map[string]bool{}
	for _, s := range allSetups() {
		t.Run(s.name, func(t *testing.T) {
			if names[s.name] {
				t.Error("two setups of that name")
			}
			names[s.name] = true
			checkSetup(t, s)
		})
	}
	for _, s := range allSetups() {
		if !names[s.answers()] {
			t.Errorf("%s has its answers from %s, which is not there", s.name, s.golden)
		}
	}
}

func checkSetup(t *testing.T, s *setup) {
	if limited := s.since != 0 || s.until != 0 || s.golden != "" && s.sglang == nil; limited != (s.why != "") {
		t.Errorf("it is not for every release: %v, and it says why: %q", limited, s.why)
	}
	// A destination that is used twice could hold what an earlier case left there.
	slots := map[string]string{}
	use := func(name string, kind string, rank int, slot int32, bound int) {
		key := fmt.Sprint(kind, rank, "/", slot)
		if other, ok := slots[key]; ok {
			t.Errorf("%s: %s slot %d of decode rank %d is also one of %s", name, kind, slot, rank, other)
		}
		slots[key] = name
		if slot < 0 || int(slot) >= bound {
			t.Errorf("%s: %s slot %d of %d", name, kind, slot, bound)
		}
	}
	cases := map[string]bool{}
	for _, c := range s.cases {
		if cases[c.name] {
			t.Errorf("two cases %s", c.name)
		}
		cases[c.name] = true
		for _, r := range c.rooms {
			sent := slices.Concat(r.send...)
			for rank, d := range s.decode {
				if r.prefillOnly {
					continue
				}
				use(c.name, "aux", rank, int32(r.toAux), d.KV.AuxSlots)
				for _, page := range r.pagesAt(rank) {
					use(c.name, "KV", rank, page, d.KV.NumSlots)
				}
				shared := max(1, d.Parallel.DCPSize)
				if want := (len(sent) + shared - 1) / shared; c.want == nil && want != len(r.pagesAt(rank)) {
					t.Errorf("%s: %d pages sent, of which the decode rank has %d, and %d asked for", c.name, len(sent), want, len(r.pagesAt(rank)))
				}
				for i, slots := range r.toState {
					for _, slot := range s.slots(i, slots) {
						use(c.name, fmt.Sprintf("state %d ", i), rank, slot, d.KV.State[i].NumSlots)
					}
					// Ranks take what follows a tail's row for rows too when they tell what lies there.
					if named := s.slots(i, slots); len(named) < len(slots) && slices.Max(slots[1:]) >= named[0] {
						t.Errorf("%s: the tail %v would tell of other rooms' rows", c.name, slots)
					}
					if len(slots) != len(r.sendState[i]) {
						t.Errorf("%s: %d slots of state %d sent, and %d asked for", c.name, len(r.sendState[i]), i, len(slots))
					}
				}
			}
			for _, p := range s.prefill {
				if slices.ContainsFunc(sent, func(page int32) bool { return page < 0 || int(page) >= p.KV.NumSlots }) && c.want == nil {
					t.Errorf("%s: pages %v of %d", c.name, sent, p.KV.NumSlots)
				}
			}
		}
	}
}

// TestGoldenIsThere: every case has an answer for every release, and every answer a case.
func TestGoldenIsThere(t *testing.T) {
	for minor := 18; minor <= 23; minor++ {
		r := release{Minor: minor}
		book, err := loadAnswers(r)
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range allSetups() {
			if !s.own() || !s.of(r) {
				if _, ok := book[s.name]; ok {
					t.Errorf("%v: answers to %s, which has none of its own", r, s.name)
				}
				continue
			}
			for _, c := range s.cases {
				right, ok := book[s.name][c.name]
				if ok != (c.want == nil) {
					t.Errorf("%v, %s/%s: an answer is there: %v", r, s.name, c.name, ok)
				}
				delete(book[s.name], c.name)
				for _, d := range append(allSucceeded("prefill", right.Prefill), allSucceeded("decode", right.Decode)...) {
					t.Errorf("%v, %s/%s: %s", r, s.name, c.name, d)
				}
			}
			if len(book[s.name]) != 0 {
				t.Errorf("%v, %s: answers to cases that are not there: %v", r, s.name, book[s.name])
			}
			delete(book, s.name)
		}
		if len(book) != 0 {
			t.Errorf("%v: answers to setups that are not there: %d", r, len(book))
		}
	}
}

// TestReleasesAgree: what has to be where does not depend on the release.
func TestReleasesAgree(t *testing.T) {
	first := answerBook{}
	for minor := 18; minor <= 23; minor++ {
		book, err := loadAnswers(release{Minor: minor})
		if err != nil {
			t.Fatal(err)
		}
		for name, answers := range book {
			if first[name] == nil {
				first[name] = answers
			}
			for c, got := range answers {
				for _, d := range got.against(first[name][c]) {
					t.Errorf("0.5.%d, %s/%s: %s", minor, name, c, d)
				}
			}
		}
	}
}

// TestGoldenIsThePattern computes an answer from the pattern that the ranks fill their memory
// with: what SGLang's pairs have told is what their cases say, not what this harness makes
// of them. The digests are those of Python's hashlib over the slots of plain/equal_tp.
func TestGoldenIsThePattern(t *testing.T) {
	right, err := rightAnswer(release{Minor: 18}, "plain", "equal_tp")
	if err != nil {
		t.Fatal(err)
	}
	want := outcome{Status: "Success",
		KV:  "54116e17b50fbd1c4f60ac6f0fb206f6f6a6cab8dcb45cce2b6f76206bd288a6",
		Aux: "85a1f1e3c3731ba786ff4268a40e5f2d7650f2d4c55ea71ac80ab3edefd24233"}
	if got := right.Decode[0][0]; got.key() != want.key() {
		t.Errorf("%s, want %s", got.key(), want.key())
	}
}

// TestJudgement: what is wrong is seen.
func TestJudgement(t *testing.T) {
	right := func() result {
		return result{
			Prefill: [][]outcome{{{Status: "Success"}, {Status: "Success"}}},
			Decode:  [][]outcome{{{Status: "Success", KV: "a", Aux: "b"}, {Status: "Success", KV: "c", Aux: "d", State: []string{"e"}}}},
		}
	}
	if d := right().against(right()); len(d) != 0 {
		t.Errorf("the right result differs from itself: %q", d)
	}
	for name, spoil := range map[string]func(*result){
		"prefill status": func(r *result) { r.Prefill[0][1].Status = "Failed" },
		"decode status":  func(r *result) { r.Decode[0][0].Status = "WaitingForInput" },
		"KV":             func(r *result) { r.Decode[0][0].KV = "c" },
		"aux":            func(r *result) { r.Decode[0][1].Aux = "" },
		"state":          func(r *result) { r.Decode[0][1].State[0] = "" },
		"a room less":    func(r *result) { r.Decode[0] = r.Decode[0][:1] },
		"a rank less":    func(r *result) { r.Decode = nil },
	} {
		got := right()
		spoil(&got)
		if d := got.against(right()); len(d) != 1 {
			t.Errorf("%s: %q", name, d)
		}
	}
	failed := result{
		Prefill: [][]outcome{{{Status: "Failed", message: "KVTransferError: out of pages"}}},
		Decode:  [][]outcome{{{Status: "Failed", message: "KVTransferError: out of pages"}}},
	}
	for _, tc := range []struct {
		want want
		n    int
	}{
		{want{prefill: "Failed", decode: "Failed"}, 0},
		{want{prefill: "Failed", prefillReason: "out of", decode: "Failed", decodeReason: "pages$"}, 0},
		{want{prefill: "Failed", decode: "WaitingForInput"}, 1},
		{want{prefill: "Success", decode: "Success"}, 2},
		{want{prefill: "Failed", decode: "Failed", decodeReason: "out of time"}, 1},
	} {
		if d := tc.want.against(failed); len(d) != tc.n {
			t.Errorf("%+v: %s", tc.want, strings.Join(d, "; "))
		}
	}
}
