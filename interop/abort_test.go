package interop

import (
	"context"
	"crypto/sha256"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/nixlkv/nixlkv/nixl"
)

// TestAbort: rooms that are given up, at every stage, by the decode, by the prefill and by both.
// Once their pages are released nothing is written there any more, and their numbers can be used
// again at once.
func TestAbort(t *testing.T) {
	env := need(t)
	peers := []impl{golang(nixl.Native)}
	for _, r := range env.only(18, 20, 21, 23) {
		peers = append(peers, sglang(r))
	}
	for _, by := range peers {
		inTurn(t, by.String(), func(t *testing.T) { testAbort(t, env, by) })
	}
}

// acks says whether a prefill tells that it writes to no page of an aborted room any more.
type acks int

const (
	always    acks = iota
	sometimes      // but not if its scheduler has seen the failure before the worker has
	never
)

func (by impl) acks() acks {
	switch {
	case by.sglang == nil || by.sglang.Minor >= 22:
		return always
	case by.sglang.Minor >= 19:
		return sometimes // 0.5.19 and 0.5.20 if they are asked to
	}
	return never
}

// largePages is a setup with pages that take a while to send.
func largePages(by impl) *setup {
	kv := regions(4, 128<<10)
	kv.NumSlots = benchPages
	release := map[acks]string{always: "20", sometimes: "3", never: "1"}[by.acks()]
	return &setup{
		name:    "large_pages",
		prefill: oneRank(rankConfig{KV: kv}.env(envDeferredRelease, "1")),
		decode:  oneRank(rankConfig{KV: kv}.env(envReleaseTimeout, release)),
	}
}

func testAbort(t *testing.T, env environment, by impl) {
	b := &abortBench{pair: startPair(t, env, largePages(by), by, golang(nixl.Native))}
	stages := []struct {
		name   string
		run    func(t *testing.T, b *abortBench, r *room)
		chunks []int // pages
	}{
		{"before_the_prefill_answers", beforeAnswer, []int{4}}, // the first: later ones know the prefill
		{"with_the_opening", withOpening, []int{4, 4}},
		{"before_the_prefill_opens", beforeOpening, []int{4}},
		{"between_chunks", betweenChunks, []int{4, 4}},
		{"during_a_transfer", duringTransfer, []int{64, 4}},
		{"after_success", afterSuccess, []int{4, 4}},
		{"at_the_prefill", atPrefill, []int{4, 4}},
		{"on_both_sides", onBothSides, []int{4, 4}},
		{"used_again_at_once", usedAgainAtOnce, []int{4, 4}},
	}
	if by.sglang != nil {
		stages = stages[:len(stages)-1] // it takes the metadata for those of the first use
	}
	for i, stage := range stages {
		t.Run(stage.name, func(t *testing.T) {
			stage.run(t, b, b.newRoom(uint64(1000+i), stage.chunks...))
			b.checkStray(t)
		})
		if b.broken() {
			t.Fatal("a rank has ended")
		}
	}
	for _, g := range b.given {
		b.checkUntouched(t, g)
	}
	b.stop(t)
}

// abortBench is a pair whose rooms are given up.
type abortBench struct {
	*pair
	pages, slots int // given to rooms so far
	given        []givenUp
}

// benchPages is how many pages both sides of an abortBench have.
const benchPages = 256

// givenUp is a room that was given up, and what lay in its slots at their release.
type givenUp struct {
	room    *room
	kv, aux string
}

// newRoom makes a room with pages that no other has.
func (b *abortBench) newRoom(number uint64, chunks ...int) *room {
	r := &room{number: number, aux: 63 - b.slots, toAux: b.slots}
	b.slots++
	for _, n := range chunks {
		var chunk []int32
		for range n {
			r.to = append(r.to, int32(b.pages))
			chunk = append(chunk, int32(benchPages-1-b.pages))
			b.pages++
		}
		r.send = append(r.send, chunk)
	}
	return r
}

// digestOfNothing is what a decode tells of a room whose pages were never published.
var digestOfNothing = fmt.Sprintf("%x", sha256.Sum256(nil))

// deadline bounds a stage.
func deadline(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), patience+reportPatience)
	t.Cleanup(cancel)
	return ctx
}

