package main

import (
	"errors"
	"strings"
	"testing"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/registry"
)

const smallest = `{"role":"prefill","kv":{"item_lens":[8],"num_slots":2}}`

func TestConfigDefaults(t *testing.T) {
	c, err := parseConfig([]byte(smallest))
	if err != nil {
		t.Fatal(err)
	}
	if c.Host != "127.0.0.1" || c.HostIP != "127.0.0.1" || c.BootstrapPort != 8998 || !c.ServeBootstrap || c.FillSeed != nil || c.AuxSeed != "p" {
		t.Errorf("%+v", c)
	}
	if k := c.KV; k.PageSize != 1 || k.Dtype != "auto" || len(k.AuxItemLens) != 1 || k.AuxItemLens[0] != 64 || k.AuxSlots != 16 || k.heads() != 1 {
		t.Errorf("%+v", k)
	}
	if len(c.unknown) != 0 {
		t.Errorf("unknown keys: %q", c.unknown)
	}
}

func TestConfigRefuses(t *testing.T) {
	for name, tc := range map[string]struct {
		config string
		want   error
	}{
		"no JSON":              {`role`, errConfig},
		"no role":              {`{"kv":{"item_lens":[8],"num_slots":2}}`, errConfig},
		"another role":         {`{"role":"router"}`, errConfig},
		"port":                 {`{"role":"prefill","bootstrap_port":65536}`, errConfig},
		"port of nobody":       {`{"role":"prefill","bootstrap_port":0,"serve_bootstrap":false}`, errConfig},
		"HTTP port":            {`{"role":"prefill","http_port":-1}`, errConfig},
		"policy":               {`{"role":"prefill","allocation_policy":"late"}`, errConfig},
		"CP-TP sharing":        {`{"role":"prefill","parallel":{"enable_cp_tp_group_sharing":true}}`, nixlkv.ErrUnsupported},
		"two DP sizes":         {`{"role":"prefill","parallel":{"dp_size":2,"system_dp_size":3}}`, errConfig},
		"variable":             {`{"role":"prefill","env":{"A":[1]}}`, errConfig},
		"slots missing":        {`{"role":"prefill","kv":{"item_lens":[8]}}`, errConfig},
		"slots of other count": {`{"role":"prefill","kv":{"item_lens":[8,8,8],"num_slots":[1,2]}}`, errConfig},
		"no slots":             {`{"role":"prefill","kv":{"item_lens":[8],"num_slots":0}}`, errConfig},
		"negative slots":       {`{"role":"prefill","kv":{"item_lens":[8],"num_slots":-1}}`, errConfig},
		"slots past 31 bits":   {`{"role":"prefill","kv":{"item_lens":[8],"num_slots":2147483648}}`, errConfig},
		"empty slots":          {`{"role":"prefill","kv":{"item_lens":[0],"num_slots":1}}`, errConfig},
		"too much memory":      {`{"role":"prefill","kv":{"item_lens":[4611686018427387904,4611686018427387904],"num_slots":2}}`, errConfig},
		"kinds":                {`{"role":"prefill","kv":{"item_lens":[8],"num_slots":2,"mem_kinds":[]}}`, errConfig},
		"layer ids":            {`{"role":"prefill","kv":{"item_lens":[8],"num_slots":2,"layer_ids":[1,2]}}`, errConfig},
		"aux slots":            {`{"role":"prefill","kv":{"item_lens":[8],"num_slots":2,"aux_slots":0}}`, errConfig},
		"state slots":          {`{"role":"prefill","kv":{"item_lens":[8],"num_slots":2,"state":[{"type":"swa","item_lens":[4]}]}}`, errConfig},
		"state lists":          {`{"role":"prefill","kv":{"item_lens":[8],"num_slots":2,"state":[{"type":"swa","item_lens":[4],"num_slots":1,"layer_ids":[1,2]}]}}`, errConfig},
	} {
		t.Run(name, func(t *testing.T) {
			if c, err := parseConfig([]byte(tc.config)); !errors.Is(err, errConfig) || !errors.Is(err, tc.want) {
				t.Errorf("%+v, %v; want %v", c, err, tc.want)
			}
		})
	}
}

