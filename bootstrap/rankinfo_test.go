package bootstrap

import (
	"encoding/json"
	"errors"
	"reflect"
	"strings"
	"testing"

	"github.com/nixlkv/nixlkv"
)

// sglangRank is what a 0.5.18 prefill sends for TP rank 1 of 2.
const sglangRank = `{"attn_tp_size": 2, "attn_tp_rank": 1, "attn_cp_size": 1, "attn_cp_rank": 0, "attn_dp_size": 1,
"attn_dp_rank": 0, "pp_size": 1, "pp_rank": 0, "system_dp_size": 1, "system_dp_rank": 0, "rank_ip": "10.0.0.7",
"rank_port": 41234, "page_size": 64, "kv_cache_dtype": "auto", "load_balance_method": "follow_bootstrap_room",
"enable_dsa_cache_layer_split": false, "prefill_http_port": 30000}`

func TestParseRankInfo(t *testing.T) {
	base := RankInfo{
		AttnTPSize: 2, AttnTPRank: 1, AttnCPSize: 1, AttnDPSize: 1, PPSize: 1, SystemDPSize: 1,
		RankIP: "10.0.0.7", RankPort: 41234, PageSize: 64, KVCacheDtype: "auto",
		LoadBalanceMethod: FollowBootstrapRoom, PrefillHTTPPort: 30000,
	}
	with := func(change func(*RankInfo)) RankInfo { x := base; change(&x); return x }
	edit := func(old, new string) string {
		if !strings.Contains(sglangRank, old) {
			t.Fatalf("no %q to edit", old)
		}
		return strings.Replace(sglangRank, old, new, 1)
	}
	for _, tc := range []struct {
		name, in string
		want     RankInfo
	}{
		{"0.5.18", sglangRank, base},
		{"method absent", edit(`"load_balance_method": "follow_bootstrap_room",`, ``),
			with(func(x *RankInfo) { x.LoadBalanceMethod = "" })},
		{"method null", edit(`"follow_bootstrap_room"`, `null`),
			with(func(x *RankInfo) { x.LoadBalanceMethod = "none" })},
		{"dtype null", edit(`"auto"`, `null`), with(func(x *RankInfo) { x.KVCacheDtype = "" })},
		{"IPv6", edit("10.0.0.7", "::1"), with(func(x *RankInfo) { x.RankIP = "::1" })},
		// DP attention up to 0.5.21: the DP rank comes as both kinds, and one size is 1.
		{"system DP rank beyond its size", edit(`"system_dp_rank": 0`, `"system_dp_rank": 3`),
			with(func(x *RankInfo) { x.SystemDPRank = 3 })},
		{"0.5.23", edit(`"prefill_http_port"`, `"kv_layout": "nhd", "dsv41_spec_layout": {"a": 1}, "new": 1,
			"enable_kv_cache_sharding": true, "decode_allocation_policy": "prefill_complete", "prefill_http_port"`),
			with(func(x *RankInfo) {
				x.KVLayout, x.DSV41SpecLayout, x.EnableKVCacheSharding = "nhd", json.RawMessage(`{"a":1}`), true
				x.DecodeAllocationPolicy = PrefillCompleteAllocation
			})},
		{"0.5.22 defaults", edit(`"prefill_http_port"`, `"kv_layout": null, "dsv41_spec_layout": null,
			"decode_allocation_policy": "early", "prefill_http_port"`),
			with(func(x *RankInfo) { x.DecodeAllocationPolicy = EarlyAllocation })},
	} {
		got, err := ParseRankInfo([]byte(tc.in))
		if err != nil || !reflect.DeepEqual(got, tc.want) {
			t.Errorf("%s: %+v, %v, want %+v", tc.name, got, err, tc.want)
		}
	}
	for _, tc := range []struct {
		name, in, says string
		want           error
	}{
		{"nothing", `{}`, "attn_tp_size: missing", nixlkv.ErrMalformed},
		{"no dtype", edit(`"kv_cache_dtype": "auto",`, ``), "kv_cache_dtype: missing", nixlkv.ErrMalformed},
		{"rank beyond size", edit(`"attn_tp_rank": 1`, `"attn_tp_rank": 2`), "TP rank 2 of 2", nixlkv.ErrMalformed},
		{"DP rank beyond size", edit(`"attn_dp_rank": 0`, `"attn_dp_rank": 1`), "DP rank 1 of 1", nixlkv.ErrMalformed},
		{"negative rank", edit(`"pp_rank": 0`, `"pp_rank": -1`), "pp_rank", nixlkv.ErrMalformed},
		{"size 0", edit(`"pp_size": 1`, `"pp_size": 0`), "pp_size", nixlkv.ErrMalformed},
		{"port 0", edit("41234", "0"), "rank_port", nixlkv.ErrMalformed},
		{"port too large", edit("41234", "65536"), "rank_port", nixlkv.ErrMalformed},
		{"no address", edit("10.0.0.7", ""), "host", nixlkv.ErrMalformed},
		{"bracketed address", edit("10.0.0.7", "[::1]"), "host", nixlkv.ErrMalformed},
		{"path for an address", edit("10.0.0.7", "a/../b"), "host", nixlkv.ErrMalformed},
		{"wildcard", edit("10.0.0.7", "0.0.0.0"), "wildcard", nixlkv.ErrMalformed},
		{"page size 0", edit(`"page_size": 64`, `"page_size": 0`), "page_size", nixlkv.ErrMalformed},
		{"too many ranks", edit(`"attn_tp_size": 2, "attn_tp_rank": 1, "attn_cp_size": 1`,
			`"attn_tp_size": 65536, "attn_tp_rank": 1, "attn_cp_size": 2`), "more than", nixlkv.ErrLimit},
	} {
		got, err := ParseRankInfo([]byte(tc.in))
		if !errors.Is(err, tc.want) || (err != nil && !strings.Contains(err.Error(), tc.says)) {
			t.Errorf("%s: %+v, %v, want %v with %q", tc.name, got, err, tc.want, tc.says)
		}
	}
}