// digests gives what lies in slots of a rank.
func digests(t *testing.T, x *process, pages []int32, aux int) (kv, auxSlot string) {
	t.Helper()
	e := x.ask(t, "expect", map[string]any{"cmd": "expect", "kv_indices": orEmpty(pages), "aux_index": aux})
	return e.KVSHA256, e.AuxSHA256
}

// start opens a room on both sides.
func (b *abortBench) start(t *testing.T, r *room) {
	t.Helper()
	b.receive(t, r, patience.Seconds())
	b.send(t, r, patience.Seconds())
}

// tellAbort has a rank give a room up.
func tellAbort(t *testing.T, x *process, r *room) {
	t.Helper()
	x.tell(t, map[string]any{"cmd": "abort", "room": r.number})
}

// ended waits for the end of a room at both sides.
func (b *abortBench) ended(t *testing.T, r *room) (prefill, decode outcome) {
	t.Helper()
	ctx := deadline(t)
	return done(t, ctx, b.prefill.ranks[0], r.number), done(t, ctx, b.decode[0], r.number)
}

// succeeded checks that what the prefill has sent lies in a room's slots.
func (b *abortBench) succeeded(t *testing.T, r *room, got outcome) {
	t.Helper()
	kv, aux := digests(t, b.prefill.ranks[0], slices.Concat(r.send...), r.aux)
	if got.Status != "Success" || got.KV != kv || got.Aux != aux {
		t.Errorf("room %d: %v %s; want KV %s, aux %s", r.number, got.key(), got.message, kv, aux)
	}
}

// again uses a number again, with success.
func (b *abortBench) again(t *testing.T, number uint64) {
	t.Helper()
	r := b.newRoom(number, 4)
	b.start(t, r)
	b.arrives(t, r)
}

// arrives waits for the end of a room, which must be success.
func (b *abortBench) arrives(t *testing.T, r *room) {
	t.Helper()
	prefill, decode := b.ended(t, r)
	if prefill.Status != "Success" {
		t.Errorf("room %d: %s at the prefill: %s", r.number, prefill.Status, prefill.message)
	}
	b.succeeded(t, r, decode)
}

// wasGivenUp checks a room that both sides have ended. If the decode was told of its success
// before, everything is there. If not, the decode uses the number again before the pages are
// released, and nothing may come into those after it. The prefill uses it when it cannot take the
// abort for one of the second use any more.
func (b *abortBench) wasGivenUp(t *testing.T, r *room, prefill, decode outcome) {
	t.Helper()
	switch {
	case decode.Status == "Success" && prefill.Status == "Success":
		b.succeeded(t, r, decode)
		b.again(t, r.number)
		return
	case decode.Status != "Failed" || decode.message == "" || prefill.Status != "Failed" && prefill.Status != "Success":
		t.Errorf("room %d: %s at the prefill: %s; %s at the decode: %s", r.number, prefill.Status, prefill.message, decode.Status, decode.message)
	}
	if by := b.prefill.by.sglang; by != nil && by.Minor < 22 {
		if decode.KV != digestOfNothing {
			b.released(t, r)
		}
		b.fence(t, r)
		if !b.revived(t, r) {
			b.again(t, r.number)
		}
		b.lastUntouched(t, r)
		return
	}
	again := b.newRoom(r.number, 4)
	b.receive(t, again, patience.Seconds())
	if decode.KV == digestOfNothing || !b.released(t, r) { // the prefill was never told where the pages are, or does not answer
		b.fence(t, r)
	}
	b.send(t, again, patience.Seconds())
	b.arrives(t, again)
	b.lastUntouched(t, r)
}

// fence runs another room: behind it the prefill has read the abort, and nothing is left of the
// aborted room in its queue.
func (b *abortBench) fence(t *testing.T, r *room) {
	t.Helper()
	b.again(t, r.number+1<<20)
}

// statusAtPrefill gives what the prefill knows of a room's number, "" if nothing.
func (b *abortBench) statusAtPrefill(t *testing.T, r *room) string {
	t.Helper()
	return b.prefill.ranks[0].ask(t, "rooms", map[string]any{"cmd": "rooms"}).RequestStatus[fmt.Sprint(r.number)]
}

// revived says whether the prefill still knows a room that ended before a fence: up to 0.5.21
// SGLang's worker can bring the room's status back to life when its sender has let go of it, and a
// second use of the number would find that one.
func (b *abortBench) revived(t *testing.T, r *room) bool {
	t.Helper()
	if by := b.prefill.by.sglang; by == nil || by.Minor >= 22 {
		return false
	}
	status := b.statusAtPrefill(t, r)
	if status != "" {
		t.Logf("room %d, which has ended, is %s at the prefill", r.number, status)
	}
	return status != ""
}

