package kvsender

import (
	"encoding/json"
	"errors"
	"os"
	"slices"
	"testing"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/nixl"
	"github.com/nixlkv/nixlkv/registry"
)

// goldenState is a row of testdata/golden_state.json: what the code of SGLang's releases makes
// of a component, "23p" with the transfers that 0.5.23 prepares on a GPU.
type goldenState struct {
	prefill, decode goldenStateSide
	src, dst        []int32
	outcomes        []goldenStateOutcome
}

type goldenStateSide struct {
	Type    string
	Tensors []goldenTensor
	TP      int
	Rank    int
	PP      int
	PPRank  int `json:"pp_rank"`
	Start   int
	End     int
	MLA     bool
	Ratios  []int
	Draft   int
	Heads   int
	Page    int
	Layout  string
}

type goldenTensor struct {
	item, slots       uint64
	layer, dim, outer int
	groups            []int
}

type goldenStateOutcome struct {
	releases []string
	pieces   *[]statePiece
}

// statePiece is some bytes of a tensor and where they go.
type statePiece struct {
	src    int
	srcAt  uint64
	dst    int
	dstAt  uint64
	length uint64
}

func (g *goldenState) UnmarshalJSON(b []byte) error {
	return readRow(b, &g.prefill, &g.decode, &g.src, &g.dst, &g.outcomes)
}

func (o *goldenStateOutcome) UnmarshalJSON(b []byte) error { return readRow(b, &o.releases, &o.pieces) }

func (p *statePiece) UnmarshalJSON(b []byte) error {
	return readRow(b, &p.src, &p.srcAt, &p.dst, &p.dstAt, &p.length)
}

func (t *goldenTensor) UnmarshalJSON(b []byte) error {
	var fields []json.RawMessage
	if err := json.Unmarshal(b, &fields); err != nil {
		return err
	}
	*t = goldenTensor{slots: 8, layer: registry.NoLayer, outer: 1}
	for i, f := range []any{&t.item, &t.slots, &t.layer, &t.dim, &t.outer, &t.groups}[:len(fields)] {
		if err := json.Unmarshal(fields[i], f); err != nil {
			return err
		}
	}
	return nil
}

func readGoldenState(t testing.TB) []goldenState {
	t.Helper()
	b, err := os.ReadFile("testdata/golden_state.json")
	if err != nil {
		t.Fatal(err)
	}
	var g []goldenState
	if err := json.Unmarshal(b, &g); err != nil {
		t.Fatal(err)
	}
	return g
}

// tensorBase lays tensors out as golden_state.py does.
func tensorBase(side uint64, i int) uint64 { return side<<40 + uint64(i)<<20 }

func (g *goldenState) sides() (*registry.Layout, *registry.Peer) {
	p, d := g.prefill, g.decode
	l := &registry.Layout{
		GPU: 1, PageSize: max(p.Page, 1), TotalKVHeads: p.Heads, SWALayout: p.Layout, MLA: p.MLA,
		StartLayer: p.Start, EndLayer: p.End, CompressionRatios: p.Ratios, DraftRegions: p.Draft,
		Ranks: registry.Ranks{TP: p.TP, TPRank: p.Rank, EngineRank: p.Rank, PP: p.PP, PPRank: p.PPRank},
	}
	c := registry.StateComponent{Type: registry.StateType(p.Type)}
	for i, x := range p.Tensors {
		t := registry.StateTensor{LayerID: x.layer, Dim: x.dim, OuterCount: x.outer, ConvGroups: x.groups}
		if x.item != 0 {
			t.Base, t.Len, t.ItemLen = tensorBase(1, i), x.item*x.slots, x.item
		}
		c.Tensors = append(c.Tensors, t)
	}
	l.State = []registry.StateComponent{c}
	s := registry.PeerState{}
	dims := slices.ContainsFunc(d.Tensors, func(x goldenTensor) bool { return x.dim != 0 })
	for i, x := range d.Tensors {
		base := tensorBase(2, i)
		if x.item == 0 {
			base = 0
		}
		s.Ptrs, s.ItemLens, s.DataLens = append(s.Ptrs, base), append(s.ItemLens, x.item), append(s.DataLens, x.item*x.slots)
		if x.layer >= 0 {
			s.LayerIDs = append(s.LayerIDs, x.layer)
		}
		if dims {
			s.Dims = append(s.Dims, x.dim)
		}
	}
	return l, &registry.Peer{Agent: "peer", GPU: 3, State: []registry.PeerState{s}, Ranks: registry.Ranks{TP: d.TP, EngineRank: d.Rank}}
}

// sendState gives the pieces that a room's component makes, or why it fails.
func sendState(l *registry.Layout, p *registry.Peer, src, dst []int32) ([]nixl.Desc, []nixl.Desc, error) {
	from, to := [][]int32{src}, [][]int32{dst}
	if err := checkStateSource(l, from); err != nil {
		return nil, nil, err
	}
	plan := planState(l, p)
	if _, err := plan.checkDestination(to, nil); err != nil {
		return nil, nil, err
	}
	if err := plan.check(from, to); err != nil {
		return nil, nil, err
	}
	a, b, _ := plan.appendDescs(nil, nil, nil, 0, src, dst)
	return a, b, nil
}

