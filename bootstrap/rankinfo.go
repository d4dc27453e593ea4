package bootstrap

import (
	"encoding/json"
	"fmt"

	"github.com/nixlkv/nixlkv"
)

// FollowBootstrapRoom is the load balance method under which room % DP size says where a room
// is. Any other method means that the prefill registers every room's rank.
const FollowBootstrapRoom = "follow_bootstrap_room"

// RankInfo is what one prefill rank registers: who it is, where its control socket listens,
// and the prefill that it belongs to. Sizes count ranks; a size of 0 means 1.
type RankInfo struct {
	AttnTPSize, AttnTPRank     int
	AttnCPSize, AttnCPRank     int
	AttnDPSize, AttnDPRank     int // DP attention
	SystemDPSize, SystemDPRank int // whole replicas behind one server
	PPSize, PPRank             int

	// RankIP and RankPort are where the rank's PULL socket listens. The address is bare
	// (`::1`), and one that decode workers can reach: no wildcard.
	RankIP   string
	RankPort int

	PageSize     int    // tokens of a KV page
	KVCacheDtype string // "": not told

	LoadBalanceMethod        string // "": FollowBootstrapRoom
	EnableDSACacheLayerSplit bool
	PrefillHTTPPort          int // 0: not told

	KVLayout               string          // "": not told (0.5.23)
	DSV41SpecLayout        json.RawMessage // a JSON object; nil: none (0.5.21)
	EnableKVCacheSharding  bool            // 0.5.23
	DecodeAllocationPolicy AllocationPolicy
}

// ID says which rank of the prefill this is. Its DP group is the DP attention rank, or the
// replica's rank when there are several replicas.
func (r RankInfo) ID() RankID {
	id := RankID{DP: r.AttnDPRank, CP: r.AttnCPRank, TP: r.AttnTPRank, PP: r.PPRank}
	if orOne(r.SystemDPSize) != 1 {
		id.DP = r.SystemDPRank
	}
	return id
}

// Endpoint is where the rank listens.
func (r RankInfo) Endpoint() Endpoint { return Endpoint{Host: r.RankIP, Port: r.RankPort} }

// Topology is what this rank alone tells of its prefill.
func (r RankInfo) Topology() Topology {
	t := Topology{
		AttnTPSize: orOne(r.AttnTPSize), AttnCPSize: orOne(r.AttnCPSize),
		DPSize: orOne(r.AttnDPSize), PPSize: orOne(r.PPSize),
		PageSize: r.PageSize, KVCacheDtype: r.KVCacheDtype,
		FollowBootstrapRoom:      r.LoadBalanceMethod == "" || r.LoadBalanceMethod == FollowBootstrapRoom,
		EnableDSACacheLayerSplit: r.EnableDSACacheLayerSplit, PrefillHTTPPort: r.PrefillHTTPPort,
		KVLayout: r.KVLayout, DSV41SpecLayout: r.DSV41SpecLayout,
		EnableKVCacheSharding: r.EnableKVCacheSharding, DecodeAllocationPolicy: r.DecodeAllocationPolicy.orEarly(),
	}
	if n := orOne(r.SystemDPSize); n != 1 {
		t.DPSize = n
	}
	return t
}

// Validate refuses ranks outside of their sizes, an address that cannot be reached, and what
// Topology.Validate refuses. Errors wrap nixlkv.ErrMalformed or nixlkv.ErrLimit.
func (r RankInfo) Validate() error {
	if err := r.Topology().Validate(); err != nil {
		return err
	}
	// Of the two kinds of DP only the one that counts is checked: with DP attention SGLang up to
	// 0.5.21 sends the DP rank as system_dp_rank, too, next to a system_dp_size of 1.
	id, t := r.ID(), r.Topology()
	for _, x := range []struct {
		name       string
		rank, size int
	}{
		{"TP", id.TP, t.AttnTPSize}, {"CP", id.CP, t.AttnCPSize}, {"DP", id.DP, t.DPSize}, {"PP", id.PP, t.PPSize},
	} {
		if x.rank < 0 || x.rank >= x.size {
			return fmt.Errorf("%w: %s rank %d of %d", nixlkv.ErrMalformed, x.name, x.rank, x.size)
		}
	}
	if err := r.Endpoint().Validate(); err != nil {
		return err
	}
	if e := r.Endpoint(); e.Reachable() != e {
		return fmt.Errorf("%w: rank at the wildcard address %s", nixlkv.ErrMalformed, e.Host)
	}
	if r.PageSize < 1 {
		return fmt.Errorf("%w: page size %d", nixlkv.ErrMalformed, r.PageSize)
	}
	return nil
}

