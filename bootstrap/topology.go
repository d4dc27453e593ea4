package bootstrap

import (
	"encoding/json"
	"fmt"

	"github.com/nixlkv/nixlkv"
)

// AllocationPolicy says when a decode worker reserves KV pages for a request
// (decode_allocation_policy, from 0.5.22).
type AllocationPolicy string

// The policies. The zero value, and a peer that does not tell, mean EarlyAllocation.
const (
	EarlyAllocation           AllocationPolicy = "early"
	PrefillCompleteAllocation AllocationPolicy = "prefill_complete"
)

// orEarly makes policies comparable.
func (p AllocationPolicy) orEarly() AllocationPolicy {
	if p == "" {
		return EarlyAllocation
	}
	return p
}

// Bounds on what a peer may claim. A topology that is larger is refused before anything is
// allocated for it.
const (
	// MaxRanks bounds the ranks of one prefill, over all its DP groups.
	MaxRanks = 1 << 16

	maxPageSize = 1 << 30
)

// Topology is what a bootstrap server tells of its prefill, once all ranks have registered.
// Sizes count ranks; a size of 0 means 1.
type Topology struct {
	AttnTPSize int // attention TP, not the server's --tp-size
	AttnCPSize int
	DPSize     int
	PPSize     int

	PageSize     int    // tokens of a KV page; 0: not told
	KVCacheDtype string // as given to --kv-cache-dtype, `auto` included; "": not told

	// FollowBootstrapRoom: a room's DP rank is room % DPSize. Otherwise the prefill registers
	// it and the decode has to ask.
	FollowBootstrapRoom bool
	// EnableDSACacheLayerSplit: every CP rank holds other layers, so all are asked.
	EnableDSACacheLayerSplit bool
	// PrefillHTTPPort is the port of the prefill's own API; 0: not told.
	PrefillHTTPPort int

	// KVLayout names the byte layout of a page where a pool has several (0.5.23); "": not told.
	KVLayout string
	// DSV41SpecLayout is a JSON object that must be the same on both sides (0.5.21); nil: none.
	DSV41SpecLayout json.RawMessage
	// EnableKVCacheSharding: every rank of a shard group holds some of the pages (0.5.23).
	EnableKVCacheSharding bool
	// DecodeAllocationPolicy must be the decode's own (0.5.22).
	DecodeAllocationPolicy AllocationPolicy
}

// Ranks gives how many ranks the prefill has, over all DP groups.
func (t Topology) Ranks() int {
	return orOne(t.AttnTPSize) * orOne(t.AttnCPSize) * orOne(t.DPSize) * orOne(t.PPSize)
}

// PrefillRank gives the number by which a rank goes in KV_STATUS and ABORT_ACK. It is unique
// within a DP group.
func (t Topology) PrefillRank(r Target) int {
	cp, pp := orOne(t.AttnCPSize), orOne(t.PPSize)
	return r.TP*pp*cp + r.PP*cp + r.CP
}

// Validate refuses sizes that are negative or whose product is above MaxRanks, and a
// DSV41SpecLayout that is no JSON object. Errors wrap nixlkv.ErrMalformed or nixlkv.ErrLimit.
func (t Topology) Validate() error {
	total := 1
	for _, size := range []int{t.AttnTPSize, t.AttnCPSize, t.DPSize, t.PPSize} {
		if size < 0 {
			return fmt.Errorf("%w: prefill with a size of %d", nixlkv.ErrMalformed, size)
		}
		if size > MaxRanks {
			return fmt.Errorf("%w: prefill with a size of %d, at most %d", nixlkv.ErrLimit, size, MaxRanks)
		}
		// Neither factor exceeds 1<<16, so the product fits 64 bits, and 32 after the check.
		if int64(total)*int64(orOne(size)) > MaxRanks {
			return fmt.Errorf("%w: prefill with TP %d, CP %d, DP %d, PP %d has more than %d ranks", nixlkv.ErrLimit,
				t.AttnTPSize, t.AttnCPSize, t.DPSize, t.PPSize, MaxRanks)
		}
		total *= orOne(size)
	}
	if t.PageSize < 0 || t.PageSize > maxPageSize {
		return fmt.Errorf("%w: page size %d", nixlkv.ErrMalformed, t.PageSize)
	}
	if _, err := decodeObject(t.DSV41SpecLayout); err != nil {
		return fmt.Errorf("DSV41SpecLayout: %w", err)
	}
	return nil
}

