package kvreceiver

import (
	"errors"
	"testing"
	"time"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/bootstrap"
	"github.com/nixlkv/nixlkv/internal/wire"
	"github.com/nixlkv/nixlkv/nixl"
)

// newCompletePair is a pair under prefill_complete.
func newCompletePair(t *testing.T, opts ...Option) *pair {
	t.Helper()
	s := shape{info: func(i *bootstrap.RankInfo) { i.DecodeAllocationPolicy = bootstrap.PrefillCompleteAllocation }}
	return newPair(t, openEngine(t, nixl.Embedded), s, append(opts, WithAllocationPolicy(bootstrap.PrefillCompleteAllocation))...)
}

// asks connects a room and gives what its prefill is asked.
func (q *pair) asks(id nixlkv.Room) (*Receiver, *wire.Bootstrap) {
	q.t.Helper()
	r := q.open(id)
	ok(q.t, r.Connect(within(q.t)))
	b := take(q.p.ranks[0], "BOOTSTRAP", func(b *wire.Bootstrap) bool { return b.Room == id })
	if b.From != q.m.self {
		q.t.Errorf("BOOTSTRAP %+v", b)
	}
	return r, b
}

// The prefill is asked, tells that it has computed the room, and only then are there pages.
func TestPrefillComplete(t *testing.T) {
	q := newCompletePair(t)
	p := q.p.ranks[0]
	for id := range nixlkv.Room(3) {
		r, b := q.asks(id)
		if has(p, func(*wire.Registration) bool { return true }) == 0 && id == 0 {
			t.Error("BOOTSTRAP came before the registration")
		}
		if err := r.Publish(Destination{Aux: Aux(0)}); !errors.Is(err, nixlkv.ErrNotReady) || r.Status() != nixlkv.Bootstrapping {
			t.Errorf("Publish before the prefill is complete: %v, %v", err, r.Status())
		}
		ctx, cancel := contextOf(1)
		if err := r.WaitReady(ctx); err == nil || errors.As(err, new(*KVTransferError)) {
			t.Errorf("ready before the prefill is complete: %v", err)
		}
		cancel()
		p.tell(b.From, id, wire.PollSuccess, "") // too early: nothing was published
		p.tell(b.From, id, wire.PollWaitingForInput, "")
		ok(t, r.WaitReady(within(t)))
		if r.Status() != nixlkv.WaitingForInput {
			t.Errorf("%v", r.Status())
		}
		ok(t, r.Publish(Destination{Pages: []int32{4}, Aux: Aux(1)}))
		p.serve(p.metadata(id), byStatus, work{src: []int32{3}, slot: 2})
		ok(t, r.Wait(within(t)))
		q.mem.compare(q.prefills, placed{src: []int32{3}, dst: []int32{4}, srcSlot: 2, dstSlot: 1})
		q.mem.clear()
		ok(t, r.Close())
	}
	if s := q.m.Stats(); s.Unknown != 3 || s.Aborts != 0 {
		t.Errorf("stats %+v", s)
	}
}

// Before the pages are told nothing can be written to them: a failure frees them at once, and
// the prefill is told with its address.
func TestPrefillCompleteFailures(t *testing.T) {
	for name, tc := range map[string]struct {
		opts []Option
		end  func(q *pair, r *Receiver, b *wire.Bootstrap)
		want error
		text string
		rank nixlkv.RankState
	}{
		"the prefill fails": {nil, func(q *pair, _ *Receiver, b *wire.Bootstrap) {
			q.p.ranks[0].tell(b.From, b.Room, wire.PollFailed, "out of memory")
		}, nixlkv.ErrPeerFailed, "out of memory", nixlkv.RankFailed},
		"the prefill fails when it was ready": {nil, func(q *pair, r *Receiver, b *wire.Bootstrap) {
			q.p.ranks[0].tell(b.From, b.Room, wire.PollWaitingForInput, "")
			ok(q.t, r.WaitReady(within(q.t)))
			q.p.ranks[0].tell(b.From, b.Room, wire.PollFailed, "")
		}, nixlkv.ErrPeerFailed, "Failed to get kvcache from prefill instance, it might be dead", nixlkv.RankFailed},
		"it takes too long": {[]Option{WithWaitingTimeout(50 * time.Millisecond)}, func(*pair, *Receiver, *wire.Bootstrap) {},
			nixlkv.ErrTimeout, "timed out after 0.05s in KVPoll.Bootstrapping", nixlkv.RankSilent},
		"it is aborted": {nil, func(_ *pair, r *Receiver, _ *wire.Bootstrap) { r.Abort("") }, nixlkv.ErrAborted, "Aborted by AbortReq.", nixlkv.RankSilent},
		"the prefill is lost": {nil, func(q *pair, _ *Receiver, _ *wire.Bootstrap) {
			q.p.ranks[0].die()
		}, nixlkv.ErrPeerLost, "Lost connection with prefill instance", nixlkv.RankLost},
	} {
		t.Run(name, func(t *testing.T) {
			q := newCompletePair(t, tc.opts...)
			r, b := q.asks(9)
			tc.end(q, r, b)
			te := checkFailed(t, r, tc.want, tc.text)
			if len(te.Ranks) != 1 || te.Ranks[0].State != tc.rank {
				t.Errorf("ranks %+v, want %v", te.Ranks, tc.rank)
			}
			ok(t, r.Released(within(t)))
			if q.p.ranks[0].ctl != nil {
				q.p.ranks[0].aborted(9)
			}
			if err := r.Publish(Destination{Aux: Aux(0)}); !errors.Is(err, tc.want) {
				t.Errorf("Publish: %v", err)
			}
			ok(t, r.Close())
		})
	}
}

// The waiting timeout begins anew when the prefill is complete, and when the pages are told.
func TestPrefillCompleteTimeout(t *testing.T) {
	q := newCompletePair(t, WithWaitingTimeout(100*time.Millisecond))
	r, b := q.asks(9)
	q.p.ranks[0].tell(b.From, 9, wire.PollWaitingForInput, "")
	ok(t, r.WaitReady(within(t)))
	ok(t, r.Publish(Destination{Pages: []int32{1}, Aux: Aux(0)}))
	q.p.ranks[0].metadata(9)
	checkFailed(t, r, nixlkv.ErrTimeout, "KVPoll.WaitingForInput")
	q.p.ranks[0].ack(q.p.ranks[0].aborted(9))
	ok(t, r.Released(within(t)))
	ok(t, r.Close())
}

// A timeout that was on its way when the room went on does not end it.
func TestPrefillCompleteTimeoutComesLate(t *testing.T) {
	q := newCompletePair(t)
	r, b := q.asks(9)
	q.p.ranks[0].tell(b.From, 9, wire.PollWaitingForInput, "")
	ok(t, r.WaitReady(within(t)))
	r.r.expire(1)
	q.drained()
	ok(t, r.Err())
	ok(t, r.Close())
}