// rankRequest is the body of PUT /route. SGLang's server takes keys that it does not know.
type rankRequest struct {
	AttnTPSize               int              `json:"attn_tp_size"`
	AttnTPRank               int              `json:"attn_tp_rank"`
	AttnCPSize               int              `json:"attn_cp_size"`
	AttnCPRank               int              `json:"attn_cp_rank"`
	AttnDPSize               int              `json:"attn_dp_size"`
	AttnDPRank               int              `json:"attn_dp_rank"`
	PPSize                   int              `json:"pp_size"`
	PPRank                   int              `json:"pp_rank"`
	SystemDPSize             int              `json:"system_dp_size"`
	SystemDPRank             int              `json:"system_dp_rank"`
	RankIP                   string           `json:"rank_ip"`
	RankPort                 int              `json:"rank_port"`
	PageSize                 int              `json:"page_size"`
	KVCacheDtype             *string          `json:"kv_cache_dtype"`
	LoadBalanceMethod        string           `json:"load_balance_method"`
	EnableDSACacheLayerSplit bool             `json:"enable_dsa_cache_layer_split"`
	PrefillHTTPPort          *int             `json:"prefill_http_port"`
	KVLayout                 string           `json:"kv_layout,omitempty"`
	DSV41SpecLayout          json.RawMessage  `json:"dsv41_spec_layout,omitempty"`
	EnableKVCacheSharding    bool             `json:"enable_kv_cache_sharding,omitempty"`
	DecodeAllocationPolicy   AllocationPolicy `json:"decode_allocation_policy"`
}

// MarshalJSON gives the body of PUT /route.
func (r RankInfo) MarshalJSON() ([]byte, error) {
	q := rankRequest{
		AttnTPSize: orOne(r.AttnTPSize), AttnTPRank: r.AttnTPRank,
		AttnCPSize: orOne(r.AttnCPSize), AttnCPRank: r.AttnCPRank,
		AttnDPSize: orOne(r.AttnDPSize), AttnDPRank: r.AttnDPRank,
		PPSize: orOne(r.PPSize), PPRank: r.PPRank,
		SystemDPSize: orOne(r.SystemDPSize), SystemDPRank: r.SystemDPRank,
		RankIP: r.RankIP, RankPort: r.RankPort,
		PageSize: r.PageSize, KVCacheDtype: nonZero(r.KVCacheDtype),
		LoadBalanceMethod:        r.LoadBalanceMethod,
		EnableDSACacheLayerSplit: r.EnableDSACacheLayerSplit, PrefillHTTPPort: nonZero(r.PrefillHTTPPort),
		KVLayout: r.KVLayout, DSV41SpecLayout: r.DSV41SpecLayout, EnableKVCacheSharding: r.EnableKVCacheSharding,
		DecodeAllocationPolicy: r.DecodeAllocationPolicy.orEarly(),
	}
	if q.LoadBalanceMethod == "" {
		q.LoadBalanceMethod = FollowBootstrapRoom
	}
	return json.Marshal(q)
}

// UnmarshalJSON is ParseRankInfo.
func (r *RankInfo) UnmarshalJSON(b []byte) (err error) {
	*r, err = ParseRankInfo(b)
	return err
}

// ParseRankInfo reads the body of PUT /route as any release sends it, and validates it.
// Errors wrap nixlkv.ErrMalformed or nixlkv.ErrLimit.
func ParseRankInfo(b []byte) (RankInfo, error) {
	f, err := parseFields(b)
	if err != nil {
		return RankInfo{}, err
	}
	r := RankInfo{
		AttnTPSize:   f.number("attn_tp_size", 1, MaxRanks),
		AttnTPRank:   f.number("attn_tp_rank", 0, MaxRanks-1),
		AttnCPSize:   f.number("attn_cp_size", 1, MaxRanks),
		AttnCPRank:   f.number("attn_cp_rank", 0, MaxRanks-1),
		AttnDPSize:   f.number("attn_dp_size", 1, MaxRanks),
		AttnDPRank:   f.number("attn_dp_rank", 0, MaxRanks-1),
		PPSize:       f.number("pp_size", 1, MaxRanks),
		PPRank:       f.number("pp_rank", 0, MaxRanks-1),
		SystemDPSize: f.number("system_dp_size", 1, MaxRanks),
		SystemDPRank: f.number("system_dp_rank", 0, MaxRanks-1),

		RankIP:   f.text("rank_ip"),
		RankPort: f.number("rank_port", 1, maxPort),

		PageSize:     f.number("page_size", 1, maxPageSize),
		KVCacheDtype: f.text("kv_cache_dtype"),

		LoadBalanceMethod:        f.text("load_balance_method"),
		EnableDSACacheLayerSplit: f.flag("enable_dsa_cache_layer_split", false),
		PrefillHTTPPort:          f.optionalNumber("prefill_http_port", 0, maxPort),

		KVLayout:               f.text("kv_layout"),
		DSV41SpecLayout:        f.object("dsv41_spec_layout"),
		EnableKVCacheSharding:  f.flag("enable_kv_cache_sharding", false),
		DecodeAllocationPolicy: AllocationPolicy(f.text("decode_allocation_policy")),
	}
	if _, ok := f.raw["kv_cache_dtype"]; !ok {
		f.fail("kv_cache_dtype", "missing")
	}
	// Absent means following; null, like any other value, that the prefill registers its rooms.
	if _, ok := f.raw["load_balance_method"]; ok && r.LoadBalanceMethod == "" {
		r.LoadBalanceMethod = "none"
	}
	if err := f.err(); err != nil {
		return RankInfo{}, err
	}
	return r, r.Validate()
}
