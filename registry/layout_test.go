package registry

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/nixlkv/nixlkv"
	"pgregory.net/rapid"
)

func TestLayoutValid(t *testing.T) {
	edit := func(change func(*Layout)) *Layout { l := mha(); change(l); return l }
	for name, l := range map[string]*Layout{
		"MHA":       mha(),
		"no KV":     edit(func(l *Layout) { l.KV = nil }),
		"no layers": edit(func(l *Layout) { setLayers(l, NoLayer) }),
		"mixed kinds": edit(func(l *Layout) {
			l.KV[1].Kind = DRAM
		}),
		"last byte of the address space": edit(func(l *Layout) {
			l.KV[3].Base = math.MaxUint64 - l.KV[3].Len + 1
		}),
		"high bit, as on XPU": edit(func(l *Layout) { l.KV[3].Base = 0xffff81ab54e01000 }),
		"unified pool: one region, state in the same memory": edit(func(l *Layout) {
			l.KV = []Region{{Base: 0x1000, Len: 0x1000, ItemLen: 0x100, LayerID: NoLayer, Kind: VRAM}}
			l.State = []StateComponent{
				{Type: StateMamba, Tensors: []StateTensor{{Base: 0x1000, Len: 0x1010, ItemLen: 0x30, LayerID: NoLayer}}},
				{Type: StateSWA, Tensors: []StateTensor{{Base: 0x1000, Len: 0x1010, ItemLen: 0x40, LayerID: NoLayer}}},
			}
		}),
		"packed pages that do not divide into tokens": edit(func(l *Layout) {
			l.PageSize = 64
			for i := range l.KV {
				l.KV[i].ItemLen, l.KV[i].Len = 0x101, 0x404
			}
		}),
		"compressed MLA": edit(func(l *Layout) {
			l.MLA, l.CompressionRatios = true, []int{0, 4, 128, 4, 2, 1}
			l.Ranks.PP, l.Ranks.PPRank, l.StartLayer, l.EndLayer = 2, 1, 3, 6
		}),
		"MLA without heads that mean something": edit(func(l *Layout) { l.MLA, l.KVHeads, l.TotalKVHeads = true, 1, 128; setLayers(l, NoLayer) }),
		"MLA, a region a layer": edit(func(l *Layout) {
			l.MLA = true
			for i := range l.KV {
				l.KV[i].LayerID = 7 - i
			}
		}),
		"a draft that numbers its layers as the model": edit(func(l *Layout) { setLayers(l, 3); l.DraftRegions = 2 }),
		"compressed MLA, three regions of a layer":     edit(func(l *Layout) { setLayers(l, 3); l.MLA, l.CompressionRatios = true, []int{4, 4} }),
		"hybrid MLA":             edit(func(l *Layout) { l.HybridMLA = true }),
		"fewer heads than ranks": edit(func(l *Layout) { l.KVHeads, l.TotalKVHeads = 1, 1 }),
		"drafts":                 edit(func(l *Layout) { l.DraftRegions = 2 }),
		"a layer id from the top": edit(func(l *Layout) {
			l.State[0].Tensors[1].LayerID = 1<<32 - 2 // QSA_ROPE_STATE_LAYER_ID
		}),
		"adjacent regions": edit(func(l *Layout) { l.KV[1].Base = l.KV[0].Base + l.KV[0].Len }),
		"the same address in another kind": edit(func(l *Layout) {
			l.Aux[0].Base = l.KV[0].Base
		}),
		"data parallel servers": edit(func(l *Layout) { l.Ranks.SystemDP, l.Ranks.SystemDPRank = 4, 3 }),
	} {
		if err := l.Validate(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func setLayers(l *Layout, id int) {
	for i := range l.KV {
		l.KV[i].LayerID = id
	}
}

func TestLayoutRefused(t *testing.T) {
	for _, c := range []struct {
		change   func(*Layout)
		field    string
		sentinel error
		text     string
	}{
		{func(l *Layout) { l.KV[3].ItemLen = 0 }, "KV[3].ItemLen", nixlkv.ErrRegions, "got 0"},
		{func(l *Layout) { l.KV[1].Base = 0 }, "KV[1].Base", nixlkv.ErrRegions, "got 0"},
		{func(l *Layout) { l.KV[1].Len = 0 }, "KV[1].Len", nixlkv.ErrRegions, "at least a page"},
		{func(l *Layout) { l.KV[1].Len = 0x401 }, "KV[1].Len", nixlkv.ErrRegions, "multiple of ItemLen 256, got 1025"},
		{func(l *Layout) { l.KV[2].Base = math.MaxUint64 - 0x3fe }, "KV[2].Len", nixlkv.ErrRegions, "2^64"},
		{func(l *Layout) { l.KV[2].Len = math.MaxUint64 &^ 0xff }, "KV[2].Len", nixlkv.ErrRegions, "2^64"},
		{func(l *Layout) { l.KV[0].Kind = Unset }, "KV[0].Kind", nixlkv.ErrMissingMemoryKind, "unset"},
		{func(l *Layout) { l.KV[0].Kind = 7 }, "KV[0].Kind", nixlkv.ErrMemoryKinds, "Kind(7)"},
		{func(l *Layout) { l.KV[2].LayerID = NoLayer }, "KV[2].LayerID", nixlkv.ErrRegions, "everywhere or nowhere"},
		{func(l *Layout) { l.KV[2].LayerID = -2 }, "KV[2].LayerID", nixlkv.ErrRegions, "got -2"},
		{func(l *Layout) { l.KV[2].LayerID = 1 << 32 }, "KV[2].LayerID", nixlkv.ErrRegions, "4294967295"},
		{func(l *Layout) { setLayers(l, 0) }, "KV[2].LayerID", nixlkv.ErrRegions, "NoLayer everywhere, or each layer twice at most, K and V, got layer 0 everywhere"},
		{func(l *Layout) { l.HybridMLA = true; setLayers(l, 0) }, "KV[2].LayerID", nixlkv.ErrRegions, "got layer 0 everywhere"},
		{func(l *Layout) { l.MLA = true; setLayers(l, 0) }, "KV[1].LayerID", nixlkv.ErrRegions, "each layer once, got layer 0 everywhere"},
		{func(l *Layout) { setLayers(l, 0); l.DraftRegions = 1 }, "KV[2].LayerID", nixlkv.ErrRegions, "got layer 0 everywhere"},
		{func(l *Layout) { l.KV[3].Base = l.KV[0].Base + 0x3ff }, "KV[3].Base", nixlkv.ErrRegions, "KV[0] covers"},
		{func(l *Layout) { l.DraftRegions = 5 }, "DraftRegions", nixlkv.ErrRegions, "0 to 4"},
		{func(l *Layout) { l.DraftRegions = -1 }, "DraftRegions", nixlkv.ErrRegions, "got -1"},
		{func(l *Layout) { l.PageSize = 0 }, "PageSize", nixlkv.ErrRegions, "got 0"},
		{func(l *Layout) { l.PageSize = 1<<30 + 1 }, "PageSize", nixlkv.ErrRegions, "got 1073741825"},
		{func(l *Layout) { l.GPU = 1 << 31 }, "GPU", nixlkv.ErrTopology, "CUDA ordinal"},
		{func(l *Layout) { l.SWALayout = "NHD" }, "SWALayout", nixlkv.ErrState, `"NHD"`},

		{func(l *Layout) { l.Aux[1].Base = 0 }, "Aux[1].Base", nixlkv.ErrAuxIndex, "got 0"},
		{func(l *Layout) { l.Aux[1].Len = 0 }, "Aux[1].Len", nixlkv.ErrAuxIndex, "at least a slot"},
		{func(l *Layout) { l.Aux[1].Len++ }, "Aux[1].Len", nixlkv.ErrAuxIndex, "multiple"},
		{func(l *Layout) { l.Aux[1].ItemLen = 0 }, "Aux[1].ItemLen", nixlkv.ErrAuxIndex, "got 0"},
		{func(l *Layout) { l.Aux[1].Base = 0x17f }, "Aux[1].Base", nixlkv.ErrRegions, "Aux[0] covers"},
		{func(l *Layout) { l.KV[1].Kind, l.KV[1].Base = DRAM, 0x80 }, "Aux[0].Base", nixlkv.ErrRegions, "KV[1] covers"},

		{func(l *Layout) { l.State[0].Type = "mamba2" }, "State[0].Type", nixlkv.ErrState, `"mamba2"`},
		{func(l *Layout) { l.State[0].Tensors[1].Len = 0x1f }, "State[0].Tensors[1].Len", nixlkv.ErrState, "at least a slot"},
		{func(l *Layout) { l.State[0].Tensors[1].Base = math.MaxUint64 }, "State[0].Tensors[1].Len", nixlkv.ErrState, "2^64"},
		{func(l *Layout) {
			x := &l.State[0].Tensors[1]
			x.ItemLen, x.Len = 1<<32, 1<<32
		}, "State[0].Tensors[1].ItemLen", nixlkv.ErrState, "4294967295"},
		{func(l *Layout) { l.State[0].Tensors[1].Dim = 5 }, "State[0].Tensors[1].ItemLen", nixlkv.ErrState, "Dim 5 × OuterCount 1"},
		{func(l *Layout) { l.State[0].Tensors[0].OuterCount = 16 }, "State[0].Tensors[0].ItemLen", nixlkv.ErrState, "Dim 4 × OuterCount 16"},
		{func(l *Layout) { l.State[0].Tensors[0].Dim = -1 }, "State[0].Tensors[0].Dim", nixlkv.ErrState, "got -1"},
		{func(l *Layout) { l.State[0].Tensors[0].OuterCount = -1 }, "State[0].Tensors[0].OuterCount", nixlkv.ErrState, "got -1"},
		{func(l *Layout) { l.State[0].Tensors[0].ConvGroups[1] = 0 }, "State[0].Tensors[0].ConvGroups[1]", nixlkv.ErrState, "got 0"},
		{func(l *Layout) { l.State[0].Tensors[1].LayerID = NoLayer }, "State[0].Tensors[1].LayerID", nixlkv.ErrState, "everywhere or nowhere"},
		{func(l *Layout) { l.State[0].Tensors[1].Base = 0x90ff }, "State[0].Tensors[1].Base", nixlkv.ErrState, "State[0].Tensors[0] covers"},

		{func(l *Layout) { l.HybridMLA, l.MLA = true, true }, "HybridMLA", nixlkv.ErrTopology, "both"},
		{func(l *Layout) { l.KVHeads = -1 }, "KVHeads", nixlkv.ErrTopology, "got -1"},
		{func(l *Layout) { l.TotalKVHeads = -1 }, "TotalKVHeads", nixlkv.ErrTopology, "got -1"},
		{func(l *Layout) { l.TotalKVHeads = 3 }, "TotalKVHeads", nixlkv.ErrTopology, "expected 4 to 8"},
		{func(l *Layout) { l.TotalKVHeads = 9 }, "TotalKVHeads", nixlkv.ErrTopology, "got 9"},
		{func(l *Layout) { l.StartLayer = -1 }, "StartLayer", nixlkv.ErrTopology, "got -1"},
		{func(l *Layout) { l.StartLayer = 2 }, "EndLayer", nixlkv.ErrTopology, "more than StartLayer 2"},
		{func(l *Layout) { l.CompressionRatios = []int{0, 4} }, "CompressionRatios", nixlkv.ErrTopology, "without MLA"},
		{func(l *Layout) { l.MLA, l.CompressionRatios = true, []int{0, 3} }, "CompressionRatios[1]", nixlkv.ErrTopology, "got 3"},
		{func(l *Layout) { l.MLA, l.CompressionRatios = true, []int{4} }, "CompressionRatios", nixlkv.ErrTopology, "EndLayer 2, got 1"},

		{func(l *Layout) { l.Ranks.TP = -1 }, "Ranks.TP", nixlkv.ErrTopology, "got -1"},
		{func(l *Layout) { l.Ranks.DCP = 1<<16 + 1 }, "Ranks.DCP", nixlkv.ErrTopology, "65537"},
		{func(l *Layout) { l.Ranks.TPRank = 2 }, "Ranks.TPRank", nixlkv.ErrTopology, "0 to 1, got 2"},
		{func(l *Layout) { l.Ranks.CPRank = 1 }, "Ranks.CPRank", nixlkv.ErrTopology, "0 to 0, got 1"},
		{func(l *Layout) { l.Ranks.PPRank = -1 }, "Ranks.PPRank", nixlkv.ErrTopology, "got -1"},
		{func(l *Layout) { l.Ranks.DPRank = 2 }, "Ranks.DPRank", nixlkv.ErrTopology, "got 2"},
		{func(l *Layout) { l.Ranks.SystemDPRank = 1 }, "Ranks.SystemDPRank", nixlkv.ErrTopology, "got 1"},
		{func(l *Layout) { l.Ranks.DCPRank = 1 }, "Ranks.DCPRank", nixlkv.ErrTopology, "got 1"},
		{func(l *Layout) { l.Ranks.ServerTP, l.Ranks.EngineRank = 0, -1 }, "Ranks.EngineRank", nixlkv.ErrTopology, "got -1"},
		{func(l *Layout) { l.Ranks.ServerTP = 5 }, "Ranks.ServerTP", nixlkv.ErrTopology, "multiple of TP 2"},
		{func(l *Layout) { l.Ranks.CP, l.Ranks.PP = 1<<10, 1<<10 }, "Ranks", nixlkv.ErrTopology, "65536 ranks"},

		{func(l *Layout) { l.KV = make([]Region, 4097) }, "KV", nixlkv.ErrLimit, "4096, got 4097"},
		{func(l *Layout) { l.Aux = make([]AuxBuffer, 257) }, "Aux", nixlkv.ErrLimit, "256, got 257"},
		{func(l *Layout) { l.State = make([]StateComponent, 65) }, "State", nixlkv.ErrLimit, "64, got 65"},
		{func(l *Layout) {
			l.State[0].Tensors = make([]StateTensor, 4097)
		}, "State[0].Tensors", nixlkv.ErrLimit, "4096, got 4097"},
	} {
		t.Run(c.field+" "+c.text, func(t *testing.T) {
			l := mha()
			c.change(l)
			refused(t, l.Validate(), c.field, c.sentinel, c.text)
		})
	}
}

func TestLayoutTellsEveryProblem(t *testing.T) {
	l := mha()
	l.KV[0].Base, l.Aux[0].Base, l.Ranks.TPRank, l.State[0].Type = 0, 0, 9, "?"
	err := l.Validate()
	refused(t, err, "KV[0].Base", nixlkv.ErrRegions, "")
	refused(t, err, "Aux[0].Base", nixlkv.ErrAuxIndex, "")
	refused(t, err, "Ranks.TPRank", nixlkv.ErrTopology, "")
	refused(t, err, "State[0].Type", nixlkv.ErrState, "")
	if n := len(fieldErrors(err)); n != 4 {
		t.Errorf("%d problems: %v", n, err)
	}
}

func TestLayoutManyProblems(t *testing.T) {
	l := mha()
	l.KV = slices.Repeat([]Region{{LayerID: NoLayer, Len: 1, ItemLen: 1, Kind: VRAM}}, 1000)
	err := l.Validate()
	if n := len(fieldErrors(err)); n != maxProblems {
		t.Errorf("%d problems told", n)
	}
	if !strings.HasSuffix(err.Error(), fmt.Sprintf("and %d more", 1000-maxProblems)) {
		t.Errorf("%v", err)
	}
}

func TestLayoutNil(t *testing.T) {
	if err := (*Layout)(nil).Validate(); !errors.Is(err, nixlkv.ErrRegions) {
		t.Error(err)
	}
	if err := new(Layout).Validate(); !errors.Is(err, nixlkv.ErrRegions) {
		t.Error("an empty layout is valid:", err)
	}
}

// Every drawn layout is valid, and what is valid can be computed with.
func TestPropertyLayout(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := anyLayout.Draw(t, "layout")
		if err := l.Validate(); err != nil {
			t.Fatal(err)
		}
		for _, r := range l.KV {
			if l.Pages() > r.Pages() {
				t.Fatalf("%d pages, a region has %d", l.Pages(), r.Pages())
			}
			if last := r.Base + (r.Pages()-1)*r.ItemLen + (r.ItemLen - 1); r.Pages() == 0 || last != r.Base+r.Len-1 {
				t.Fatalf("last byte at %#x of %+v", last, r)
			}
		}
		for _, a := range l.Aux {
			if l.AuxSlots() > a.Slots() || l.AuxSlots() == 0 {
				t.Fatalf("%d slots, a buffer has %d", l.AuxSlots(), a.Slots())
			}
		}
	})
}

// The sweep tells of an extent that another one, which starts before it, reaches into, and counts
// the others.
func TestPropertyOverlaps(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var extents []extent
		for i := range rapid.IntRange(0, 12).Draw(t, "n") {
			first := rapid.Uint64Range(0, 60).Draw(t, "first")
			extents = append(extents, extent{first, first + rapid.Uint64Range(0, 9).Draw(t, "len"), "X", i})
		}
		want := map[string]bool{}
		for i, a := range extents {
			for j, b := range extents {
				before := b.first < a.first || b.first == a.first && j < i
				if before && a.first <= b.last {
					want[index("X", i, "Base")] = true
				}
			}
		}
		var p problems
		checkDisjoint(&p, nixlkv.ErrRegions, slices.Clone(extents))
		got := fieldErrors(p.err())
		if len(want) == 0 && len(got) == 0 {
			return
		}
		more := fmt.Sprintf("; %d more overlap", len(want)-1)
		if len(got) != 1 || !want[got[0].Field] || strings.HasSuffix(got[0].Error(), more) != (len(want) > 1) {
			t.Fatalf("%+v: overlaps at %v, told %v", extents, want, p.err())
		}
	})
}

