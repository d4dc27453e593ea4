package kvreceiver

import (
	"context"

	"github.com/nixlkv/nixlkv/internal/wire"
	"github.com/nixlkv/nixlkv/nixl"
)

// dialect is a way in which a prefill tells of success.
type dialect int

const (
	byNotifications dialect = iota // SGLang 0.5.18 to 0.5.22
	byStatus                       // 0.5.23
)

func (d dialect) String() string { return [...]string{"notifications", "status"}[d] }

var dialects = []dialect{byNotifications, byStatus}

// work is what a prefill rank has to write for a room.
type work struct {
	src    []int32 // its pages, for the decode's in the same order
	chunks []int   // pages of each chunk; nil: all in one
	parts  int     // writes a chunk is made of; 0: one, not numbered
	slot   int     // its aux slot
}

// peer gives what is known of a decode; its metadata is loaded the first time.
func (r *rank) peer(agent string) *peer {
	r.t.Helper()
	r.mu.Lock()
	p := r.peers[agent]
	r.mu.Unlock()
	if p != nil {
		return p
	}
	return r.learn(take(r, "the registration of "+agent, func(g *wire.Registration) bool { return g.Agent == agent }))
}

// learn loads what a decode has registered with.
func (r *rank) learn(g *wire.Registration) *peer {
	r.t.Helper()
	if g.Dialect() != wire.DialectStatus || g.Frames != 25 {
		r.t.Errorf("registered with %d frames", g.Frames)
	}
	remote, err := r.agent.Load(g.AgentMetadata)
	ok(r.t, err)
	p := &peer{g, remote}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.peers[g.Agent] = p
	return p
}

// write posts one write with a notification, if there is one, and waits until it has landed.
func (r *rank) write(to *peer, from, dst []nixl.Desc, notif []byte) {
	r.t.Helper()
	list := func(descs []nixl.Desc) *nixl.List {
		l, err := r.agent.NewList(nixl.DRAM)
		ok(r.t, err)
		ok(r.t, l.Append(descs...))
		return l
	}
	local, remote := list(from), list(dst)
	x := r.agent.NewTransfer()
	ok(r.t, x.Create(nixl.Write, local, to.remote, remote, nixl.TransferOptions{Notif: notif, Post: true}))
	ctx, cancel := context.WithTimeout(context.Background(), patience) // robots outlive the test's own
	defer cancel()
	ok(r.t, x.Wait(ctx))
	ok(r.t, x.Release())
	ok(r.t, local.Free())
	ok(r.t, remote.Free())
}

// pages gives the descriptors of this rank's share of pages.
func (r *rank) pages(g *wire.Registration, src, dst []int32) (from, to []nixl.Desc) {
	n := uint64(r.hi - r.lo)
	for region := r.first; region < r.last; region++ {
		for i := range src {
			s := uint64((region*kitPages+int(src[i]))*kitPage + r.lo)
			d := uint64(dst[i])*g.ItemLens[region] + uint64(r.lo)
			from = append(from, nixl.Desc{Addr: uint64(r.site.mem.kv.Addr()) + s, Len: n})
			to = append(to, nixl.Desc{Addr: g.KVPtrs[region] + d, Len: n})
		}
	}
	return from, to
}

// chunk writes a chunk of a room, in parts if there are more than none.
func (r *rank) chunk(m *wire.Metadata, d dialect, number int, last bool, src, dst []int32, parts int) {
	r.t.Helper()
	p := r.peer(m.Agent)
	from, to := r.pages(p.geometry, src, dst)
	notif := func(b []byte) []byte {
		if d == byStatus {
			return nil
		}
		return b
	}
	if parts == 0 {
		r.write(p, from, to, notif(wire.AppendKV(nil, m.Room, number, last, r.source)))
		return
	}
	for i := range parts {
		lo, hi := len(from)*i/parts, len(from)*(i+1)/parts
		r.write(p, from[lo:hi], to[lo:hi], notif(wire.AppendKVPart(nil, m.Room, number, last, r.source, i, parts)))
	}
}

// kv writes all chunks of a room.
func (r *rank) kv(m *wire.Metadata, d dialect, w work) {
	r.t.Helper()
	if len(m.KVIndices) != len(w.src) {
		r.t.Fatalf("the decode has %d pages for %d", len(m.KVIndices), len(w.src))
	}
	chunks := w.chunks
	if chunks == nil && len(w.src) > 0 {
		chunks = []int{len(w.src)}
	}
	at := 0
	for i, n := range chunks {
		r.chunk(m, d, i, i == len(chunks)-1, w.src[at:at+n], m.KVIndices[at:at+n], w.parts)
		at += n
	}
}

// aux writes the aux slot.
func (r *rank) aux(m *wire.Metadata, d dialect, slot int, bare bool) {
	r.t.Helper()
	p, mem := r.peer(m.Agent), r.site.mem
	var from, to []nixl.Desc
	for i, n := range mem.auxItems {
		from = append(from, nixl.Desc{Addr: uint64(mem.aux.Addr()) + mem.auxAt(i) + uint64(slot)*n, Len: n})
		to = append(to, nixl.Desc{Addr: p.geometry.AuxPtrs[i] + uint64(m.AuxIndex)*n, Len: n})
	}
	var notif []byte
	switch {
	case d == byStatus:
	case bare:
		notif = wire.AppendAuxNoKV(nil, m.Room, r.source, 0)
	default:
		notif = wire.AppendAux(nil, m.Room)
	}
	r.write(p, from, to, notif)
}

// states writes the state slots, from the same slots here.
func (r *rank) states(m *wire.Metadata, d dialect) {
	r.t.Helper()
	p, mem := r.peer(m.Agent), r.site.mem
	for c, slots := range m.StateIndices {
		if len(slots) == 0 {
			continue
		}
		var from, to []nixl.Desc
		for _, s := range slots {
			from = append(from, nixl.Desc{Addr: uint64(mem.state.Addr()) + uint64((c*kitSlots+int(s))*kitState), Len: kitState})
			to = append(to, nixl.Desc{Addr: p.geometry.StatePtrs[c][0] + uint64(s)*kitState, Len: kitState})
		}
		var notif []byte
		if d == byNotifications {
			notif = wire.AppendState(nil, m.Room, r.source, c)
		}
		r.write(p, from, to, notif)
	}
}

// serve writes everything of a room, and tells that it has.
func (r *rank) serve(m *wire.Metadata, d dialect, w work) {
	r.t.Helper()
	r.kv(m, d, w)
	r.states(m, d)
	r.aux(m, d, w.slot, len(w.src) == 0)
	if d == byStatus {
		r.tell(m.From, m.Room, wire.PollSuccess, "")
	}
}
