package embedded

import (
	"errors"
	"math"
	"strings"
	"testing"

	"github.com/nixlkv/nixlkv/internal/engine"
)

func TestBackend(t *testing.T) {
	e := New(nil, WithWorkers(0), WithInbox(-1))
	if info := e.Info(); info.Name != "embedded" {
		t.Fatalf("info %+v", info)
	}
	for _, name := range []string{"", strings.Repeat("x", MaxName+1)} {
		_, err := e.NewAgent(name, engine.AgentConfig{})
		wantErr(t, err, engine.ErrInvalidParam)
	}
	a, err := e.NewAgent("a", engine.AgentConfig{HostVRAM: true})
	if err != nil {
		t.Fatal(err)
	}
	// Nothing works before there is a backend.
	mem := foreign(t, 4096)
	wantErr(t, a.Register(engine.DRAM, []engine.Region{mem.region()}), engine.ErrNotFound)
	wantErr(t, a.Deregister(engine.DRAM, []engine.Region{mem.region()}), engine.ErrNotFound)
	_, err = a.LocalMetadata()
	wantErr(t, err, engine.ErrNotFound)
	wantErr(t, a.Notifications(&engine.Notifications{}), engine.ErrNotFound)
	_, _, err = a.BackendParams(backendHandle)
	wantErr(t, err, engine.ErrInvalidParam)

	plugins, err := a.Plugins()
	if err != nil || len(plugins) != 1 || plugins[0] != "EMBEDDED" {
		t.Fatalf("plugins %q, %v", plugins, err)
	}
	_, _, err = a.PluginParams("GDS")
	wantErr(t, err, engine.ErrNotFound)
	_, err = a.CreateBackend("GDS", nil)
	wantErr(t, err, engine.ErrNotFound)
	if _, mems, err := a.PluginParams("UCX"); err != nil || len(mems) != 2 {
		t.Fatalf("kinds of memory %v, %v", mems, err)
	}
	h, err := a.CreateBackend("UCX", map[string]string{"num_threads": "8"})
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"UCX", "EMBEDDED"} {
		_, err = a.CreateBackend(name, nil)
		wantErr(t, err, engine.ErrInvalidParam)
	}
	params, mems, err := a.BackendParams(h)
	if err != nil || params["num_threads"] != "8" || len(mems) != 2 {
		t.Fatalf("backend parameters %v, %v, %v", params, mems, err)
	}
	if err := a.Destroy(); err != nil {
		t.Fatal(err)
	}
	if err := a.Destroy(); err != nil {
		t.Fatal(err)
	}
	wantErr(t, a.Register(engine.DRAM, []engine.Region{mem.region()}), engine.ErrInvalidState)
	_, err = a.CreateBackend("UCX", nil)
	wantErr(t, err, engine.ErrInvalidState)
}

