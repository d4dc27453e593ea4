package interop

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nixlkv/nixlkv/nixl"
)

// TestPrefillComplete: under that policy this library's decode asks when a room is computed, and
// only then tells the prefill where the pages go. SGLang has it from 0.5.22 on, in the part that
// its backends share, and does not let it be used with NIXL; the peer joins the two.
func TestPrefillComplete(t *testing.T) {
	env := need(t)
	for _, r := range env.only(22, 23) {
		inTurn(t, r.String(), func(t *testing.T) { testPrefillComplete(t, env, r) })
	}
}

func testPrefillComplete(t *testing.T, env environment, r release) {
	s := largePages(sglang(r))
	s.prefill[0].AllocationPolicy = "prefill_complete"
	s.decode[0].AllocationPolicy = "prefill_complete"
	b := &abortBench{pair: startPair(t, env, s, sglang(r), golang(nixl.Native))}
	for i, stage := range []struct {
		name   string
		run    func(t *testing.T, b *abortBench, r *room)
		chunks []int // pages
	}{
		{"computed_first", computedFirst, []int{4, 4}},
		{"computed_later", computedLater, []int{4, 4}},
		{"decode_first", decodeFirst, []int{4, 4}},
		{"side_by_side", computedSideBySide, []int{4, 4}},
		{"number_again", computedAgain, []int{4, 4}},
		{"aborted_before_completion", abortedBeforeCompletion, []int{4, 4}},
		{"aborted_after_completion", abortedAfterCompletion, []int{4, 4}},
		{"aborted_by_the_prefill", abortedByPrefill, []int{4, 4}},
		{"aborted_by_the_prefill_after_completion", abortedByPrefillLater, []int{4, 4}},
		{"aborted_by_the_prefill_during_a_transfer", abortedByPrefillDuring, []int{64, 4}},
		{"good_after_aborts", computedLater, []int{4, 4}},
	} {
		t.Run(stage.name, func(t *testing.T) {
			stage.run(t, b, b.newRoom(uint64(100+10*i), stage.chunks...))
			b.checkStray(t)
		})
		if b.broken() {
			t.Fatal("a rank has ended")
		}
	}
	for _, g := range b.given {
		b.checkUntouched(t, g)
	}
	t.Run("other_policy", func(t *testing.T) { otherPolicy(t, b) })
	b.stop(t)
}

// compute opens a room at the prefill. It is not computed yet.
func (b *abortBench) compute(t *testing.T, r *room) {
	t.Helper()
	b.prefill.ranks[0].tell(t, map[string]any{"cmd": "send", "room": r.number, "chunks": r.send, "aux_index": r.aux,
		"gap_s": r.gap.Seconds(), "timeout": patience.Seconds(), "computed": false})
}

// computed says that it is.
func (b *abortBench) computed(t *testing.T, r *room) {
	t.Helper()
	b.prefill.ranks[0].tell(t, map[string]any{"cmd": "complete", "room": r.number})
	if _, err := b.prefill.ranks[0].takeOf(deadline(t), "completed", &r.number); err != nil {
		t.Fatal(err)
	}
}

// asked waits until the decode has asked when a room is computed. It must not have told more.
func (b *abortBench) asked(t *testing.T, r *room) {
	t.Helper()
	b.prefill.ranks[0].askUntil(t, "the question for the room", "rooms", map[string]any{"cmd": "rooms"}, func(e event) bool {
		return slices.Contains(e.Asked, r.number)
	})
	e := b.decode[0].ask(t, "rooms", map[string]any{"cmd": "rooms"})
	if status := e.RequestStatus[fmt.Sprint(r.number)]; status != "Bootstrapping" {
		t.Errorf("room %d is not computed, and %s at the decode", r.number, status)
	}
}

func computedFirst(t *testing.T, b *abortBench, r *room) {
	b.compute(t, r)
	b.computed(t, r)
	b.receive(t, r, patience.Seconds())
	b.arrives(t, r)
}

func computedLater(t *testing.T, b *abortBench, r *room) {
	b.compute(t, r)
	b.receive(t, r, patience.Seconds())
	b.asked(t, r)
	b.computed(t, r)
	b.arrives(t, r)
}

func decodeFirst(t *testing.T, b *abortBench, r *room) {
	b.receive(t, r, patience.Seconds())
	b.asked(t, r)
	b.compute(t, r)
	b.computed(t, r)
	b.arrives(t, r)
}

// computedSideBySide: rooms are computed in another order than they were opened.
func computedSideBySide(t *testing.T, b *abortBench, r *room) {
	rooms := []*room{r, b.newRoom(r.number+1, 4), b.newRoom(r.number+2, 4, 1, 2)}
	for _, r := range rooms {
		b.receive(t, r, patience.Seconds())
		b.compute(t, r)
	}
	for _, r := range rooms {
		b.asked(t, r)
	}
	for _, r := range slices.Backward(rooms) {
		b.computed(t, r)
		b.arrives(t, r)
	}
}