// released waits for the release of a room's pages, and says whether it is confirmed.
func (b *abortBench) released(t *testing.T, r *room) bool {
	t.Helper()
	e, err := b.decode[0].takeOf(deadline(t), "released", &r.number)
	if err != nil {
		t.Fatal(err)
	}
	if acks := b.prefill.by.acks(); e.Confirmed && acks == never || !e.Confirmed && acks == always {
		t.Errorf("room %d: release confirmed: %v, by %v", r.number, e.Confirmed, b.prefill.by)
	}
	if e.Confirmed {
		kv, aux := digests(t, b.decode[0], r.to, r.toAux)
		b.given = append(b.given, givenUp{r, kv, aux})
	}
	return e.Confirmed
}

// checkUntouched: nothing was written to a room's slots since their release.
func (b *abortBench) checkUntouched(t *testing.T, g givenUp) {
	t.Helper()
	if kv, aux := digests(t, b.decode[0], g.room.to, g.room.toAux); kv != g.kv || aux != g.aux {
		t.Errorf("the slots of room %d have changed since they were released", g.room.number)
	}
}

// lastUntouched is checkUntouched for a room, if it was the last one whose release was confirmed.
func (b *abortBench) lastUntouched(t *testing.T, r *room) {
	t.Helper()
	if n := len(b.given); n > 0 && b.given[n-1].room == r {
		b.checkUntouched(t, b.given[n-1])
	}
}

// firstPage waits until a room's first page is there: what comes after it is on its way.
func (b *abortBench) firstPage(t *testing.T, r *room) {
	t.Helper()
	b.arrived(t, r, 1)
}

// firstChunk waits until a room's first chunk is there.
func (b *abortBench) firstChunk(t *testing.T, r *room) {
	t.Helper()
	b.arrived(t, r, len(r.send[0]))
}

// arrived waits until so many pages are there.
func (b *abortBench) arrived(t *testing.T, r *room, n int) {
	t.Helper()
	want, _ := digests(t, b.prefill.ranks[0], slices.Concat(r.send...)[:n], r.aux)
	b.decode[0].askUntil(t, fmt.Sprintf("%d pages of room %d", n, r.number), "expect",
		map[string]any{"cmd": "expect", "kv_indices": r.to[:n]}, func(e event) bool { return e.KVSHA256 == want })
}

// beforeAnswer: the prefill has not even told who it is.
func beforeAnswer(t *testing.T, b *abortBench, r *room) {
	resume := b.prefill.ranks[0].pause(t)
	b.receive(t, r, patience.Seconds())
	tellAbort(t, b.decode[0], r)
	got := done(t, deadline(t), b.decode[0], r.number)
	resume()
	if got.Status != "Failed" || got.message == "" {
		t.Errorf("%s: %s", got.Status, got.message)
	}
	if b.prefill.by.sglang != nil { // it would take an abort that is still on its way for one of the second use
		b.fence(t, r)
	}
	b.again(t, r.number)
}

// withOpening: nobody knows how far both have come. The prefill may have opened the room behind the
// abort, and wait; the second use of the number is then what it waits for.
func withOpening(t *testing.T, b *abortBench, r *room) {
	b.start(t, r)
	tellAbort(t, b.decode[0], r)
	decode := done(t, deadline(t), b.decode[0], r.number)
	if decode.Status == "Failed" && decode.KV != digestOfNothing {
		b.released(t, r)
	}
	b.fence(t, r)
	again := b.newRoom(r.number, 4, 4)
	if b.statusAtPrefill(t, r) == "Bootstrapping" {
		again.send, again.aux = r.send, r.aux
	} else {
		prefill := done(t, deadline(t), b.prefill.ranks[0], r.number)
		t.Logf("%s at the prefill, %s at the decode", prefill.Status, decode.Status)
		if b.revived(t, r) {
			return
		}
		b.send(t, again, patience.Seconds())
	}
	b.receive(t, again, patience.Seconds())
	b.arrives(t, again)
}

