package bootstrap

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/nixlkv/nixlkv"
)

// goldenDecode is the decode's side of a case in testdata/compat.json; what is absent has the
// default of the generator.
type goldenDecode struct {
	TP         int              `json:"tp"`
	DCP        int              `json:"dcp"`
	Kind       Attention        `json:"kind"`
	PageSize   int              `json:"page_size"`
	Dtype      string           `json:"dtype"`
	KVLayout   string           `json:"kv_layout"`
	SpecLayout json.RawMessage  `json:"spec_layout"`
	Policy     AllocationPolicy `json:"policy"`
	StateTypes []string         `json:"state_types"`
}

func (g goldenDecode) config() DecodeConfig {
	d := DecodeConfig{
		Geometry: Geometry{TP: g.TP, DCP: g.DCP, Attention: g.Kind},
		PageSize: g.PageSize, KVCacheDtype: g.Dtype, KVLayout: g.KVLayout, DSV41SpecLayout: g.SpecLayout,
		DecodeAllocationPolicy: g.Policy, StateTypes: g.StateTypes,
	}
	if d.PageSize == 0 {
		d.PageSize = 1
	}
	if d.KVCacheDtype == "" {
		d.KVCacheDtype = "auto"
	}
	return d
}

// TestCheckDecodeGolden compares with the newest release, whose checks include the older ones'.
func TestCheckDecodeGolden(t *testing.T) {
	var golden []struct {
		Reply  json.RawMessage   `json:"reply"`
		Decode goldenDecode      `json:"decode"`
		Says   map[string]string `json:"says"`
	}
	readJSON(t, "compat.json", &golden)
	refused := 0
	for _, tc := range golden {
		topo, err := ParseTopology(tc.Reply)
		if err != nil {
			t.Errorf("%s: %v", tc.Reply, err)
			continue
		}
		d := tc.Decode.config()
		_, mapErr := MapRanks(topo, d.Geometry)
		err = errors.Join(CheckDecode(topo, d), mapErr)
		says, ok := tc.Says["0.5.23"]
		if !ok {
			t.Fatal("0.5.23 is missing")
		}
		if says != "" {
			refused++
		}
		switch {
		case (err != nil) != (says != ""):
			t.Errorf("%s %+v: %v, SGLang says %q", tc.Reply, d, err, says)
		case err != nil && strings.Contains(says, "mismatch") != errors.Is(err, nixlkv.ErrMismatch),
			err != nil && !strings.Contains(says, "mismatch") != errors.Is(err, nixlkv.ErrTopology):
			t.Errorf("%s %+v: %v is of another kind than %q", tc.Reply, d, err, says)
		}
	}
	if len(golden) < 30 || refused < 15 {
		t.Errorf("%d cases, %d refused: too few", len(golden), refused)
	}
}

func TestCheckDecodeTellsBothValues(t *testing.T) {
	topo := Topology{
		AttnTPSize: 2, PageSize: 16, KVCacheDtype: "fp8_e4m3", KVLayout: "nhd",
		DSV41SpecLayout: json.RawMessage(`{"num_draft_tokens":4}`), DecodeAllocationPolicy: PrefillCompleteAllocation,
	}
	err := CheckDecode(topo, DecodeConfig{
		Geometry: Geometry{TP: 4}, PageSize: 64, KVCacheDtype: "auto", KVLayout: "hnd",
		DSV41SpecLayout: json.RawMessage(`{"num_draft_tokens":5}`), StateTypes: []string{"block_scale"},
	})
	if !errors.Is(err, nixlkv.ErrMismatch) || !errors.Is(err, nixlkv.ErrTopology) {
		t.Fatalf("%v wraps too little", err)
	}
	for _, text := range []string{
		"page size: prefill has 16, decode has 64",
		`KV cache dtype: prefill has "fp8_e4m3", decode has "auto"`,
		`KV layout: prefill has "nhd", decode has "hnd"`,
		`decode allocation policy: prefill has "prefill_complete", decode has "early"`,
		"DSpark layout (num_draft_tokens)",
		`state "block_scale" needs equal TP sizes, prefill has 2, decode 4`,
	} {
		if !strings.Contains(err.Error(), text) {
			t.Errorf("%q is missing in:\n%v", text, err)
		}
	}
	var one *MismatchError
	if !errors.As(err, &one) || one.What != "page size" || one.Prefill != "16" || one.Decode != "64" {
		t.Errorf("no MismatchError in %v", err)
	}
}

// What SGLang leaves to its server arguments or to the first transfer.
func TestCheckDecodeIsStricter(t *testing.T) {
	complete := Topology{DecodeAllocationPolicy: PrefillCompleteAllocation}
	for _, tc := range []struct {
		name string
		topo Topology
		d    DecodeConfig
		want error
	}{
		{"prefill_complete", complete, DecodeConfig{DecodeAllocationPolicy: PrefillCompleteAllocation,
			StateTypes: []string{"dsa"}}, nil},
		{"prefill_complete, decode TP", complete, DecodeConfig{DecodeAllocationPolicy: PrefillCompleteAllocation,
			Geometry: Geometry{TP: 2}}, nixlkv.ErrTopology},
		{"prefill_complete, state", complete, DecodeConfig{DecodeAllocationPolicy: PrefillCompleteAllocation,
			StateTypes: []string{"dsa", "mamba"}}, nixlkv.ErrTopology},
		{"invalid layout", Topology{}, DecodeConfig{DSV41SpecLayout: json.RawMessage(`{`)}, nixlkv.ErrMalformed},
		{"nothing told", Topology{}, DecodeConfig{}, nil},
	} {
		if err := CheckDecode(tc.topo, tc.d); !errors.Is(err, tc.want) {
			t.Errorf("%s: %v, want %v", tc.name, err, tc.want)
		}
	}
}
