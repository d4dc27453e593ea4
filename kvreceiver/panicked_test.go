package kvreceiver

import (
	"sync/atomic"
	"testing"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/internal/wire"
	"github.com/nixlkv/nixlkv/nixl"
)

// A message whose handling panics fails its room here and at the prefill, and nothing else.
func TestPanicFailsTheRoom(t *testing.T) {
	var over atomic.Uint64
	taking := func(c *config) {
		c.taking = func(msg wire.Message) {
			if s, is := msg.(*wire.KVStatus); is && uint64(s.Room) == over.Load() {
				panic("clumsy")
			}
		}
	}
	e := openEngine(t, nixl.Embedded)
	mem, prefills := newKitMemory(t), newKitMemory(t)
	prefills.fill()
	q := &pair{t: t, mem: mem, prefills: prefills, p: newSite(t, e, prefills, shape{})}
	var err error
	q.m, err = NewManager(t.Context(), mem.layout(), append(quick(e), taking)...)
	ok(t, err)
	t.Cleanup(func() { ok(t, q.m.Close()) })
	p := q.p.ranks[0]
	q.oneRoom(1, byStatus, 1, 1)

	over.Store(2)
	r, told := q.published(2)
	other, _ := q.published(3)
	// Of a rank that is none of the room's: it stays as it is.
	p.tellAs(77, told[0].From, 2, wire.PollSuccess, "")
	eventually(t, "the panic", func() bool { return q.m.Stats().Control.Panics == 1 })
	q.oneRoom(4, byStatus, 1, 1)
	if ended(r) {
		t.Errorf("a stranger's message failed the room: %v", r.Err())
	}
	p.tell(told[0].From, 2, wire.PollSuccess, "")
	checkFailed(t, r, nixlkv.ErrInternal, "clumsy")
	p.ack(p.aborted(2))
	ok(t, r.Released(within(t)))
	ok(t, r.Close())
	if s := q.m.Stats(); s.Control.Panics != 2 {
		t.Errorf("%d panics", s.Control.Panics)
	}
	if ended(other) {
		t.Errorf("another room failed: %v", other.Err())
	}
	p.tell(told[0].From, 3, wire.PollFailed, "enough")
	checkFailed(t, other, nixlkv.ErrPeerFailed, "enough")
	ok(t, other.Close())
	q.oneRoom(5, byStatus, 1, 1)
}
