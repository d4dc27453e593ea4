package bootstrap

import (
	"encoding/json"
	"errors"
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/nixlkv/nixlkv"
	"pgregory.net/rapid"
)

// keys0518 are the fields of PrefillServerInfo in 0.5.18, and of the reply of its server.
var keys0518 = []string{
	"attn_cp_size", "attn_tp_size", "dp_size", "enable_dsa_cache_layer_split", "follow_bootstrap_room",
	"kv_cache_dtype", "page_size", "pp_size", "prefill_http_port", "required_dst_info_num",
	"required_prefill_response_num", "target_cp_ranks", "target_pp_ranks", "target_tp_rank", "target_tp_ranks",
}

func keysOf(t *testing.T, b []byte) []string {
	t.Helper()
	var m map[string]any
	if err := json.Unmarshal(b, &m); err != nil {
		t.Fatal(err)
	}
	return slices.Sorted(maps.Keys(m))
}

func TestTopologyKeys(t *testing.T) {
	for _, tc := range []struct {
		name  string
		topo  Topology
		extra []string
	}{
		{"zero", Topology{}, nil},
		{"all that 0.5.18 knows", Topology{
			AttnTPSize: 8, AttnCPSize: 2, DPSize: 4, PPSize: 2, PageSize: 64, KVCacheDtype: "auto",
			FollowBootstrapRoom: true, EnableDSACacheLayerSplit: true, PrefillHTTPPort: 30000,
		}, nil},
		{"default policy", Topology{DecodeAllocationPolicy: EarlyAllocation}, nil},
		{"other policy", Topology{DecodeAllocationPolicy: PrefillCompleteAllocation}, []string{"decode_allocation_policy"}},
		{"layout", Topology{KVLayout: "x"}, []string{"kv_layout"}},
		{"sharding", Topology{EnableKVCacheSharding: true}, []string{"enable_kv_cache_sharding"}},
		{"DSpark", Topology{DSV41SpecLayout: json.RawMessage(`{"a":1}`)}, []string{"dsv41_spec_layout"}},
	} {
		b, err := json.Marshal(tc.topo)
		if err != nil {
			t.Fatal(err)
		}
		want := slices.Sorted(slices.Values(append(tc.extra, keys0518...)))
		if got := keysOf(t, b); !slices.Equal(got, want) {
			t.Errorf("%s: keys %v, want %v", tc.name, got, want)
		}
	}
}

func TestTopologyReplyText(t *testing.T) {
	b, err := json.Marshal(Topology{AttnTPSize: 2, PageSize: 16, KVCacheDtype: "auto", FollowBootstrapRoom: true})
	if err != nil {
		t.Fatal(err)
	}
	const want = `{"attn_tp_size":2,"attn_cp_size":1,"dp_size":1,"pp_size":1,"page_size":16,"kv_cache_dtype":"auto",` +
		`"follow_bootstrap_room":true,"enable_dsa_cache_layer_split":false,"prefill_http_port":null,` +
		`"target_tp_rank":null,"target_tp_ranks":null,"target_cp_ranks":null,"target_pp_ranks":null,` +
		`"required_dst_info_num":null,"required_prefill_response_num":null}`
	if string(b) != want {
		t.Errorf("reply\n%s\nwant\n%s", b, want)
	}
}