func TestRegister(t *testing.T) {
	a := newTestAgent(t, "a", engine.AgentConfig{})
	mem, sh := foreign(t, 8192), shared(t, 8192)
	reg := func(change func(*engine.Region)) engine.Region {
		r := sh.region()
		change(&r)
		return r
	}
	bad := []struct {
		name string
		mem  engine.Mem
		reg  engine.Region
		errs []error
	}{
		{"VRAM", engine.VRAM, mem.region(), []error{engine.ErrUnsupported, engine.ErrNotFound}},
		{"file", engine.File, mem.region(), []error{engine.ErrUnsupported}},
		{"no kind", 99, mem.region(), []error{engine.ErrUnsupported}},
		{"empty", engine.DRAM, reg(func(r *engine.Region) { r.Len = 0 }), []error{engine.ErrInvalidParam}},
		{"null", engine.DRAM, reg(func(r *engine.Region) { r.Addr = 0 }), []error{engine.ErrInvalidParam}},
		{"wraps", engine.DRAM, reg(func(r *engine.Region) { r.Len = math.MaxUint64 }), []error{engine.ErrInvalidParam}},
		{"device", engine.DRAM, reg(func(r *engine.Region) { r.Dev = 1 }), []error{engine.ErrInvalidParam}},
		{"beyond the file", engine.DRAM, reg(func(r *engine.Region) { r.Off = 1 }), []error{engine.ErrInvalidParam}},
		{"before the file", engine.DRAM, reg(func(r *engine.Region) { r.Off = -1 }), []error{engine.ErrInvalidParam}},
		{"no such descriptor", engine.DRAM, reg(func(r *engine.Region) { r.FD = 1 << 20 }), []error{engine.ErrInvalidParam}},
	}
	for _, c := range bad {
		t.Run(c.name, func(t *testing.T) {
			// With a good one before, which must not stay.
			wantErr(t, a.Register(c.mem, []engine.Region{sh.region(), c.reg}), c.errs...)
			if n := a.Stats().Regions; n != 0 {
				t.Fatalf("%d regions", n)
			}
		})
	}

	// The same twice, and overlapping.
	register(t, a, mem, mem, sh)
	half := mem.region()
	half.Len /= 2
	if err := a.Register(engine.DRAM, []engine.Region{half}); err != nil {
		t.Fatal(err)
	}
	three := []engine.Region{mem.region(), mem.region(), mem.region()}
	wantErr(t, a.Deregister(engine.DRAM, three), engine.ErrNotRegistered, engine.ErrNotFound)
	if n := a.Stats().Regions; n != 4 {
		t.Fatalf("%d regions", n)
	}
	if err := a.Deregister(engine.DRAM, three[:2]); err != nil {
		t.Fatal(err)
	}
	// What is left of mem is its first half.
	l := newList(t, a, engine.Desc{Addr: half.Addr, Len: half.Len})
	if p, err := a.PrepareLocal(l); err != nil {
		t.Fatal(err)
	} else if err := a.FreePrepared(p); err != nil {
		t.Fatal(err)
	}
	l = newList(t, a, engine.Desc{Addr: half.Addr, Len: half.Len + 1})
	_, err := a.PrepareLocal(l)
	wantErr(t, err, engine.ErrNotRegistered, engine.ErrNotFound)
}

// TestHostVRAM: with the option, VRAM is host memory, whatever the device.
func TestHostVRAM(t *testing.T) { overEach(t, transports, testHostVRAM) }

func testHostVRAM(t *testing.T, kind wayKind) {
	cfg := engine.AgentConfig{HostVRAM: true}
	a, b := kind.agent(t, "a", cfg), kind.agent(t, "b", cfg)
	local, peer := foreign(t, 4096), shared(t, 4096)
	for _, x := range []struct {
		a *Agent
		m *memory
	}{{a, local}, {b, peer}} {
		reg := x.m.region()
		reg.Dev = 3
		if err := x.a.Register(engine.VRAM, []engine.Region{reg}); err != nil {
			t.Fatal(err)
		}
	}
	fill(local.data, 1)
	vram := func(m *memory) engine.List {
		l, err := a.NewList(engine.VRAM)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { a.FreeList(l) })
		if err := a.AppendRuns(l, []engine.Run{{Addr: m.addr(), Len: 1024, Stride: 1024, Count: 4, Dev: 5}}); err != nil {
			t.Fatal(err)
		}
		return l
	}
	r := transfer(t, a, engine.Spec{Op: engine.Write, Remote: load(t, a, b), LocalList: vram(local), RemoteList: vram(peer), Post: true})
	mustSucceed(t, a, r)
	wantBytes(t, peer.data, local.data)
	reg := peer.region()
	reg.Dev = 3
	if err := b.Deregister(engine.VRAM, []engine.Region{reg}); err != nil {
		t.Fatal(err)
	}

	plain := kind.agent(t, "plain", engine.AgentConfig{})
	_, err := plain.NewList(engine.VRAM)
	wantErr(t, err, engine.ErrUnsupported)
	if !strings.Contains(err.Error(), "HostVRAM") {
		t.Fatalf("the error does not say what to do: %v", err)
	}
}

