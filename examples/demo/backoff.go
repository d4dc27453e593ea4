package main

import (
	"context"
	"time"
)

// The pauses of a loop that polls: short while things move, longer while they do not. The
// longest is also how late the end of a transfer may be seen.
const (
	minPause = 20 * time.Microsecond
	maxPause = 500 * time.Microsecond
)

// backoff paces a loop that polls. The zero value is ready.
type backoff struct {
	pause time.Duration
	timer *time.Timer
}

// moved says that something has happened, so that the next pause is a short one.
func (b *backoff) moved() { b.pause = 0 }

// wait pauses. It gives the context's cause as soon as that has ended.
func (b *backoff) wait(ctx context.Context) error {
	b.pause = min(max(b.pause*3/2, minPause), maxPause)
	if b.timer == nil {
		b.timer = time.NewTimer(b.pause)
	} else {
		b.timer.Reset(b.pause)
	}
	select {
	case <-b.timer.C:
		return nil
	case <-ctx.Done():
		b.timer.Stop()
		return context.Cause(ctx)
	}
}
