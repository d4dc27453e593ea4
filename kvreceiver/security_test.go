package kvreceiver

import (
	"errors"
	"net/netip"
	"testing"
	"time"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/internal/control"
	"github.com/nixlkv/nixlkv/internal/wire"
	"github.com/nixlkv/nixlkv/nixl"
)

// A rank, or a bootstrap server, outside of the allowed networks is not connected to.
func TestAllowedPeers(t *testing.T) {
	e := openEngine(t, nixl.Embedded)
	loopback := netip.MustParsePrefix("127.0.0.1/32")
	t.Run("rank", func(t *testing.T) {
		q := newPair(t, e, shape{}, WithAllowedPeers(netip.MustParsePrefix("10.0.0.0/8"), loopback))
		q.oneRoom(1, byStatus, 1, 1)
		other := newSite(t, e, q.prefills, shape{})
		rank := other.ranks[0]
		rank.info.RankIP = "127.0.0.9"
		rank.register()
		r, err := q.m.Open(2, other.addr)
		ok(t, err)
		checkError(t, r, r.Connect(within(t)), nixlkv.ErrNotAllowed, "127.0.0.9")
		ok(t, r.Close())
		if s := q.m.Stats(); s.Ranks != 1 {
			t.Errorf("%d ranks", s.Ranks)
		}
		// A name is what it stands for.
		rank.info.RankIP = "localhost"
		rank.register()
		r, err = q.m.Open(3, other.addr)
		ok(t, err)
		ok(t, r.Connect(within(t)))
		ok(t, r.Close())
	})
	t.Run("bootstrap server", func(t *testing.T) {
		q := newPair(t, e, shape{}, WithAllowedPeers(netip.MustParsePrefix("10.0.0.0/8")))
		r := q.open(1)
		checkError(t, r, r.Connect(within(t)), nixlkv.ErrNotAllowed, q.p.addr)
		ok(t, r.Close())
		if n := q.p.count("GET /route"); n != 0 {
			t.Errorf("it was asked %d times", n)
		}
	})
	t.Run("connections", func(t *testing.T) {
		q := newPair(t, e, shape{}, WithAllowedPeers(netip.MustParsePrefix("10.0.0.0/8")))
		p := q.p.ranks[0]
		to := q.m.self
		frames, err := new(wire.Encoder).KVStatus(&wire.KVStatus{Room: 1, Status: wire.PollFailed})
		ok(t, err)
		p.attempt(to, frames)
		eventually(t, "the refusal", func() bool { return q.m.Stats().Control.PeersRefused > 0 })
		if s := q.m.Stats(); s.Statuses != 0 || s.Control.MessagesIn != 0 {
			t.Errorf("heard: %+v", s)
		}
	})
	t.Run("none that can be", func(t *testing.T) {
		mem := newKitMemory(t)
		if _, err := NewManager(t.Context(), mem.layout(), WithEngine(e), WithAllowedPeers(netip.Prefix{})); !errors.Is(err, nixlkv.ErrMalformed) {
			t.Error(err)
		}
	})
}

// What is told of a room counts only from where the rank is that it names.
func TestSourceMatching(t *testing.T) {
	q := newPair(t, openEngine(t, nixl.Embedded), shape{}, WithSourceMatching())
	q.oneRoom(1, byStatus, 1, 1)
	r, _ := q.published(7)
	for _, s := range []wire.KVPoll{wire.PollFailed, wire.PollSuccess} {
		frames, err := new(wire.Encoder).KVStatus(&wire.KVStatus{Room: 7, Status: s})
		ok(t, err)
		q.m.receive(netip.MustParseAddr("127.0.0.9"), frames)
		q.m.receive(netip.Addr{}, frames)
	}
	if ended(r) || q.m.Stats().Untrusted != 4 || q.m.Stats().Unknown != 4 {
		t.Errorf("ended %v, stats %+v", ended(r), q.m.Stats())
	}
	r.Abort("")
	a := q.p.ranks[0].aborted(7)
	frames, err := new(wire.Encoder).AbortAck(&wire.AbortAck{Room: 7, Generation: a.Generation, HasGeneration: true})
	ok(t, err)
	q.m.receive(netip.MustParseAddr("127.0.0.9"), frames)
	if isReleased(r) || q.m.Stats().Untrusted != 5 {
		t.Errorf("released %v, stats %+v", isReleased(r), q.m.Stats())
	}
	q.p.ranks[0].ack(a)
	ok(t, r.Released(within(t)))
	ok(t, r.Close())
	q.oneRoom(8, byStatus, 1, 1)
}

// attempt sends frames to an endpoint that may refuse it.
func (r *rank) attempt(to wire.Endpoint, frames [][]byte) {
	r.t.Helper()
	e, err := control.NewEndpoint(to.IP, to.Port)
	ok(r.t, err)
	ok(r.t, r.ctl.SendAsync(control.Message{To: e, Frames: frames, Deadline: time.Now().Add(patience)}, func(_ uint64, err error) {
		if err == nil {
			r.t.Error("it was taken")
		}
	}))
}
