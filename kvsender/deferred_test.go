package kvsender

import (
	"errors"
	"testing"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/bootstrap"
	"github.com/nixlkv/nixlkv/internal/wire"
	"github.com/nixlkv/nixlkv/nixl"
)

// newManager starts a prefill over kit memory.
func newManager(t *testing.T, e *nixl.Engine, mem *kitMemory, opts ...Option) *Manager {
	t.Helper()
	m, err := NewManager(t.Context(), mem.layout(), append([]Option{WithEngine(e)}, opts...)...)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// ask sends a decode's question for a room.
func (d *decode) ask(id nixlkv.Room) {
	d.t.Helper()
	d.send(new(wire.Encoder).Bootstrap(&wire.Bootstrap{Room: id, From: d.endpoint()}))
}

func deferred(t *testing.T, f func(m *Manager, d *decode, prefill *kitMemory)) {
	eachEngine(t, func(t *testing.T, e *nixl.Engine) {
		prefill, mem := newKitMemory(t, 2), newKitMemory(t, 2)
		defer prefill.free(t)
		defer mem.free(t)
		prefill.fill()
		m := newManager(t, e, prefill, WithAllocationPolicy(bootstrap.PrefillCompleteAllocation))
		d := newDecode(t, e, m, mem, 25)
		d.register(d.registration())
		f(m, d, prefill)
		d.close()
		closeManager(t, m)
	})
}

func TestComputed(t *testing.T) {
	for _, askFirst := range []bool{true, false} {
		deferred(t, func(m *Manager, d *decode, prefill *kitMemory) {
			if askFirst {
				d.ask(5)
				d.until("the question", func() bool { r := m.lookup(5); return r != nil })
			}
			s, err := m.Open(5)
			if err != nil {
				t.Fatal(err)
			}
			s.Computed()
			s.Computed()
			if !askFirst {
				d.ask(5)
			}
			if st := d.status(5); st.Status != wire.PollWaitingForInput {
				t.Fatalf("status %v (%s), want WaitingForInput", st.Status, st.Reason)
			}
			d.tell(5, []int32{7, 8}, 3)
			if _, err := s.WaitBootstrapped(t.Context()); err != nil {
				t.Fatal(err)
			}
			if err := s.Begin(Plan{Pages: 2, Aux: Aux(1)}); err != nil {
				t.Fatal(err)
			}
			if err := s.Finish([]int32{1, 2}, nil); err != nil {
				t.Fatal(err)
			}
			if err := s.Wait(t.Context()); err != nil {
				t.Fatal(err)
			}
			if st := d.status(5); st.Status != wire.PollSuccess {
				t.Fatalf("status %v (%s), want Success", st.Status, st.Reason)
			}
			d.compare(prefill, []int32{1, 2}, []int32{7, 8}, 1, 3)
			if err := s.Close(); err != nil {
				t.Error(err)
			}
		})
	}
}

// A room that fails before its pages were asked for tells the decode that waits.
func TestFailedBeforeComputed(t *testing.T) {
	deferred(t, func(m *Manager, d *decode, _ *kitMemory) {
		s, err := m.Open(5)
		if err != nil {
			t.Fatal(err)
		}
		d.ask(5)
		d.until("the question", func() bool { r := m.lookup(5); r.mu.Lock(); defer r.mu.Unlock(); return !r.asker.at.IsZero() })
		s.Abort("no model")
		if st := d.status(5); st.Status != wire.PollFailed || st.Reason != "nixlkv: room given up: no model" {
			t.Errorf("status %v (%s)", st.Status, st.Reason)
		}
		// Another one asks for a room that has failed: that is the number's next use.
		d.ask(5)
		s2, err := m.Open(5)
		for errors.Is(err, nixlkv.ErrRoomInUse) { // until the question has come
			s2, err = m.Open(5)
		}
		if err != nil {
			t.Fatal(err)
		}
		s2.Computed()
		if st := d.status(5); st.Status != wire.PollWaitingForInput {
			t.Errorf("status %v (%s), want WaitingForInput", st.Status, st.Reason)
		}
		for _, s := range []*Sender{s, s2} {
			if err := s.Close(); err != nil {
				t.Error(err)
			}
		}
	})
}

// A decode that gave a room up is not told of its end, which it could take for that of the
// number's next use.
func TestAskerGivesUp(t *testing.T) {
	deferred(t, func(m *Manager, d *decode, _ *kitMemory) {
		s, err := m.Open(5)
		if err != nil {
			t.Fatal(err)
		}
		d.ask(5)
		d.send(new(wire.Encoder).Abort(&wire.Abort{Room: 5, From: d.endpoint(), Generation: 1, HasGeneration: true}))
		d.ack(5)
		if err := s.Wait(t.Context()); !errors.Is(err, nixlkv.ErrAborted) {
			t.Errorf("the room ended with %v", err)
		}
		d.mu.Lock()
		if len(d.statuses) > 0 {
			t.Errorf("it was told %+v", d.statuses[0])
		}
		d.mu.Unlock()
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
}

// A second decode for a room is refused, and the first one is served.
func TestSecondAsker(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *nixl.Engine) {
		prefill, mem := newKitMemory(t, 1), newKitMemory(t, 1)
		defer prefill.free(t)
		defer mem.free(t)
		m := newManager(t, e, prefill, WithAllocationPolicy(bootstrap.PrefillCompleteAllocation))
		first, second := newDecode(t, e, m, mem, 25), newDecode(t, e, m, mem, 25)
		s, err := m.Open(5)
		if err != nil {
			t.Fatal(err)
		}
		first.register(first.registration())
		second.register(second.registration())
		first.ask(5)
		first.until("the question", func() bool { r := m.lookup(5); r.mu.Lock(); defer r.mu.Unlock(); return !r.asker.at.IsZero() })
		second.ask(5)
		if st := second.status(5); st.Status != wire.PollFailed {
			t.Errorf("the second decode was told %v", st.Status)
		}
		s.Computed()
		if st := first.status(5); st.Status != wire.PollWaitingForInput {
			t.Errorf("the first decode was told %v (%s)", st.Status, st.Reason)
		}
		first.close()
		second.close()
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		closeManager(t, m)
	})
}

func TestPolicyNeedsOneRank(t *testing.T) {
	mem := newKitMemory(t, 1)
	defer mem.free(t)
	l := mem.layout()
	l.Ranks.TP = 2
	_, err := NewManager(t.Context(), l, WithAllocationPolicy(bootstrap.PrefillCompleteAllocation))
	if !errors.Is(err, nixlkv.ErrTopology) {
		t.Errorf("got %v", err)
	}
	if _, err = NewManager(t.Context(), mem.layout(), WithAllocationPolicy("later")); !errors.Is(err, nixlkv.ErrUnsupported) {
		t.Errorf("got %v", err)
	}
}