func TestParseTopology(t *testing.T) {
	const sizes = `"attn_tp_size":8,"attn_cp_size":1,"dp_size":2,"pp_size":1`
	base := Topology{AttnTPSize: 8, AttnCPSize: 1, DPSize: 2, PPSize: 1, FollowBootstrapRoom: true}
	with := func(change func(*Topology)) Topology { x := base; change(&x); return x }
	for _, tc := range []struct {
		name, in string
		want     Topology
	}{
		{"sizes alone", `{` + sizes + `}`, base},
		{"nulls", `{` + sizes + `,"page_size":null,"kv_cache_dtype":null,"follow_bootstrap_room":null,
			"enable_dsa_cache_layer_split":null,"prefill_http_port":null,"kv_layout":null,"dsv41_spec_layout":null,
			"enable_kv_cache_sharding":null,"decode_allocation_policy":null,"target_tp_rank":null}`, base},
		{"unknown keys", `{` + sizes + `,"new":{"a":[1,2]},"ATTN_TP_SIZE":3,"Page_Size":9}`, base},
		{"0.5.23", `{` + sizes + `,"page_size":64,"kv_cache_dtype":"fp8_e4m3","follow_bootstrap_room":false,
			"enable_dsa_cache_layer_split":true,"prefill_http_port":30000,"kv_layout":"nhd",
			"dsv41_spec_layout": {"a": [1, 2]} ,"enable_kv_cache_sharding":true,
			"decode_allocation_policy":"prefill_complete"}`,
			with(func(x *Topology) {
				x.PageSize, x.KVCacheDtype, x.FollowBootstrapRoom = 64, "fp8_e4m3", false
				x.EnableDSACacheLayerSplit, x.PrefillHTTPPort, x.KVLayout = true, 30000, "nhd"
				x.DSV41SpecLayout, x.EnableKVCacheSharding = json.RawMessage(`{"a":[1,2]}`), true
				x.DecodeAllocationPolicy = PrefillCompleteAllocation
			})},
	} {
		got, err := ParseTopology([]byte(tc.in))
		if err != nil || !reflect.DeepEqual(got, tc.want) {
			t.Errorf("%s: %+v, %v, want %+v", tc.name, got, err, tc.want)
		}
	}
}

func TestParseTopologyRefuses(t *testing.T) {
	const good = `{"attn_tp_size":8,"attn_cp_size":1,"dp_size":2,"pp_size":1}`
	for _, tc := range []struct {
		name, in, says string
		want           error
	}{
		{"empty", ``, "", nixlkv.ErrMalformed},
		{"null", `null`, "null", nixlkv.ErrMalformed},
		{"a list", `[]`, "", nixlkv.ErrMalformed},
		{"trailing", good + `x`, "", nixlkv.ErrMalformed},
		{"no TP", strings.Replace(good, "attn_tp_size", "x", 1), "attn_tp_size: missing", nixlkv.ErrMalformed},
		{"null TP", strings.Replace(good, ":8", ":null", 1), "attn_tp_size: missing", nixlkv.ErrMalformed},
		{"TP 0", strings.Replace(good, ":8", ":0", 1), "attn_tp_size", nixlkv.ErrMalformed},
		{"negative", strings.Replace(good, ":8", ":-8", 1), "attn_tp_size", nixlkv.ErrMalformed},
		{"fraction", strings.Replace(good, ":8", ":8.5", 1), "attn_tp_size", nixlkv.ErrMalformed},
		{"string", strings.Replace(good, ":8", `:"8"`, 1), "attn_tp_size", nixlkv.ErrMalformed},
		{"huge", strings.Replace(good, ":8", ":99999999999999999999", 1), "attn_tp_size", nixlkv.ErrMalformed},
		{"too many ranks", strings.Replace(good, ":8", ":65536", 1), "more than", nixlkv.ErrLimit},
		{"flag", strings.Replace(good, `"pp`, `"follow_bootstrap_room":1,"pp`, 1), "follow", nixlkv.ErrMalformed},
		{"layout", strings.Replace(good, `"pp`, `"dsv41_spec_layout":[1],"pp`, 1), "dsv41", nixlkv.ErrMalformed},
		{"long dtype", strings.Replace(good, `"pp`, `"kv_cache_dtype":"`+strings.Repeat("x", 300)+`","pp`, 1),
			"kv_cache_dtype", nixlkv.ErrMalformed},
	} {
		got, err := ParseTopology([]byte(tc.in))
		if !errors.Is(err, tc.want) || !strings.Contains(err.Error(), tc.says) {
			t.Errorf("%s: %+v, %v, want %v with %q", tc.name, got, err, tc.want, tc.says)
		}
	}
}

