package kvsender

import (
	"fmt"
	"math"
	"slices"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/registry"
)

// statePlan is how a room's state gets to one decode rank: component i of this rank goes to
// component i of the decode, from VRAM to VRAM. Types are not on the wire; this rank's decide.
// Components that only the decode has, a draft's, are left alone.
//
// A decode is not refused for state that cannot be sent to it: its rooms may never bring any.
// The component keeps the reason, and a room that brings indices for it fails with that, as
// in SGLang (maybe_send_extra in nixl/conn.py).
type statePlan struct{ components []stateComponent }

// stateComponent is one of them.
type stateComponent struct {
	kind  registry.StateType
	fault error      // why it cannot be sent to this decode
	slots segment    // a slot is a page of it
	rings []ringPair // of dsa_tail, in its place
}

// stateSides are the two sides of a component.
type stateSides struct {
	l   *registry.Layout
	p   *registry.Peer
	src []registry.StateTensor
	dst []stateTarget
	// dims says that the decode told the dimensions that TP shards.
	dims bool
}

// allSlots is the number of slots where no tensor bounds it: as many as indices can name.
const allSlots = math.MaxInt32

// stateTarget is a tensor of the decode, as far as it was told.
type stateTarget struct {
	base, itemLen uint64
	len           uint64
	told          bool // itemLen was told
	bounded       bool // len was told, from SGLang 0.5.23 on
	dim, layer    int
}

// absent says that the decode keeps no such state.
func (t *stateTarget) absent() bool {
	return t.base == 0 || t.told && t.itemLen == 0 || t.bounded && t.len == 0
}

// planState plans all components. It trusts neither side, and keeps no references to them.
func planState(l *registry.Layout, p *registry.Peer) *statePlan {
	plan := &statePlan{make([]stateComponent, len(l.State))}
	for i := range l.State {
		var peer registry.PeerState
		if i < len(p.State) {
			peer = p.State[i]
		}
		plan.components[i] = planComponent(l, p, i, peer)
	}
	return plan
}

// faults gives why components cannot be sent, one error each.
func (p *statePlan) faults() []error {
	var errs []error
	for i := range p.components {
		if err := p.components[i].fault; err != nil {
			errs = append(errs, err)
		}
	}
	return errs
}

func planComponent(l *registry.Layout, p *registry.Peer, i int, peer registry.PeerState) stateComponent {
	kind := l.State[i].Type
	s := &stateSides{l: l, p: p, src: l.State[i].Tensors}
	c := stateComponent{kind: kind, slots: segment{
		srcKind: registry.VRAM, srcDev: deviceOf(registry.VRAM, l.GPU), srcPages: allSlots,
		dstKind: registry.VRAM, dstDev: deviceOf(registry.VRAM, p.GPU), dstPages: allSlots,
	}}
	err := s.setTargets(peer)
	if err == nil {
		err = c.plan(s)
	}
	if err == nil {
		err = c.validate(s)
	}
	if err != nil {
		return stateComponent{kind: kind, fault: fmt.Errorf("%w: component %d, %s: %w (prefill: %s; decode: %s)",
			nixlkv.ErrState, i, kind, err, s.prefill(), s.decode())}
	}
	return c
}

// setTargets reads the lists of the peer.
func (s *stateSides) setTargets(peer registry.PeerState) error {
	n := len(peer.Ptrs)
	for _, list := range []struct {
		name string
		n    int
	}{{"item lengths", len(peer.ItemLens)}, {"dims", len(peer.Dims)}, {"layer ids", len(peer.LayerIDs)}, {"lengths", len(peer.DataLens)}} {
		if list.n != 0 && list.n != n {
			return fmt.Errorf("the decode told %d %s for %d tensors", list.n, list.name, n)
		}
	}
	s.dst, s.dims = make([]stateTarget, n), len(peer.Dims) > 0
	for j := range s.dst {
		t := &s.dst[j]
		t.base, t.layer = peer.Ptrs[j], registry.NoLayer
		t.told, t.bounded = len(peer.ItemLens) > 0, len(peer.DataLens) > 0
		if t.told {
			t.itemLen = peer.ItemLens[j]
		}
		if t.bounded {
			t.len = peer.DataLens[j]
		}
		if len(peer.Dims) > 0 {
			t.dim = peer.Dims[j]
		}
		if len(peer.LayerIDs) > 0 {
			t.layer = peer.LayerIDs[j]
		}
	}
	return nil
}

