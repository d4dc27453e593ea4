package kvsender

import (
	"slices"
	"sync"
	"testing"

	"go.uber.org/zap"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/internal/embedded"
	"github.com/nixlkv/nixlkv/internal/engine"
	"github.com/nixlkv/nixlkv/internal/wire"
	"github.com/nixlkv/nixlkv/nixl"
	"github.com/nixlkv/nixlkv/registry"
)

// recorder is an engine that notes every descriptor of every list, by kind of memory, and
// otherwise is the embedded one.
type recorder struct {
	engine.Engine
	mu    sync.Mutex
	descs map[engine.Mem][]engine.Desc
}

type recordingAgent struct {
	engine.Agent
	r *recorder

	mu   sync.Mutex
	mems map[engine.List]engine.Mem
}

func newRecorder() *recorder {
	return &recorder{Engine: embedded.New(), descs: map[engine.Mem][]engine.Desc{}}
}

func (r *recorder) NewAgent(name string, cfg engine.AgentConfig) (engine.Agent, error) {
	a, err := r.Engine.NewAgent(name, cfg)
	if err != nil {
		return nil, err
	}
	return &recordingAgent{Agent: a, r: r, mems: map[engine.List]engine.Mem{}}, nil
}

func (a *recordingAgent) NewList(m engine.Mem) (engine.List, error) {
	l, err := a.Agent.NewList(m)
	if err == nil {
		a.mu.Lock()
		a.mems[l] = m
		a.mu.Unlock()
	}
	return l, err
}

func (a *recordingAgent) note(l engine.List, descs ...engine.Desc) {
	a.mu.Lock()
	m := a.mems[l]
	a.mu.Unlock()
	a.r.mu.Lock()
	defer a.r.mu.Unlock()
	a.r.descs[m] = append(a.r.descs[m], descs...)
}

func (a *recordingAgent) Append(l engine.List, d []engine.Desc) error {
	a.note(l, d...)
	return a.Agent.Append(l, d)
}

func (a *recordingAgent) AppendRuns(l engine.List, runs []engine.Run) error {
	for _, r := range runs {
		a.note(l, engine.Desc{Addr: r.Addr, Len: r.Len, Dev: r.Dev}, engine.Desc{Addr: r.Addr + r.Stride*(r.Count-1), Len: r.Len, Dev: r.Dev})
	}
	return a.Agent.AppendRuns(l, runs)
}

// Descriptors of VRAM carry the device of their side, those of DRAM and aux 0, and each lies
// in a region of its side, whether it goes by prepared lists or anew.
func TestDescriptorsCarryTheDevice(t *testing.T) {
	const hereGPU, thereGPU = 2, 5
	rec := newRecorder()
	e := nixl.OpenOver(rec, nixl.Embedded, zap.NewNop())
	here, there := newKitMemory(t, 4), newKitMemory(t, 4)
	here.fill()
	layout := here.layout()
	layout.GPU = hereGPU
	for i := range layout.KV {
		layout.KV[i].Kind = registry.VRAM
	}
	m, err := NewManager(t.Context(), layout, WithEngine(e), WithHostVRAM())
	ok(t, err)
	d := &decode{t: t, mem: there, frames: 25, came: make(chan struct{}, 1)}
	d.start(e, m, nixl.WithHostVRAM())
	g := d.registration()
	g.GPU = thereGPU
	for i := range g.Kinds {
		g.Kinds[i] = wire.VRAM
	}
	d.register(g)
	for i, pages := range [][]int32{{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}, {40, 20, 30}} {
		s := open(t, m, nixlkv.Room(i+1))
		d.tell(s.Room(), pages, 0)
		ok(t, s.Begin(Plan{Pages: len(pages), Aux: Aux(0)}))
		ok(t, s.Finish(pages, nil))
		ok(t, s.Wait(within(t)))
		ok(t, s.Close())
	}
	closeManager(t, m)
	d.close()
	ok(t, e.Close())

	inside := func(b []byte, addr uintptr, x engine.Desc) bool {
		return x.Addr >= uint64(addr) && x.Addr+x.Len <= uint64(addr)+uint64(len(b))
	}
	seen := map[uint64]int{}
	for _, x := range rec.descs[engine.VRAM] {
		switch {
		case inside(here.kv.Bytes(), here.kv.Addr(), x) && x.Dev == hereGPU:
		case inside(there.kv.Bytes(), there.kv.Addr(), x) && x.Dev == thereGPU:
		default:
			t.Errorf("VRAM descriptor %+v", x)
		}
		seen[x.Dev]++
	}
	if seen[hereGPU] == 0 || seen[hereGPU] != seen[thereGPU] {
		t.Errorf("descriptors by device: %v", seen)
	}
	if len(rec.descs[engine.DRAM]) == 0 || slices.ContainsFunc(rec.descs[engine.DRAM], func(x engine.Desc) bool { return x.Dev != 0 }) {
		t.Errorf("DRAM descriptors %+v", rec.descs[engine.DRAM])
	}
	here.free(t)
	there.free(t)
}
