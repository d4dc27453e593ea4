package kvsender

import (
	"encoding/binary"
	"net/netip"
	"testing"
	"time"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/internal/wire"
	"github.com/nixlkv/nixlkv/nixl"
)

// fuzzedManager is one manager for many inputs: making one takes far longer than what an input has
// it do. Between inputs it is as new.
type fuzzedManager struct {
	*Manager
	engine *nixl.Engine
	mem    *kitMemory
	inputs int
}

// fuzzSource is where the messages come from; nobody listens there.
var fuzzSource = netip.MustParseAddr("127.0.0.77")

// goodRoomEvery is after how many inputs a decode is served, which takes some milliseconds.
const goodRoomEvery = 500

func newFuzzedManager(f *testing.F) *fuzzedManager {
	e, err := nixl.Open(nixl.Embedded)
	ok(f, err)
	mem := newKitMemory(f, 1)
	mem.fill()
	m, err := NewManager(f.Context(), mem.layout(), WithEngine(e), WithSourceMatching(),
		WithAllowedPeers(netip.PrefixFrom(fuzzSource, 32), netip.MustParsePrefix("127.0.0.1/32")),
		WithLimits(Limits{Rooms: 8, Peers: 4, AnnouncedBytes: 4096, Registrations: 3, Strangers: 2}))
	ok(f, err)
	f.Cleanup(func() {
		closeManager(f, m)
		ok(f, e.Close())
		mem.free(f)
	})
	return &fuzzedManager{Manager: m, engine: e, mem: mem}
}

// check checks the state that an input has left.
func (m *fuzzedManager) check(t *testing.T) {
	m.roomsMu.Lock()
	announced, bytes, rooms := m.backlog.rooms, m.backlog.bytes, len(m.live)
	m.roomsMu.Unlock()
	checkBacklog(t, m.Manager, announced)
	peers := m.peers.Snapshot()
	if s := m.ctl.Stats(); announced > 4 || bytes > 4096 || rooms > 8 || len(peers) > 4 || s.Panics != 0 {
		t.Errorf("%d rooms, %d announced, %d bytes, peers %+v, control %+v", rooms, announced, bytes, peers, s)
	}
	// Every room's lock can be had, or this never ends.
	for _, r := range m.allRooms() {
		r.mu.Lock()
		if r.sender != nil || r.inFlight != 0 || len(r.queue) != 0 {
			t.Errorf("room %d is open, or sends: %d in flight, %d to be posted", r.id, r.inFlight, len(r.queue))
		}
		r.mu.Unlock()
	}
}

func (m *fuzzedManager) allRooms() (rooms []*room) {
	m.roomsMu.Lock()
	defer m.roomsMu.Unlock()
	for r := range m.live {
		rooms = append(rooms, r)
	}
	return rooms
}

// reset forgets all that an input has left.
func (m *fuzzedManager) reset(t *testing.T) {
	for _, r := range m.allRooms() {
		r.mu.Lock()
		r.forget(nixlkv.ErrAborted)
		r.mu.Unlock()
	}
	for _, p := range m.peers.Snapshot() {
		m.peers.Forget(p.Agent)
	}
	// The loader ends what it has begun.
	loaded := make(chan struct{})
	if !m.peers.enqueue(func() { close(loaded) }) {
		t.Fatal("the loader takes no more")
	}
	select {
	case <-loaded:
	case <-time.After(10 * time.Second):
		t.Fatal("the loader hangs")
	}
	m.intake.mu.Lock()
	clear(m.intake.buckets)
	m.intake.mu.Unlock()
	m.unregistered.reset()
	m.missed.reset()
	checkBacklog(t, m.Manager, 0)
	if n := m.peers.Len(); n != 0 {
		t.Errorf("%d decodes are left", n)
	}
}

func (c *recent[V]) reset() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.rooms, c.oldest, c.next = nil, nil, 0
}

// serve checks that a decode is served after all that came.
func (m *fuzzedManager) serve(t *testing.T) {
	p := &pairUp{m: m.Manager, src: m.mem}
	p.d = newDecode(t, m.engine, m.Manager, newKitMemory(t, 1), 25)
	defer p.d.mem.free(t)
	defer p.d.close()
	p.d.register(p.d.registration())
	p.transfer(t, nixlkv.MaxRoom)
	if st := p.d.status(nixlkv.MaxRoom); st.Status != wire.PollSuccess {
		t.Errorf("told %+v", st)
	}
	p.d.compare(m.mem, []int32{4}, []int32{3}, 2, 1)
	m.reset(t)
}

// FuzzReceive takes any bytes for the frames of messages: each frame's length as a uint16,
// then its bytes, and an empty frame for the end of a message. Whatever comes, the manager
// counts rightly, answers nobody that may not be, and serves who may.
func FuzzReceive(f *testing.F) {
	source := fuzzSource
	add := func(messages ...[][]byte) {
		var b []byte
		for _, m := range messages {
			for _, frame := range m {
				b = append(binary.LittleEndian.AppendUint16(b, uint16(len(frame))), frame...)
			}
			b = append(b, 0xff, 0xff)
		}
		f.Add(b)
	}
	encode := func(frames [][]byte, err error) [][]byte {
		if err != nil {
			f.Fatal(err)
		}
		return frames
	}
	at := wire.Endpoint{IP: source.String(), Port: 7}
	meta := &wire.Metadata{Room: 5, From: at, Agent: "a", KVIndices: []int32{1, 2}, Destinations: 2, StateIndices: [][]int32{{1}}}
	g := &wire.Registration{From: at, Agent: "a", AgentMetadata: []byte("md"), KVPtrs: []uint64{4096}, ItemLens: []uint64{256},
		Kinds: []wire.Kind{wire.DRAM}, Slots: 4, AuxPtrs: []uint64{1}, TPSize: 1, DCPSize: 1}
	add(encode(new(wire.Encoder).Registration(g)), encode(new(wire.Encoder).Metadata(meta)),
		encode(new(wire.Encoder).Abort(&wire.Abort{Room: 5, From: at, Generation: 1, HasGeneration: true})))
	meta.Destinations = 1
	add(encode(new(wire.Encoder).Metadata(meta)), encode(new(wire.Encoder).Abort(&wire.Abort{Room: 5})), encode(new(wire.Encoder).Metadata(meta)))
	m := newFuzzedManager(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		var message [][]byte
		for len(b) >= 2 {
			n := int(binary.LittleEndian.Uint16(b))
			b = b[2:]
			if n == 0xffff {
				m.receive(source, message)
				message = nil
				continue
			}
			n = min(n, len(b))
			message, b = append(message, b[:n:n]), b[n:]
		}
		m.receive(source, message)
		m.check(t)
		m.reset(t)
		if m.inputs++; m.inputs%goodRoomEvery == 1 {
			m.serve(t)
		}
	})
}