func TestSourceKind(t *testing.T) {
	l := mha()
	if k, err := l.SourceKind(); k != VRAM || err != nil {
		t.Error(k, err)
	}
	l.KV[2].Kind = DRAM
	if _, err := l.SourceKind(); !errors.Is(err, nixlkv.ErrMemoryKinds) || !strings.Contains(err.Error(), "KV[2] is DRAM") {
		t.Error(err)
	}
	l.KV[2].Kind = 9
	if _, err := l.SourceKind(); !errors.Is(err, nixlkv.ErrMemoryKinds) || !strings.Contains(err.Error(), "Kind(9)") {
		t.Error(err)
	}
	l.KV[2].Kind = Unset
	for range 2 {
		_, err := l.SourceKind()
		if !errors.Is(err, nixlkv.ErrMissingMemoryKind) || !strings.Contains(err.Error(), "Missing NIXL source KV memory kind") {
			t.Error(err)
		}
		l.KV = nil
	}
}

func TestKindNames(t *testing.T) {
	for _, k := range []Kind{VRAM, DRAM} {
		if got, err := ParseKind(k.String()); got != k || err != nil {
			t.Error(k, got, err)
		}
		if kindOfWire(k.wire()) != k || k.wire().String() != k.String() {
			t.Error(k, k.wire())
		}
	}
	for _, s := range []string{"", "vram", "unset", "OBJ"} {
		if k, err := ParseKind(s); k != Unset || !errors.Is(err, nixlkv.ErrMemoryKinds) {
			t.Error(s, k, err)
		}
	}
	if s := Unset.String() + " " + Kind(9).String(); s != "unset Kind(9)" {
		t.Error(s)
	}
	if kindOfWire(Unset.wire()) != Unset {
		t.Error("unset does not stay unset")
	}
}

