package wire

import (
	"fmt"
	"math"
	"math/bits"

	"github.com/nixlkv/nixlkv"
)

// Dialect is how a peer wants to be told that a room is complete. It is decided by what
// the peer sends, never by configuration.
type Dialect uint8

const (
	// DialectNotifications: the peer drains NIXL notifications and takes success from them
	// alone (0.5.18 to 0.5.22). It may or may not read KV_STATUS for failures.
	DialectNotifications Dialect = iota
	// DialectStatus: the peer takes success and failure from KV_STATUS and need not drain
	// notifications (0.5.23 does not; this library registers so too).
	DialectStatus
)

// String gives the dialect in a word.
func (d Dialect) String() string {
	if d == DialectStatus {
		return "status"
	}
	return "notifications"
}

// Where a registration keeps what, the guard being frame 0.
const (
	regRoom = iota + 1
	regIP
	regPort
	regAgent
	regAgentMetadata
	regKVPtrs
	regAuxPtrs
	regStatePtrs
	regGPU
	regTPSize
	regEngineRank
	regItemLen
	regStateItemLens
	regStateDims
	regStagingBase
	regStagingSize
	regSlots
	regKinds
	regItemLens
	regStateLayerIDs
	regLayerIDs
	regDCPSize
	regDCPRank
	regStateDataLens
	regFrames // how many there are

	regRequired = regItemLen + 1
)

var registrationFields = [regFrames]string{
	0:                fieldTag,
	regRoom:          fieldRoom,
	regIP:            fieldIP,
	regPort:          fieldPort,
	regAgent:         fieldAgent,
	regAgentMetadata: "agent metadata",
	regKVPtrs:        "KV pointers",
	regAuxPtrs:       "aux pointers",
	regStatePtrs:     "state pointers",
	regGPU:           "GPU id",
	regTPSize:        "decode TP size",
	regEngineRank:    "decode engine rank",
	regItemLen:       "first KV item length",
	regStateItemLens: "state item lengths",
	regStateDims:     "state dims",
	regStagingBase:   "staging base",
	regStagingSize:   "staging size",
	regSlots:         "KV slots",
	regKinds:         "KV memory kinds",
	regItemLens:      "KV item lengths",
	regStateLayerIDs: "state layer ids",
	regLayerIDs:      "KV layer ids",
	regDCPSize:       "DCP size",
	regDCPRank:       "DCP rank",
	regStateDataLens: "state data lengths",
}

// Registration is a decode rank's geometry, sent to every prefill rank that will get
// metadata from it, once per connection and before the metadata
// (NixlKVManager.build_receiver_registration_message in 0.5.23,
// NixlKVReceiver._register_kv_args before).
//
// State lists have one entry a component and in it one a tensor. Pointers use all 64 bits.
type Registration struct {
	From          Endpoint // where the decode's PULL socket listens
	Agent         string   // NIXL agent name, unique per process life
	AgentMetadata []byte   // NIXL's, opaque

	KVPtrs   []uint64 // one a region
	ItemLens []uint64 // bytes of a page, one a region, never 0
	Kinds    []Kind   // one a region
	LayerIDs []uint32 // one a region, or none
	// Slots is how many pages a region holds; 0 if not told. It is the smallest region's
	// from 0.5.22 on, the first region's before, which a shorter later region then belies.
	Slots uint64

	AuxPtrs []uint64 // one a metadata buffer, in DRAM

	StatePtrs     [][]uint64 // a zero pointer is a tensor that is not there
	StateItemLens [][]uint32 // bytes of a slot; as StatePtrs, or no lists
	StateDims     [][]uint32 // as StatePtrs, or no lists; a component's may be empty
	StateLayerIDs [][]uint32 // as StatePtrs, or no lists; a component's may be empty
	StateDataLens [][]uint64 // bytes of a tensor; as StatePtrs, or no lists (before 0.5.23)

	GPU        int // device id of the decode's VRAM
	TPSize     int // decode attention TP size
	EngineRank int // decode rank within its server; may exceed TPSize
	DCPSize    int // decode context parallel size; at least 1
	DCPRank    int

	StagingBase uint64 // 0 without staging, which this library does not have
	StagingSize uint64

	// Frames is how many frames it came in; 0 if it did not come from the wire. Encoding
	// ignores it and makes 25.
	Frames int
}

// Dialect is decided by the number of frames: 25 came with 0.5.23.
func (g *Registration) Dialect() Dialect {
	if g.Frames >= regFrames {
		return DialectStatus
	}
	return DialectNotifications
}

// Extra counts the frames that were ignored because this package does not know them.
func (g *Registration) Extra() int { return max(0, g.Frames-regFrames) }

