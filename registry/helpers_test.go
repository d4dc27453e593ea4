package registry

import (
	"errors"
	"strings"
	"testing"

	"github.com/nixlkv/nixlkv/internal/sentinels"
	"pgregory.net/rapid"
)

// mha is a valid layout of two layers, K and V, four pages of two tokens.
func mha() *Layout {
	l := &Layout{
		PageSize: 2, KVHeads: 4, TotalKVHeads: 8, GPU: 3, StartLayer: 0, EndLayer: 2,
		Ranks: Ranks{TP: 2, TPRank: 1, EngineRank: 3, ServerTP: 4, DP: 2, DPRank: 1},
		Aux:   []AuxBuffer{{Base: 0x100, Len: 0x80, ItemLen: 8}, {Base: 0x200, Len: 0x80, ItemLen: 0x10}},
		State: []StateComponent{
			{Type: StateMamba, Tensors: []StateTensor{
				{Base: 0x9000, Len: 0x100, ItemLen: 0x20, LayerID: 0, Dim: 4, OuterCount: 2, ConvGroups: []int{4, 4}},
				{Base: 0x9100, Len: 0x100, ItemLen: 0x20, LayerID: 1, Dim: 8},
			}},
			{Type: StateDSATail, Tensors: []StateTensor{
				{LayerID: NoLayer},
				{Base: 0xa000, Len: 0x105, ItemLen: 0x20, LayerID: NoLayer},
			}},
			{Type: StateQSAPending},
		},
	}
	for i := range uint64(4) {
		l.KV = append(l.KV, Region{Base: 0x1000 * (i + 1), Len: 0x400, ItemLen: 0x100, LayerID: int(i % 2), Kind: VRAM})
	}
	return l
}

// peerOf is a valid peer.
func peerOf(agent string) *Peer {
	return &Peer{
		Agent: agent, AgentMetadata: []byte("metadata"), Addr: "10.0.0.1:5000", Dialect: Status,
		KV: []Region{
			{Base: 0x1000, Len: 0x400, ItemLen: 0x100, LayerID: 0, Kind: VRAM},
			{Base: 0x2000, Len: 0x300, ItemLen: 0x100, LayerID: 1, Kind: VRAM},
		},
		Aux: []uint64{0x100},
		State: []PeerState{{
			Ptrs: []uint64{0x9000}, ItemLens: []uint64{0x20}, Dims: []int{4}, LayerIDs: []int{1}, DataLens: []uint64{0x100},
		}},
		GPU: 1, Ranks: Ranks{TP: 2, EngineRank: 1},
	}
}

// refused checks that err tells of a field, wraps a sentinel and says some text.
func refused(t *testing.T, err error, field string, sentinel error, text string) {
	t.Helper()
	if !errors.Is(err, sentinel) {
		t.Errorf("%v does not wrap %v", err, sentinel)
	}
	if err := sentinels.Repeated(err); err != nil {
		t.Error(err)
	}
	for _, fe := range fieldErrors(err) {
		if fe.Field == field && errors.Is(fe, sentinel) {
			if !strings.Contains(fe.Error(), text) {
				t.Errorf("%v does not say %q", fe, text)
			}
			return
		}
	}
	t.Errorf("%v says nothing of %s with %v", err, field, sentinel)
}

// fieldErrors takes joined errors apart.
func fieldErrors(err error) []*FieldError {
	switch e := err.(type) {
	case *FieldError:
		return []*FieldError{e}
	case interface{ Unwrap() []error }:
		var all []*FieldError
		for _, e := range e.Unwrap() {
			all = append(all, fieldErrors(e)...)
		}
		return all
	case interface{ Unwrap() error }:
		return fieldErrors(e.Unwrap())
	}
	return nil
}

// anyLayout draws valid layouts.
var anyLayout = rapid.Custom(func(t *rapid.T) *Layout {
	next := uint64(0x1000)
	memory := func(n uint64) uint64 {
		base := next
		next += n + rapid.Uint64Range(0, 1<<20).Draw(t, "gap")
		return base
	}
	layered := rapid.Bool().Draw(t, "layer ids")
	layer := func() int {
		if !layered {
			return NoLayer
		}
		return rapid.IntRange(0, maxLayerID).Draw(t, "layer")
	}
	uses := map[int]int{} // of a layer by KV regions: K and V
	region := func() int {
		id := layer()
		for id != NoLayer && uses[id] == 2 {
			id = layer()
		}
		uses[id]++
		return id
	}
	tp := rapid.IntRange(0, 8).Draw(t, "tp")
	dcp := rapid.IntRange(0, 4).Draw(t, "dcp")
	l := &Layout{
		PageSize: rapid.IntRange(1, 256).Draw(t, "page size"),
		GPU:      rapid.Uint64Range(0, 16).Draw(t, "gpu"),
		Ranks:    Ranks{TP: tp, DCP: dcp},
	}
	l.Ranks.TPRank = rapid.IntRange(0, max(tp, 1)-1).Draw(t, "tp rank")
	l.Ranks.EngineRank = l.Ranks.TPRank
	l.Ranks.DCPRank = rapid.IntRange(0, max(dcp, 1)-1).Draw(t, "dcp rank")
	for range rapid.IntRange(0, 5).Draw(t, "regions") {
		item := rapid.Uint64Range(1, 1<<20).Draw(t, "item")
		length := item * rapid.Uint64Range(1, 1<<10).Draw(t, "pages")
		l.KV = append(l.KV, Region{
			Base: memory(length), Len: length, ItemLen: item, LayerID: region(),
			Kind: rapid.SampledFrom([]Kind{VRAM, DRAM}).Draw(t, "kind"),
		})
	}
	for range rapid.IntRange(0, 3).Draw(t, "aux") {
		item := rapid.Uint64Range(1, 1<<10).Draw(t, "aux item")
		length := item * rapid.Uint64Range(1, 64).Draw(t, "slots")
		l.Aux = append(l.Aux, AuxBuffer{Base: memory(length), Len: length, ItemLen: item})
	}
	types := []StateType{StateMamba, StateSWA, StateDSA, StateC128, StateRequestRow}
	for range rapid.IntRange(0, 3).Draw(t, "components") {
		c := StateComponent{Type: rapid.SampledFrom(types).Draw(t, "type")}
		for range rapid.IntRange(0, 4).Draw(t, "tensors") {
			x := StateTensor{LayerID: layer()}
			if !rapid.Bool().Draw(t, "absent") {
				x.Dim = rapid.IntRange(0, 64).Draw(t, "dim")
				x.ItemLen = uint64(max(x.Dim, 1)) * rapid.Uint64Range(1, 1<<10).Draw(t, "state item")
				x.Len = x.ItemLen*rapid.Uint64Range(1, 64).Draw(t, "state slots") + rapid.Uint64Range(0, 7).Draw(t, "tail")
				x.Base = memory(x.Len)
			}
			c.Tensors = append(c.Tensors, x)
		}
		l.State = append(l.State, c)
	}
	return l
})