// topologyReply is the wire form. Without the last four keys it is 0.5.18's reply, nulls
// included: up to 0.5.23 a decode gives up on a key that it does not know
// (`PrefillServerInfo(**reply)`), so a newer key goes out only when its value matters.
type topologyReply struct {
	AttnTPSize               int     `json:"attn_tp_size"`
	AttnCPSize               int     `json:"attn_cp_size"`
	DPSize                   int     `json:"dp_size"`
	PPSize                   int     `json:"pp_size"`
	PageSize                 *int    `json:"page_size"`
	KVCacheDtype             *string `json:"kv_cache_dtype"`
	FollowBootstrapRoom      bool    `json:"follow_bootstrap_room"`
	EnableDSACacheLayerSplit bool    `json:"enable_dsa_cache_layer_split"`
	PrefillHTTPPort          *int    `json:"prefill_http_port"`

	// The decode's own fields, which SGLang's server sends along unset.
	TargetTPRank               *int `json:"target_tp_rank"`
	TargetTPRanks              *int `json:"target_tp_ranks"`
	TargetCPRanks              *int `json:"target_cp_ranks"`
	TargetPPRanks              *int `json:"target_pp_ranks"`
	RequiredDstInfoNum         *int `json:"required_dst_info_num"`
	RequiredPrefillResponseNum *int `json:"required_prefill_response_num"`

	DSV41SpecLayout        json.RawMessage  `json:"dsv41_spec_layout,omitempty"`
	DecodeAllocationPolicy AllocationPolicy `json:"decode_allocation_policy,omitempty"`
	KVLayout               string           `json:"kv_layout,omitempty"`
	EnableKVCacheSharding  bool             `json:"enable_kv_cache_sharding,omitempty"`
}

// MarshalJSON gives the reply to GET /route. Keys that 0.5.18 does not know are left out
// unless their values differ from the defaults.
func (t Topology) MarshalJSON() ([]byte, error) {
	r := topologyReply{
		AttnTPSize: orOne(t.AttnTPSize), AttnCPSize: orOne(t.AttnCPSize),
		DPSize: orOne(t.DPSize), PPSize: orOne(t.PPSize),
		PageSize: nonZero(t.PageSize), KVCacheDtype: nonZero(t.KVCacheDtype),
		FollowBootstrapRoom: t.FollowBootstrapRoom, EnableDSACacheLayerSplit: t.EnableDSACacheLayerSplit,
		PrefillHTTPPort: nonZero(t.PrefillHTTPPort),
		DSV41SpecLayout: t.DSV41SpecLayout, KVLayout: t.KVLayout, EnableKVCacheSharding: t.EnableKVCacheSharding,
	}
	if p := t.DecodeAllocationPolicy.orEarly(); p != EarlyAllocation {
		r.DecodeAllocationPolicy = p
	}
	return json.Marshal(r)
}

// UnmarshalJSON is ParseTopology.
func (t *Topology) UnmarshalJSON(b []byte) (err error) {
	*t, err = ParseTopology(b)
	return err
}

// ParseTopology reads the reply to GET /route of any release. The four sizes must be there;
// other keys may be absent or null, unknown ones are ignored. Errors wrap
// nixlkv.ErrMalformed or nixlkv.ErrLimit.
func ParseTopology(b []byte) (Topology, error) {
	f, err := parseFields(b)
	if err != nil {
		return Topology{}, err
	}
	t := Topology{
		AttnTPSize: f.number("attn_tp_size", 1, MaxRanks),
		AttnCPSize: f.number("attn_cp_size", 1, MaxRanks),
		DPSize:     f.number("dp_size", 1, MaxRanks),
		PPSize:     f.number("pp_size", 1, MaxRanks),

		PageSize:     f.optionalNumber("page_size", 1, maxPageSize),
		KVCacheDtype: f.text("kv_cache_dtype"),

		FollowBootstrapRoom:      f.flag("follow_bootstrap_room", true),
		EnableDSACacheLayerSplit: f.flag("enable_dsa_cache_layer_split", false),
		PrefillHTTPPort:          f.optionalNumber("prefill_http_port", 0, maxPort),

		KVLayout:               f.text("kv_layout"),
		DSV41SpecLayout:        f.object("dsv41_spec_layout"),
		EnableKVCacheSharding:  f.flag("enable_kv_cache_sharding", false),
		DecodeAllocationPolicy: AllocationPolicy(f.text("decode_allocation_policy")),
	}
	if err := f.err(); err != nil {
		return Topology{}, err
	}
	return t, t.Validate()
}

// orOne is the size that a zero stands for.
func orOne(size int) int {
	if size == 0 {
		return 1
	}
	return size
}

// nonZero is null in JSON for a value that is not told.
func nonZero[T comparable](v T) *T {
	var zero T
	if v == zero {
		return nil
	}
	return &v
}
