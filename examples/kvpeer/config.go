package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"strings"

	"github.com/nixlkv/nixlkv"
)

// errConfig: a configuration that cannot be.
var errConfig = errors.New("invalid configuration")

const (
	rolePrefill = "prefill"
	roleDecode  = "decode"

	// maxSlots is how many slots 32-bit indices name.
	maxSlots = math.MaxInt32
	// maxMemory bounds what one rank allocates.
	maxMemory = 1 << 40
)

// config is what CONFIG.json says. Everything but role and kv has a default.
type config struct {
	Role             string         `json:"role"`
	Host             string         `json:"host"`         // of the bootstrap server
	HostIP           string         `json:"host_ip"`      // of the control socket
	ControlPort      int            `json:"control_port"` // of the control socket; 0: any
	BootstrapPort    int            `json:"bootstrap_port"`
	ServeBootstrap   bool           `json:"serve_bootstrap"` // else register at host:bootstrap_port
	IsMLA            bool           `json:"is_mla"`
	TPSize           int            `json:"tp_size"` // of the server; 0: attn_tp_size
	Env              map[string]any `json:"env"`     // variables to set first
	FillSeed         *string        `json:"fill_seed"`
	AuxSeed          string         `json:"aux_seed"`
	AllocationPolicy string         `json:"allocation_policy"`
	HTTPPort         int            `json:"http_port"`
	ChunkedPrefill   int            `json:"chunked_prefill_size"` // for staging, which is not there
	KV               kvConfig       `json:"kv"`
	Parallel         parallelConfig `json:"parallel"`
	KVArgs           kvArgsConfig   `json:"kv_args"`

	unknown []string // keys that mean nothing here, as far as they were looked for
}

// kvConfig is the memory.
type kvConfig struct {
	PageSize     int           `json:"page_size"` // tokens
	ItemLens     []int         `json:"item_lens"` // bytes of a page, one a region
	NumSlots     slotCounts    `json:"num_slots"`
	MemKinds     []string      `json:"mem_kinds"` // absent: all VRAM
	LayerIDs     []int         `json:"layer_ids"`
	KVHeads      *int          `json:"kv_head_num"`
	TotalKVHeads int           `json:"total_kv_head_num"`
	Dtype        string        `json:"dtype"`
	AuxItemLens  []int         `json:"aux_item_lens"`
	AuxSlots     int           `json:"aux_slots"`
	State        []stateConfig `json:"state"`
}

// stateConfig is one state component. Lists are absent, or one entry a tensor.
type stateConfig struct {
	Type             string  `json:"type"`
	ItemLens         []int   `json:"item_lens"` // 0: the tensor is not there
	NumSlots         int     `json:"num_slots"`
	LayerIDs         []int   `json:"layer_ids"`
	DimPerTensor     []int   `json:"dim_per_tensor"`
	SliceOuterCounts []int   `json:"slice_outer_counts"`
	ConvShardGroups  [][]int `json:"conv_shard_groups"`
}

// parallelConfig is where the rank stands. Sizes are 1 and ranks 0 if absent.
type parallelConfig struct {
	AttnTPSize   int `json:"attn_tp_size"`
	AttnTPRank   int `json:"attn_tp_rank"`
	AttnCPSize   int `json:"attn_cp_size"`
	AttnCPRank   int `json:"attn_cp_rank"`
	AttnDCPSize  int `json:"attn_dcp_size"`
	AttnDCPRank  int `json:"attn_dcp_rank"`
	AttnDPSize   int `json:"attn_dp_size"`
	AttnDPRank   int `json:"attn_dp_rank"`
	DPSize       int `json:"dp_size"`
	SystemDPSize int `json:"system_dp_size"` // another name of dp_size
	PPSize       int `json:"pp_size"`
	PPRank       int `json:"pp_rank"`

	LoadBalance   string `json:"load_balance_method"`
	ShardKV       bool   `json:"enable_kv_cache_sharding"`
	DSALayerSplit bool   `json:"enable_dsa_cache_layer_split"`
	CPTPSharing   bool   `json:"enable_cp_tp_group_sharing"`

	// SGLang has these as well; they follow from the others.
	TPSize            int  `json:"tp_size"`
	NumDPRanks        int  `json:"num_dp_ranks"`
	EnableDPAttention bool `json:"enable_dp_attention"`
	NNodes            int  `json:"nnodes"`
}

// kvArgsConfig has what SGLang keeps in its KVArgs beside the memory.
type kvArgsConfig struct {
	EngineRank        int    `json:"engine_rank"`
	PPRank            *int   `json:"pp_rank"` // absent: that of parallel
	SystemDPRank      int    `json:"system_dp_rank"`
	StartLayer        int    `json:"prefill_start_layer"`
	EndLayer          *int   `json:"prefill_end_layer"`
	GPU               uint32 `json:"gpu_id"`
	CompressionRatios []int  `json:"mla_compression_ratios"`
	HybridMLA         bool   `json:"is_hybrid_mla_backend"`
	DraftEntries      int    `json:"num_draft_entries"`
	KVLayout          string `json:"kv_layout"`
	SWALayout         string `json:"swa_kv_cache_layout"`
}

// slotCounts is a number for all regions, or one each.
type slotCounts []int

