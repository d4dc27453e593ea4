package nixl

import (
	"context"
	"fmt"
	"time"

	"github.com/nixlkv/nixlkv/internal/engine"
)

// Status asks how the transfer is: InProgress, Success, or the status it failed with, and
// then the error says why. A transfer that was never posted gives ErrNotPosted.
func (t *Transfer) Status() (Status, error) {
	one, out := [1]*Transfer{t}, [1]Status{}
	if err := t.a.Poll(one[:], out[:]); err != nil {
		return out[0], err
	}
	switch out[0] {
	case statusUnknown:
		return InProgress, t.a.fail("status", "", ErrNotPosted)
	case InProgress, Success:
		return out[0], nil
	}
	return out[0], t.Err()
}

// Err gives the error of a failed transfer, nil for any other.
func (t *Transfer) Err() error {
	if !t.mu.TryLock() {
		return nil
	}
	defer t.mu.Unlock()
	if t.state != transferSettled || t.err == nil {
		return nil
	}
	return t.a.fail("transfer", t.remote.name, t.err)
}

// Wait waits until the transfer has settled and gives its error. At the context's end it
// gives the context's error; the transfer goes on, and must still be waited for or left to
// Agent.Close.
func (t *Transfer) Wait(ctx context.Context) error {
	pause := minPollPause
	var timer *time.Timer
	for {
		st, err := t.Status()
		if err != nil || st != InProgress {
			return err
		}
		if timer == nil {
			timer = time.NewTimer(pause)
			defer timer.Stop()
		} else {
			timer.Reset(pause)
		}
		select {
		case <-ctx.Done():
			return t.a.fail("wait", "", fmt.Errorf("%w: %w", ErrInProgress, ctx.Err()))
		case <-timer.C:
		}
		pause = min(pause*3/2, maxPollPause)
	}
}

// pollBatch is the reusable memory of one Poll.
type pollBatch struct {
	reqs []engine.Request
	sts  []Status
	at   []int // position in the caller's slice
}

// Poll asks for the status of many transfers in one native call: out[i] becomes that of
// ts[i]: InProgress, Success, or the status that it failed with (Transfer.Err says why). A
// transfer that another goroutine uses counts as in progress; one that was never posted
// gives a status that is none of these. The transfers must be this agent's. out must be as
// long as ts. It allocates nothing once it has seen as many transfers. On a closed agent it
// tells what was known last, with ErrClosed.
func (a *Agent) Poll(ts []*Transfer, out []Status) error {
	if len(out) < len(ts) {
		return a.fail("poll", "", fmt.Errorf("%w: room for %d statuses of %d transfers", StatusInvalidParam, len(out), len(ts)))
	}
	if err := a.enter(); err != nil {
		for i, t := range ts {
			out[i] = t.lastKnown()
		}
		return a.fail("poll", "", err)
	}
	defer a.leave()
	b, _ := a.polls.Get().(*pollBatch)
	if b == nil {
		b = new(pollBatch)
	}
	defer a.polls.Put(b)
	b.reqs, b.at = b.reqs[:0], b.at[:0]
	for i, t := range ts {
		out[i] = InProgress
		if t.a != a {
			a.unlock(ts, b)
			return a.fail("poll", "", ErrForeign)
		}
		if !t.mu.TryLock() {
			continue
		}
		if t.state == transferPosted {
			b.reqs, b.at = append(b.reqs, t.req), append(b.at, i)
			continue
		}
		out[i] = t.status
		t.mu.Unlock()
	}
	if cap(b.sts) < len(b.reqs) {
		b.sts = make([]Status, len(b.reqs), cap(b.reqs))
	}
	b.sts = b.sts[:len(b.reqs)]
	a.raw.Poll(b.reqs, b.sts)
	for k, i := range b.at {
		t := ts[i]
		if b.sts[k] != InProgress {
			_ = t.settle(b.sts[k], nil) // kept for Err
			out[i] = t.status
		}
		t.mu.Unlock()
	}
	return nil
}

func (a *Agent) unlock(ts []*Transfer, b *pollBatch) {
	for _, i := range b.at {
		ts[i].mu.Unlock()
	}
}

// pollOne asks about a posted transfer; the caller holds it.
func (t *Transfer) pollOne() Status {
	reqs, out := [1]engine.Request{t.req}, [1]Status{}
	t.a.raw.Poll(reqs[:], out[:])
	if out[0] != InProgress {
		_ = t.settle(out[0], nil) // kept for Err
	}
	return out[0]
}

// lastKnown gives the status without asking the engine.
func (t *Transfer) lastKnown() Status {
	if !t.mu.TryLock() {
		return InProgress
	}
	defer t.mu.Unlock()
	if t.state == transferPosted {
		return InProgress
	}
	return t.status
}