func TestGeometryHelpers(t *testing.T) {
	l := mha()
	if l.Pages() != 4 || l.AuxSlots() != 8 || !l.HasLayerIDs() {
		t.Error(l.Pages(), l.AuxSlots(), l.HasLayerIDs())
	}
	l.KV[3].Len = 0x300
	setLayers(l, NoLayer)
	if l.Pages() != 3 || l.HasLayerIDs() {
		t.Error(l.Pages(), l.HasLayerIDs())
	}
	tail := l.State[1].Tensors
	if !tail[0].Absent() || tail[0].Slots() != 0 || tail[1].Slots() != 8 {
		t.Error(tail[0].Slots(), tail[1].Slots())
	}
	empty := &Layout{}
	if empty.Pages() != 0 || empty.AuxSlots() != 0 || empty.HasLayerIDs() {
		t.Error("an empty layout has something")
	}
	if (AuxBuffer{Len: 8}).Slots() != 0 || (Region{Len: 8}).Pages() != 0 {
		t.Error("slots or pages of no length")
	}
}

func TestCheckTokens(t *testing.T) {
	l := mha()
	if err := l.CheckTokens(); err != nil {
		t.Error(err)
	}
	l.PageSize = 3
	refused(t, l.CheckTokens(), "KV[2].ItemLen", nixlkv.ErrRegions, "multiple of PageSize 3, got 256")
	l.PageSize = 0
	refused(t, l.CheckTokens(), "PageSize", nixlkv.ErrRegions, "got 0")
}

