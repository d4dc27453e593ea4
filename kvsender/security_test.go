package kvsender

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/internal/control"
	"github.com/nixlkv/nixlkv/internal/wire"
	"github.com/nixlkv/nixlkv/nixl"
	"github.com/nixlkv/nixlkv/registry"
)

// embeddedEngine gives an engine that is closed with the test.
func embeddedEngine(t *testing.T) *nixl.Engine {
	t.Helper()
	e, err := nixl.Open(nixl.Embedded)
	ok(t, err)
	t.Cleanup(func() {
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	})
	return e
}

func eventually(t *testing.T, what string, done func() bool) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for end := time.After(20 * time.Second); !done(); {
		select {
		case <-tick.C:
		case <-end:
			t.Fatalf("waiting for %s", what)
		}
	}
}

// elsewhere is an address of this host that connections do not come from.
var elsewhere = wire.Endpoint{IP: "127.0.0.9", Port: 7}

// knowsRoom says whether a room is in the table.
func (m *Manager) knowsRoom(id nixlkv.Room) bool { return m.lookup(id) != nil }

// spoof sends everything that can name another's address for its answer.
func (d *decode) spoof(id nixlkv.Room, as wire.Endpoint) (messages uint64) {
	d.t.Helper()
	g := d.registration()
	g.Agent, g.From = "spoofed", as
	d.register(g)
	d.tell(id, []int32{1}, 0, func(m *wire.Metadata) { m.From = as })
	d.send(new(wire.Encoder).Abort(&wire.Abort{Room: id, From: as}))
	d.send(new(wire.Encoder).Abort(&wire.Abort{Room: id, From: as, Generation: 1, HasGeneration: true}))
	return 4
}

func TestSourceMatching(t *testing.T) {
	p := newPair(t, embeddedEngine(t), 25, WithSourceMatching())
	p.d.register(p.d.registration())
	p.transfer(t, 1)
	sent := p.d.spoof(2, elsewhere)
	// Metadata that cannot be read, and name somebody else, or nobody.
	frames, err := new(wire.Encoder).Metadata(&wire.Metadata{Room: 3, From: elsewhere, Agent: "spoofed", Destinations: 1})
	ok(t, err)
	frames[6] = []byte("None")
	p.d.sendRaw(frames)
	frames[2] = []byte("?")
	p.d.sendRaw(frames)
	// A host name is nobody's address.
	p.d.tell(2, []int32{1}, 0, func(m *wire.Metadata) { m.From.IP = "localhost" })
	p.transfer(t, 4) // behind all of it
	if s := p.m.Stats(); s.Untrusted != sent+2 || s.Refused != 2 || p.m.knowsRoom(2) || p.m.knowsRoom(3) || len(s.Peers) != 1 {
		t.Errorf("untrusted %d, refused %d, peers %+v", s.Untrusted, s.Refused, s.Peers)
	}

	// An abort that names nobody counts for the sender's own rooms.
	s := open(t, p.m, 5)
	p.d.send(new(wire.Encoder).Abort(&wire.Abort{Room: 5}))
	p.d.tell(5, []int32{3}, 1)
	_, err = s.WaitBootstrapped(within(t))
	ok(t, err)
	p.d.send(new(wire.Encoder).Abort(&wire.Abort{Room: 5}))
	wantFailure(t, s, nil, nixlkv.ErrAborted, "")
}

