package wire

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"slices"

	"github.com/nixlkv/nixlkv"
)

const registrationName = "registration"

func parseRegistration(r *reader) *Registration {
	r.open(registrationName, registrationFields[:], regRequired)
	l := &r.limits
	if n := len(r.frame(regAgentMetadata)); n > l.AgentMetadata {
		r.fail(regAgentMetadata, tooMany("bytes", n, l.AgentMetadata))
	}
	g := &Registration{
		From:          r.endpoint(regIP),
		Agent:         r.agent(regAgent),
		KVPtrs:        words[uint64](r, regKVPtrs, l.Regions),
		AuxPtrs:       words[uint64](r, regAuxPtrs, l.AuxBuffers),
		StatePtrs:     lists[uint64](r, regStatePtrs, l.StateTensors),
		GPU:           r.count(regGPU),
		TPSize:        r.count(regTPSize),
		EngineRank:    r.count(regEngineRank),
		StateItemLens: lists[uint32](r, regStateItemLens, l.StateTensors),
		StateDims:     lists[uint32](r, regStateDims, l.StateTensors),
		StagingBase:   parseStagingBase(r),
		StagingSize:   r.numberOr(regStagingSize, math.MaxUint64, 0),
		Slots:         r.numberOr(regSlots, math.MaxUint64, 0),
		StateLayerIDs: lists[uint32](r, regStateLayerIDs, l.StateTensors),
		LayerIDs:      words[uint32](r, regLayerIDs, l.Regions),
		DCPSize:       int(r.numberOr(regDCPSize, maxInt, 1)),
		DCPRank:       int(r.numberOr(regDCPRank, maxInt, 0)),
		StateDataLens: lists[uint64](r, regStateDataLens, l.StateTensors),
		Frames:        len(r.frames),
	}
	g.ItemLens = parseItemLens(r, len(g.KVPtrs))
	if r.err == nil {
		kinds, err := parseKinds(r.frame(regKinds), len(g.KVPtrs))
		r.fail(regKinds, err)
		g.Kinds = kinds
	}
	if r.err == nil {
		g.AgentMetadata = bytes.Clone(r.frame(regAgentMetadata))
		r.fail(g.check())
	}
	return g
}

// parseStagingBase reads a pointer that is packed, unlike the other single numbers.
func parseStagingBase(r *reader) uint64 {
	switch b := r.frame(regStagingBase); len(b) {
	case 0:
		return 0
	case 8:
		return binary.LittleEndian.Uint64(b)
	default:
		r.fail(regStagingBase, fmt.Errorf("%w: %d bytes, expected 8 or none", ErrTruncated, len(b)))
		return 0
	}
}

// parseItemLens reads the item lengths of n regions from the two frames that tell them:
// the first region's, which stands for all when the list is absent, and the list.
func parseItemLens(r *reader, n int) []uint64 {
	first := r.number(regItemLen, math.MaxUint64)
	lens := words[uint64](r, regItemLens, r.limits.Regions)
	switch {
	case r.err != nil:
		return nil
	case n == 0 && first != 0:
		r.fail(regItemLen, fmt.Errorf("%w: expected 0 without KV, got %d", nixlkv.ErrRegions, first))
	case len(lens) == 0 && n > 0:
		return slices.Repeat([]uint64{first}, n)
	case len(lens) > 0 && lens[0] != first:
		r.fail(regItemLen, fmt.Errorf("%w: expected %d as in frame %d, got %d", nixlkv.ErrRegions, lens[0], regItemLens, first))
	}
	return lens
}

// Registration encodes a decode's geometry in 25 frames. It refuses what
// [Registration.Validate] refuses.
func (e *Encoder) Registration(g *Registration) ([][]byte, error) {
	if err := g.Validate(); err != nil {
		return nil, err
	}
	var first uint64
	if len(g.ItemLens) > 0 {
		first = g.ItemLens[0]
	}
	e.begin(tagGuard)
	e.text(noRoom)
	e.endpoint(g.From)
	e.text(g.Agent)
	e.bytes(g.AgentMetadata)
	e.end(pack(e.buf, g.KVPtrs))
	e.end(pack(e.buf, g.AuxPtrs))
	e.end(packLists(e.buf, g.StatePtrs))
	e.number(uint64(g.GPU))
	e.number(uint64(g.TPSize))
	e.number(uint64(g.EngineRank))
	e.number(first)
	e.end(packLists(e.buf, g.StateItemLens))
	e.end(packLists(e.buf, g.StateDims))
	if g.StagingBase == 0 && g.StagingSize == 0 {
		e.text("")
		e.text("")
	} else {
		e.end(binary.LittleEndian.AppendUint64(e.buf, g.StagingBase))
		e.number(g.StagingSize)
	}
	e.number(g.Slots)
	e.end(appendKinds(e.buf, g.Kinds))
	e.end(pack(e.buf, g.ItemLens))
	e.end(packLists(e.buf, g.StateLayerIDs))
	e.end(pack(e.buf, g.LayerIDs))
	e.number(uint64(g.DCPSize))
	e.number(uint64(g.DCPRank))
	e.end(packLists(e.buf, g.StateDataLens))
	return e.frames(), nil
}
