package kvreceiver

import (
	"fmt"
	"time"

	"go.uber.org/zap"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/internal/control"
	"github.com/nixlkv/nixlkv/internal/wire"
)

// giveUp tells every prefill rank of a failed room that nobody waits for it any more. Ranks
// that were told where the pages go answer when they have nothing in flight; metadata that
// wait for the registration are taken back first, or they would arrive after the abort.
func (r *room) giveUp() {
	if len(r.targets) == 0 {
		return
	}
	r.abort = r.m.generations.Add(1)
	var enc wire.Encoder // let go with the frames, which stay queued
	frames, err := enc.Abort(&wire.Abort{Room: r.id, From: r.m.self, Generation: r.abort, HasGeneration: true})
	if err != nil {
		r.m.log.Error("encoding an abort", zap.Error(err), zap.Uint64("room", uint64(r.id)))
		return
	}
	waits := false
	for _, t := range r.targets {
		if t.out != nil && t.link.cancel(t.out) {
			t.out, t.told = nil, false
		}
		// Worth trying for as long as somebody waits for the answer.
		deadline := r.m.sendDeadline()
		if t.told {
			waits, deadline = true, time.Now().Add(r.m.cfg.releaseTimeout)
		}
		failed := func(err error) {
			r.m.stats.untold.Add(1)
			r.m.warn.Warn("could not tell a prefill of an abort", zap.Stringer("rank", t.to), zap.Uint64("room", uint64(r.id)), zap.Error(err))
		}
		err := r.m.ctl.SendAsync(control.Message{To: t.to, Frames: frames, Deadline: deadline}, func(_ uint64, err error) {
			if err != nil {
				failed(err)
			}
		})
		if err != nil {
			failed(err)
			continue
		}
		r.m.stats.aborts.Add(1)
	}
	if waits {
		r.release = time.AfterFunc(r.m.cfg.releaseTimeout, r.unconfirmed)
	}
}

// writers counts the ranks that may still write to the room's pages.
func (r *room) writers() int {
	n := 0
	for i, t := range r.targets {
		if t.told && !t.acked && !r.track.ranks[i].quiet() && !(t.dummy && r.track.ranks[i].state == nixlkv.RankLost) {
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
	r.acked = confirmed
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
	r.unlink()
	if r.abort == 0 {
		r.m.settled(r, confirmed)
		return
	}
	// Notifications may have come before the answer to the abort, and not be fetched yet: they
	// must not be taken for those of a later use of the number.
	r.m.afterDrain(func() { r.m.settled(r, confirmed) })
}

// unconfirmed gives up waiting for prefill ranks that do not answer. It takes mu.
func (r *room) unconfirmed() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.setReleased(false)
}

// ack takes a rank's answer to an abort, and says whether the room waited for it. It takes mu.
func (r *room) ack(a *wire.AbortAck) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.abort == 0 || a.HasGeneration && a.Generation != r.abort {
		return false
	}
	t := r.target(a.PrefillRank)
	if t == nil || !t.told || t.acked {
		return false
	}
	t.acked = true
	r.settle()
	return true
}

// releaseError says that pages may still be written.
func (r *room) releaseError() error {
	if r.acked {
		return nil
	}
	return fmt.Errorf("kvreceiver: room %d: %w: %d of %d prefill ranks have not answered within %v: %w",
		r.id, nixlkv.ErrReleaseUnconfirmed, r.writers(), len(r.targets), r.m.cfg.releaseTimeout, r.failure)
}
