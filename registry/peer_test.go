package registry

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/internal/wire"
	"pgregory.net/rapid"
)

var (
	from = wire.Endpoint{IP: "::1", Port: 4711}
	noon = time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)
)

func TestLayoutRegistration(t *testing.T) {
	g, err := mha().Registration("decode-1", []byte("md"), from)
	if err != nil {
		t.Fatal(err)
	}
	want := &wire.Registration{
		From: from, Agent: "decode-1", AgentMetadata: []byte("md"),
		KVPtrs: []uint64{0x1000, 0x2000, 0x3000, 0x4000}, ItemLens: []uint64{0x100, 0x100, 0x100, 0x100},
		Kinds: []wire.Kind{wire.VRAM, wire.VRAM, wire.VRAM, wire.VRAM}, LayerIDs: []uint32{0, 1, 0, 1}, Slots: 4,
		AuxPtrs:       []uint64{0x100, 0x200},
		StatePtrs:     [][]uint64{{0x9000, 0x9100}, {0, 0xa000}, nil},
		StateItemLens: [][]uint32{{0x20, 0x20}, {0, 0x20}, nil},
		StateDims:     [][]uint32{{4, 8}, nil, nil},
		StateLayerIDs: [][]uint32{{0, 1}, nil, nil},
		StateDataLens: [][]uint64{{0x100, 0x100}, {0, 0x105}, nil},
		GPU:           3, TPSize: 2, EngineRank: 1, DCPSize: 1,
	}
	if !reflect.DeepEqual(g, want) {
		t.Errorf("%+v\nwant %+v", g, want)
	}
}

func TestLayoutRegistrationRefused(t *testing.T) {
	l := mha()
	l.KV[0].Kind = Unset
	if _, err := l.Registration("a", []byte("md"), from); !errors.Is(err, nixlkv.ErrMissingMemoryKind) {
		t.Error(err)
	}
	for _, c := range []struct {
		agent    string
		metadata []byte
		from     wire.Endpoint
	}{
		{"", []byte("md"), from}, {"a", nil, from}, {"a", []byte("md"), wire.Endpoint{}}, {"a\n", []byte("md"), from},
	} {
		if g, err := mha().Registration(c.agent, c.metadata, c.from); g != nil || !errors.Is(err, nixlkv.ErrMalformed) {
			t.Error(g, err)
		}
	}
}