func TestRanks(t *testing.T) {
	zero := Ranks{}.Normalized()
	if zero != (Ranks{ServerTP: 1, TP: 1, CP: 1, PP: 1, DP: 1, SystemDP: 1, DCP: 1}) {
		t.Errorf("%+v", zero)
	}
	if zero.PrefillRank() != 0 || zero.SourceRank() != 0 || (Ranks{}).PrefillRank() != 0 {
		t.Error("the only rank is not 0")
	}
	r := Ranks{EngineRank: 5, ServerTP: 8, TP: 2, TPRank: 1, CP: 4, CPRank: 2, PP: 3, PPRank: 2}
	if got := r.PrefillRank(); got != 1*3*4+2*4+2 {
		t.Error(got)
	}
	if got := r.SourceRank(); got != 2*8+5 {
		t.Error(got)
	}
	r.ServerTP, r.EngineRank = 0, 1
	if got := r.SourceRank(); got != 2*2+1 {
		t.Error(got)
	}
}

// No two ranks of a DP group go by one number.
func TestPropertyRanksUnique(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		size := rapid.IntRange(1, 4)
		tp, cp, pp := size.Draw(t, "tp"), size.Draw(t, "cp"), size.Draw(t, "pp")
		seen := map[int]Ranks{}
		for i := range tp * cp * pp {
			r := Ranks{TP: tp, TPRank: i % tp, CP: cp, CPRank: i / tp % cp, PP: pp, PPRank: i / tp / cp, ServerTP: tp * cp, EngineRank: i % (tp * cp)}
			var p problems
			if r.validate(&p); p.err() != nil {
				t.Fatal(p.err())
			}
			n := r.PrefillRank()
			if other, ok := seen[n]; ok || n < 0 || n >= tp*cp*pp {
				t.Fatalf("%+v and %+v are both %d", r, other, n)
			}
			seen[n] = r
		}
	})
}