// plan is the one place where a type finds its way into the decode's memory, or is refused.
// The rules are those of SGLang 0.5.23, maybe_send_extra in nixl/conn.py. Earlier releases
// refuse more: dsa between TP sizes before 0.5.20, swa without MLA between TP sizes before
// 0.5.22, and types that they do not have.
func (c *stateComponent) plan(s *stateSides) error {
	src, dst := ranks(s.l.Ranks.TP), ranks(s.p.Ranks.TP)
	if min(src, dst) < 1 || max(src, dst) > math.MaxInt32 || s.l.Ranks.EngineRank < 0 || s.p.Ranks.EngineRank < 0 {
		return fmt.Errorf("%w: TP %d and %d, engine ranks %d and %d", nixlkv.ErrTopology, src, dst, s.l.Ranks.EngineRank, s.p.Ranks.EngineRank)
	}
	equal := src == dst
	switch c.kind {
	case registry.StateMamba:
		at, err := s.pairMamba()
		switch {
		case err != nil:
			return err
		case equal:
			if err := s.checkServes(); err != nil {
				return err
			}
			return c.addWhole(s, at)
		case s.sliced():
			return c.addMambaSlices(s, at)
		}
		// Without the sharded dimension on both sides every rank has all of it.
		return c.addWhole(s, at)
	case registry.StateDSATail:
		at, err := s.pairTails()
		if err != nil {
			return err
		}
		return c.addRings(s, at)
	case registry.StateSWA:
		if !s.l.MLA && !equal {
			return c.addHeadSlices(s)
		}
	case registry.StateDSA:
		equal = true // an index key has no heads
	case registry.StateMinimaxIndexK, registry.StateMinimaxDenseKV:
		if pp := ranks(s.l.Ranks.PP); pp > 1 || !equal {
			return fmt.Errorf("%w: state type not supported for this topology: prefill PP %d, TP %d and %d; it needs PP 1 and equal TP", nixlkv.ErrTopology, pp, src, dst)
		}
	case registry.StateQSAPending, registry.StateQSACompressed, registry.StateSWARing, registry.StateC128,
		registry.StateBlockScale, registry.StateBlockScaleSWA, registry.StateRequestRow:
	default:
		return fmt.Errorf("%w: state type", nixlkv.ErrUnsupported)
	}
	if !equal && !s.l.MLA {
		return fmt.Errorf("%w: state type not supported for this topology: TP %d and %d without MLA", nixlkv.ErrTopology, src, dst)
	}
	at, err := s.pairSlots(c.kind)
	if err != nil {
		return err
	}
	return c.addWhole(s, at)
}

// checkServes refuses a decode that keeps other shards than this rank has. Ranks meet as in
// _resolve_rank_mapping of common/conn.py.
func (s *stateSides) checkServes() error {
	src, dst := ranks(s.l.Ranks.TP), ranks(s.p.Ranks.TP)
	larger, smaller := max(src, dst), min(src, dst)
	a, b := s.l.Ranks.EngineRank%src, s.p.Ranks.EngineRank%dst
	n := larger / smaller
	serves := larger%smaller == 0
	if src > dst {
		serves = serves && a/n == b
	} else {
		serves = serves && b/n == a
	}
	if !serves {
		return fmt.Errorf("%w: prefill TP rank %d of %d, decode TP rank %d of %d: they keep different shards", nixlkv.ErrTopology, a, src, b, dst)
	}
	return nil
}

// addWhole plans whole slots. Neither side's stride may differ from the other's: SGLang takes
// the prefill's for both, which puts every slot but the first in the wrong place if the
// decode has another; its prepared transfers refuse that (_StateLayoutMismatch, 0.5.23).
func (c *stateComponent) addWhole(s *stateSides, at [][2]int) error {
	for _, ij := range at {
		src, dst := &s.src[ij[0]], &s.dst[ij[1]]
		if src.Absent() || dst.absent() {
			continue
		}
		if dst.told && dst.itemLen != src.ItemLen {
			return fmt.Errorf("%w: a slot has %d bytes in prefill tensor %d, %d in decode tensor %d", nixlkv.ErrStride, src.ItemLen, ij[0], dst.itemLen, ij[1])
		}
		if err := c.add(s, ij, pair{src: src.Base, srcStride: src.ItemLen, dst: dst.base, dstStride: src.ItemLen, len: src.ItemLen, rows: 1}); err != nil {
			return err
		}
	}
	return nil
}

// add appends a pair of two tensors that are there, and narrows the slots to those of both.
func (c *stateComponent) add(s *stateSides, ij [2]int, q pair) error {
	src, dst := &s.src[ij[0]], &s.dst[ij[1]]
	from := min(slotsAt(src.Base, src.ItemLen), src.Slots())
	to := slotsAt(dst.base, q.dstStride)
	if dst.bounded {
		to = min(to, dst.len/q.dstStride)
	}
	if from == 0 || to == 0 {
		return s.noSlot(ij, q.srcStride, q.dstStride)
	}
	c.slots.srcPages, c.slots.dstPages = min(c.slots.srcPages, from), min(c.slots.dstPages, to)
	c.slots.pairs = append(c.slots.pairs, q)
	return nil
}