func TestRankInfoRoundTrip(t *testing.T) {
	for _, want := range []RankInfo{
		{RankIP: "::1", RankPort: 1, PageSize: 1},
		{AttnTPSize: 4, AttnTPRank: 3, AttnCPSize: 2, AttnCPRank: 1, AttnDPSize: 2, AttnDPRank: 1, PPSize: 2, PPRank: 1,
			RankIP: "10.0.0.7", RankPort: 9, PageSize: 64, KVCacheDtype: "fp8_e4m3", LoadBalanceMethod: "round_robin",
			EnableDSACacheLayerSplit: true, PrefillHTTPPort: 30000, KVLayout: "nhd",
			DSV41SpecLayout: json.RawMessage(`{"a":[1]}`), EnableKVCacheSharding: true,
			DecodeAllocationPolicy: PrefillCompleteAllocation},
	} {
		b, err := json.Marshal(want)
		if err != nil {
			t.Fatal(err)
		}
		var got RankInfo
		if err := json.Unmarshal(b, &got); err != nil {
			t.Fatal(err)
		}
		// Zero values stand for defaults, which the wire spells out.
		if got.ID() != want.ID() || got.Endpoint() != want.Endpoint() || !reflect.DeepEqual(got.Topology(), want.Topology()) {
			t.Errorf("%s gives %+v, want %+v", b, got, want)
		}
	}
}

func TestRankID(t *testing.T) {
	for _, tc := range []struct {
		info RankInfo
		id   RankID
		dp   int
	}{
		{RankInfo{}, RankID{}, 1},
		{RankInfo{AttnDPSize: 4, AttnDPRank: 3, SystemDPSize: 1, SystemDPRank: 9}, RankID{DP: 3}, 4},
		{RankInfo{AttnDPSize: 4, AttnDPRank: 3, SystemDPSize: 2, SystemDPRank: 1}, RankID{DP: 1}, 2},
		{RankInfo{AttnTPRank: 5, AttnCPRank: 6, PPRank: 7}, RankID{CP: 6, TP: 5, PP: 7}, 1},
	} {
		if tc.info.ID() != tc.id || tc.info.Topology().DPSize != tc.dp {
			t.Errorf("%+v: rank %+v, DP size %d, want %+v, %d", tc.info, tc.info.ID(), tc.info.Topology().DPSize, tc.id, tc.dp)
		}
	}
}