func TestSpans(t *testing.T) {
	l := &Layout{
		GPU: 3,
		KV: []Region{
			{Base: 0x3000, Len: 0x100, ItemLen: 0x10, Kind: VRAM},
			{Base: 0x1000, Len: 0x100, ItemLen: 0x10, Kind: VRAM},
			{Base: 0x1100, Len: 0x100, ItemLen: 0x10, Kind: VRAM}, // touches the one before
			{Base: 0x5000, Len: 0x100, ItemLen: 0x10, Kind: DRAM},
		},
		Aux: []AuxBuffer{{Base: 0x1000, Len: 0x100, ItemLen: 0x10}},
		State: []StateComponent{{Tensors: []StateTensor{
			{Base: 0x3000, Len: 0x110, ItemLen: 0x10}, // the whole allocation of the first region
			{},
			{Base: 0x9000, Len: 0, ItemLen: 0x10},
			{Base: 0x2000, Len: 0x10, ItemLen: 0x10},
		}}},
	}
	want := []Span{
		{0x1000, 0x100, VRAM, 3}, {0x1100, 0x100, VRAM, 3}, {0x2000, 0x10, VRAM, 3}, {0x3000, 0x110, VRAM, 3},
		{0x1000, 0x100, DRAM, 0}, {0x5000, 0x100, DRAM, 0},
	}
	if got := l.Spans(); !slices.Equal(got, want) {
		t.Errorf("%+v", got)
	}
	if got := (&Layout{}).Spans(); len(got) != 0 {
		t.Errorf("%+v", got)
	}
}