// beforeOpening: the prefill has been told where the pages go, and has not opened the room.
func beforeOpening(t *testing.T, b *abortBench, r *room) {
	b.receive(t, r, patience.Seconds())
	number := fmt.Sprint(r.number)
	b.prefill.ranks[0].askUntil(t, "the metadata of room "+number, "rooms", map[string]any{"cmd": "rooms"}, func(e event) bool {
		_, known := e.RequestStatus[number]
		return known || e.Held > 0
	})
	tellAbort(t, b.decode[0], r)
	if got := done(t, deadline(t), b.decode[0], r.number); got.Status != "Failed" || got.message == "" {
		t.Errorf("%s: %s", got.Status, got.message)
	}
	if !b.released(t, r) {
		if b.prefill.by.acks() != never {
			t.Error("the release of a room of which nothing was sent is not confirmed")
		}
		b.fence(t, r)
	}
	// The prefill remembers the abort of a room that it did not know: it fails when it is opened.
	b.send(t, r, patience.Seconds())
	if got := done(t, deadline(t), b.prefill.ranks[0], r.number); got.Status != "Failed" {
		t.Errorf("%s at the prefill: %s", got.Status, got.message)
	}
	b.again(t, r.number)
}

func betweenChunks(t *testing.T, b *abortBench, r *room) {
	r.gap = time.Minute
	b.start(t, r)
	b.firstChunk(t, r)
	tellAbort(t, b.decode[0], r)
	prefill, decode := b.ended(t, r)
	b.wasGivenUp(t, r, prefill, decode)
}

// duringTransfer: the abort meets chunks in flight and chunks in the queue.
func duringTransfer(t *testing.T, b *abortBench, r *room) {
	b.start(t, r)
	b.firstPage(t, r)
	tellAbort(t, b.decode[0], r)
	prefill, decode := b.ended(t, r)
	t.Logf("%s at the prefill, %s at the decode", prefill.Status, decode.Status)
	b.wasGivenUp(t, r, prefill, decode)
}

// afterSuccess: there is nothing to give up any more. SGLang's prefill 0.5.23 would keep such an
// abort for the next use of the number.
func afterSuccess(t *testing.T, b *abortBench, r *room) {
	b.start(t, r)
	_, decode := b.ended(t, r)
	b.succeeded(t, r, decode)
	for _, x := range b.ranks() {
		if !x.ours {
			continue
		}
		tellAbort(t, x, r)
		if _, err := x.takeOf(deadline(t), "aborted", &r.number); err != nil {
			t.Fatal(err)
		}
	}
	b.again(t, r.number)
	b.checkUntouched(t, givenUp{r, decode.KV, decode.Aux})
}

// atPrefill: SGLang's prefill does not tell the decode, which would wait for its timeout.
func atPrefill(t *testing.T, b *abortBench, r *room) {
	r.gap = time.Minute
	b.start(t, r)
	b.firstChunk(t, r)
	tellAbort(t, b.prefill.ranks[0], r)
	prefill := done(t, deadline(t), b.prefill.ranks[0], r.number)
	if b.prefill.by.sglang != nil {
		tellAbort(t, b.decode[0], r)
	}
	b.wasGivenUp(t, r, prefill, done(t, deadline(t), b.decode[0], r.number))
}

func onBothSides(t *testing.T, b *abortBench, r *room) {
	r.gap = time.Minute
	b.start(t, r)
	b.firstChunk(t, r)
	for _, x := range b.ranks() {
		tellAbort(t, x, r)
	}
	prefill, decode := b.ended(t, r)
	b.wasGivenUp(t, r, prefill, decode)
}

// usedAgainAtOnce: the decode uses the number again before it knows what the prefill has made of
// the first use.
func usedAgainAtOnce(t *testing.T, b *abortBench, r *room) {
	r.gap = time.Minute
	b.start(t, r)
	b.firstChunk(t, r)
	tellAbort(t, b.decode[0], r)
	if decode := done(t, deadline(t), b.decode[0], r.number); decode.Status != "Failed" {
		t.Errorf("%s: %s", decode.Status, decode.message)
	}
	again := b.newRoom(r.number, 4)
	b.receive(t, again, patience.Seconds())
	if prefill := done(t, deadline(t), b.prefill.ranks[0], r.number); prefill.Status != "Failed" {
		t.Errorf("%s: %s", prefill.Status, prefill.message)
	}
	b.send(t, again, patience.Seconds())
	b.released(t, r)
	b.arrives(t, again)
}
