package registry

import (
	"fmt"
	"math/bits"
	"slices"
	"time"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/internal/wire"
)

// Registration gives what a decode of this layout tells the prefill ranks that will serve it
// (build_receiver_registration_message in SGLang 0.5.23, 25 frames): agent is the name of its
// NIXL agent, metadata that agent's metadata, from where its control socket listens. The
// lists are the registration's own, metadata is not copied.
//
// It refuses what [Layout.Validate] refuses, and agents and addresses that no prefill takes.
func (l *Layout) Registration(agent string, metadata []byte, from wire.Endpoint) (*wire.Registration, error) {
	if err := l.Validate(); err != nil {
		return nil, fmt.Errorf("layout: %w", err)
	}
	ranks := l.Ranks.Normalized()
	g := &wire.Registration{
		From: from, Agent: agent, AgentMetadata: metadata,
		Slots: l.Pages(), GPU: int(l.GPU),
		// SGLang's decodes tell their attention TP rank as engine rank.
		TPSize: ranks.TP, EngineRank: ranks.TPRank,
		DCPSize: ranks.DCP, DCPRank: ranks.DCPRank,
	}
	for _, r := range l.KV {
		g.KVPtrs = append(g.KVPtrs, r.Base)
		g.ItemLens = append(g.ItemLens, r.ItemLen)
		g.Kinds = append(g.Kinds, r.Kind.wire())
		if r.LayerID != NoLayer {
			g.LayerIDs = append(g.LayerIDs, uint32(r.LayerID))
		}
	}
	for _, b := range l.Aux {
		g.AuxPtrs = append(g.AuxPtrs, b.Base)
	}
	for i := range l.State {
		l.State[i].register(g)
	}
	if err := g.Validate(); err != nil {
		return nil, err
	}
	return g, nil
}

// register appends a component to every list. Dims and layer ids are lists of none where no
// tensor has any; a dim of 0 among others is SGLang's mark of a tensor that is not sharded.
func (c *StateComponent) register(g *wire.Registration) {
	var ptrs, dataLens []uint64
	var itemLens, dims, layers []uint32
	sharded := slices.ContainsFunc(c.Tensors, func(t StateTensor) bool { return t.Dim != 0 })
	for _, t := range c.Tensors {
		if t.Absent() {
			t.Base, t.Len, t.ItemLen = 0, 0, 0
		}
		ptrs = append(ptrs, t.Base)
		dataLens = append(dataLens, t.Len)
		itemLens = append(itemLens, uint32(t.ItemLen))
		if sharded {
			dims = append(dims, uint32(t.Dim))
		}
		if t.LayerID != NoLayer {
			layers = append(layers, uint32(t.LayerID))
		}
	}
	g.StatePtrs = append(g.StatePtrs, ptrs)
	g.StateDataLens = append(g.StateDataLens, dataLens)
	g.StateItemLens = append(g.StateItemLens, itemLens)
	g.StateDims = append(g.StateDims, dims)
	g.StateLayerIDs = append(g.StateLayerIDs, layers)
}

// PeerFromRegistration makes a peer of what a decode told, of any release; now is when. It
// keeps nothing of g.
//
//   - Memory kinds that are not told are VRAM, item lengths that are not told the first
//     region's: package wire has put them in already.
//   - A region's Len is its item length times the page count. A decode that does not tell the
//     count gets regions of Len 0, so that [Peer.Pages] is 0, unknown; [Peer.WithPages] fills
//     it in. SGLang's prefill then takes its own page count for the peer's.
//   - What goes by success notifications, and what by KV_STATUS, is decided by the number of
//     frames ([Dialect]).
//
// The error is what [Peer.Validate] says, or what is wrong with g.
func PeerFromRegistration(g *wire.Registration, now time.Time) (*Peer, error) {
	if g == nil {
		return nil, fmt.Errorf("%w: no registration", nixlkv.ErrMalformed)
	}
	if err := g.Validate(); err != nil {
		return nil, err
	}
	p := &Peer{
		Agent: g.Agent, AgentMetadata: slices.Clone(g.AgentMetadata), Addr: g.From.String(),
		Aux: slices.Clone(g.AuxPtrs), GPU: uint64(g.GPU), Seen: now,
		Ranks: Ranks{EngineRank: g.EngineRank, TP: g.TPSize, DCP: g.DCPSize, DCPRank: g.DCPRank},
	}
	if g.Dialect() == wire.DialectStatus {
		p.Dialect = Status
	}
	p.KV = make([]Region, len(g.KVPtrs))
	for i := range p.KV {
		p.KV[i] = Region{
			Base: g.KVPtrs[i], Len: g.ItemLens[i] * g.Slots, ItemLen: g.ItemLens[i],
			LayerID: NoLayer, Kind: kindOfWire(g.Kinds[i]),
		}
		if len(g.LayerIDs) > 0 {
			p.KV[i].LayerID = int(g.LayerIDs[i])
		}
	}
	p.State = make([]PeerState, len(g.StatePtrs))
	for i := range p.State {
		p.State[i] = PeerState{
			Ptrs:     slices.Clone(g.StatePtrs[i]),
			ItemLens: widen[uint64](g.StateItemLens, i),
			Dims:     widen[int](g.StateDims, i),
			LayerIDs: widen[int](g.StateLayerIDs, i),
		}
		if len(g.StateDataLens) > 0 {
			p.State[i].DataLens = slices.Clone(g.StateDataLens[i])
		}
	}
	if err := p.Validate(); err != nil {
		return nil, err
	}
	return p, nil
}

// widen gives list i in wider numbers, nil if it is empty or there are no lists.
func widen[T uint64 | int](lists [][]uint32, i int) []T {
	if len(lists) == 0 || len(lists[i]) == 0 {
		return nil
	}
	out := make([]T, len(lists[i]))
	for j, v := range lists[i] {
		out[j] = T(v)
	}
	return out
}

// WithPages gives a peer whose regions of unknown length have n pages; regions that were told
// keep theirs. It is p itself if nothing was unknown. The error wraps nixlkv.ErrRegions: n
// pages of a region would reach past 2^64.
func (p *Peer) WithPages(n uint64) (*Peer, error) {
	if !slices.ContainsFunc(p.KV, func(r Region) bool { return r.Len == 0 }) {
		return p, nil
	}
	q := *p
	q.KV = slices.Clone(p.KV)
	for i := range q.KV {
		r := &q.KV[i]
		if r.Len != 0 {
			continue
		}
		high, low := bits.Mul64(r.ItemLen, n)
		if high != 0 || !fits(r.Base, low) {
			return nil, &FieldError{index("KV", i, "Len"), fmt.Errorf(
				"%w: expected an end below 2^64, got %d pages of %d bytes at %#x", nixlkv.ErrRegions, n, r.ItemLen, r.Base)}
		}
		r.Len = low
	}
	return &q, nil
}
