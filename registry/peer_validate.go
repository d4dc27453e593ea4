package registry

import (
	"bytes"
	"slices"
	"strconv"

	"github.com/nixlkv/nixlkv"
)

// String gives the dialect in a word.
func (d Dialect) String() string {
	switch d {
	case Notifications:
		return "notifications"
	case Status:
		return "status"
	}
	return "Dialect(" + strconv.Itoa(int(d)) + ")"
}

// Validate says everything that is wrong with a peer, joined, as [Layout.Validate] does. Kinds
// may be unset and lengths 0, which is unknown; to send to such a peer is an error of its own.
// Regions may overlap: up to SGLang 0.5.21 a decode overstates the length of a region that is
// shorter than the first.
func (p *Peer) Validate() error {
	var probs problems
	if p.Agent == "" {
		probs.add("Agent", nixlkv.ErrMalformed, "expected a name, got none")
	}
	if p.Dialect > Status {
		probs.add("Dialect", nixlkv.ErrMalformed, "expected notifications or status, got %v", p.Dialect)
	}
	for i := range p.KV {
		r := &p.KV[i]
		if why := checkBuffer(r.Base, r.Len, r.ItemLen); why != nil {
			probs.add(index("KV", i, why.field), nixlkv.ErrRegions, "%s", why.text)
		}
		if r.Kind > DRAM {
			probs.add(index("KV", i, "Kind"), nixlkv.ErrMemoryKinds, "expected VRAM or DRAM, got %v", r.Kind)
		}
	}
	validateLayerIDs(&probs, "KV", nixlkv.ErrRegions, len(p.KV), func(i int) int { return p.KV[i].LayerID })
	for i, base := range p.Aux {
		if base == 0 {
			probs.add(index("Aux", i, ""), nixlkv.ErrAuxIndex, "expected an address, got 0")
		}
	}
	for i := range p.State {
		p.State[i].validate(&probs, i)
	}
	p.validateRanks(&probs)
	return probs.err()
}

// validateRanks checks what a decode tells of its place. Its engine rank may exceed TP.
func (p *Peer) validateRanks(probs *problems) {
	r := p.Ranks.Normalized()
	for _, c := range []struct {
		field            string
		got, least, most int
	}{
		{"Ranks.TP", r.TP, 1, maxNumber},
		{"Ranks.EngineRank", r.EngineRank, 0, maxNumber},
		{"Ranks.DCP", r.DCP, 1, maxNumber},
		{"Ranks.DCPRank", r.DCPRank, 0, r.DCP - 1},
	} {
		if c.got < c.least || c.got > c.most {
			probs.add(c.field, nixlkv.ErrTopology, "expected %d to %d, got %d", c.least, c.most, c.got)
		}
	}
}

func (s *PeerState) validate(p *problems, i int) {
	for _, l := range []struct {
		name string
		got  int
	}{
		{"ItemLens", len(s.ItemLens)}, {"Dims", len(s.Dims)},
		{"LayerIDs", len(s.LayerIDs)}, {"DataLens", len(s.DataLens)},
	} {
		if l.got != 0 && l.got != len(s.Ptrs) {
			p.add(index("State", i, l.name), nixlkv.ErrState, "expected %d, one a tensor, or none, got %d", len(s.Ptrs), l.got)
		}
	}
	for j, d := range s.Dims {
		if d < 0 {
			p.add(index("State", i, index("Dims", j, "")), nixlkv.ErrState, "expected at least 0, got %d", d)
		}
	}
}

// SameGeometry says whether two registrations of an agent tell the same: everything but when
// they came and the agent's metadata, which differ between repeats that mean nothing new.
func (p *Peer) SameGeometry(q *Peer) bool {
	return p.Agent == q.Agent && p.Addr == q.Addr && p.Dialect == q.Dialect &&
		p.GPU == q.GPU && p.Ranks.Normalized() == q.Ranks.Normalized() &&
		slices.Equal(p.KV, q.KV) && slices.Equal(p.Aux, q.Aux) &&
		slices.EqualFunc(p.State, q.State, PeerState.same)
}

func (s PeerState) same(o PeerState) bool {
	return slices.Equal(s.Ptrs, o.Ptrs) && slices.Equal(s.ItemLens, o.ItemLens) &&
		slices.Equal(s.Dims, o.Dims) && slices.Equal(s.LayerIDs, o.LayerIDs) &&
		slices.Equal(s.DataLens, o.DataLens)
}

// sameMetadata says whether two registrations carry the same agent metadata.
func (p *Peer) sameMetadata(q *Peer) bool { return bytes.Equal(p.AgentMetadata, q.AgentMetadata) }
