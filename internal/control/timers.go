//go:build linux && cgo

package control

import (
	"container/heap"
	"time"
)

// timer is one deadline in a timers. Its owner embeds it; the zero timer is not set.
type timer struct {
	at    time.Time
	pos   int // in the heap, plus one
	owner any // *outgoing or *peer
}

func (t *timer) armed() bool { return t.pos > 0 }

// timers are the deadlines of a sender, soonest first.
type timers struct {
	heap timerHeap
}

// set arms t, or moves it.
func (ts *timers) set(t *timer, owner any, at time.Time) {
	t.at, t.owner = at, owner
	if t.armed() {
		heap.Fix(&ts.heap, t.pos-1)
		return
	}
	heap.Push(&ts.heap, t)
}

func (ts *timers) stop(t *timer) {
	if t.armed() {
		heap.Remove(&ts.heap, t.pos-1)
	}
}

// due takes out a timer that has passed; nil if there is none.
func (ts *timers) due(now time.Time) *timer {
	if len(ts.heap) == 0 || ts.heap[0].at.After(now) {
		return nil
	}
	return heap.Pop(&ts.heap).(*timer)
}

// next is the soonest deadline; zero if there is none.
func (ts *timers) next() time.Time {
	if len(ts.heap) == 0 {
		return time.Time{}
	}
	return ts.heap[0].at
}

type timerHeap []*timer

func (h timerHeap) Len() int           { return len(h) }
func (h timerHeap) Less(i, j int) bool { return h[i].at.Before(h[j].at) }

func (h timerHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].pos, h[j].pos = i+1, j+1
}

func (h *timerHeap) Push(x any) {
	t := x.(*timer)
	*h = append(*h, t)
	t.pos = len(*h)
}

func (h *timerHeap) Pop() any {
	last := len(*h) - 1
	t := (*h)[last]
	(*h)[last] = nil
	*h = (*h)[:last]
	t.pos = 0
	return t
}