func TestLists(t *testing.T) {
	a := newTestAgent(t, "a", engine.AgentConfig{})
	l := newList(t, a)
	wantErr(t, a.Append(l, []engine.Desc{{Addr: 1, Len: 1, Dev: 1}}), engine.ErrInvalidParam)
	bad := []engine.Run{
		{Addr: 1, Len: 1, Stride: 1, Count: MaxDescriptors + 1},
		{Addr: 1, Len: 1, Stride: 1, Count: math.MaxUint64},
		{Addr: 1, Len: 1, Stride: math.MaxUint64, Count: 3},
		{Addr: math.MaxUint64, Len: 1, Stride: 1, Count: 1},
		{Addr: 1, Len: math.MaxUint64, Stride: 1, Count: 1},
		{Addr: 1, Len: 1, Stride: 1, Count: 1, Dev: 1},
	}
	for _, run := range bad {
		wantErr(t, a.AppendRuns(l, []engine.Run{{Addr: 1, Len: 1, Stride: 1, Count: 2}, run}), engine.ErrInvalidParam)
	}
	if n := len(a.lists.get(uintptr(l)).descs); n != 0 {
		t.Fatalf("%d descriptors after errors", n)
	}
	if err := a.AppendRuns(l, []engine.Run{{Addr: 100, Len: 2, Stride: 10, Count: 3}, {Addr: 5}}); err != nil {
		t.Fatal(err)
	}
	want := []engine.Desc{{Addr: 100, Len: 2}, {Addr: 110, Len: 2}, {Addr: 120, Len: 2}}
	if got := a.lists.get(uintptr(l)).descs; len(got) != 3 || got[0] != want[0] || got[1] != want[1] || got[2] != want[2] {
		t.Fatalf("descriptors %v", got)
	}

	descs := make([]engine.Desc, 1000)
	runs := []engine.Run{{Addr: 1, Len: 1, Stride: 1, Count: 1000}}
	if n := testing.AllocsPerRun(10, func() {
		if errors.Join(a.Clear(l), a.Append(l, descs), a.AppendRuns(l, runs)) != nil {
			t.Fatal("list")
		}
	}); n > 0 {
		t.Fatalf("%v allocations to fill a list again", n)
	}
	for _, err := range []error{a.Append(99, nil), a.AppendRuns(99, nil), a.Clear(99), a.FreePrepared(99)} {
		wantErr(t, err, engine.ErrInvalidParam)
	}
	a.FreeList(99)
	a.FreeRemote(99)
}

func TestCreateErrors(t *testing.T) {
	p := newPair(t, memfdKind, 64<<10)
	a := p.a
	good := p.spec(t, engine.Write, 4096)
	l := func(d ...engine.Desc) engine.List { return newList(t, a, d...) }
	end := p.peer.addr() + uint64(len(p.peer.data))
	cases := []struct {
		name   string
		change func(*engine.Spec)
		errs   []error
		says   string
	}{
		{"nothing", func(s *engine.Spec) { *s = engine.Spec{Op: engine.Write} }, []error{engine.ErrInvalidParam}, ""},
		{"operation", func(s *engine.Spec) { s.Op = 7 }, []error{engine.ErrInvalidParam}, ""},
		{"no remote", func(s *engine.Spec) { s.Remote = 0 }, []error{engine.ErrInvalidParam}, ""},
		{"no list", func(s *engine.Spec) { s.RemoteList = 0 }, []error{engine.ErrInvalidParam}, ""},
		{"empty lists", func(s *engine.Spec) { s.LocalList, s.RemoteList = l(), l() }, []error{engine.ErrInvalidParam}, ""},
		{"counts", func(s *engine.Spec) { s.LocalList = l(p.local.pages(8192)...) }, []error{engine.ErrInvalidParam}, "8 local descriptors, 16"},
		{"lengths", func(s *engine.Spec) {
			s.LocalList = l(p.local.pages(4096)[:2]...)
			s.RemoteList = l(p.peer.pages(4096)[0], engine.Desc{Addr: p.peer.addr(), Len: 5})
		}, []error{engine.ErrInvalidParam}, "descriptor 1: 4096 bytes here, 5 at the peer"},
		{"local bounds", func(s *engine.Spec) {
			s.LocalList, s.RemoteList = l(engine.Desc{Addr: p.local.addr() - 1, Len: 8}), l(p.peer.pages(8)[0])
		}, []error{engine.ErrNotRegistered, engine.ErrNotFound}, "local descriptor 0: 8 bytes at 0x"},
		{"remote bounds", func(s *engine.Spec) {
			s.LocalList, s.RemoteList = l(p.local.pages(8)[0]), l(engine.Desc{Addr: end - 7, Len: 8})
		}, []error{engine.ErrNotRegistered, engine.ErrNotFound}, `peer "target": descriptor 0: 8 bytes at 0x`},
		{"wrapping length", func(s *engine.Spec) {
			s.LocalList, s.RemoteList = l(p.local.pages(8)[0]), l(engine.Desc{Addr: end - 8, Len: math.MaxUint64 - 3})
		}, []error{engine.ErrNotRegistered, engine.ErrNotFound}, ""},
		{"notification", func(s *engine.Spec) { s.HasNotif, s.Notif = true, make([]byte, MaxNotification+1) }, []error{engine.ErrInvalidParam}, ""},
		{"both", func(s *engine.Spec) { s.LocalPrep = 1 }, []error{engine.ErrInvalidParam}, ""},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			spec := good
			c.change(&spec)
			before := a.Stats().Handles
			r, st, err := a.Create(&spec)
			wantErr(t, err, c.errs...)
			if r != 0 || st >= 0 || !errors.Is(err, st) {
				t.Fatalf("request %v, status %v, error %v", r, st, err)
			}
			if !strings.Contains(err.Error(), c.says) {
				t.Fatalf("error %q does not say %q", err, c.says)
			}
			if n := a.Stats().Handles; n != before {
				t.Fatalf("%d handles, had %d", n, before)
			}
		})
	}
}

