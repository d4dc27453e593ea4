package kvsender

import (
	"errors"
	"testing"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/internal/wire"
	"github.com/nixlkv/nixlkv/nixl"
)

func TestRoom(t *testing.T) {
	eachDialect(t, func(t *testing.T, e *nixl.Engine, frames int) {
		p := newPair(t, e, frames)
		p.d.register(p.d.registration())
		for round, early := range []bool{false, true} {
			id := nixlkv.Room(1<<40 + round)
			src, dst := []int32{1, 2, 3, 8, 9}, []int32{3, 4, 9, 10, 11}
			var s *Sender
			if early {
				p.d.tell(id, dst, 2)
				s = open(t, p.m, id)
			} else {
				s = open(t, p.m, id)
				p.d.tell(id, dst, 2)
			}
			prefix, err := s.WaitBootstrapped(within(t))
			ok(t, err)
			if prefix != 0 {
				t.Errorf("prefix %d", prefix)
			}
			ok(t, s.Begin(Plan{Pages: 5, Aux: Aux(5)}))
			ok(t, s.Send(src[:3]))
			ok(t, s.Finish(src[3:], nil))
			ok(t, s.Wait(within(t)))
			ok(t, s.Wait(within(t)))
			if st := s.Status(); st != nixlkv.Success {
				t.Errorf("status %v", st)
			}
			if frames == 25 {
				if st := p.d.status(id); st.Status != wire.PollSuccess || st.PrefillRank != 0 || st.Reason != "" {
					t.Errorf("status %+v", st)
				}
			} else {
				p.d.until("three notifications", func() bool { return len(p.d.tags) == 3 })
				checkTags(t, p.d.tags, id, 2)
				p.d.tags = nil
			}
			p.d.compare(p.src, src, dst, 5, 2)
			p.d.clear()
			m := s.Metrics()
			if m.Bytes != 5*4*kitPage+kitAux || m.Chunks != 2 || m.Pages != 20 || m.Transfers != 3 || m.Ended.Before(m.Posted) || m.Posted.Before(m.Bootstrapped) {
				t.Errorf("metrics %+v", m)
			}
			ok(t, s.Close())
			ok(t, s.Close())
			if err := s.Send(nil); !errors.Is(err, nixlkv.ErrClosed) {
				t.Errorf("send after close: %v", err)
			}
		}
		if frames == 24 && len(p.d.statuses) != 0 || frames == 25 && len(p.d.tags) != 0 {
			t.Errorf("told in the other dialect: %+v, %+v", p.d.statuses, p.d.tags)
		}
		if s := p.m.Stats(); s.Rooms != 0 || s.Succeeded != 2 || s.Failed != 0 || s.Refused != 0 {
			t.Errorf("stats %+v", s)
		}
	})
}

func TestFullPrefixHit(t *testing.T) {
	eachDialect(t, func(t *testing.T, e *nixl.Engine, frames int) {
		p := newPair(t, e, frames)
		p.d.register(p.d.registration())
		s := open(t, p.m, 9)
		p.d.tell(9, nil, 3, func(m *wire.Metadata) { m.Prefix = 16 })
		prefix, err := s.WaitBootstrapped(within(t))
		ok(t, err)
		if prefix != 16 {
			t.Errorf("prefix %d, want 16", prefix)
		}
		ok(t, s.Begin(Plan{Aux: Aux(4)}))
		ok(t, s.Finish(nil, nil))
		ok(t, s.Wait(within(t)))
		if frames == 25 {
			p.d.status(9)
		} else {
			p.d.until("the notification", func() bool { return len(p.d.tags) == 1 })
			if g := p.d.tags[0]; g.Kind != wire.TagAuxNoKV || g.Chunks != 0 {
				t.Errorf("tag %+v", g)
			}
		}
		p.d.compare(p.src, nil, nil, 4, 3)
		ok(t, s.Close())
	})
}

func TestManyRoomsSideBySide(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *nixl.Engine) {
		p := newPair(t, e, 25)
		p.d.register(p.d.registration())
		const n = 60
		senders := make([]*Sender, n)
		var src, dst []int32
		for i := range n {
			senders[i] = open(t, p.m, nixlkv.Room(i+1))
			src, dst = append(src, int32(n-1-i)), append(dst, int32(i))
			ok(t, senders[i].Begin(Plan{Pages: 1, Aux: Aux(7)}))
			ok(t, senders[i].Finish([]int32{int32(n - 1 - i)}, nil)) // before its decode has told anything
		}
		for i := n - 1; i >= 0; i-- {
			p.d.tell(nixlkv.Room(i+1), []int32{int32(i)}, 0)
		}
		for _, s := range senders {
			ok(t, s.Wait(within(t)))
		}
		events, complete := p.m.Poll(nil)
		if !complete || len(events) != n {
			t.Errorf("%d events, complete %v", len(events), complete)
		}
		for _, ev := range events {
			if ev.Status != nixlkv.Success || ev.Err != nil || ev.Sender.Room() != ev.Room {
				t.Errorf("event %+v", ev)
			}
		}
		for _, s := range senders {
			p.d.status(s.Room())
			ok(t, s.Close())
		}
		p.d.compare(p.src, src, dst, 7, 0)
	})
}

func TestDummyDecode(t *testing.T) {
	eachDialect(t, func(t *testing.T, e *nixl.Engine, frames int) {
		p := newPair(t, e, frames)
		p.d.register(p.d.registration())
		s := open(t, p.m, 80)
		p.d.tell(80, nil, 0, func(m *wire.Metadata) { m.Dummy = true })
		_, err := s.WaitBootstrapped(within(t))
		ok(t, err)
		ok(t, s.Begin(Plan{Pages: 2, Aux: Aux(0)}))
		ok(t, s.Finish([]int32{1, 2}, nil))
		ok(t, s.Wait(within(t)))
		ok(t, s.Close())
		p.d.compare(p.src, nil, nil, -1, 0)
		if len(p.d.statuses) != 0 || len(p.d.tags) != 0 {
			t.Errorf("a dummy was told %+v, %+v", p.d.statuses, p.d.tags)
		}
	})
}

func TestOpenTwice(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *nixl.Engine) {
		p := newPair(t, e, 25)
		s := open(t, p.m, 1)
		if _, err := p.m.Open(1); !errors.Is(err, nixlkv.ErrRoomInUse) {
			t.Errorf("got %v", err)
		}
		if _, err := p.m.Open(nixlkv.MaxRoom + 1); !errors.Is(err, nixlkv.ErrMalformed) {
			t.Errorf("got %v", err)
		}
		ok(t, s.Close())
		ok(t, open(t, p.m, 1).Close())
	})
}