// frames encodes a registration.
func frames(t interface{ Fatal(...any) }, g *wire.Registration) [][]byte {
	var e wire.Encoder
	f, err := e.Registration(g)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// parse reads a registration.
func parse(t interface{ Fatal(...any) }, f [][]byte) *wire.Registration {
	m, err := wire.ParseAtPrefill(f, wire.Limits{})
	if err != nil {
		t.Fatal(err)
	}
	return m.(*wire.Registration)
}

func TestPeerFromRegistration(t *testing.T) {
	g, err := mha().Registration("decode-1", []byte("md"), from)
	if err != nil {
		t.Fatal(err)
	}
	all := frames(t, g)
	p, err := PeerFromRegistration(parse(t, all), noon)
	if err != nil {
		t.Fatal(err)
	}
	want := &Peer{
		Agent: "decode-1", AgentMetadata: []byte("md"), Addr: "[::1]:4711", Dialect: Status,
		KV: []Region{
			{0x1000, 0x400, 0x100, 0, VRAM}, {0x2000, 0x400, 0x100, 1, VRAM},
			{0x3000, 0x400, 0x100, 0, VRAM}, {0x4000, 0x400, 0x100, 1, VRAM},
		},
		Aux: []uint64{0x100, 0x200},
		State: []PeerState{
			{Ptrs: []uint64{0x9000, 0x9100}, ItemLens: []uint64{0x20, 0x20}, Dims: []int{4, 8}, LayerIDs: []int{0, 1}, DataLens: []uint64{0x100, 0x100}},
			{Ptrs: []uint64{0, 0xa000}, ItemLens: []uint64{0, 0x20}, DataLens: []uint64{0, 0x105}},
			{},
		},
		GPU: 3, Ranks: Ranks{TP: 2, EngineRank: 1, DCP: 1}, Seen: noon,
	}
	if !reflect.DeepEqual(p, want) {
		t.Errorf("%+v\nwant %+v", p, want)
	}

	// A decode before 0.5.23 has 24 frames; the oldest form that is read has 13.
	p, err = PeerFromRegistration(parse(t, all[:24]), noon)
	if err != nil || p.Dialect != Notifications || p.Pages() != 4 || p.State[0].DataLens != nil {
		t.Errorf("%+v, %v", p, err)
	}
	p, err = PeerFromRegistration(parse(t, all[:13]), noon)
	if err != nil || p.Dialect != Notifications || p.Pages() != 0 || p.HasLayerIDs() || p.State[0].ItemLens != nil {
		t.Errorf("%+v, %v", p, err)
	}
	if k, err := p.DestinationKind(); k != VRAM || err != nil {
		t.Error(k, err)
	}
	if p.KV[3] != (Region{0x4000, 0, 0x100, NoLayer, VRAM}) {
		t.Errorf("%+v", p.KV[3])
	}
	// A later release may add frames.
	p, err = PeerFromRegistration(parse(t, append(slices.Clone(all), []byte("later"))), noon)
	if err != nil || p.Dialect != Status {
		t.Errorf("%+v, %v", p, err)
	}
}

func TestPeerFromRegistrationRefused(t *testing.T) {
	for _, c := range []struct {
		change   func(*wire.Registration)
		sentinel error
	}{
		{func(g *wire.Registration) { g.KVPtrs[2] = 0 }, nixlkv.ErrRegions},
		{func(g *wire.Registration) { g.ItemLens[2] = 0 }, nixlkv.ErrRegions},
		{func(g *wire.Registration) { g.Slots = math.MaxUint64 }, nixlkv.ErrRegions},
		{func(g *wire.Registration) { g.Kinds[0] = wire.KindUnset }, nixlkv.ErrMemoryKinds},
		{func(g *wire.Registration) { g.AuxPtrs[1] = 0 }, nixlkv.ErrAuxIndex},
		{func(g *wire.Registration) { g.StateDims[0] = []uint32{1} }, nixlkv.ErrState},
		{func(g *wire.Registration) { g.DCPRank = 1 }, nixlkv.ErrTopology},
		{func(g *wire.Registration) { g.Agent = "" }, nixlkv.ErrMalformed},
	} {
		g, err := mha().Registration("a", []byte("md"), from)
		if err != nil {
			t.Fatal(err)
		}
		c.change(g)
		if p, err := PeerFromRegistration(g, noon); p != nil || !errors.Is(err, c.sentinel) {
			t.Errorf("%+v, %v, want %v", p, err, c.sentinel)
		}
	}
	if p, err := PeerFromRegistration(nil, noon); p != nil || !errors.Is(err, nixlkv.ErrMalformed) {
		t.Error(p, err)
	}
}

func TestPeerKeepsNothingOfTheRegistration(t *testing.T) {
	g := parse(t, frames(t, must(mha().Registration("a", []byte("md"), from))))
	p := must(PeerFromRegistration(g, noon))
	kept := *p
	q := must(PeerFromRegistration(g, noon))
	g.AgentMetadata[0], g.AuxPtrs[0], g.StatePtrs[0][0], g.StateDataLens[0][0] = 'x', 1, 1, 1
	if !reflect.DeepEqual(&kept, q) {
		t.Errorf("%+v became %+v", kept, q)
	}
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// What a decode tells over the wire is what its layout says.
func TestPropertyRegistration(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := anyLayout.Draw(t, "layout")
		g, err := l.Registration("agent", []byte("md"), from)
		if err != nil {
			t.Fatal(err)
		}
		p, err := PeerFromRegistration(parse(t, frames(t, g)), noon)
		if err != nil {
			t.Fatal(err)
		}
		if p.Pages() != l.Pages() || p.HasLayerIDs() != l.HasLayerIDs() || len(p.KV) != len(l.KV) || p.GPU != l.GPU {
			t.Fatalf("%+v of %+v", p, l)
		}
		for i, r := range l.KV {
			if got := p.KV[i]; got.Base != r.Base || got.ItemLen != r.ItemLen || got.Kind != r.Kind || got.LayerID != r.LayerID || got.Len != l.Pages()*r.ItemLen {
				t.Fatalf("region %d: %+v of %+v", i, got, r)
			}
		}
		for i, c := range l.State {
			s := p.State[i]
			for j, x := range c.Tensors {
				if s.Ptrs[j] != x.Base || s.ItemLens[j] != x.ItemLen || s.DataLens[j] != x.Len {
					t.Fatalf("state %d, %d: %+v of %+v", i, j, s, x)
				}
				if s.Dims != nil && s.Dims[j] != x.Dim || s.Dims == nil && x.Dim != 0 {
					t.Fatalf("state %d, %d: %+v of %+v", i, j, s, x)
				}
				if s.LayerIDs != nil && s.LayerIDs[j] != x.LayerID || s.LayerIDs == nil && x.LayerID != NoLayer {
					t.Fatalf("state %d, %d: %+v of %+v", i, j, s, x)
				}
			}
		}
		want := l.Ranks.Normalized()
		if got := p.Ranks.Normalized(); got.TP != want.TP || got.EngineRank != want.TPRank || got.DCP != want.DCP || got.DCPRank != want.DCPRank {
			t.Fatalf("%+v of %+v", got, want)
		}
	})
}