func TestByIndex(t *testing.T) { overEach(t, transports, testByIndex) }

func testByIndex(t *testing.T, kind wayKind) {
	const page, count = 4096, 64
	p := newPair(t, kind, page*count)
	a := p.a
	fill(p.local.data, 1)
	lp, err := a.PrepareLocal(newList(t, a, p.local.pages(page)...))
	if err != nil {
		t.Fatal(err)
	}
	rp, err := a.PrepareRemote(p.remote, newList(t, a, p.peer.pages(page)...))
	if err != nil {
		t.Fatal(err)
	}
	short, err := a.PrepareLocal(newList(t, a, p.local.pages(100)...))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, h := range []engine.Prepared{lp, rp, short} {
			if err := a.FreePrepared(h); err != nil {
				t.Error(err)
			}
		}
	})
	spec := engine.Spec{Op: engine.Write, LocalPrep: lp, RemotePrep: rp, LocalIndex: []int32{0, 1, 2, 9, 10, 63}, RemoteIndex: []int32{5, 6, 7, 8, 20, 0}}
	for _, noMerge := range []bool{false, true} {
		clear(p.peer.data)
		spec.NoMerge, spec.Post = noMerge, true
		r := transfer(t, a, spec)
		mustSucceed(t, a, r)
		for i, l := range spec.LocalIndex {
			m := spec.RemoteIndex[i]
			wantBytes(t, p.peer.data[m*page:][:page], p.local.data[l*page:][:page])
		}
		tel, err := a.Telemetry(r)
		want := map[bool]uint64{false: 4, true: 6}[noMerge]
		if err != nil || tel.Descriptors != want || tel.Bytes != 6*page || tel.Start.IsZero() || tel.Total <= 0 {
			t.Fatalf("telemetry %+v, %v", tel, err)
		}
	}

	bad := []struct {
		change func(*engine.Spec)
		says   string
	}{
		{func(s *engine.Spec) { s.LocalIndex = s.LocalIndex[:2] }, "2 local indices, 6"},
		{func(s *engine.Spec) { s.LocalIndex, s.RemoteIndex = nil, nil }, "empty"},
		{func(s *engine.Spec) { s.LocalIndex = []int32{0, 1, 2, 3, 4, 64} }, "local index 5 is 64"},
		{func(s *engine.Spec) { s.RemoteIndex = []int32{0, -1, 2, 3, 4, 5} }, "remote index 1 is -1"},
		{func(s *engine.Spec) { s.LocalPrep, s.RemotePrep = rp, lp }, "one of the local side"},
		{func(s *engine.Spec) { s.RemotePrep = 0 }, "one of the local side"},
		{func(s *engine.Spec) { s.LocalPrep = short }, "descriptor 0: 100 bytes here, 4096"},
	}
	for _, c := range bad {
		s := spec
		c.change(&s)
		_, _, err := a.Create(&s)
		wantErr(t, err, engine.ErrInvalidParam)
		if !strings.Contains(err.Error(), c.says) {
			t.Fatalf("error %q does not say %q", err, c.says)
		}
	}
	_, err = a.PrepareLocal(newList(t, a))
	wantErr(t, err, engine.ErrInvalidParam)
	_, err = a.PrepareRemote(0, newList(t, a))
	wantErr(t, err, engine.ErrInvalidParam)

	spec.Post = false
	r := transfer(t, a, spec)
	if _, err := a.Post(r, nil, false); err != nil {
		t.Fatal(err)
	}
	mustSucceed(t, a, r)
	// Create and release use what earlier requests left.
	if n := testing.AllocsPerRun(100, func() {
		r, _, err := a.Create(&spec)
		if err != nil || a.Release(r) != nil {
			t.Fatal(err)
		}
	}); n > 0 {
		t.Fatalf("%v allocations for a request by index", n)
	}
	reqs, out := []engine.Request{r, r, 1 << 40}, make([]engine.Status, 3)
	if n := testing.AllocsPerRun(100, func() { a.Poll(reqs, out) }); n > 0 {
		t.Fatalf("%v allocations to poll", n)
	}
	if out[0] != engine.Success || out[2] != engine.ErrInvalidParam {
		t.Fatalf("polled %v", out)
	}
}

