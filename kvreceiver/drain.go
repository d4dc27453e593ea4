package kvreceiver

import (
	"bytes"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/nixlkv/nixlkv/internal/wire"
	"github.com/nixlkv/nixlkv/nixl"
)

// drainer fetches NIXL's notifications, in one loop on a thread of its own, and so moves the
// agent on: writes that a transport cannot do alone land while somebody polls.
type drainer struct {
	m    *Manager
	open atomic.Int64 // rooms that notifications may be about
	wake chan struct{}
	stop chan struct{}

	mu    sync.Mutex
	after []func() // to run behind the next drain
	over  bool
}

// The pause between two drains: while a room is open, longer the longer nothing comes; and
// when none is, short enough for a prefill that connects.
const (
	minDrainPause  = 100 * time.Microsecond
	maxDrainPause  = time.Millisecond
	idleDrainPause = 10 * time.Millisecond
	// drainPatience bounds how long what has to run behind a drain waits for one that does not
	// return.
	drainPatience = time.Second
)

func startDrainer(m *Manager) (*drainer, error) {
	d := &drainer{m: m, wake: make(chan struct{}, 1), stop: make(chan struct{})}
	started := make(chan error)
	m.loops.Add(1)
	go func() {
		defer m.loops.Done()
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		var err error
		if m.cfg.threadInit != nil {
			err = m.cfg.threadInit()
		}
		started <- err
		d.run()
	}()
	if err := <-started; err != nil {
		return d, fmt.Errorf("initialising a thread: %w", err)
	}
	return d, nil
}

// watching counts a room in or out.
func (m *Manager) watching(n int64) {
	if m.drain.open.Add(n) == 1 && n > 0 {
		m.drain.nudge()
	}
}

func (d *drainer) nudge() {
	select {
	case d.wake <- struct{}{}:
	default:
	}
}

// run is the loop.
func (d *drainer) run() {
	var buf nixl.Notifications
	timer := time.NewTimer(idleDrainPause)
	defer timer.Stop()
	pause := minDrainPause
	for {
		stopping := false
		select {
		case <-d.stop:
			stopping = true
		default:
		}
		after := d.takeAfter(false)
		n, err := d.drain(&buf)
		over := stopping || err != nil // the agent was closed
		if over {
			after = append(after, d.takeAfter(true)...)
		}
		for _, f := range after {
			f()
		}
		switch {
		case over:
			return
		case n > 0:
			pause = minDrainPause
		default:
			pause = min(2*pause, maxDrainPause)
		}
		if d.open.Load() == 0 {
			timer.Reset(idleDrainPause)
		} else {
			timer.Reset(pause)
		}
		select {
		case <-timer.C:
		case <-d.wake:
			pause = minDrainPause
		case <-d.stop:
		}
	}
}

// drain fetches what has come and hands it on.
func (d *drainer) drain(buf *nixl.Notifications) (int, error) {
	if err := d.m.agent.Notifications(buf); err != nil {
		if errors.Is(err, nixl.ErrClosed) {
			return 0, err
		}
		d.m.warn.Warn("fetching notifications", zap.Error(err))
		return 0, nil
	}
	for from, msg := range buf.All() {
		d.m.notified(from, msg)
	}
	return buf.Len(), nil
}

// notified takes one notification.
func (m *Manager) notified(from, msg []byte) {
	m.stats.notifications.Add(1)
	tag, err := wire.ParseTag(msg)
	switch {
	case err != nil:
		m.stats.refused.Add(1)
		m.warn.Warn("refused a notification", zap.ByteString("agent", bytes.Clone(from)), zap.Error(err))
		return
	case tag.Kind == wire.TagStaging:
		m.stats.dropped.Add(1)
		return
	}
	m.roomsMu.Lock()
	r := m.rooms[tag.Room]
	m.roomsMu.Unlock()
	if r == nil || !r.takeTag(from, &tag) {
		m.stats.unknown.Add(1)
	}
}

// takeTag takes a notification if the room waits for it. It takes mu.
func (r *room) takeTag(from []byte, tag *wire.Tag) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.open || r.status.Ended() {
		return false
	}
	v, err := r.track.notify(from, tag)
	if err != nil {
		err = fmt.Errorf("notification of agent %.64q: %w", from, err)
	}
	r.verdict(v, err)
	return true
}

// afterDrain runs f behind a drain that begins from now on, so that what came before f was
// asked for is known: completion beats loss and timeout. Where a drain does not return f runs
// all the same.
func (m *Manager) afterDrain(f func()) {
	var once sync.Once
	run := func() { once.Do(f) }
	d := m.drain
	d.mu.Lock()
	over := d.over
	if !over {
		late := time.AfterFunc(drainPatience, run)
		d.after = append(d.after, func() {
			late.Stop()
			run()
		})
	}
	d.mu.Unlock()
	if over {
		go run() // the caller may hold locks
		return
	}
	d.nudge()
}

// takeAfter gives what is to run behind the next drain; last says that there will be no other.
func (d *drainer) takeAfter(last bool) []func() {
	d.mu.Lock()
	defer d.mu.Unlock()
	after := d.after
	d.after = nil
	d.over = d.over || last
	return after
}
