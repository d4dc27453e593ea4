package embedded

import (
	"testing"

	"github.com/nixlkv/nixlkv/internal/engine"
)

func TestLoadErrors(t *testing.T) {
	a, b := newTestAgent(t, "a", engine.AgentConfig{}), newTestAgent(t, "b", engine.AgentConfig{})
	register(t, b, shared(t, 4096))
	md, err := b.LocalMetadata()
	if err != nil {
		t.Fatal(err)
	}
	changed := func(change func(*metadata)) []byte {
		m, err := parseMetadata(md)
		if err != nil {
			t.Fatal(err)
		}
		change(m)
		return m.encode()
	}
	own, err := a.LocalMetadata()
	if err != nil {
		t.Fatal(err)
	}
	cases := []struct {
		name string
		md   []byte
		errs []error
	}{
		{"none", nil, []error{engine.ErrUnsupported, engine.ErrInvalidParam}},
		{"of NIXL", []byte("nixlSerDes|00000000Agent"), []error{engine.ErrUnsupported}},
		{"cut short", md[:len(md)-1], []error{engine.ErrInvalidParam}},
		{"own", own, []error{engine.ErrInvalidParam}},
		{"another boot", changed(func(m *metadata) { m.host.boot[0]++ }), []error{ErrOtherHost, engine.ErrUnsupported}},
		{"another namespace", changed(func(m *metadata) { m.host.netInode++ }), []error{ErrOtherHost, engine.ErrUnsupported}},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			r, _, err := a.LoadRemote(c.md)
			wantErr(t, err, c.errs...)
			if r != 0 {
				t.Fatal("a handle came with the error")
			}
		})
	}
	for _, err := range []error{a.CheckRemote(0), a.Connect(7), a.InvalidateRemote(7), a.Notify(7, nil)} {
		wantErr(t, err, engine.ErrInvalidParam)
	}
}

// TestNobodyThere: metadata of an agent that is gone loads, as with NIXL, and shows at
// the first use.
func TestNobodyThere(t *testing.T) { overEach(t, transports, testNobodyThere) }

