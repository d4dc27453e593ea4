package registry

// Kind is the NIXL memory kind of a KV region. The zero value is Unset: a Peer built in
// code says what its memory is, or sending to it fails.
type Kind uint8

// The kinds that SGLang's NIXL backend knows (KV_MEM_KINDS in nixl/conn.py).
const (
	Unset Kind = iota
	VRAM
	DRAM
)

// NoLayer marks a region without a layer id.
const NoLayer = -1

// Region is one per-layer KV buffer: page p is ItemLen bytes at Base + p·ItemLen. With MHA
// all K regions come first, then all V regions; with MLA there is one a layer. So a layer has two
// regions, or one; beside them it may have a draft model's (Layout.DraftRegions). Layer 0 is a
// layer like others: where none are told, LayerID is NoLayer.
type Region struct {
	Base    uint64 // address of the first byte
	Len     uint64 // bytes, a multiple of ItemLen
	ItemLen uint64 // bytes of a page
	LayerID int    // model layer, or NoLayer; all regions of a layout have one, or none
	Kind    Kind
}

// Pages counts the pages of the region.
func (r Region) Pages() uint64 {
	if r.ItemLen == 0 {
		return 0
	}
	return r.Len / r.ItemLen
}

// AuxBuffer is one metadata buffer: slot s is ItemLen bytes at Base + s·ItemLen, in DRAM.
type AuxBuffer struct {
	Base, Len, ItemLen uint64
}

// StateType names a kind of state component (StateType in SGLang's base/conn.py). The types
// are not on the wire: component i of one side goes to component i of the other.
type StateType string

// The state types of SGLang 0.5.18 to 0.5.23.
const (
	StateMamba          StateType = "mamba"
	StateSWA            StateType = "swa"
	StateSWARing        StateType = "swa_ring"
	StateDSA            StateType = "dsa"
	StateDSATail        StateType = "dsa_tail"
	StateC128           StateType = "c128_state"
	StateMinimaxIndexK  StateType = "minimax_index_k"
	StateMinimaxDenseKV StateType = "minimax_dense_kv"
	StateQSAPending     StateType = "qsa_pending"
	StateQSACompressed  StateType = "qsa_compressed"
	StateBlockScale     StateType = "block_scale"
	StateBlockScaleSWA  StateType = "block_scale_swa"
	StateRequestRow     StateType = "request_row"
)

// StateTensor is one tensor of a state component: slot s is ItemLen bytes at Base +
// s·ItemLen, in VRAM. A zero Base or ItemLen is a tensor that is not there. Len is at least
// a slot; what is left after the last whole one is not used.
type StateTensor struct {
	Base, Len, ItemLen uint64
	LayerID            int // model layer, or NoLayer
	// Dim is the length of the axis that TP shards. 0 means not told or, next to tensors that
	// have one, that every rank has the whole tensor (from SGLang 0.5.20).
	Dim        int
	OuterCount int // rows before that axis in a slot; 0 means 1
	// ConvGroups are the lengths of independently sharded blocks along the axis, over all
	// ranks; nil if the axis is one block.
	ConvGroups []int
}

// StateComponent is state that goes with the last chunk of a room.
type StateComponent struct {
	Type    StateType
	Tensors []StateTensor
}

// Ranks says where a worker stands. Sizes of 0 mean 1. TP here is attention TP, unless it
// says otherwise.
type Ranks struct {
	EngineRank int // global TP rank (SGLang's engine_rank); modulo TP it is TPRank
	ServerTP   int // the server's whole TP size; 0: TP
	TP, TPRank int
	CP, CPRank int
	PP, PPRank int
	DP, DPRank int // attention DP
	// SystemDP is the number of data-parallel servers; above 1 it replaces attention DP in
	// the rendezvous (SGLang: system_dp_size).
	SystemDP, SystemDPRank int
	DCP, DCPRank           int // decode context parallelism
}

// Layout is what a worker knows of itself: its memory, its model, its place. It is made
// once and not changed afterwards; Validate says whether it can be used. The memory is the
// caller's, and stays mapped as long as a manager uses the layout.
type Layout struct {
	KV    []Region
	Aux   []AuxBuffer
	State []StateComponent

	PageSize     int    // tokens of a page
	KVDtype      string // SGLang's kv_cache_dtype; "auto" if empty
	KVHeads      int    // KV heads of this rank
	TotalKVHeads int    // KV heads of the model; 0: KVHeads × TP
	GPU          uint64 // CUDA ordinal of this rank's VRAM
	KVLayout     string // SGLang's kv_layout, from 0.5.23; empty if the pool has only one
	SWALayout    string // layout of the SWA pool: nhd, hnd, vectorized_5d; empty if it has none

	Ranks Ranks

	MLA       bool
	HybridMLA bool // maps like MHA, writes like MLA (is_hybrid_mla_backend)
	// StartLayer and EndLayer are this PP stage's model layers, the end exclusive. EndLayer 0
	// means unknown.
	StartLayer, EndLayer int
	// CompressionRatios has 0, 4 or 128 for each layer of a compressed-MLA model, in newer ones
	// also 1 or 2 (collect_sources_by_ratio in SGLang's deepseek_v4_memory_pool.py).
	CompressionRatios []int
	// DraftRegions counts KV regions at the end that belong to a speculative draft model.
	DraftRegions int
	// ShardKV: pages are dealt out to the ranks by number (enable_kv_cache_sharding, 0.5.23).
	ShardKV bool
	// SplitLayers: the ranks of context parallelism hold the cache of other layers each, and all of
	// them send all pages (enable_dsa_cache_layer_split). Regions and state tensors tell their layer
	// ids.
	SplitLayers bool
}