// computedAgain: the number of a room that has succeeded can be used again, and no word of the
// first use is taken for one of the second.
func computedAgain(t *testing.T, b *abortBench, r *room) {
	b.compute(t, r)
	b.computed(t, r)
	b.receive(t, r, patience.Seconds())
	b.arrives(t, r)
	again := b.newRoom(r.number, 4)
	b.receive(t, again, patience.Seconds())
	b.compute(t, again)
	b.asked(t, again)
	b.computed(t, again)
	b.arrives(t, again)
}

// neverTold: the decode has failed a room whose pages the prefill never knew. Nothing has to be
// released, and nothing was written.
func (b *abortBench) neverTold(t *testing.T, r *room, got outcome) {
	t.Helper()
	if got.Status != "Failed" || got.message == "" || got.KV != digestOfNothing {
		t.Errorf("room %d: %v %s", r.number, got.key(), got.message)
	}
	kv, aux := digests(t, b.decode[0], r.to, r.toAux)
	free := b.newRoom(0, 4, 4) // slots that no prefill has ever heard of
	if wantKV, wantAux := digests(t, b.decode[0], free.to, free.toAux); kv != wantKV || aux != wantAux {
		t.Errorf("room %d: something was written", r.number)
	}
}

func abortedBeforeCompletion(t *testing.T, b *abortBench, r *room) {
	b.compute(t, r)
	b.receive(t, r, patience.Seconds())
	b.asked(t, r)
	tellAbort(t, b.decode[0], r)
	prefill, decode := b.ended(t, r)
	if prefill.Status != "Failed" {
		t.Errorf("%s at the prefill: %s", prefill.Status, prefill.message)
	}
	b.neverTold(t, r, decode)
}

func abortedAfterCompletion(t *testing.T, b *abortBench, r *room) {
	r.gap = time.Minute
	b.compute(t, r)
	b.receive(t, r, patience.Seconds())
	b.computed(t, r)
	b.firstChunk(t, r)
	tellAbort(t, b.decode[0], r)
	prefill, decode := b.ended(t, r)
	if prefill.Status != "Failed" || decode.Status != "Failed" {
		t.Errorf("%s at the prefill: %s; %s at the decode: %s", prefill.Status, prefill.message, decode.Status, decode.message)
	}
	b.released(t, r)
}

// abortedByPrefill: under this policy SGLang's prefill tells the decode.
func abortedByPrefill(t *testing.T, b *abortBench, r *room) {
	b.compute(t, r)
	b.receive(t, r, patience.Seconds())
	b.asked(t, r)
	tellAbort(t, b.prefill.ranks[0], r)
	_, decode := b.ended(t, r)
	b.neverTold(t, r, decode)
}

func abortedByPrefillLater(t *testing.T, b *abortBench, r *room) {
	r.gap = time.Minute
	b.compute(t, r)
	b.receive(t, r, patience.Seconds())
	b.computed(t, r)
	b.firstChunk(t, r)
	tellAbort(t, b.prefill.ranks[0], r)
	if _, decode := b.ended(t, r); decode.Status != "Failed" {
		t.Errorf("%s at the decode: %s", decode.Status, decode.message)
	}
	b.released(t, r)
}

// abortedByPrefillDuring: it tells the decode at once, with writes in flight.
func abortedByPrefillDuring(t *testing.T, b *abortBench, r *room) {
	b.compute(t, r)
	b.receive(t, r, patience.Seconds())
	b.computed(t, r)
	b.firstPage(t, r)
	tellAbort(t, b.prefill.ranks[0], r)
	prefill, decode := b.ended(t, r)
	t.Logf("%s at the prefill, %s at the decode", prefill.Status, decode.Status)
	if decode.Status == "Success" {
		b.succeeded(t, r, decode)
		return
	}
	b.released(t, r)
	b.fence(t, r)
	b.lastUntouched(t, r)
}

// otherPolicy: a decode that reserves pages early is refused by itself: this prefill's control
// thread would not survive it.
func otherPolicy(t *testing.T, b *abortBench) {
	c := b.setup.decode[0]
	c.AllocationPolicy = ""
	p := b.prefill.startDecode(t, &setup{name: "other_policy", decode: oneRank(c)}, golang(nixl.Native))
	r := &room{number: 1, to: []int32{1}}
	p.receive(t, r, patience.Seconds())
	ctx, cancel := context.WithTimeout(t.Context(), patience+reportPatience)
	defer cancel()
	if got := done(t, ctx, p.decode[0], 1); got.Status != "Failed" || !strings.Contains(got.message, "policy") {
		t.Errorf("%s: %s", got.Status, got.message)
	}
	p.stopDecode(t)
}