func testNobodyThere(t *testing.T, kind wayKind) {
	a := kind.agent(t, "a", engine.AgentConfig{})
	local := foreign(t, 4096)
	register(t, a, local)
	gone, err := New().NewAgent("b", engine.AgentConfig{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := gone.CreateBackend("UCX", kind.params); err != nil {
		t.Fatal(err)
	}
	mem := shared(t, 4096)
	register(t, gone.(*Agent), mem)
	md, err := gone.LocalMetadata()
	if err != nil {
		t.Fatal(err)
	}
	if err := gone.Destroy(); err != nil {
		t.Fatal(err)
	}
	remote := loadBytes(t, a, md)
	if err := a.CheckRemote(remote); err != nil {
		t.Fatal(err)
	}
	r := transfer(t, a, engine.Spec{
		Op: engine.Write, Remote: remote, Post: true,
		LocalList: newList(t, a, local.pages(4096)...), RemoteList: newList(t, a, mem.pages(4096)...),
	})
	mustFail(t, a, r, engine.ErrBackend, engine.ErrPeerLost)
	wantErr(t, a.CheckRemote(remote), engine.ErrNotFound, engine.ErrPeerLost)
	wantErr(t, a.Connect(loadBytes(t, a, md)), engine.ErrPeerLost)
	wantErr(t, a.Notify(loadBytes(t, a, md), nil), engine.ErrPeerLost)
	if got := a.Stats(); got.Loaded != 0 || got.Lost != 3 {
		t.Fatalf("stats %+v", got)
	}
}

// TestReload: memory registered after the metadata was made is not known until newer
// metadata is loaded; memory deregistered since is not known any more.
func TestReload(t *testing.T) {
	for _, kind := range kinds {
		t.Run(kind.name, func(t *testing.T) {
			p := newPair(t, kind, 4096)
			stale, err := p.b.LocalMetadata()
			if err != nil {
				t.Fatal(err)
			}
			first := p.spec(t, engine.Write, 4096)
			first.Post = true
			old := transfer(t, p.a, first)
			mustSucceed(t, p.a, old)

			later := kind.get(t, 4096)
			register(t, p.b, later)
			second := first
			second.RemoteList = newList(t, p.a, later.pages(4096)...)
			_, _, err = p.a.Create(&second)
			wantErr(t, err, engine.ErrNotRegistered, engine.ErrNotFound)
			again := load(t, p.a, p.b)
			if again == p.remote {
				t.Fatal("the same handle twice")
			}
			// Either handle knows, and older metadata takes nothing away.
			loadBytes(t, p.a, stale)
			mustSucceed(t, p.a, transfer(t, p.a, second))
			second.Remote = again
			mustSucceed(t, p.a, transfer(t, p.a, second))

			if err := p.b.Deregister(engine.DRAM, []engine.Region{p.peer.region()}); err != nil {
				t.Fatal(err)
			}
			// By the old metadata it is there; the peer says no.
			if _, err := p.a.Post(old, nil, false); err != nil {
				t.Fatal(err)
			}
			mustFail(t, p.a, old, engine.ErrNotFound, engine.ErrNotRegistered)
			load(t, p.a, p.b)
			_, _, err = p.a.Create(&first)
			wantErr(t, err, engine.ErrNotRegistered)
			_, err = p.a.Post(old, nil, false)
			wantErr(t, err, engine.ErrNotRegistered)

			// At the same address again: a new region, which needs newer metadata.
			register(t, p.b, p.peer)
			load(t, p.a, p.b)
			mustSucceed(t, p.a, transfer(t, p.a, first))
			_, err = p.a.Post(old, nil, false)
			wantErr(t, err, engine.ErrNotRegistered)
		})
	}
}

// TestReloadUnmaps: newer metadata without a region makes the initiator let it go by
// itself.
func TestReloadUnmaps(t *testing.T) {
	p := newPair(t, memfdKind, 4096)
	spec := p.spec(t, engine.Write, 4096)
	spec.Post = true
	r := transfer(t, p.a, spec)
	mustSucceed(t, p.a, r)
	md, err := p.b.LocalMetadata()
	if err != nil {
		t.Fatal(err)
	}
	m, err := parseMetadata(md)
	if err != nil {
		t.Fatal(err)
	}
	m.regions, m.epoch = nil, m.epoch+1
	loadBytes(t, p.a, m.encode())
	in := p.b.listInbound()
	eventually(t, "the end of the grant", func() bool {
		_, held := in[0].holds(p.b.region(1))
		return !held
	})
	_, err = p.a.Post(r, nil, false)
	wantErr(t, err, engine.ErrNotRegistered)
}

func TestInvalidate(t *testing.T) {
	for _, kind := range kinds {
		t.Run(kind.name, func(t *testing.T) {
			p := newPair(t, kind, 16<<20)
			spec := p.spec(t, engine.Write, 4096)
			spec.NoMerge, spec.Post = true, true
			mustSucceed(t, p.a, transfer(t, p.a, spec))
			second := load(t, p.a, p.b)
			var flying []engine.Request
			for range 8 {
				flying = append(flying, transfer(t, p.a, spec))
			}
			if err := p.a.InvalidateRemote(p.remote); err != nil {
				t.Fatal(err)
			}
			for _, r := range flying {
				// Those that were quicker did succeed.
				if st := settled(t, p.a, r); st != engine.Success {
					mustFail(t, p.a, r, engine.ErrNotFound)
				}
			}
			for _, h := range []engine.Remote{p.remote, second} {
				wantErr(t, p.a.CheckRemote(h), engine.ErrNotFound)
				wantErr(t, p.a.Connect(h), engine.ErrNotFound)
				wantErr(t, p.a.InvalidateRemote(h), engine.ErrNotFound)
				wantErr(t, p.a.Notify(h, nil), engine.ErrNotFound)
			}
			_, _, err := p.a.Create(&spec)
			wantErr(t, err, engine.ErrNotFound)
			_, err = p.a.Post(flying[0], nil, false)
			wantErr(t, err, engine.ErrNotFound)
			// The target need not be asked: what was mapped is let go.
			eventually(t, "the end of the connection", func() bool { return p.b.Stats().Inbound == 0 })

			spec.Remote = load(t, p.a, p.b)
			fill(p.local.data, 1)
			mustSucceed(t, p.a, transfer(t, p.a, spec))
			wantBytes(t, p.peer.data, p.local.data)
			if lost := p.a.Stats().Lost; lost != 0 {
				t.Fatalf("%d peers lost", lost)
			}
		})
	}
}

// TestReplace: an agent with the name of one that is loaded takes its place.
func TestReplace(t *testing.T) { overEach(t, transports, testReplace) }

func testReplace(t *testing.T, kind wayKind) {
	p := newPair(t, kind, 4096)
	spec := p.spec(t, engine.Write, 4096)
	spec.Post = true
	r := transfer(t, p.a, spec)
	mustSucceed(t, p.a, r)
	later := kind.agent(t, "target", engine.AgentConfig{})
	register(t, later, p.peer)
	spec.Remote = load(t, p.a, later)
	wantErr(t, p.a.CheckRemote(p.remote), engine.ErrNotFound, engine.ErrPeerLost)
	_, err := p.a.Post(r, nil, false)
	wantErr(t, err, engine.ErrNotFound)
	spec.HasNotif = true
	mustSucceed(t, p.a, transfer(t, p.a, spec))
	notes(t, later, 1)
	notes(t, p.b, 0)
}

// TestDestroyTarget: an agent that ends takes its memory with it.
func TestDestroyTarget(t *testing.T) {
	for _, kind := range kinds {
		t.Run(kind.name, func(t *testing.T) {
			p := newPair(t, kind, 4<<20)
			spec := p.spec(t, engine.Write, 4096)
			spec.NoMerge, spec.Post, spec.HasNotif = true, true, true
			mustSucceed(t, p.a, transfer(t, p.a, spec))
			var flying []engine.Request
			for range 8 {
				flying = append(flying, transfer(t, p.a, spec))
			}
			if err := p.b.Destroy(); err != nil {
				t.Fatal(err)
			}
			clear(p.peer.data)
			for _, r := range flying {
				switch settled(t, p.a, r) {
				case engine.Success:
				case engine.ErrNotFound: // while the memory was taken away
					mustFail(t, p.a, r, engine.ErrNotFound, engine.ErrNotRegistered)
				default:
					mustFail(t, p.a, r, engine.ErrBackend, engine.ErrPeerLost)
				}
			}
			eventually(t, "loss of the peer", func() bool { return p.a.CheckRemote(p.remote) != nil })
			for i, b := range p.peer.data {
				if b != 0 {
					t.Fatalf("byte %d was written after Destroy", i)
				}
			}
		})
	}
}
