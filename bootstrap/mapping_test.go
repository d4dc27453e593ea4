package bootstrap

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"testing"

	"github.com/nixlkv/nixlkv"
	"pgregory.net/rapid"
)

// goldenMapping is testdata/mapping.json, written by testdata/sglang/generate.py from what
// SGLang's own decode does.
type goldenMapping struct {
	Columns []string            `json:"columns"`
	Cases   [][]json.RawMessage `json:"cases"`
}

func readJSON(t *testing.T, name string, v any) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", name))
	if err == nil {
		err = json.Unmarshal(b, v)
	}
	if err != nil {
		t.Fatal(err)
	}
}

func TestMapRanksGolden(t *testing.T) {
	var golden goldenMapping
	readJSON(t, "mapping.json", &golden)
	refused, dummies := 0, 0
	for _, row := range golden.Cases {
		var releases string
		var targets []int
		n := make(map[string]int)
		for i, name := range golden.Columns {
			var err error
			switch v := row[i]; name {
			case "releases":
				err = json.Unmarshal(v, &releases)
			case "targets":
				err = json.Unmarshal(v, &targets)
			default:
				var x int
				err = json.Unmarshal(v, &x)
				n[name] = x
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		topo := Topology{
			AttnTPSize: n["tp"], AttnCPSize: n["cp"], PPSize: n["pp"],
			EnableDSACacheLayerSplit: n["layer_split"] == 1, EnableKVCacheSharding: n["sharding"] == 1,
		}
		g := Geometry{
			TP: n["decode_tp"], EngineRank: n["engine_rank"], CP: n["decode_cp"], PP: n["decode_pp"],
			PPRank: n["decode_pp_rank"], DCP: n["dcp"], Attention: Attention(n["kind"]), AllCPRanks: n["all_cp"] == 1,
		}
		got, err := MapRanks(topo, g)
		if n["destinations"] == 0 {
			refused++
			if !errors.Is(err, nixlkv.ErrTopology) {
				t.Errorf("%s %+v %+v: %+v, %v, want ErrTopology", releases, topo, g, got, err)
			}
			continue
		}
		want := RankMap{Destinations: n["destinations"], Responses: n["responses"]}
		for c := range slices.Chunk(targets, 4) {
			want.Targets = append(want.Targets, Target{TP: c[0], CP: c[1], PP: c[2], Dummy: c[3] == 1})
			dummies += c[3]
		}
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s %+v %+v:\ngot  %+v, %v\nwant %+v", releases, topo, g, got, err, want)
		}
	}
	// The file must still hold what makes the comparison worth something.
	if len(golden.Cases) < 2000 || refused < 50 || dummies < 100 {
		t.Errorf("%d cases, %d refused, %d dummies: too few", len(golden.Cases), refused, dummies)
	}
}

func TestMapRanksRefuses(t *testing.T) {
	for _, tc := range []struct {
		name string
		topo Topology
		g    Geometry
		want error
	}{
		{"neither TP divides the other, more prefill", Topology{AttnTPSize: 3}, Geometry{TP: 2}, nixlkv.ErrTopology},
		{"neither TP divides the other, more decode", Topology{AttnTPSize: 2}, Geometry{TP: 3}, nixlkv.ErrTopology},
		{"decode CP", Topology{}, Geometry{CP: 2}, nixlkv.ErrTopology},
		{"decode PP", Topology{PPSize: 4}, Geometry{PP: 2}, nixlkv.ErrTopology},
		{"decode PP rank", Topology{PPSize: 2}, Geometry{PP: 2, PPRank: 2}, nixlkv.ErrTopology},
		{"negative rank", Topology{}, Geometry{EngineRank: -1}, nixlkv.ErrTopology},
		{"negative TP", Topology{}, Geometry{TP: -4}, nixlkv.ErrTopology},
		{"DCP of MHA", Topology{}, Geometry{DCP: 2}, nixlkv.ErrTopology},
		{"DCP and CP", Topology{AttnCPSize: 2}, Geometry{DCP: 2, Attention: MLA}, nixlkv.ErrTopology},
		{"DCP and sharding", Topology{EnableKVCacheSharding: true}, Geometry{DCP: 2, Attention: HybridMLA}, nixlkv.ErrTopology},
		{"sharding of unequal TP", Topology{AttnTPSize: 2, EnableKVCacheSharding: true}, Geometry{TP: 4, Attention: MLA},
			nixlkv.ErrTopology},
		{"unknown attention", Topology{}, Geometry{Attention: 9}, nixlkv.ErrTopology},
		{"a prefill beyond bounds", Topology{AttnTPSize: MaxRanks, PPSize: MaxRanks}, Geometry{}, nixlkv.ErrLimit},
	} {
		if got, err := MapRanks(tc.topo, tc.g); !errors.Is(err, tc.want) {
			t.Errorf("%s: %+v, %v, want %v", tc.name, got, err, tc.want)
		}
	}
}

func TestMapRanksZeroValues(t *testing.T) {
	want := RankMap{Targets: []Target{{}}, Destinations: 1, Responses: 1}
	if got, err := MapRanks(Topology{}, Geometry{}); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, %v, want %+v", got, err, want)
	}
}

