package nixl

import (
	"context"
	"fmt"
	"time"

	"github.com/nixlkv/nixlkv/internal/engine"
)

// The pause between two looks at a transfer that Wait waits for.
const (
	minPollPause = 20 * time.Microsecond
	maxPollPause = 2 * time.Millisecond
)

// Status asks how the transfer is: InProgress, Success, or the status it failed with, and
// then the error says why. A transfer that was never posted gives StatusNotPosted and an
// error; one that another goroutine uses at the moment is in progress.
func (t *Transfer) Status() (Status, error) {
	if err := t.a.enter(); err != nil {
		return t.lastKnown(), t.a.fail("status", "", err)
	}
	defer t.a.leave()
	if !t.mu.TryLock() {
		return InProgress, nil
	}
	defer t.mu.Unlock()
	switch {
	case t.state == transferIdle:
		return t.status, t.a.fail("status", "", ErrNotCreated)
	case t.state == transferCreated:
		return t.status, t.a.fail("status", t.remote.name, ErrNotPosted)
	case t.state == transferPosted && t.pollOne() == InProgress:
		return InProgress, nil
	}
	return t.status, t.Err()
}

// Err gives the error of a transfer that has failed, nil for any other.
func (t *Transfer) Err() error {
	if e := t.failed.Load(); e != nil {
		return e
	}
	return nil
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
// ts[i]: InProgress, Success, StatusNotPosted, or the status that it failed with
// (Transfer.Err says why). A transfer that another goroutine uses counts as in progress, and
// so does the second of two that are the same. The transfers must be this agent's; out must
// not be shorter than ts. It allocates nothing once it has seen as many transfers. On a
// closed agent it tells what was known last, with ErrClosed.
func (a *Agent) Poll(ts []*Transfer, out []Status) error {
	if len(out) < len(ts) {
		return a.fail("poll", "", fmt.Errorf("%w: room for %d statuses of %d transfers", StatusInvalidParam, len(out), len(ts)))
	}
	for i, t := range ts {
		if t == nil {
			return a.fail("poll", "", fmt.Errorf("%w: transfer %d is nil", StatusInvalidParam, i))
		}
		if t.a != a {
			return a.fail("poll", "", fmt.Errorf("transfer %d: %w", i, ErrForeign))
		}
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