func TestWithPages(t *testing.T) {
	p := peerOf("a")
	if q, err := p.WithPages(9); q != p || err != nil {
		t.Error("a peer that told its pages was changed", err)
	}
	p.KV[0].Len = 0
	q, err := p.WithPages(9)
	if err != nil || q.KV[0].Len != 0x900 || q.KV[1].Len != 0x300 || p.KV[0].Len != 0 || q.Pages() != 3 {
		t.Errorf("%+v of %+v, %v", q, p, err)
	}
	_, err = p.WithPages(math.MaxUint64)
	refused(t, err, "KV[0].Len", nixlkv.ErrRegions, "2^64")
	p.KV[0].Base = math.MaxUint64 - 0x8ff
	if q, err := p.WithPages(9); err != nil || q.KV[0].Pages() != 9 {
		t.Error(err)
	}
	_, err = p.WithPages(10)
	refused(t, err, "KV[0].Len", nixlkv.ErrRegions, "2^64")
}

func TestDestinationKind(t *testing.T) {
	p := peerOf("decode-7")
	if k, err := p.DestinationKind(); k != VRAM || err != nil {
		t.Error(k, err)
	}
	p.KV[1].Kind = DRAM
	if _, err := p.DestinationKind(); !errors.Is(err, nixlkv.ErrMemoryKinds) {
		t.Error(err)
	}
	p.KV[1].Kind = Unset
	_, err := p.DestinationKind()
	if !errors.Is(err, nixlkv.ErrMissingMemoryKind) || !strings.Contains(err.Error(), "Missing NIXL destination KV memory kind") ||
		!strings.Contains(err.Error(), "decode-7") {
		t.Error(err)
	}
}

func TestPeerValidate(t *testing.T) {
	if err := peerOf("a").Validate(); err != nil {
		t.Fatal(err)
	}
	unknown := peerOf("a") // kinds and lengths that are not told
	for i := range unknown.KV {
		unknown.KV[i].Kind, unknown.KV[i].Len = Unset, 0
	}
	if err := unknown.Validate(); err != nil {
		t.Error(err)
	}
	for _, c := range []struct {
		change   func(*Peer)
		field    string
		sentinel error
	}{
		{func(p *Peer) { p.Agent = "" }, "Agent", nixlkv.ErrMalformed},
		{func(p *Peer) { p.Dialect = 2 }, "Dialect", nixlkv.ErrMalformed},
		{func(p *Peer) { p.KV[1].Base = 0 }, "KV[1].Base", nixlkv.ErrRegions},
		{func(p *Peer) { p.KV[1].ItemLen = 0 }, "KV[1].ItemLen", nixlkv.ErrRegions},
		{func(p *Peer) { p.KV[1].Len = 5 }, "KV[1].Len", nixlkv.ErrRegions},
		{func(p *Peer) { p.KV[1].Kind = 3 }, "KV[1].Kind", nixlkv.ErrMemoryKinds},
		{func(p *Peer) { p.KV[1].LayerID = NoLayer }, "KV[1].LayerID", nixlkv.ErrRegions},
		{func(p *Peer) { p.Aux[0] = 0 }, "Aux[0]", nixlkv.ErrAuxIndex},
		{func(p *Peer) { p.State[0].ItemLens = []uint64{1, 2} }, "State[0].ItemLens", nixlkv.ErrState},
		{func(p *Peer) { p.State[0].DataLens = []uint64{1, 2} }, "State[0].DataLens", nixlkv.ErrState},
		{func(p *Peer) { p.State[0].Dims[0] = -1 }, "State[0].Dims[0]", nixlkv.ErrState},
		{func(p *Peer) { p.Ranks.TP = -1 }, "Ranks.TP", nixlkv.ErrTopology},
		{func(p *Peer) { p.Ranks.EngineRank = -1 }, "Ranks.EngineRank", nixlkv.ErrTopology},
		{func(p *Peer) { p.Ranks.DCPRank = 1 }, "Ranks.DCPRank", nixlkv.ErrTopology},
	} {
		p := peerOf("a")
		c.change(p)
		refused(t, p.Validate(), c.field, c.sentinel, "expected")
	}
}

