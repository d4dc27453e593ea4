package kvreceiver

import (
	"fmt"
	"net/netip"
	"time"

	"go.uber.org/zap"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/bootstrap"
	"github.com/nixlkv/nixlkv/internal/control"
	"github.com/nixlkv/nixlkv/internal/wire"
)

// giveUp tells every prefill rank of a failed room that nobody waits for it any more. Ranks
// that were told where the pages go answer when they have nothing in flight; what waits for the
// registration is taken back first, or it would arrive after the abort. A rank that has told
// its end is not told: it may use the number again, and would take the abort for one of that
// use.
func (r *room) giveUp() {
	for _, t := range r.targets {
		if t.out != nil && t.link.cancel(t.out) {
			t.out, t.told = nil, false
		}
	}
	if r.writers() > 0 {
		r.release = time.AfterFunc(r.m.cfg.releaseTimeout, r.unconfirmed)
	}
	for i, t := range r.targets {
		if r.track == nil || !r.track.ranks[i].quiet() {
			r.sendAbort(t)
		}
	}
}

// abortRetry is the pause before an abort is sent again that could not be.
const abortRetry = 100 * time.Millisecond

// sendAbort tells a rank that the room is given up. Where the rank may be writing it is asked
// to answer, under a number of this abort alone, and the abort is sent again until it is taken.
// The others are not: an answer without the number, as from 0.5.19 to 0.5.21, could be taken
// for one to a later use's abort.
func (r *room) sendAbort(t *roomTarget) {
	a := &wire.Abort{Room: r.id}
	deadline := r.m.sendDeadline()
	if t.told {
		t.abort = r.m.generations.Add(1)
		a.From, a.Generation, a.HasGeneration = r.m.self, t.abort, true
		deadline = time.Now().Add(r.m.cfg.releaseTimeout)
	} else if r.m.cfg.policy == bootstrap.PrefillCompleteAllocation {
		a.From = r.m.self // by which the prefill knows whom the room is for
	}
	var enc wire.Encoder // let go with the frames, which stay queued
	frames, err := enc.Abort(a)
	if err == nil {
		generation := t.abort
		err = r.m.ctl.SendAsync(control.Message{To: t.to, Frames: frames, Deadline: deadline}, func(over uint64, err error) {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.abortSent(t, generation, over, err)
		})
	}
	if err != nil {
		r.abortSent(t, t.abort, 0, err)
	}
}

// abortSent takes the outcome of sending an abort. The caller holds mu.
func (r *room) abortSent(t *roomTarget, generation, over uint64, err error) {
	switch {
	case err == nil:
		r.m.stats.aborts.Add(1)
		// Over another connection than the metadata it may be read before them; the second time
		// it is not.
		t.detour = t.told && over != t.generation && !t.detour
		t.abortOver = over
	case generation != t.abort || !r.awaits(t):
		r.m.stats.abortsUntold.Add(1)
	default:
		r.m.warn.Warn("could not tell a prefill of an abort yet", zap.Stringer("rank", t.to), zap.Uint64("room", uint64(r.id)), zap.Error(err))
		time.AfterFunc(abortRetry, func() { r.abortAgain(t, generation) })
	}
}

// abortAgain sends an abort anew, if its answer is still waited for. It takes mu.
func (r *room) abortAgain(t *roomTarget, generation uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if t.abort == generation && r.awaits(t) {
		r.sendAbort(t)
	}
}

// awaits says whether the room still waits for a rank's answer.
func (r *room) awaits(t *roomTarget) bool {
	select {
	case <-r.released:
		return false
	default:
		return r.status == nixlkv.Failed && t.told && !t.answered
	}
}

// writers counts the ranks that may still write to the room's pages.
func (r *room) writers() int {
	n := 0
	for i, t := range r.targets {
		if t.told && !t.answered && !r.track.ranks[i].quiet() && !(t.dummy && r.track.ranks[i].state == nixlkv.RankLost) {
			n++
		}
	}
	return n
}

// settle releases the pages of an ended room once nobody writes to them any more, and forgets
// a room that was closed then.
func (r *room) settle() {
	if !r.status.Ended() {
		return
	}
	if r.status == nixlkv.Success || r.writers() == 0 {
		r.setReleased(true)
	}
}

// setReleased ends the wait for the pages' release; confirmed says how.
func (r *room) setReleased(confirmed bool) {
	select {
	case <-r.released:
		return
	default:
	}
	r.confirmed = confirmed
	stopTimer(&r.release)
	if r.open {
		r.open = false
		r.m.watching(-1)
	}
	if confirmed {
		r.metrics.Released = time.Now()
	} else {
		r.m.stats.unconfirmed.Add(1)
	}
	close(r.released)
	aborted := false
	for _, t := range r.targets {
		aborted = aborted || t.abort != 0
	}
	r.unlink()
	if !aborted || r.m.ctx.Err() != nil {
		r.m.settled(r, confirmed)
		return
	}
	// A rank's last words about this use may come behind its answer, and notifications be on
	// their way or not yet fetched: they must not be taken for those of a later use.
	time.AfterFunc(r.m.cfg.lossGrace, func() {
		r.m.afterDrain(func() { r.m.settled(r, confirmed) })
	})
}

// unconfirmed gives up waiting for prefill ranks that do not answer. It takes mu.
func (r *room) unconfirmed() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.setReleased(false)
}

// ack takes a rank's answer to an abort, and says whether the room waited for it. It takes mu.
func (r *room) ack(source netip.Addr, a *wire.AbortAck) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	t := r.speaker(source, a.PrefillRank)
	switch {
	case t == nil || t.abort == 0 || !r.awaits(t):
		return false
	case a.HasGeneration && a.Generation != t.abort:
		return false
	case !a.HasGeneration && r.group.topology.DecodeAllocationPolicy != "":
		return false // a release that answers with the number, and so to another abort
	case t.detour:
		// The rank may have answered before it has read the metadata, which came over a
		// connection that is gone. It has them by the time that it reads another abort.
		generation := t.abort
		time.AfterFunc(r.m.cfg.lossGrace, func() { r.abortAgain(t, generation) })
		return true
	}
	t.answered = true
	r.settle()
	return true
}

// releaseError says that pages may still be written.
func (r *room) releaseError() error {
	if r.confirmed {
		return nil
	}
	return fmt.Errorf("kvreceiver: room %d: %w: %d of %d prefill ranks have not answered within %v: %w",
		r.id, nixlkv.ErrReleaseUnconfirmed, r.writers(), len(r.targets), r.m.cfg.releaseTimeout, r.failure)
}