func drawTopology(t *rapid.T) Topology {
	size := rapid.SampledFrom([]int{1, 2, 3, 4, 8})
	x := Topology{
		AttnTPSize: size.Draw(t, "tp"), AttnCPSize: size.Draw(t, "cp"), DPSize: size.Draw(t, "dp"), PPSize: size.Draw(t, "pp"),
		PageSize: rapid.IntRange(0, 256).Draw(t, "page"), KVCacheDtype: rapid.StringN(0, 20, 60).Draw(t, "dtype"),
		FollowBootstrapRoom: rapid.Bool().Draw(t, "follow"), EnableDSACacheLayerSplit: rapid.Bool().Draw(t, "split"),
		PrefillHTTPPort: rapid.IntRange(0, maxPort).Draw(t, "port"), KVLayout: rapid.StringN(0, 8, 20).Draw(t, "layout"),
		EnableKVCacheSharding:  rapid.Bool().Draw(t, "shard"),
		DecodeAllocationPolicy: rapid.SampledFrom([]AllocationPolicy{"", PrefillCompleteAllocation, "other"}).Draw(t, "policy"),
	}
	if rapid.Bool().Draw(t, "spec") {
		b, err := json.Marshal(rapid.MapOf(rapid.StringN(0, 5, 20), rapid.SliceOfN(rapid.Int(), 0, 4)).Draw(t, "spec"))
		if err != nil {
			t.Fatal(err)
		}
		x.DSV41SpecLayout = b
	}
	return x
}

func TestTopologyRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		want := drawTopology(t)
		b, err := json.Marshal(want)
		if err != nil {
			t.Fatal(err)
		}
		var got Topology
		if err := json.Unmarshal(b, &got); err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(got, want) {
			t.Fatalf("%s\ngives %+v, want %+v", b, got, want)
		}
	})
}

func TestPrefillRankIsUnique(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		topo := drawTopology(t)
		seen := make(map[int]bool)
		for tp := range topo.AttnTPSize {
			for cp := range topo.AttnCPSize {
				for pp := range topo.PPSize {
					seen[topo.PrefillRank(Target{TP: tp, CP: cp, PP: pp})] = true
				}
			}
		}
		if want := topo.AttnTPSize * topo.AttnCPSize * topo.PPSize; len(seen) != want {
			t.Fatalf("%d numbers for %d ranks", len(seen), want)
		}
	})
}

func TestTopologyValidate(t *testing.T) {
	for _, tc := range []struct {
		topo Topology
		want error
	}{
		{Topology{}, nil},
		{Topology{AttnTPSize: MaxRanks}, nil},
		{Topology{AttnTPSize: -1}, nixlkv.ErrMalformed},
		{Topology{PageSize: -1}, nixlkv.ErrMalformed},
		{Topology{AttnTPSize: MaxRanks + 1}, nixlkv.ErrLimit},
		{Topology{AttnTPSize: MaxRanks, AttnCPSize: MaxRanks, DPSize: MaxRanks, PPSize: MaxRanks}, nixlkv.ErrLimit},
		{Topology{PPSize: 1 << 62}, nixlkv.ErrLimit},
		{Topology{DSV41SpecLayout: json.RawMessage(`{"a":`)}, nixlkv.ErrMalformed},
		{Topology{DSV41SpecLayout: json.RawMessage(`{} {}`)}, nixlkv.ErrMalformed},
		{Topology{DSV41SpecLayout: json.RawMessage(`7`)}, nixlkv.ErrMalformed},
	} {
		if err := tc.topo.Validate(); !errors.Is(err, tc.want) {
			t.Errorf("%+v: %v, want %v", tc.topo, err, tc.want)
		}
	}
}

func TestDifferingKeys(t *testing.T) {
	for _, tc := range []struct {
		a, b string
		want []string
	}{
		{`{"a":1,"b":[1,{"c":2}]}`, ` {"b" : [1.0, {"c": 2e0}], "a": 1}`, nil},
		{``, ``, nil},
		{``, `{"a":null}`, []string{"a"}},
		{`{"z":1,"b":2,"a":3}`, `{"a":4,"c":2,"z":1}`, []string{"a", "b", "c"}},
		{`{"a":1}`, `{"a":"1"}`, []string{"a"}},
		{`{"a":[1,2]}`, `{"a":[2,1]}`, []string{"a"}},
		{`{"a":9007199254740993}`, `{"a":9007199254740992}`, []string{"a"}},
		{`{"a":1e400}`, `{"a":1e400}`, nil},
	} {
		raw := func(s string) json.RawMessage {
			if s == "" {
				return nil
			}
			return json.RawMessage(s)
		}
		for range 2 { // in both orders
			if got, err := differingKeys(raw(tc.a), raw(tc.b)); err != nil || !slices.Equal(got, tc.want) {
				t.Errorf("%s and %s differ in %v, %v, want %v", tc.a, tc.b, got, err, tc.want)
			}
			tc.a, tc.b = tc.b, tc.a
		}
	}
}