func (s *slotCounts) UnmarshalJSON(b []byte) error {
	var n int
	if err := json.Unmarshal(b, &n); err == nil {
		*s = slotCounts{n}
		return nil
	}
	return json.Unmarshal(b, (*[]int)(s))
}

// of gives the slots of region i of n.
func (s slotCounts) of(i int) int {
	if len(s) == 1 {
		return s[0]
	}
	return s[i]
}

func readConfig(path string) (*config, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	return parseConfig(b)
}

// parseConfig reads a configuration and checks what this program itself relies on; the
// library checks the rest when the rank is opened.
func parseConfig(b []byte) (*config, error) {
	c := &config{
		Host: "127.0.0.1", HostIP: "127.0.0.1", BootstrapPort: 8998, ServeBootstrap: true,
		AuxSeed: "p", AllocationPolicy: "early",
		KV: kvConfig{PageSize: 1, Dtype: "auto", AuxItemLens: []int{64}, AuxSlots: 16},
	}
	if err := json.Unmarshal(b, c); err != nil {
		return nil, fmt.Errorf("%w: %w", errConfig, err)
	}
	strict := json.NewDecoder(bytes.NewReader(b))
	strict.DisallowUnknownFields()
	if err := strict.Decode(new(config)); err != nil {
		c.unknown = append(c.unknown, strings.TrimPrefix(err.Error(), "json: "))
	}
	if err := c.validate(); err != nil {
		return nil, err
	}
	return c, nil
}

func (c *config) validate() error {
	bad := func(format string, args ...any) error {
		return fmt.Errorf("%w: "+format, append([]any{errConfig}, args...)...)
	}
	unsupported := func(what string) error {
		return fmt.Errorf("%w: %w: %s", errConfig, nixlkv.ErrUnsupported, what)
	}
	switch {
	case c.Role != rolePrefill && c.Role != roleDecode:
		return bad("role is %q, want prefill or decode", c.Role)
	case c.BootstrapPort < 0 || c.BootstrapPort > math.MaxUint16:
		return bad("bootstrap_port is %d", c.BootstrapPort)
	case c.BootstrapPort == 0 && !c.ServeBootstrap:
		return bad("bootstrap_port is 0, and another rank serves it")
	case c.HTTPPort < 0 || c.HTTPPort > math.MaxUint16:
		return bad("http_port is %d", c.HTTPPort)
	case c.AllocationPolicy != "early" && c.AllocationPolicy != "prefill_complete":
		return bad("allocation_policy is %q", c.AllocationPolicy)
	case c.Parallel.CPTPSharing:
		return unsupported("enable_cp_tp_group_sharing")
	case c.Parallel.DPSize > 1 && c.Parallel.SystemDPSize > 1 && c.Parallel.DPSize != c.Parallel.SystemDPSize:
		return bad("dp_size is %d, and system_dp_size %d", c.Parallel.DPSize, c.Parallel.SystemDPSize)
	}
	for name, value := range c.Env {
		switch value.(type) {
		case string, float64, bool:
		default:
			return bad("variable %s has neither a text nor a number", name)
		}
	}
	return c.KV.validate(bad)
}

func (k *kvConfig) validate(bad func(string, ...any) error) error {
	regions := len(k.ItemLens)
	switch {
	case len(k.NumSlots) != 1 && len(k.NumSlots) != regions:
		return bad("num_slots has %d entries, for %d regions", len(k.NumSlots), regions)
	case k.MemKinds != nil && len(k.MemKinds) != regions:
		return bad("mem_kinds has %d entries, for %d regions", len(k.MemKinds), regions)
	case len(k.LayerIDs) != 0 && len(k.LayerIDs) != regions:
		return bad("layer_ids has %d entries, for %d regions", len(k.LayerIDs), regions)
	}
	total := 0
	add := func(what string, itemLen, slots int) error {
		if itemLen < 1 || slots < 1 || slots > maxSlots || itemLen > (maxMemory-total)/slots {
			return bad("%s: %d slots of %d bytes", what, slots, itemLen)
		}
		total += itemLen * slots
		return nil
	}
	for i, n := range k.ItemLens {
		if err := add(fmt.Sprintf("region %d", i), n, k.NumSlots.of(i)); err != nil {
			return err
		}
	}
	for i, n := range k.AuxItemLens {
		if err := add(fmt.Sprintf("aux buffer %d", i), n, k.AuxSlots); err != nil {
			return err
		}
	}
	for i, s := range k.State {
		for _, list := range []struct {
			name string
			n    int
		}{
			{"layer_ids", len(s.LayerIDs)}, {"dim_per_tensor", len(s.DimPerTensor)},
			{"slice_outer_counts", len(s.SliceOuterCounts)}, {"conv_shard_groups", len(s.ConvShardGroups)},
		} {
			if list.n != 0 && list.n != len(s.ItemLens) {
				return bad("state %d: %s has %d entries, for %d tensors", i, list.name, list.n, len(s.ItemLens))
			}
		}
		for j, n := range s.ItemLens {
			if n == 0 {
				continue
			}
			if err := add(fmt.Sprintf("state %d, tensor %d", i, j), n, s.NumSlots); err != nil {
				return err
			}
		}
	}
	return nil
}