func TestInvolves(t *testing.T) {
	p := newPair(t, embeddedEngine(t), 25)
	p.d.register(p.d.registration())
	p.transfer(t, 1)
	here, known, stranger := p.d.endpoint(), netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("192.0.2.1")
	complete := &room{m: p.m, need: 1, dests: []*dest{{meta: &wire.Metadata{From: elsewhere}}}}
	partial := &room{m: p.m, need: 2, dests: complete.dests}
	asked := &room{m: p.m, asker: asker{at: elsewhere}}
	for name, c := range map[string]struct {
		r     *room
		match bool
		from  netip.Addr
		named wire.Endpoint
		want  bool
	}{
		"its decode":                             {complete, false, stranger, elsewhere, true},
		"another one":                            {complete, false, known, here, false},
		"one that may be its own":                {partial, false, known, here, true},
		"one that is not registered":             {partial, false, known, wire.Endpoint{IP: "127.0.0.1", Port: 1}, false},
		"of a room that nobody announced":        {&room{m: p.m}, false, known, here, true},
		"of that, by one that is not known":      {&room{m: p.m}, false, known, elsewhere, false},
		"who asked":                              {asked, false, known, elsewhere, true},
		"without an address":                     {complete, false, stranger, wire.Endpoint{}, true},
		"without an address, from its decode":    {complete, true, netip.MustParseAddr("127.0.0.9"), wire.Endpoint{}, true},
		"without an address, from another":       {complete, true, known, wire.Endpoint{}, false},
		"without an address, from nowhere":       {complete, true, netip.Addr{}, wire.Endpoint{}, false},
		"without an address, of nobody's, match": {&room{m: p.m}, true, known, wire.Endpoint{}, false},
	} {
		p.m.cfg.trust.MatchSource = c.match
		if got := c.r.involves(c.from, c.named); got != c.want {
			t.Errorf("%s: %v", name, got)
		}
	}
	p.m.cfg.trust.MatchSource = false
}

func TestAllowedPeers(t *testing.T) {
	p := newPair(t, embeddedEngine(t), 25, WithAllowedPeers(netip.MustParsePrefix("10.0.0.0/8")), WithAllowedPeers(netip.MustParsePrefix("127.0.0.1/32")))
	p.d.register(p.d.registration())
	p.transfer(t, 1)
	sent := p.d.spoof(2, elsewhere)
	p.transfer(t, 3)
	if s := p.m.Stats(); s.Untrusted != sent || p.m.knowsRoom(2) || len(s.Peers) != 1 || s.Control.PeersRefused != 0 {
		t.Errorf("untrusted %d, peers %+v", s.Untrusted, s.Peers)
	}
}

// Connections from other networks are refused before anything is read.
func TestConnectionsFromElsewhere(t *testing.T) {
	e := embeddedEngine(t)
	mem := newKitMemory(t, 1)
	defer mem.free(t)
	m, err := NewManager(t.Context(), mem.layout(), WithEngine(e), WithAllowedPeers(netip.MustParsePrefix("10.0.0.0/8")))
	ok(t, err)
	defer closeManager(t, m)
	c, err := control.New(control.Config{Handler: func([][]byte) {}, Linger: -1})
	ok(t, err)
	to, err := control.NewEndpoint("127.0.0.1", m.ControlPort())
	ok(t, err)
	sent := make(chan error, 1)
	ok(t, c.SendAsync(control.Message{To: to, Frames: [][]byte{[]byte("ABORT"), []byte("1")}}, func(_ uint64, err error) { sent <- err }))
	eventually(t, "the refusal", func() bool { return m.Stats().Control.PeersRefused > 0 })
	ok(t, c.Close(within(t)))
	if err := <-sent; !errors.Is(err, nixlkv.ErrSendBlocked) {
		t.Error(err)
	}
	if s := m.Stats(); s.Aborts != 0 || s.Control.MessagesIn != 0 {
		t.Errorf("%+v", s.Control)
	}
	if _, err := NewManager(t.Context(), mem.layout(), WithEngine(e), WithAllowedPeers(netip.Prefix{})); !errors.Is(err, nixlkv.ErrMalformed) {
		t.Error(err)
	}
}

// checkBacklog compares the backlog with the rooms that there are.
func checkBacklog(t *testing.T, m *Manager, rooms int) {
	t.Helper()
	m.roomsMu.Lock()
	defer m.roomsMu.Unlock()
	var sum backlog
	for r := range m.live {
		if r.charged.counted {
			sum.rooms++
		}
		sum.bytes += r.charged.bytes
	}
	if sum != m.backlog || sum.rooms != rooms || rooms == 0 && sum.bytes != 0 {
		t.Errorf("a backlog of %+v, but rooms of %+v, want %d", m.backlog, sum, rooms)
	}
}