func TestRequestHandles(t *testing.T) {
	p := newPair(t, memfdKind, 4096)
	spec := p.spec(t, engine.Write, 4096)
	old, _, err := p.a.Create(&spec)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.a.Release(old); err != nil {
		t.Fatal(err)
	}
	r := transfer(t, p.a, spec) // in the same slot
	if r == old {
		t.Fatal("a handle was used again")
	}
	wantErr(t, p.a.Release(old), engine.ErrInvalidParam)
	wantErr(t, p.a.Reason(old), engine.ErrInvalidParam)
	_, err = p.a.Post(old, nil, false)
	wantErr(t, err, engine.ErrInvalidParam)
	_, err = p.a.Telemetry(old)
	wantErr(t, err, engine.ErrInvalidParam)
	_, err = p.a.EstimateCost(old)
	wantErr(t, err, engine.ErrInvalidParam)
	if st := poll(p.a, old); st != engine.ErrInvalidParam {
		t.Fatalf("status %v of a released request", st)
	}
	_, err = p.a.Telemetry(r)
	wantErr(t, err, engine.ErrInvalidState)
	_, err = p.a.EstimateCost(r)
	wantErr(t, err, engine.ErrUnsupported)
	_, err = p.a.Post(r, make([]byte, MaxNotification+1), true)
	wantErr(t, err, engine.ErrInvalidParam)
	if _, err := p.a.Post(r, nil, false); err != nil {
		t.Fatal(err)
	}
	mustSucceed(t, p.a, r)
	if c, err := p.a.EstimateCost(r); err != nil || c.Duration <= 0 || c.Margin <= 0 {
		t.Fatalf("cost %+v, %v", c, err)
	}

	quiet := newTestAgent(t, "quiet", engine.AgentConfig{})
	register(t, quiet, p.local)
	s := engine.Spec{
		Op: engine.Write, Remote: load(t, quiet, p.b), Post: true,
		LocalList:  newList(t, quiet, p.local.pages(4096)...),
		RemoteList: newList(t, quiet, p.peer.pages(4096)...),
	}
	q := transfer(t, quiet, s)
	mustSucceed(t, quiet, q)
	_, err = quiet.Telemetry(q)
	wantErr(t, err, engine.ErrNoTelemetry)
}
