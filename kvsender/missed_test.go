package kvsender

import (
	"testing"
	"time"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/nixl"
)

// TestDecodeComesTooLate: the room was given up and closed before its decode told where its pages
// go. It is told at once, and the number can be used again, whichever side is first.
func TestDecodeComesTooLate(t *testing.T) {
	eachDialect(t, func(t *testing.T, e *nixl.Engine, frames int) {
		p := newPair(t, e, frames)
		p.d.register(p.d.registration())
		for id, again := range map[nixlkv.Room]bool{1: false, 2: true} {
			s := open(t, p.m, id)
			s.Abort("the request was cancelled")
			wantFailure(t, s, nil, nixlkv.ErrAborted, "the request was cancelled")
			p.d.tell(id, []int32{1}, 0)
			p.d.toldOf(id, "the request was cancelled")
			if again { // the decode's second use comes before the prefill's
				p.d.tell(id, []int32{3}, 1)
				p.d.until("the announcement", func() bool { return p.m.Stats().Announced == 1 })
				s = open(t, p.m, id)
			} else {
				s = open(t, p.m, id)
				p.d.tell(id, []int32{3}, 1)
			}
			ok(t, s.Begin(Plan{Pages: 1, Aux: Aux(1)}))
			ok(t, s.Finish([]int32{2}, nil))
			ok(t, s.Wait(within(t)))
			ok(t, s.Close())
		}
	})
}

// A room that timed out, and is closed, is no different.
func TestDecodeComesAfterTheTimeout(t *testing.T) {
	eachDialect(t, func(t *testing.T, e *nixl.Engine, frames int) {
		p := newPair(t, e, frames, WithBootstrapTimeout(time.Second))
		p.d.register(p.d.registration())
		wantFailure(t, open(t, p.m, 3), nil, nixlkv.ErrTimeout, "timed out")
		p.d.tell(3, []int32{1}, 0)
		p.d.toldOf(3, "timed out")
	})
}
