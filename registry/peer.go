package registry

import "time"

// Dialect is how a decode wants to be told that a room is complete.
type Dialect uint8

// A decode of SGLang 0.5.18 to 0.5.22 drains notifications, one of 0.5.23 and one of this
// library takes KV_STATUS.
const (
	Notifications Dialect = iota
	Status
)

// Peer is a decode rank as it registered: its memory, its place, and how to talk to it. A
// Peer is not changed once it is in a Table; registering anew replaces it.
type Peer struct {
	Agent         string // NIXL agent name, unique per process life
	AgentMetadata []byte // NIXL's, opaque; kept to load it again after a disconnect
	Addr          string // host:port of its control socket, brackets around IPv6
	Dialect       Dialect

	KV    []Region    // Len is ItemLen × the pages it told; Base as told
	Aux   []uint64    // base addresses, one a metadata buffer
	State []PeerState // one a component
	GPU   uint64      // device id of its VRAM descriptors
	Ranks Ranks       // EngineRank, TP, DCP, DCPRank as told
	Seen  time.Time   // when it registered
}

// PeerState is one state component of a peer. Lists that a release does not send are nil.
type PeerState struct {
	Ptrs     []uint64
	ItemLens []uint64
	Dims     []int
	LayerIDs []int
	DataLens []uint64 // bytes of each tensor, from 0.5.23; nil: not told
}
