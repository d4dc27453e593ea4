package kvsender

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/hostmem"
	"github.com/nixlkv/nixlkv/internal/control"
	"github.com/nixlkv/nixlkv/internal/wire"
	"github.com/nixlkv/nixlkv/nixl"
	"github.com/nixlkv/nixlkv/registry"
)

// A decode worker for tests: it registers, tells pages, and keeps what comes. It is no
// decode of this library; the real ones, SGLang's, are in the interop tests.

const (
	kitPage  = 256 // bytes
	kitPages = 64
	kitAux   = 64 // bytes of a slot
	kitSlots = 16
)

var engineKinds = []nixl.Kind{nixl.Embedded, nixl.Native}

// eachEngine runs a test over both engines.
func eachEngine(t *testing.T, f func(t *testing.T, e *nixl.Engine)) {
	for _, k := range engineKinds {
		t.Run(k.String(), func(t *testing.T) {
			e, err := nixl.Open(k)
			if err != nil {
				if k == nixl.Native && os.Getenv("NIXLKV_NIXL_LIB") == "" {
					t.Skip("skip: no NIXL library on this machine; make test fetches one")
				}
				t.Fatal(err)
			}
			defer func() {
				if err := e.Close(); err != nil {
					t.Error(err)
				}
				if s := e.Stats(); s.Agents != 0 {
					t.Errorf("agents left: %+v", s)
				}
			}()
			f(t, e)
		})
	}
}

// kitMemory is the memory of either side: KV regions, one behind the other, and one aux
// buffer.
type kitMemory struct {
	kv, aux *hostmem.Buffer
	regions int
}

func newKitMemory(t testing.TB, regions int) *kitMemory {
	t.Helper()
	kv, err := hostmem.Alloc(regions * kitPages * kitPage)
	if err != nil {
		t.Fatal(err)
	}
	aux, err := hostmem.Alloc(kitSlots * kitAux)
	if err != nil {
		t.Fatal(err)
	}
	return &kitMemory{kv, aux, regions}
}

func (k *kitMemory) free(t testing.TB) {
	if err := k.kv.Free(); err != nil {
		t.Error(err)
	}
	if err := k.aux.Free(); err != nil {
		t.Error(err)
	}
}

func (k *kitMemory) layout() *registry.Layout {
	l := &registry.Layout{PageSize: 16, KVHeads: 1, TotalKVHeads: 1, Aux: []registry.AuxBuffer{{Base: uint64(k.aux.Addr()), Len: kitSlots * kitAux, ItemLen: kitAux}}}
	for i := range k.regions {
		l.KV = append(l.KV, registry.Region{Base: uint64(k.kv.Addr()) + uint64(i*kitPages*kitPage), Len: kitPages * kitPage, ItemLen: kitPage, LayerID: registry.NoLayer, Kind: registry.DRAM})
	}
	return l
}

// page views a page of a region.
func (k *kitMemory) page(region int, page int32) []byte {
	at := (region*kitPages + int(page)) * kitPage
	return k.kv.Bytes()[at : at+kitPage]
}

func (k *kitMemory) slot(n int) []byte { return k.aux.Bytes()[n*kitAux : (n+1)*kitAux] }

func (k *kitMemory) fill() {
	for i, b := 0, k.kv.Bytes(); i < len(b); i++ {
		b[i] = byte(i*7 + i/kitPage*13 + 1)
	}
	for i, b := 0, k.aux.Bytes(); i < len(b); i++ {
		b[i] = byte(i*3 + 5)
	}
}

func closeManager(t testing.TB, m *Manager) {
	t.Helper()
	if err := m.Close(); err != nil {
		t.Error(err)
	}
	if s := m.Stats(); s.Rooms != 0 || s.Agent != (nixl.AgentStats{}) {
		t.Errorf("left after Close: %d rooms, agent %+v", s.Rooms, s.Agent)
	}
}

// decode is the test's decode worker.
type decode struct {
	t       *testing.T
	mem     *kitMemory
	agent   *nixl.Agent
	reg     *nixl.Registration
	ctl     *control.Control
	to      control.Endpoint
	frames  int           // of its registration: 24 or 25
	regions []nixl.Region // of KV, where they are not all of one kind
	port    int           // of its control socket; 0: any

	mu       sync.Mutex
	statuses []*wire.KVStatus
	acks     []*wire.AbortAck
	tags     []wire.Tag
	came     chan struct{}
}

var decodes atomic.Int64

// newDecode makes a decode that talks to a manager. frames says which dialect it speaks.
func newDecode(t *testing.T, e *nixl.Engine, m *Manager, mem *kitMemory, frames int) *decode {
	t.Helper()
	d := &decode{t: t, mem: mem, frames: frames, came: make(chan struct{}, 1)}
	d.start(e, m)
	return d
}

// start makes the decode's agent, memory and socket.
func (d *decode) start(e *nixl.Engine, m *Manager, opts ...nixl.AgentOption) {
	d.t.Helper()
	var err error
	if d.agent, err = e.NewAgent(fmt.Sprintf("decode-%d-%d", os.Getpid(), decodes.Add(1)), opts...); err != nil {
		d.t.Fatal(err)
	}
	kv := d.regions
	if kv == nil {
		kv = []nixl.Region{nixl.Host(d.mem.kv)}
		if d.agent.HostVRAM() {
			kv[0] = kv[0].As(nixl.VRAM, 0)
		}
	}
	if d.reg, err = d.agent.Register(append(kv, nixl.Host(d.mem.aux))...); err != nil {
		d.t.Fatal(err)
	}
	if d.ctl, err = control.New(control.Config{Handler: d.receive, Port: d.port}); err != nil {
		d.t.Fatal(err)
	}
	if d.to, err = control.NewEndpoint(m.advertise, m.ControlPort()); err != nil {
		d.t.Fatal(err)
	}
}