func (s *stateSides) noSlot(ij [2]int, src, dst uint64) error {
	a, b := &s.src[ij[0]], &s.dst[ij[1]]
	return fmt.Errorf("%w: no slot of %d bytes in prefill tensor %d of %d bytes at %#x, or of %d in decode tensor %d of %d at %#x",
		nixlkv.ErrRegions, src, ij[0], a.Len, a.Base, dst, ij[1], b.len, b.base)
}

// slotsAt counts the slots of n bytes between base and the end of the address space.
func slotsAt(base, n uint64) uint64 {
	if base == 0 || n == 0 {
		return 0
	}
	return -base / n
}

// validate checks what was planned, whatever made it, as validatePlan does for pages. How far
// the decode's tensors reach is known only if it told; within that, or else within 64 bits,
// no two pieces of different slots or pairs are written to the same place.
func (c *stateComponent) validate(s *stateSides) error {
	var src, dst []registry.Region
	bounded := true
	for _, t := range s.src {
		src = append(src, registry.Region{Base: t.Base, Len: t.Len, Kind: registry.VRAM})
	}
	for i := range s.dst {
		t := &s.dst[i]
		bounded = bounded && t.bounded
		n := -t.base // to the end of the address space
		if t.bounded {
			n = t.len
		}
		dst = append(dst, registry.Region{Base: t.base, Len: n, Kind: registry.VRAM})
	}
	from, to := spansByKind(src)[registry.VRAM], spansByKind(dst)[registry.VRAM]
	var written []stripe
	for k := range c.slots.pairs {
		q := &c.slots.pairs[k]
		if err := q.validate(&c.slots, from, to); err != nil {
			return err
		}
		reach := c.slots
		if !bounded {
			reach.dstPages = 1 // farther apart than that is the decode's own affair
		}
		written = append(written, q.stripe(&reach))
	}
	for i := range c.rings {
		r := &c.rings[i]
		n := c.slots.dstPages
		if !bounded {
			n = 1
		}
		srcLast, ok := lastByte(r.src, r.srcRow, c.slots.srcPages, r.srcRow)
		dstLast, ok2 := lastByte(r.dst, r.dstRow, c.slots.dstPages, r.dstRow)
		if !ok || !ok2 || !from.contain(r.src, srcLast) || !to.contain(r.dst, dstLast) {
			return fmt.Errorf("%w: %d rows of %d bytes at %#x, %d of %d at %#x, lie in no tensor", nixlkv.ErrRegions, c.slots.srcPages, r.srcRow, r.src, c.slots.dstPages, r.dstRow, r.dst)
		}
		written = append(written, stripe{r.dst, r.dst + n*r.dstRow - 1, r.dstRow, r.dstRow})
	}
	return checkDisjoint(written)
}

// prefill and decode say in one line what an operator compares.
func (s *stateSides) prefill() string {
	k := s.l.Ranks
	lens, dims, ids := make([]uint64, len(s.src)), 0, 0
	for i, t := range s.src {
		lens[i] = t.ItemLen
		dims, ids = dims+one(t.Dim != 0), ids+one(t.LayerID >= 0)
	}
	attention := "MHA"
	if s.l.MLA {
		attention = "MLA"
	}
	return fmt.Sprintf("%s, %s, TP rank %d of %d, PP rank %d of %d, model layers %d to %d", describeTensors(lens, dims, ids),
		attention, k.EngineRank%ranks(k.TP), ranks(k.TP), k.PPRank, ranks(k.PP), s.l.StartLayer, s.l.EndLayer)
}

func (s *stateSides) decode() string {
	k := s.p.Ranks
	lens, dims, ids := make([]uint64, len(s.dst)), 0, 0
	for i, t := range s.dst {
		lens[i] = t.itemLen
		dims, ids = dims+one(t.dim != 0), ids+one(t.layer >= 0)
	}
	return fmt.Sprintf("%s, engine rank %d, TP %d", describeTensors(lens, dims, ids), k.EngineRank, ranks(k.TP))
}

func describeTensors(lens []uint64, dims, ids int) string {
	if len(lens) == 0 {
		return "no tensors"
	}
	return fmt.Sprintf("%d tensors, slots of %s bytes, %d sharded dimensions, %d layer ids", len(lens), between(slices.Min(lens), slices.Max(lens)), dims, ids)
}

func one(b bool) int {
	if b {
		return 1
	}
	return 0
}
