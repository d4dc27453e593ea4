package kvreceiver

import (
	"strings"
	"testing"
	"time"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/internal/faultengine"
	"github.com/nixlkv/nixlkv/nixl"
)

// eachFaulty runs a test over both engines, whose notifications can go wrong.
func eachFaulty(t *testing.T, f func(t *testing.T, e *nixl.Engine, faults *faultengine.Engine)) {
	for _, k := range []nixl.Kind{nixl.Embedded, nixl.Native} {
		t.Run(k.String(), func(t *testing.T) {
			e, faults := faultengine.Open(t, k)
			f(t, e, faults)
		})
	}
}

// about matches the notifications of a room, of one kind.
func about(id nixlkv.Room, kind string) func(string) bool {
	return func(m string) bool { return strings.HasPrefix(m, id.String()+"_"+kind) }
}

// A room of which a notification is lost never counts as complete. It fails in its time, and its
// pages are released by the answer to its abort; the room beside it succeeds.
func TestLostNotification(t *testing.T) {
	eachFaulty(t, func(t *testing.T, e *nixl.Engine, faults *faultengine.Engine) {
		q := newPair(t, e, shape{}, WithWaitingTimeout(2*time.Second))
		q.oneRoom(1, byNotifications, 1, 1) // the first contact takes long
		for id, kind := range map[nixlkv.Room]string{2: "kv", 3: "aux"} {
			f := faults.Add(faultengine.Rule{On: faultengine.Notifications, Do: faultengine.Lose, Match: about(id, kind)})
			r, told := q.published(id)
			q.p.ranks[0].serve(told[0], byNotifications, work{src: []int32{1, 2}})
			q.mem.clear()
			q.oneRoom(id+100, byNotifications, 5, 6)
			ok(t, f.Wait(within(t), 1))
			checkFailed(t, r, nixlkv.ErrTimeout, "notifications are complete from")
			if isReleased(r) {
				t.Error("released without an answer")
			}
			q.p.ranks[0].ack(q.p.ranks[0].aborted(id))
			ok(t, r.Released(within(t)))
			ok(t, r.Close())
			q.mem.clear()
		}
	})
}

// Late notifications complete their room when they come, in any order. Those of a room that was
// given up meanwhile are for nobody.
func TestLateNotification(t *testing.T) {
	eachFaulty(t, func(t *testing.T, e *nixl.Engine, faults *faultengine.Engine) {
		q := newPair(t, e, shape{})
		for id, kind := range map[nixlkv.Room]string{2: "kv", 3: "aux"} {
			f := faults.Add(faultengine.Rule{On: faultengine.Notifications, Do: faultengine.Delay, Match: about(id, kind)})
			r, told := q.published(id)
			q.p.ranks[0].serve(told[0], byNotifications, work{src: []int32{1, 2}})
			ok(t, f.Wait(within(t), 1))
			q.drained()
			if ended(r) {
				t.Fatalf("ended without its %s: %v", kind, r.Err())
			}
			f.Release()
			ok(t, r.Wait(within(t)))
			ok(t, r.Close())
		}
		f := faults.Add(faultengine.Rule{On: faultengine.Notifications, Do: faultengine.Delay, Match: about(4, "")})
		r, told := q.published(4)
		q.p.ranks[0].serve(told[0], byNotifications, work{src: []int32{1, 2}})
		ok(t, f.Wait(within(t), 2))
		r.Abort("")
		q.p.ranks[0].ack(q.p.ranks[0].aborted(4))
		ok(t, r.Released(within(t)))
		ok(t, r.Close())
		eventually(t, "the number to be free", func() bool { return q.m.Stats().Waiting == 0 })
		unknown := q.m.Stats().Unknown
		f.Release()
		eventually(t, "the notifications to come", func() bool { return q.m.Stats().Unknown == unknown+2 })
		checkError(t, r, r.Err(), nixlkv.ErrAborted, "")
	})
}

// Notifications that come twice say nothing new.
func TestDoubledNotification(t *testing.T) {
	eachFaulty(t, func(t *testing.T, e *nixl.Engine, faults *faultengine.Engine) {
		q := newPair(t, e, shape{tp: 2})
		for id, do := range map[nixlkv.Room]faultengine.Do{2: faultengine.Double, 3: faultengine.Again} {
			f := faults.Add(faultengine.Rule{On: faultengine.Notifications, Do: do, Match: about(id, "")})
			r, told := q.published(id)
			q.p.ranks[0].serve(told[0], byNotifications, work{src: []int32{1, 2}})
			ok(t, f.Wait(within(t), 2))
			q.drained()
			if ended(r) {
				t.Fatalf("ended by the notifications of one rank of two: %v", r.Err())
			}
			q.p.ranks[1].serve(told[1], byNotifications, work{src: []int32{1, 2}})
			ok(t, r.Wait(within(t)))
			f.Release()
			q.drained()
			ok(t, r.Err())
			ok(t, r.Close())
		}
		if s := q.m.Stats(); s.Succeeded != 2 || s.Failed != 0 {
			t.Errorf("%+v", s)
		}
	})
}