func (d *decode) close() {
	d.t.Helper()
	if err := d.ctl.Close(context.Background()); err != nil {
		d.t.Error(err)
	}
	if err := d.agent.Close(); err != nil {
		d.t.Error(err)
	}
}

func (d *decode) receive(frames [][]byte) {
	msg, err := wire.ParseAtDecode(frames, wire.Limits{})
	d.mu.Lock()
	defer d.mu.Unlock()
	switch msg := msg.(type) {
	case *wire.KVStatus:
		d.statuses = append(d.statuses, msg)
	case *wire.AbortAck:
		d.acks = append(d.acks, msg)
	default:
		d.t.Errorf("the prefill sent %q: %v", frames, err)
	}
	select {
	case d.came <- struct{}{}:
	default:
	}
}

func (d *decode) endpoint() wire.Endpoint { return wire.Endpoint{IP: "127.0.0.1", Port: d.ctl.Port()} }

func (d *decode) send(frames [][]byte, err error) {
	d.t.Helper()
	if err != nil {
		d.t.Fatal(err)
	}
	d.sendRaw(frames)
}

func (d *decode) sendRaw(frames [][]byte) {
	d.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if _, err := d.ctl.Send(ctx, control.Message{To: d.to, Frames: frames}); err != nil {
		d.t.Fatal(err)
	}
}

// registration describes the decode's memory; change it before register sends it.
func (d *decode) registration() *wire.Registration {
	md, err := d.agent.LocalMetadata()
	if err != nil {
		d.t.Fatal(err)
	}
	g, err := d.mem.layout().Registration(d.agent.Name(), md, d.endpoint())
	if err != nil {
		d.t.Fatal(err)
	}
	return g
}

func (d *decode) register(g *wire.Registration) {
	d.t.Helper()
	frames, err := new(wire.Encoder).Registration(g)
	if err == nil {
		frames = frames[:d.frames]
	}
	d.send(frames, err)
}

// tell sends a room's metadata.
func (d *decode) tell(id nixlkv.Room, pages []int32, aux int, change ...func(*wire.Metadata)) {
	d.t.Helper()
	meta := &wire.Metadata{Room: id, From: d.endpoint(), Agent: d.agent.Name(), KVIndices: pages, AuxIndex: aux, Destinations: 1}
	for _, c := range change {
		c(meta)
	}
	d.send(new(wire.Encoder).Metadata(meta))
}

// until waits for something to have come. It polls notifications meanwhile.
func (d *decode) until(what string, done func() bool) {
	d.t.Helper()
	var buf nixl.Notifications
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for end := time.After(20 * time.Second); ; {
		if err := d.agent.Notifications(&buf); err != nil {
			d.t.Fatal(err)
		}
		d.mu.Lock()
		for _, msg := range buf.All() {
			tag, err := wire.ParseTag(bytes.Clone(msg))
			if err != nil {
				d.t.Errorf("notification %q: %v", msg, err)
			}
			d.tags = append(d.tags, tag)
		}
		ok := done()
		d.mu.Unlock()
		if ok {
			return
		}
		select {
		case <-d.came:
		case <-tick.C:
		case <-end:
			d.t.Fatalf("waiting for %s: statuses %+v, acks %+v, tags %+v", what, d.statuses, d.acks, d.tags)
		}
	}
}

func (d *decode) status(id nixlkv.Room) (found *wire.KVStatus) {
	d.t.Helper()
	d.until(fmt.Sprintf("the status of room %d", id), func() bool {
		i := slices.IndexFunc(d.statuses, func(s *wire.KVStatus) bool { return s.Room == id })
		if i >= 0 {
			found = d.statuses[i]
			d.statuses = slices.Delete(d.statuses, i, i+1)
		}
		return i >= 0
	})
	return found
}

func (d *decode) ack(id nixlkv.Room) (found *wire.AbortAck) {
	d.t.Helper()
	d.until(fmt.Sprintf("the acknowledgement of room %d", id), func() bool {
		i := slices.IndexFunc(d.acks, func(a *wire.AbortAck) bool { return a.Room == id })
		if i >= 0 {
			found = d.acks[i]
			d.acks = slices.Delete(d.acks, i, i+1)
		}
		return i >= 0
	})
	return found
}

// compare checks that pages and slot arrived, and that every other byte is still zero.
func (d *decode) compare(from *kitMemory, src, dst []int32, srcSlot, dstSlot int) {
	d.t.Helper()
	want := make([]byte, len(d.mem.kv.Bytes()))
	for r := range min(from.regions, d.mem.regions) {
		for i := range src {
			copy(want[(r*kitPages+int(dst[i]))*kitPage:], from.page(r, src[i]))
		}
	}
	if !bytes.Equal(d.mem.kv.Bytes(), want) {
		d.t.Error("the decode's pages are not those of the prefill, or others changed")
	}
	wantAux := make([]byte, len(d.mem.aux.Bytes()))
	if srcSlot >= 0 {
		copy(wantAux[dstSlot*kitAux:], from.slot(srcSlot))
	}
	if !bytes.Equal(d.mem.aux.Bytes(), wantAux) {
		d.t.Error("the decode's aux slot is not that of the prefill, or others changed")
	}
}

func (d *decode) clear() {
	clear(d.mem.kv.Bytes())
	clear(d.mem.aux.Bytes())
}

// toldOf waits until the decode was told that a room has failed, and why.
func (d *decode) toldOf(id nixlkv.Room, why string) {
	d.t.Helper()
	if st := d.status(id); st.Status != wire.PollFailed || !strings.Contains(st.Reason, why) {
		d.t.Errorf("told %+v, want a failure with %q", st, why)
	}
}
