package kvsender

import (
	"errors"
	"net"
	"net/netip"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/bootstrap"
	"github.com/nixlkv/nixlkv/internal/control"
	"github.com/nixlkv/nixlkv/internal/trust"
	"github.com/nixlkv/nixlkv/internal/wire"
)

// secure gives a decode another control socket for what it is told. It goes on sending over the
// first.
func (d *decode) secure(cfg control.Config) (at wire.Endpoint, stats func() control.Stats) {
	d.t.Helper()
	cfg.Handler = d.receive
	c, err := control.New(cfg)
	ok(d.t, err)
	d.t.Cleanup(func() { ok(d.t, c.Close(within(d.t))) })
	return wire.Endpoint{IP: "127.0.0.1", Port: c.Port()}, c.Stats
}

// A decode that does not let this prefill in cannot be told that its room is computed: the room
// fails with that.
func TestDecodeRefuses(t *testing.T) {
	elsewhere, err := trust.NewList(netip.MustParsePrefix("10.0.0.0/8"))
	ok(t, err)
	keys, err := nixlkv.NewCurve()
	ok(t, err)
	for name, c := range map[string]struct {
		decode control.Config
		want   error
		text   string
	}{
		"network": {control.Config{Allowed: elsewhere}, nixlkv.ErrNotAllowed, "this address is not allowed there"},
		// Either side may hang up on the other: this one need not know more.
		"CURVE": {control.Config{Curve: &keys}, nixlkv.ErrSendBlocked, "asks for CURVE"},
	} {
		t.Run(name, func(t *testing.T) {
			p := newPair(t, embeddedEngine(t), 25, WithAllocationPolicy(bootstrap.PrefillCompleteAllocation), WithBootstrapTimeout(3*time.Second))
			at, stats := p.d.secure(c.decode)
			g := p.d.registration()
			g.From = at
			p.d.register(g)
			s := open(t, p.m, 2)
			s.Computed()
			p.d.send(new(wire.Encoder).Bootstrap(&wire.Bootstrap{Room: 2, From: at}))
			wantFailure(t, s, nil, c.want, c.text)
			if err := s.Err(); !errors.Is(err, nixlkv.ErrSendBlocked) {
				t.Error(err)
			}
			ok(t, s.Close())
			if s := stats(); s.PeersRefused+s.HandshakesRefused == 0 || s.MessagesIn != 0 {
				t.Errorf("the decode's stats %+v", s)
			}
		})
	}
}

// A decode that cannot be told how its room ended is logged with the reason; the room has ended.
func TestUntoldDecodeIsLogged(t *testing.T) {
	elsewhere, err := trust.NewList(netip.MustParsePrefix("10.0.0.0/8"))
	ok(t, err)
	core, logs := observer.New(zap.InfoLevel)
	p := newPair(t, embeddedEngine(t), 25, WithLogger(zap.New(core)))
	at, stats := p.d.secure(control.Config{Allowed: elsewhere})
	g := p.d.registration()
	g.From = at
	p.d.register(g)
	s := open(t, p.m, 2)
	p.d.tell(2, []int32{1}, 0, func(m *wire.Metadata) { m.From = at })
	ok(t, s.Begin(Plan{Pages: 1, Aux: Aux(2)}))
	ok(t, s.Finish([]int32{4}, nil))
	ok(t, s.Wait(within(t)))
	ok(t, s.Close())
	eventually(t, "the log", func() bool {
		for _, l := range logs.FilterMessage("control: cannot connect").All() {
			for _, f := range l.Context {
				if err, is := f.Interface.(error); is && errors.Is(err, nixlkv.ErrNotAllowed) {
					return true
				}
			}
		}
		return false
	})
	if stats().PeersRefused == 0 {
		t.Errorf("the decode's stats %+v", stats())
	}
}

// Decodes that registered addresses where nobody answers hold no more places for what they are
// told than others leave them.
func TestBlackHolesHoldUpNobody(t *testing.T) {
	p := newPair(t, embeddedEngine(t), 25)
	p.d.register(p.d.registration())
	p.transfer(t, 1)
	const holes = 8
	var at [holes]wire.Endpoint
	for i := range at {
		at[i] = blackHole(t)
		d := newDecode(t, p.m.Engine(), p.m, p.d.mem, 25)
		defer d.close()
		g := d.registration()
		g.From = at[i]
		d.register(g)
		eventually(t, "the registration", func() bool { return p.m.registered(at[i]) })
	}
	// Metadata that name another's address are answered there, and so are aborts.
	for i := range 3 << 13 {
		p.d.tell(nixlkv.Room(100+i), []int32{1}, 0, func(m *wire.Metadata) { m.From = at[i%holes] })
	}
	p.d.send(new(wire.Encoder).Abort(&wire.Abort{Room: 2, From: p.d.endpoint(), Generation: 1, HasGeneration: true}))
	p.d.ack(2)
	if s := p.m.Stats(); s.Control.SendsRefused == 0 || s.Control.Pending < 8192 {
		t.Errorf("the flood has not filled the queues: %+v", s.Control)
	}
	// One that registers now is connected to and told all the same.
	late := newDecode(t, p.m.Engine(), p.m, p.d.mem, 25)
	defer late.close()
	late.register(late.registration())
	for id := nixlkv.Room(3); id < 40; id++ {
		late.send(new(wire.Encoder).Abort(&wire.Abort{Room: id, From: late.endpoint(), Generation: 1, HasGeneration: true}))
	}
	for id := nixlkv.Room(3); id < 40; id++ {
		late.ack(id)
	}
	p.transfer(t, 41)
	if st := p.d.status(41); st.Status != wire.PollSuccess {
		t.Errorf("told %+v", st)
	}
}

// blackHole takes connections and never answers.
func blackHole(t *testing.T) wire.Endpoint {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	ok(t, err)
	t.Cleanup(func() { ok(t, l.Close()) })
	return wire.Endpoint{IP: "127.0.0.1", Port: l.Addr().(*net.TCPAddr).Port}
}