func TestConfigNotesUnknownKeys(t *testing.T) {
	c, err := parseConfig([]byte(strings.Replace(smallest, `"kv"`, `"colour":"red","kv"`, 1)))
	if err != nil || len(c.unknown) != 1 || !strings.Contains(c.unknown[0], "colour") {
		t.Errorf("%q, %v", c.unknown, err)
	}
}

func TestLayout(t *testing.T) {
	c, err := parseConfig([]byte(`{
		"role": "prefill", "is_mla": true, "tp_size": 4,
		"kv": {"page_size": 2, "item_lens": [8, 16], "num_slots": [3, 5], "mem_kinds": ["DRAM", "VRAM"], "layer_ids": [7, 9],
			"dtype": "fp8_e4m3", "aux_item_lens": [64, 32], "aux_slots": 2, "total_kv_head_num": 4,
			"state": [{"type": "mamba", "item_lens": [0, 24], "num_slots": 2, "layer_ids": [1, 3], "dim_per_tensor": [0, 4],
				"slice_outer_counts": [0, 3], "conv_shard_groups": [null, [2, 2]]}]},
		"parallel": {"attn_tp_size": 2, "attn_tp_rank": 1, "attn_cp_size": 2, "attn_cp_rank": 1, "pp_size": 2, "pp_rank": 1,
			"dp_size": 3, "attn_dcp_size": 1},
		"kv_args": {"engine_rank": 3, "system_dp_rank": 2, "prefill_start_layer": 7, "prefill_end_layer": 10, "gpu_id": 1}}`))
	if err != nil {
		t.Fatal(err)
	}
	m, err := newMemory(c)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := m.free(); err != nil {
			t.Error(err)
		}
	}()
	l, err := newLayout(c, m)
	if err != nil {
		t.Fatal(err)
	}
	wantRanks := registry.Ranks{EngineRank: 3, ServerTP: 4, TP: 2, TPRank: 1, CP: 2, CPRank: 1, PP: 2, PPRank: 1, SystemDP: 3, SystemDPRank: 2, DCP: 1}
	if l.Ranks != wantRanks {
		t.Errorf("ranks %+v, want %+v", l.Ranks, wantRanks)
	}
	if r := l.KV[1]; len(l.KV) != 2 || r.Len != 80 || r.ItemLen != 16 || r.LayerID != 9 || r.Kind != registry.VRAM || l.KV[0].Kind != registry.DRAM {
		t.Errorf("regions %+v", l.KV)
	}
	if len(l.Aux) != 2 || l.Aux[1].Len != 64 || l.PageSize != 2 || l.KVDtype != "fp8_e4m3" || l.GPU != 1 || !l.MLA || l.HybridMLA {
		t.Errorf("layout %+v", l)
	}
	if l.KVHeads != 0 || l.TotalKVHeads != 4 || l.StartLayer != 7 || l.EndLayer != 10 {
		t.Errorf("layout %+v", l)
	}
	s := l.State[0].Tensors
	if l.State[0].Type != registry.StateMamba || s[0].Base != 0 || s[0].Len != 0 || s[1].Len != 48 || s[1].LayerID != 3 ||
		s[1].Dim != 4 || s[1].OuterCount != 3 || len(s[1].ConvGroups) != 2 {
		t.Errorf("state %+v", l.State)
	}
}

func FuzzParseConfig(f *testing.F) {
	f.Add([]byte(smallest))
	f.Add([]byte(`{"role":"decode","kv":{"item_lens":[4,4],"num_slots":[1,2],"mem_kinds":["VRAM","DRAM"],"state":[{"type":"swa","item_lens":[0]}]}}`))
	f.Add([]byte(`{"role":"prefill","kv":{"item_lens":[9223372036854775807],"num_slots":9223372036854775807}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		c, err := parseConfig(b)
		if err != nil {
			if !errors.Is(err, errConfig) {
				t.Errorf("%v is not an %v", err, errConfig)
			}
			return
		}
		// What was accepted can be allocated: no product overflows, and no list runs out.
		total := 0
		for i, n := range c.KV.ItemLens {
			total += n * c.KV.NumSlots.of(i)
		}
		if total < 0 || total > maxMemory {
			t.Errorf("%d bytes", total)
		}
		for i, n := range c.KV.ItemLens {
			if n*c.KV.NumSlots.of(i) <= 0 {
				t.Errorf("region %d of %d bytes", i, n*c.KV.NumSlots.of(i))
			}
		}
	})
}
