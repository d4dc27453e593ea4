package main

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
)

// life is what the prefill has to do with a process of decodes, until that ends or is killed.
type life struct {
	killed   atomic.Bool   // or about to be: rooms may fail for that, and go no further than their pages
	peers    int           // that the prefill knew before
	held     chan struct{} // closed when a room has gone so far
	holdOnce sync.Once
	tally    tally
	ctx      context.Context
	over     context.CancelFunc // rooms that no decode has asked for are not waited for any more
	streams  sync.WaitGroup
}

func (l *life) begin() {
	l.ctx, l.over = context.WithCancel(context.Background())
	l.held = make(chan struct{})
}

// end waits for the end of the rooms that are under way.
func (l *life) end() {
	if l == nil || l.ctx == nil {
		return // it was not begun
	}
	l.over()
	l.streams.Wait()
}

// begin has the streams of a decode process go on where they are.
func (f *prefill) begin(process int) {
	l := new(life)
	l.begin()
	f.lives[process] = l
	for _, s := range f.plan.streamsOf(process) {
		l.streams.Go(func() {
			for {
				room, there := f.plan.room(s, f.next[s])
				if !there {
					return
				}
				f.next[s]++
				if !f.send(l, room, s) {
					return
				}
			}
		})
	}
}

// count counts a room in what there is of all, and of a life.
func (f *prefill) count(l *life, add func(*tally)) {
	add(&f.tally)
	add(&l.tally)
}

// killing: a decode process is about to be killed. It waits until a room of it is in the middle, if
// there is one yet; others are wherever they are.
func (f *prefill) killing(process int) {
	l := f.lives[process]
	l.peers = len(f.manager.Stats().Peers)
	l.killed.Store(true)
	ended := make(chan struct{})
	go func() {
		l.streams.Wait()
		close(ended)
	}()
	timeout := time.NewTimer(idleTimeout)
	defer timeout.Stop()
	select {
	case <-l.held:
	case <-ended:
	case <-timeout.C:
	}
}

// killed follows the death of a decode process. Its peers have to be forgotten and its rooms to
// fail by themselves; those of which nothing was heard end here, and their numbers are not used
// again: an answer to one may be on its way.
func (f *prefill) killed(process int, r *report) {
	l := f.lives[process]
	most := l.peers - f.plan.Managers
	r.Left = untilNone(idleTimeout, func() (left []string) {
		if n := len(f.manager.Stats().Peers); n > most {
			left = append(left, fmt.Sprintf("%d peers after %d were killed, were %d", n, f.plan.Managers, l.peers))
		}
		return left
	})
	l.end()
	l.tally.report(r)
	for _, s := range f.plan.streamsOf(process) {
		r.Next = append(r.Next, f.next[s])
	}
}

// calm waits until the prefill is connected to nobody but the peers that it knows. What it reads of a
// dead decode after that was forgotten it tries to answer, for a time.
func (f *prefill) calm() (left []string) {
	return untilNone(idleTimeout, func() (left []string) {
		if s := f.manager.Stats(); s.Control.Endpoints > len(s.Peers) {
			left = append(left, fmt.Sprintf("%d connections to %d peers", s.Control.Endpoints, len(s.Peers)))
		}
		return left
	})
}

// alone waits until the prefill holds nothing for decodes, all of which have ended.
func (f *prefill) alone() (left []string) {
	return untilNone(idleTimeout, func() (left []string) {
		var r report
		f.report(&r)
		for _, name := range []string{"peers", "remotes", "prepared", "connections"} {
			if n := r.Held[name]; n != 0 {
				left = append(left, fmt.Sprintf("%d %s after the last decode", n, name))
			}
		}
		return left
	})
}

// untilNone waits until nothing is left, and gives what still is when time is up.
func untilNone(timeout time.Duration, list func() []string) (left []string) {
	for end := time.Now().Add(timeout); ; time.Sleep(10 * time.Millisecond) {
		if left = list(); len(left) == 0 || time.Now().After(end) {
			return left
		}
	}
}
