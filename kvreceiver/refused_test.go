package kvreceiver

import (
	"errors"
	"net/netip"
	"testing"
	"time"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/internal/control"
	"github.com/nixlkv/nixlkv/internal/trust"
	"github.com/nixlkv/nixlkv/internal/wire"
	"github.com/nixlkv/nixlkv/nixl"
)

func curveKeys(t *testing.T) nixlkv.Curve {
	t.Helper()
	k, err := nixlkv.NewCurve()
	ok(t, err)
	return k
}

// secure gives a rank another control socket, and has it found there.
func (r *rank) secure(cfg control.Config) {
	r.t.Helper()
	r.die()
	cfg.Handler = r.receive
	var err error
	r.ctl, err = control.New(cfg)
	ok(r.t, err)
	r.info.RankPort = r.ctl.Port()
	r.register()
}

// A prefill that does not let this decode in fails its rooms with that, whichever time is over
// first: the message's, or the caller's.
func TestConnectIsRefused(t *testing.T) {
	e := openEngine(t, nixl.Embedded)
	keys, other := curveKeys(t), curveKeys(t)
	here := other
	here.ServerKey = keys.PublicKey
	elsewhere, err := trust.NewList(netip.MustParsePrefix("10.0.0.0/8"))
	ok(t, err)
	for name, c := range map[string]struct {
		rank control.Config
		opts []Option
		text string
		may  bool // the two hang up on each other, and this side need not be the one to know why
	}{
		"another server key":     {rank: control.Config{Curve: &keys}, opts: []Option{WithCurve(other)}, text: "CURVE handshake"},
		"a key that is unlisted": {rank: control.Config{Curve: &keys}, opts: []Option{WithCurve(here)}, text: "this CURVE key"},
		"CURVE there":            {rank: control.Config{Curve: &keys}, text: "asks for CURVE", may: true},
		"CURVE here":             {opts: []Option{WithCurve(keys)}, text: "CURVE"},
		"network":                {rank: control.Config{Allowed: elsewhere}, text: "this address is not allowed"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			want := nixlkv.ErrNotAllowed
			if c.may {
				want = nixlkv.ErrSendBlocked
			}
			q := newPair(t, e, shape{}, append(c.opts, WithSendTimeout(4*time.Second))...)
			q.p.ranks[0].secure(c.rank)
			r := q.open(1)
			checkError(t, r, r.Connect(within(t)), want, c.text)
			if err := r.Err(); !errors.Is(err, nixlkv.ErrSendBlocked) {
				t.Error(err)
			}
			ok(t, r.Close())
			r = q.open(2)
			ctx, cancel := contextOf(3500)
			defer cancel()
			checkError(t, r, r.Connect(ctx), nil, c.text)
			if err := r.Err(); !errors.Is(err, nixlkv.ErrTimeout) || !c.may && !errors.Is(err, want) {
				t.Error(err)
			}
			ok(t, r.Close())
			if s := q.p.ranks[0].ctl.Stats(); s.PeersRefused+s.HandshakesRefused == 0 || s.MessagesIn != 0 {
				t.Errorf("the prefill's stats %+v", s)
			}
		})
	}
}

// A room that waits in vain for a prefill that this decode does not let in says so.
func TestPrefillIsRefused(t *testing.T) {
	decode, prefill := curveKeys(t), curveKeys(t)
	decode.ServerKey = prefill.PublicKey
	prefill.ServerKey, prefill.ClientKeys = curveKeys(t).PublicKey, []string{decode.PublicKey}
	t.Parallel()
	q := newPair(t, openEngine(t, nixl.Embedded), shape{}, WithCurve(decode), WithWaitingTimeout(time.Second), WithReleaseTimeout(100*time.Millisecond))
	q.p.ranks[0].secure(control.Config{Curve: &prefill})
	r, told := q.published(1)
	frames, err := new(wire.Encoder).KVStatus(&wire.KVStatus{Room: 1, Status: wire.PollSuccess})
	ok(t, err)
	q.p.ranks[0].attempt(told[0].From, frames)
	te := checkFailed(t, r, nixlkv.ErrTimeout, "127.0.0.1 was refused in its handshake: it was made for another server key")
	if !errors.Is(te, nixlkv.ErrNotAllowed) {
		t.Error(te)
	}
	if s := q.m.Stats(); s.Control.HandshakesRefused == 0 || s.Statuses != 0 {
		t.Errorf("stats %+v", s)
	}
	if err := r.Released(within(t)); !errors.Is(err, nixlkv.ErrReleaseUnconfirmed) {
		t.Error(err)
	}
	ok(t, r.Close())
}