// Joined spans cover the same bytes, do not overlap, and none begins within what was one
// buffer.
func TestPropertySpans(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const size = 64
		var spans []Span
		var covered [DRAM + 1][size]bool
		for range rapid.IntRange(0, 8).Draw(t, "n") {
			s := Span{
				Base: rapid.Uint64Range(0, size-10).Draw(t, "base"), Len: rapid.Uint64Range(1, 10).Draw(t, "len"),
				Kind: rapid.SampledFrom([]Kind{VRAM, DRAM}).Draw(t, "kind"),
			}
			for b := s.Base; b < s.Base+s.Len; b++ {
				covered[s.Kind][b] = true
			}
			spans = append(spans, s)
		}
		joined := joinOverlapping(slices.Clone(spans))
		var got [DRAM + 1][size]bool
		for _, s := range joined {
			for b := s.Base; b < s.Base+s.Len; b++ {
				if got[s.Kind][b] {
					t.Fatalf("byte %d is in two spans: %+v", b, joined)
				}
				got[s.Kind][b] = true
			}
		}
		if got != covered {
			t.Fatalf("%+v cover other bytes than %+v", joined, spans)
		}
		for _, s := range spans {
			inOne := slices.ContainsFunc(joined, func(j Span) bool {
				return j.Kind == s.Kind && j.Base <= s.Base && s.Base+s.Len <= j.Base+j.Len
			})
			if !inOne {
				t.Fatalf("%+v is spread over %+v", s, joined)
			}
		}
	})
}