// piecesOf reads descriptors as golden_state.py does: in the source's order, neighbours as one.
func piecesOf(t *testing.T, from, to []nixl.Desc) []statePiece {
	t.Helper()
	var out []statePiece
	for k, s := range from {
		d := to[k]
		if s.Len != d.Len || s.Len == 0 || s.Dev != 1 || d.Dev != 3 {
			t.Fatalf("descriptors %+v and %+v", s, d)
		}
		a, b := s.Addr-tensorBase(1, 0), d.Addr-tensorBase(2, 0)
		out = append(out, statePiece{int(a >> 20), a & (1<<20 - 1), int(b >> 20), b & (1<<20 - 1), s.Len})
	}
	slices.SortFunc(out, func(a, b statePiece) int {
		return slices.Compare([]uint64{uint64(a.src), a.srcAt, uint64(a.dst), a.dstAt, a.length}, []uint64{uint64(b.src), b.srcAt, uint64(b.dst), b.dstAt, b.length})
	})
	merged := out[:0]
	for _, p := range out {
		if n := len(merged); n > 0 {
			q := &merged[n-1]
			if q.src == p.src && q.dst == p.dst && q.srcAt+q.length == p.srcAt && q.dstAt+q.length == p.dstAt {
				q.length += p.length
				continue
			}
		}
		merged = append(merged, p)
	}
	return merged
}

// refusals name the cases that this library refuses and SGLang does not.
const (
	missingState  = "slots that only the decode gives"
	otherStrides  = "slots of other lengths at the decode"
	strayDraft    = "a draft in a stage before the last"
	unpairedKV    = "K and V that do not pair"
	someLayers    = "a stage of which some layers have state"
	noStageSlices = "compressed MLA with a type that has no stages"
)

// Here SGLang goes by position, and names memory that is not there.
const (
	byLayer     = "layers"
	absentState = "absent tensors"
)

// differs names the cases in which this library means to do otherwise than 0.5.23, empty for
// the others.
func (g *goldenState) differs() string {
	p, d := g.prefill, g.decode
	lengths := func(s goldenStateSide) (lens []uint64) {
		for _, t := range s.Tensors {
			lens = append(lens, t.item)
		}
		return lens
	}
	layers := func(s goldenStateSide) bool { return len(s.Tensors) > 0 && s.Tensors[0].layer >= 0 }
	halves := !p.MLA && !slices.Contains([]string{"mamba", "dsa", "dsa_tail", "qsa_pending", "qsa_compressed", "minimax_index_k", "minimax_dense_kv"}, p.Type)
	n, m := len(p.Tensors), len(d.Tensors)
	switch {
	case len(g.src) == 0 && len(g.dst) > 0:
		return missingState
	case layers(p) && layers(d) && n <= m:
		return byLayer
	case p.Draft > 0 && p.PPRank < p.PP-1:
		return strayDraft
	case halves && n != m && (n%2+m%2 > 0 || n > m):
		return unpairedKV
	case halves && p.PP > 1 && n != m && p.End-p.Start != n/2:
		return someLayers
	case p.Ratios != nil && p.Type == "dsa":
		return noStageSlices
	case slices.Contains(lengths(p), 0) || slices.Contains(lengths(d), 0):
		return absentState
	case p.Type != "dsa_tail" && p.TP == d.TP && !slices.Equal(lengths(p), lengths(d)) && n == m:
		return otherStrides
	}
	return ""
}

// State goes where 0.5.23 puts it, wherever that release can and is right.
func TestStateGolden(t *testing.T) {
	tally := map[string]int{}
	for k, g := range readGoldenState(t) {
		at := slices.IndexFunc(g.outcomes, func(o goldenStateOutcome) bool { return slices.Contains(o.releases, "23p") })
		if at < 0 {
			t.Fatalf("case %d: no outcome of 0.5.23", k)
		}
		want := g.outcomes[at].pieces
		l, p := g.sides()
		from, to, err := sendState(l, p, g.src, g.dst)
		got := piecesOf(t, from, to)
		if err != nil && !errors.Is(err, nixlkv.ErrState) {
			t.Errorf("case %d: %v, expected %v", k, err, nixlkv.ErrState)
		}
		if (err != nil) == (want == nil) && (want == nil || slices.Equal(got, *want)) {
			tally["same"]++
			continue
		}
		what := g.differs()
		tally[what]++
		if what == "" || (err == nil) != (what == byLayer || what == absentState) {
			t.Errorf("case %d, %s %+v to %+v, %v to %v:\n got %v, %v\nwant %v", k, what, g.prefill, g.decode, g.src, g.dst, got, err, want)
		}
		for _, x := range got {
			if from, to := g.prefill.Tensors[x.src].layer, g.decode.Tensors[x.dst].layer; from != to {
				t.Errorf("case %d: layer %d to layer %d", k, from, to)
			}
		}
	}
	t.Logf("%v", tally)
	for _, what := range []string{"same", missingState, otherStrides, strayDraft, unpairedKV, someLayers, noStageSlices, byLayer, absentState} {
		if tally[what] == 0 {
			t.Errorf("no case of %q", what)
		}
	}
}