// Validate checks what can be checked without knowing anything else: that lists agree in
// shape, and that numbers are in range. The *[FrameError] names the frame, what was expected
// and what was got; it wraps nixlkv.ErrMemoryKinds, ErrRegions, ErrState, ErrTopology or
// ErrMalformed. What [ParseAtPrefill] returns is valid, and only what is valid is encoded.
func (g *Registration) Validate() error {
	frame, err := g.check()
	if err == nil {
		return nil
	}
	return &FrameError{
		Message: registrationName, Frame: frame, Field: registrationFields[frame], Err: err,
		From: g.From, Agent: g.Agent,
	}
}

// check gives the first frame that is wrong.
func (g *Registration) check() (int, error) {
	if err := checkHost(g.From.IP); err != nil {
		return regIP, err
	}
	if err := checkPort(g.From.Port); err != nil {
		return regPort, err
	}
	if err := checkAgent(g.Agent, math.MaxInt); err != nil {
		return regAgent, err
	}
	if len(g.AgentMetadata) == 0 {
		return regAgentMetadata, malformed("empty")
	}
	if frame, err := g.checkRanks(); err != nil {
		return frame, err
	}
	if frame, err := g.checkRegions(); err != nil {
		return frame, err
	}
	return g.checkState()
}

func (g *Registration) checkRanks() (int, error) {
	for _, c := range []struct{ frame, got, least, most int }{
		{regGPU, g.GPU, 0, maxInt},
		{regTPSize, g.TPSize, 1, maxInt},
		{regEngineRank, g.EngineRank, 0, maxInt},
		{regDCPSize, g.DCPSize, 1, maxInt},
		{regDCPRank, g.DCPRank, 0, g.DCPSize - 1},
	} {
		if c.got < c.least || c.got > c.most {
			return c.frame, fmt.Errorf("%w: expected %d to %d, got %d", nixlkv.ErrTopology, c.least, c.most, c.got)
		}
	}
	return 0, nil
}

func (g *Registration) checkRegions() (int, error) {
	n := len(g.KVPtrs)
	if len(g.ItemLens) != n {
		return regItemLens, fmt.Errorf("%w: expected %d, one a region, got %d", nixlkv.ErrRegions, n, len(g.ItemLens))
	}
	if len(g.Kinds) != n {
		return regKinds, fmt.Errorf("%w: expected %d, one a region, got %d", nixlkv.ErrMemoryKinds, n, len(g.Kinds))
	}
	if len(g.LayerIDs) != 0 && len(g.LayerIDs) != n {
		return regLayerIDs, fmt.Errorf("%w: expected %d, one a region, or none, got %d", nixlkv.ErrRegions, n, len(g.LayerIDs))
	}
	for i := range n {
		if k := g.Kinds[i]; k != VRAM && k != DRAM {
			return regKinds, fmt.Errorf("%w: region %d: expected VRAM or DRAM, got %v", nixlkv.ErrMemoryKinds, i, k)
		}
		if g.ItemLens[i] == 0 {
			return regItemLens, fmt.Errorf("%w: region %d: expected an item length, got 0", nixlkv.ErrRegions, i)
		}
		// Whoever computes addresses from this may then do so without looking for overflow.
		high, size := bits.Mul64(g.ItemLens[i], g.Slots)
		if high != 0 || (size > 0 && g.KVPtrs[i] > math.MaxUint64-(size-1)) {
			return regSlots, fmt.Errorf("%w: region %d at %#x: %d slots of %d bytes exceed the address space",
				nixlkv.ErrRegions, i, g.KVPtrs[i], g.Slots, g.ItemLens[i])
		}
	}
	return 0, nil
}

func (g *Registration) checkState() (int, error) {
	for _, c := range []struct {
		frame int
		err   error
	}{
		{regStateItemLens, sameShape(g.StatePtrs, g.StateItemLens, false)},
		{regStateDims, sameShape(g.StatePtrs, g.StateDims, true)},
		{regStateLayerIDs, sameShape(g.StatePtrs, g.StateLayerIDs, true)},
		{regStateDataLens, sameShape(g.StatePtrs, g.StateDataLens, false)},
	} {
		if c.err != nil {
			return c.frame, c.err
		}
	}
	return 0, nil
}

// sameShape asks for one list a component, each with one entry a tensor, or for no lists.
// Where a component may have none, SGLang's append_state_component puts an empty list.
func sameShape[T word](ptrs [][]uint64, got [][]T, mayBeEmpty bool) error {
	if len(got) == 0 {
		return nil
	}
	if len(got) != len(ptrs) {
		return fmt.Errorf("%w: expected %d lists, one a component, or none, got %d", nixlkv.ErrState, len(ptrs), len(got))
	}
	for i, l := range got {
		if len(l) != len(ptrs[i]) && (!mayBeEmpty || len(l) != 0) {
			return fmt.Errorf("%w: component %d: expected %d, one a tensor, got %d", nixlkv.ErrState, i, len(ptrs[i]), len(l))
		}
	}
	return nil
}