// What decodes announce takes no place from the rooms that are opened here.
func TestAnnouncedRoomsAreBounded(t *testing.T) {
	p := newPair(t, embeddedEngine(t), 25, WithLimits(Limits{Rooms: 8, Announced: 3}))
	p.d.register(p.d.registration())
	p.transfer(t, 1)
	for id := nixlkv.Room(10); id < 20; id++ {
		p.d.tell(id, []int32{int32(id)}, 0)
	}
	for id := nixlkv.Room(13); id < 20; id++ {
		if s := p.d.status(id); s.Status != wire.PollFailed || !strings.Contains(s.Reason, nixlkv.ErrLimit.Error()) {
			t.Errorf("room %d: %+v", id, s)
		}
	}
	checkBacklog(t, p.m, 3)
	if s := p.m.Stats(); s.Announced != 3 || s.AnnouncedBytes < 3*destOverhead {
		t.Errorf("%d announced, %d bytes", s.Announced, s.AnnouncedBytes)
	}
	// Three more than were announced can be opened.
	var senders []*Sender
	for id := nixlkv.Room(30); id < 33; id++ {
		senders = append(senders, open(t, p.m, id))
	}
	// One that was announced goes on, and leaves its place to another.
	s := open(t, p.m, 10)
	checkBacklog(t, p.m, 2)
	_, err := s.WaitBootstrapped(within(t))
	ok(t, err)
	ok(t, s.Begin(Plan{Pages: 1, Aux: Aux(2)}))
	ok(t, s.Finish([]int32{4}, nil))
	ok(t, s.Wait(within(t)))
	ok(t, s.Close())
	p.d.tell(20, []int32{1}, 0)
	eventually(t, "the next", func() bool { return p.m.knowsRoom(20) })
	checkBacklog(t, p.m, 3)
	// An abort takes away what a room held, but not its place: whoever opens it is told.
	p.d.send(new(wire.Encoder).Abort(&wire.Abort{Room: 20, From: p.d.endpoint(), Generation: 1, HasGeneration: true}))
	p.d.ack(20)
	checkBacklog(t, p.m, 3)
	for _, s := range senders {
		ok(t, s.Close())
	}
	p.transfer(t, 40)
}

func TestAnnouncedBytesAreBounded(t *testing.T) {
	many := make([]int32, 5000)
	for i := range many {
		many[i] = int32(i)
	}
	p := newPair(t, embeddedEngine(t), 25, WithLimits(Limits{AnnouncedBytes: 3 * 20_600}), WithBootstrapTimeout(2*time.Second))
	p.d.register(p.d.registration())
	p.transfer(t, 1)
	for id := nixlkv.Room(10); id < 16; id++ {
		p.d.tell(id, many, 0)
	}
	for id := nixlkv.Room(13); id < 16; id++ { // a room takes 20,512 bytes: there is place for three
		if s := p.d.status(id); s.Status != wire.PollFailed || !strings.Contains(s.Reason, nixlkv.ErrLimit.Error()) {
			t.Errorf("room %d: %+v", id, s)
		}
	}
	// Repeats are the same bytes.
	for range 3 {
		p.d.tell(10, many, 0)
	}
	p.d.tell(17, []int32{1}, 0, func(m *wire.Metadata) { m.StateIndices = [][]int32{many} })
	p.d.status(17)
	if s := p.m.Stats(); s.AnnouncedBytes != 3*(destOverhead+4*len(many)) {
		t.Errorf("%d bytes", s.AnnouncedBytes)
	}
	// The one that was refused tells whoever opens it.
	s := open(t, p.m, 13)
	wantFailure(t, s, nil, nixlkv.ErrLimit, "announced and not opened")
	// Those that nobody opens expire.
	eventually(t, "the rooms to expire", func() bool { return p.m.Stats().Announced == 0 })
	checkBacklog(t, p.m, 0)
	p.transfer(t, 20)
}

// Registrations that differ in turn, under one name that is not taken up yet, do not keep the
// loader from others: the first one counts until the loader is done with it.
func TestOneNameDoesNotKeepTheLoader(t *testing.T) {
	p := newPair(t, embeddedEngine(t), 25)
	proceed := make(chan struct{})
	p.m.peers.enqueue(func() { <-proceed })
	g := p.d.registration()
	for i := range 10 {
		g.EngineRank = i
		p.d.register(g)
	}
	// Nor does one that cannot be read under its name.
	frames, err := new(wire.Encoder).Registration(g)
	ok(t, err)
	frames[10] = []byte("garbage")
	p.d.sendRaw(frames)
	eventually(t, "the registrations", func() bool { s := p.m.Stats(); return s.Registrations == 10 && s.Refused == 1 })
	peer, info, _ := p.m.peers.Lookup(p.d.agent.Name())
	if info.Phase != registry.Preparing || peer.Ranks.EngineRank != 0 || p.m.Stats().Dropped != 9 {
		t.Errorf("%v, rank %d, stats %+v", info.Phase, peer.Ranks.EngineRank, p.m.Stats())
	}
	close(proceed)
	p.transfer(t, 1)
}