// TestMapRanksAddsUp looks at all decode workers of an engine together: every prefill rank
// that sends hears from exactly as many of them as they announce to it, and somebody waits for
// every rank that is not a dummy to all.
func TestMapRanksAddsUp(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		size := rapid.SampledFrom([]int{1, 2, 3, 4, 6, 8})
		topo := Topology{
			AttnTPSize: size.Draw(t, "prefill TP"), AttnCPSize: rapid.IntRange(1, 3).Draw(t, "prefill CP"),
			PPSize:                   rapid.IntRange(1, 4).Draw(t, "prefill PP"),
			EnableDSACacheLayerSplit: rapid.Bool().Draw(t, "split"), EnableKVCacheSharding: rapid.Bool().Draw(t, "shard"),
		}
		g := Geometry{
			TP: size.Draw(t, "decode TP"), PP: rapid.SampledFrom([]int{1, topo.PPSize}).Draw(t, "decode PP"),
			Attention:  rapid.SampledFrom([]Attention{MHA, MLA, HybridMLA}).Draw(t, "attention"),
			AllCPRanks: rapid.Bool().Draw(t, "all CP"),
		}
		group := g.TP * rapid.IntRange(0, 2).Draw(t, "DP group")
		heard, real := make(map[RankID]int), make(map[RankID]int)
		destinations := 0
		for r := range g.TP {
			for pp := range g.PP {
				g.EngineRank, g.PPRank = group+r, pp
				m, err := MapRanks(topo, g)
				if err != nil {
					if !errors.Is(err, nixlkv.ErrTopology) {
						t.Fatal(err)
					}
					t.Skip("skip: SGLang does not support the case")
				}
				destinations = m.Destinations
				responses := 0
				for i, x := range m.Targets {
					if i > 0 && x.TP == m.Targets[i-1].TP && x.CP == m.Targets[i-1].CP && x.PP >= m.Targets[i-1].PP {
						t.Fatalf("PP stages in the wrong order: %+v", m.Targets)
					}
					heard[x.In(0)]++
					if !x.Dummy {
						real[x.In(0)]++
						responses++
					}
				}
				if responses != m.Responses || responses == 0 {
					t.Fatalf("%d responses, %d targets that are no dummies", m.Responses, responses)
				}
			}
		}
		cps := targetCPs(topo, g)
		for tp := range topo.AttnTPSize {
			for cp := range cps {
				for pp := range topo.PPSize {
					id := RankID{TP: tp, CP: cp, PP: pp}
					if heard[id] != destinations {
						t.Fatalf("rank %+v hears from %d decode workers, told %d", id, heard[id], destinations)
					}
					if g.Attention != MLA && real[id] == 0 {
						t.Fatalf("nobody takes the heads of rank %+v", id)
					}
					delete(heard, id)
				}
			}
		}
		if len(heard) > 0 {
			t.Fatalf("ranks that do not send are asked: %v", heard)
		}
	})
}

func TestAttentionString(t *testing.T) {
	for a, want := range map[Attention]string{MHA: "MHA", MLA: "MLA", HybridMLA: "hybrid MLA", 7: "Attention(7)"} {
		if a.String() != want {
			t.Errorf("%d is %q", a, a)
		}
	}
}