func TestSameGeometry(t *testing.T) {
	p := peerOf("a")
	q := peerOf("a")
	q.Seen, q.AgentMetadata, q.Ranks.DCP = noon, []byte("newer"), 1
	if !p.SameGeometry(q) || !q.SameGeometry(p) {
		t.Error("a repeat is not the same")
	}
	for i, change := range []func(*Peer){
		func(p *Peer) { p.Agent = "b" }, func(p *Peer) { p.Addr = "x" }, func(p *Peer) { p.Dialect = Notifications },
		func(p *Peer) { p.KV[0].Base++ }, func(p *Peer) { p.KV = p.KV[:1] }, func(p *Peer) { p.KV[1].Kind = DRAM },
		func(p *Peer) { p.Aux[0]++ }, func(p *Peer) { p.GPU++ }, func(p *Peer) { p.Ranks.TP++ },
		func(p *Peer) { p.State[0].Dims = nil }, func(p *Peer) { p.State[0].Ptrs[0]++ },
		func(p *Peer) { p.State[0].ItemLens[0]++ }, func(p *Peer) { p.State[0].LayerIDs[0]++ },
		func(p *Peer) { p.State[0].DataLens[0]++ }, func(p *Peer) { p.State = nil },
	} {
		q := peerOf("a")
		change(q)
		if p.SameGeometry(q) {
			t.Errorf("change %d goes unnoticed", i)
		}
	}
}

func TestDialectNames(t *testing.T) {
	if s := Notifications.String() + " " + Status.String() + " " + Dialect(4).String(); s != "notifications status Dialect(4)" {
		t.Error(s)
	}
}

// FuzzPeerFromRegistration takes any bytes for the frames of a message to a prefill: each
// frame's length as a uint16, then its bytes.
func FuzzPeerFromRegistration(f *testing.F) {
	seed := frames(f, must(mha().Registration("decode-1", []byte("md"), from)))
	for _, n := range []int{13, 18, 24, 25} {
		var b []byte
		for _, frame := range seed[:n] {
			b = append(binary.LittleEndian.AppendUint16(b, uint16(len(frame))), frame...)
		}
		f.Add(b)
		f.Add(bytes.Replace(b, []byte("VRAM,VRAM"), []byte("DRAM,VRAM"), 1))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var input [][]byte
		for len(b) >= 2 {
			n := min(int(binary.LittleEndian.Uint16(b)), len(b)-2)
			input, b = append(input, b[2:2+n]), b[2+n:]
		}
		m, err := wire.ParseAtPrefill(input, wire.Limits{})
		if err != nil {
			return
		}
		g, ok := m.(*wire.Registration)
		if !ok {
			return
		}
		p, err := PeerFromRegistration(g, noon)
		if err != nil {
			if len(fieldErrors(err)) == 0 {
				t.Fatalf("%v names no field", err)
			}
			return
		}
		checkPeer(t, p, g)
	})
}

func checkPeer(t *testing.T, p *Peer, g *wire.Registration) {
	t.Helper()
	if len(p.KV) > 0 && p.Pages() != g.Slots {
		t.Fatalf("%d pages, told %d", p.Pages(), g.Slots)
	}
	for _, r := range p.KV {
		if r.Base == 0 || r.ItemLen == 0 || r.Len%r.ItemLen != 0 || r.Len > 0 && r.Base+(r.Len-1) < r.Base {
			t.Fatalf("%+v", r)
		}
	}
	q, err := p.WithPages(1 << 20)
	if err == nil && len(q.KV) > 0 && q.Pages() == 0 {
		t.Fatalf("%+v has no pages", q)
	}
	table := NewTable(TableConfig[int]{})
	first, outcome, err := table.Register(p)
	if first == nil || outcome != Added || err != nil {
		t.Fatal(outcome, err)
	}
	again, err := PeerFromRegistration(g, noon.Add(time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	if prep, outcome, err := table.Register(again); prep != nil || outcome != Unchanged || err != nil {
		t.Fatal(outcome, err)
	}
}