// More decodes from one address than may be taken up in a minute wait until a room needs them.
func TestRegistrationsOfOneAddress(t *testing.T) {
	p := newPair(t, embeddedEngine(t), 25, WithLimits(Limits{Registrations: 5}))
	for i := range 30 {
		g := p.d.registration()
		g.Agent = fmt.Sprintf("sybil-%d", i)
		p.d.register(g)
	}
	p.d.register(p.d.registration())
	p.transfer(t, 1)
	refused := 0
	for _, info := range p.m.Stats().Peers {
		if strings.Contains(info.Reason, nixlkv.ErrLimit.Error()) {
			refused++
		}
	}
	if refused != 25 {
		t.Errorf("%d registrations were put off", refused)
	}
}

// Aborts of rooms that are not here, which name addresses where nobody is, fill no table.
func TestAbortFlood(t *testing.T) {
	const strangers = 8
	p := newPair(t, embeddedEngine(t), 25, WithLimits(Limits{Strangers: strangers}))
	p.d.register(p.d.registration())
	p.transfer(t, 1)
	for i := range 2000 {
		at := wire.Endpoint{IP: fmt.Sprintf("127.1.%d.%d", i/250, 1+i%250), Port: 9}
		p.d.send(new(wire.Encoder).Abort(&wire.Abort{Room: nixlkv.Room(1000 + i), From: at, Generation: 1, HasGeneration: true}))
		p.d.tell(nixlkv.Room(5000+i), []int32{1}, 0, func(m *wire.Metadata) { m.From, m.Destinations = at, 1<<30 })
		if i%500 == 499 {
			p.transfer(t, nixlkv.Room(2+i))
			// An abort of a decode that is known is answered all the same.
			p.d.send(new(wire.Encoder).Abort(&wire.Abort{Room: nixlkv.Room(9000 + i), From: p.d.endpoint(), Generation: 1, HasGeneration: true}))
			p.d.ack(nixlkv.Room(9000 + i))
		}
		if n := p.m.Stats().Control.Endpoints; n > strangers+1 {
			t.Fatalf("%d endpoints", n)
		}
	}
	eventually(t, "the strangers to be let go", func() bool { return p.m.Stats().Control.Endpoints == 1 })
}

// The bounds on messages are the caller's to set.
func TestMessageLimits(t *testing.T) {
	p := newPair(t, embeddedEngine(t), 25, WithLimits(Limits{Pages: 3, Regions: 4, FrameBytes: 64 << 10, MetadataBytes: 32 << 10}))
	p.d.register(p.d.registration())
	p.transfer(t, 1)
	p.d.tell(2, []int32{1, 2, 3, 4}, 0)
	if s := p.d.status(2); s.Status != wire.PollFailed || !strings.Contains(s.Reason, nixlkv.ErrLimit.Error()) {
		t.Errorf("a room of too many pages was told %+v", s)
	}
	for name, change := range map[string]func(*wire.Registration){
		"regions": func(g *wire.Registration) {
			g.KVPtrs, g.ItemLens, g.Kinds = append(g.KVPtrs, 1<<20), append(g.ItemLens, g.ItemLens[0]), append(g.Kinds, g.Kinds[0])
			g.LayerIDs = nil
		},
		"metadata": func(g *wire.Registration) { g.AgentMetadata = make([]byte, 40<<10) },
	} {
		g := p.d.registration()
		g.Agent = name
		change(g)
		refused := p.m.Stats().Refused
		p.d.register(g)
		eventually(t, name, func() bool { return p.m.Stats().Refused == refused+1 })
	}
	// A frame over its bound ends the connection, and nothing else.
	before := p.m.Stats().Control.MessagesIn
	p.d.sendRaw([][]byte{[]byte("NixlMsgGuard"), make([]byte, 100<<10)})
	eventually(t, "the end of the connection", func() bool { return p.d.ctl.Stats().Disconnects > 0 })
	if after := p.m.Stats().Control.MessagesIn; after != before {
		t.Errorf("%d messages", after-before)
	}
	p.transfer(t, 3)
}
