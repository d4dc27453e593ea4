package interop

import (
	"maps"

	"github.com/nixlkv/nixlkv/internal/testkit/netns"
)

// rankConfig is the configuration of one rank, as examples/kvpeer documents it.
type rankConfig struct {
	Role             string            `json:"role"`
	Host             string            `json:"host,omitempty"`         // of the bootstrap server
	HostIP           string            `json:"host_ip,omitempty"`      // of the control socket
	ControlPort      int               `json:"control_port,omitempty"` // this library's alone; 0: any
	BootstrapPort    int               `json:"bootstrap_port,omitempty"`
	ServeBootstrap   bool              `json:"serve_bootstrap"`
	IsMLA            bool              `json:"is_mla,omitempty"`
	TPSize           int               `json:"tp_size,omitempty"`
	Env              map[string]string `json:"env,omitempty"`
	FillSeed         string            `json:"fill_seed,omitempty"` // of a prefill; "": its own
	AllocationPolicy string            `json:"allocation_policy,omitempty"`
	KV               kvConfig          `json:"kv"`
	Parallel         parallelConfig    `json:"parallel"`
	KVArgs           kvArgsConfig      `json:"kv_args"`

	// SGLang's peers alone.
	Source  string `json:"sglang_src,omitempty"`
	Version string `json:"version,omitempty"`

	host *netns.Host // on which the rank runs; nil: that of the tests
}

type kvConfig struct {
	PageSize     int           `json:"page_size"`
	ItemLens     []int         `json:"item_lens"`
	NumSlots     int           `json:"num_slots"`
	MemKinds     []string      `json:"mem_kinds,omitempty"`
	LayerIDs     []int         `json:"layer_ids,omitempty"`
	KVHeads      int           `json:"kv_head_num"`
	TotalKVHeads int           `json:"total_kv_head_num"`
	AuxItemLens  []int         `json:"aux_item_lens"`
	AuxSlots     int           `json:"aux_slots"`
	State        []stateConfig `json:"state,omitempty"`
}

// stateConfig is a state component: one entry a tensor, or none.
type stateConfig struct {
	Type        string  `json:"type"`
	ItemLens    []int   `json:"item_lens"`
	NumSlots    int     `json:"num_slots"`
	LayerIDs    []int   `json:"layer_ids,omitempty"`
	Dims        []int   `json:"dim_per_tensor,omitempty"`
	OuterCounts []int   `json:"slice_outer_counts,omitempty"`
	ConvGroups  [][]int `json:"conv_shard_groups,omitempty"`
}

type parallelConfig struct {
	AttnTPSize int `json:"attn_tp_size,omitempty"`
	AttnTPRank int `json:"attn_tp_rank,omitempty"`
	TPSize     int `json:"tp_size,omitempty"`
	AttnCPSize int `json:"attn_cp_size,omitempty"`
	AttnCPRank int `json:"attn_cp_rank,omitempty"`
	DCPSize    int `json:"attn_dcp_size,omitempty"`
	DCPRank    int `json:"attn_dcp_rank,omitempty"`
	PPSize     int `json:"pp_size,omitempty"`
	PPRank     int `json:"pp_rank,omitempty"`
	// ShardKV deals the pages out to a prefill's ranks, LayerSplit the layers.
	ShardKV    bool `json:"enable_kv_cache_sharding,omitempty"`
	LayerSplit bool `json:"enable_dsa_cache_layer_split,omitempty"`
}

type kvArgsConfig struct {
	EngineRank int    `json:"engine_rank,omitempty"`
	PPRank     int    `json:"pp_rank,omitempty"`
	StartLayer int    `json:"prefill_start_layer,omitempty"`
	EndLayer   int    `json:"prefill_end_layer,omitempty"`
	SWALayout  string `json:"swa_kv_cache_layout,omitempty"`
	// Drafts are the regions of a speculative model, at the end.
	Drafts    int   `json:"num_draft_entries,omitempty"`
	HybridMLA bool  `json:"is_hybrid_mla_backend,omitempty"`
	Ratios    []int `json:"mla_compression_ratios,omitempty"`
}

// The names of variables that both sides read.
const (
	envBootstrapTimeout = "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT"
	envAllCPRanks       = "SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER"
	envNIXLParams       = "SGLANG_DISAGGREGATION_NIXL_BACKEND_PARAMS"
	envHeartbeat        = "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL"
	envDeferredRelease  = "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE"
	envReleaseTimeout   = "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT"
)

// regions gives a KV configuration with so many regions of so many bytes a page.
func regions(n, itemLen int) kvConfig {
	c := kvConfig{PageSize: 4, NumSlots: 128, KVHeads: 1, TotalKVHeads: 1, AuxItemLens: []int{64, 40}, AuxSlots: 64}
	for range n {
		c.ItemLens = append(c.ItemLens, itemLen)
	}
	return c
}

func (c kvConfig) layers(ids ...int) kvConfig {
	c.LayerIDs = ids
	return c
}

// lens gives the regions so many bytes a page each.
func (c kvConfig) lens(itemLens ...int) kvConfig {
	c.ItemLens = itemLens
	return c
}

// kinds gives the regions their memory kinds, in turn.
func (c kvConfig) kinds(kinds ...string) kvConfig {
	c.MemKinds = nil
	for i := range c.ItemLens {
		c.MemKinds = append(c.MemKinds, kinds[i%len(kinds)])
	}
	return c
}

// heads says how many KV heads the rank has, and how many the model.
func (c kvConfig) heads(n, total int) kvConfig {
	c.KVHeads, c.TotalKVHeads = n, total
	return c
}

func (c kvConfig) state(components ...stateConfig) kvConfig {
	c.State = components
	return c
}

// tp is rank r of n attention TP ranks that have a cache each.
func (c rankConfig) tp(r, n int) rankConfig {
	c.TPSize = n
	c.Parallel.AttnTPSize, c.Parallel.AttnTPRank, c.Parallel.TPSize = n, r, n
	c.KVArgs.EngineRank = r
	return c
}

// cp is rank r of n context-parallel ranks; the server counts them as TP ranks.
func (c rankConfig) cp(r, n int) rankConfig {
	c.TPSize = n
	c.Parallel.AttnCPSize, c.Parallel.AttnCPRank, c.Parallel.TPSize = n, r, n
	c.KVArgs.EngineRank = r
	return c
}

// pp is stage r of n, of the layers from start up to end.
func (c rankConfig) pp(r, n, start, end int) rankConfig {
	c.Parallel.PPSize, c.Parallel.PPRank = n, r
	c.KVArgs.PPRank, c.KVArgs.StartLayer, c.KVArgs.EndLayer = r, start, end
	return c
}

// dcp is rank r of n decode-context-parallel ranks, which share the tokens.
func (c rankConfig) dcp(r, n int) rankConfig {
	c.Parallel.DCPSize, c.Parallel.DCPRank = n, r
	return c
}

// shard is a rank that shares one KV cache with the others.
func (c rankConfig) shard() rankConfig {
	c.Parallel.ShardKV = true
	return c
}

// env sets a variable more.
func (c rankConfig) env(name, value string) rankConfig {
	c.Env = maps.Clone(c.Env)
	if c.Env == nil {
		c.Env = map[string]string{}
	}
	c.Env[name] = value
	return c
}
