package registry

import (
	"fmt"
	"math"
	"math/bits"
	"slices"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/internal/wire"
)

const (
	maxPageSize = 1 << 30        // what a bootstrap server takes
	maxNumber   = math.MaxInt32  // counts and ranks on the wire
	maxLayerID  = math.MaxUint32 // layer ids on the wire; SGLang numbers what has no layer from the top
)

// Validate says everything that is wrong with the layout, joined; each problem is a
// *[FieldError] that wraps nixlkv.ErrRegions, ErrMissingMemoryKind (an unset kind),
// ErrMemoryKinds (an unknown one), ErrAuxIndex (aux buffers), ErrState, ErrTopology or
// ErrLimit.
//
// It refuses what no peer could work with, and leaves to the plan for a peer what depends on
// that peer: whether regions pair, pages fit and tokens divide ([Layout.CheckTokens]). Mixed
// memory kinds are valid, a decode may have them; a prefill asks [Layout.SourceKind] as well.
func (l *Layout) Validate() error {
	if l == nil {
		return fmt.Errorf("%w: no layout", nixlkv.ErrRegions)
	}
	var p problems
	l.validateLimits(&p)
	l.validateRegions(&p)
	l.validateAux(&p)
	for i := range l.State {
		l.State[i].validate(&p, i)
	}
	l.validateModel(&p)
	l.Ranks.validate(&p)
	l.validateOverlaps(&p)
	return p.err()
}

func (l *Layout) validateRegions(p *problems) {
	for i := range l.KV {
		r := &l.KV[i]
		if why := checkBuffer(r.Base, r.Len, r.ItemLen); why != nil {
			p.add(index("KV", i, why.field), nixlkv.ErrRegions, "%s", why.text)
		}
		if r.Len == 0 {
			p.add(index("KV", i, "Len"), nixlkv.ErrRegions, "expected at least a page, got 0")
		}
		if err := r.Kind.check(); err != nil {
			p.add(index("KV", i, "Kind"), err, "expected VRAM or DRAM, got %v", r.Kind)
		}
	}
	validateLayerIDs(p, "KV", nixlkv.ErrRegions, len(l.KV), func(i int) int { return l.KV[i].LayerID })
	if l.DraftRegions < 0 || l.DraftRegions > len(l.KV) {
		p.add("DraftRegions", nixlkv.ErrRegions, "expected 0 to %d, the number of KV regions, got %d", len(l.KV), l.DraftRegions)
		return
	}
	l.validateLayerRoles(p)
}

// validateLayerRoles refuses a layout all of whose regions are of one layer, though a layer has no
// more than K and V, or with MLA one: a forgotten NoLayer. What else is doubled shows when the
// layers of both sides are paired. Left out are drafts, which may number their layers as the model
// does, and compressed MLA, whose layers have several regions (get_kv_layer_ids in SGLang's
// deepseek_v4_memory_pool.py).
func (l *Layout) validateLayerRoles(p *problems) {
	roles, often := 2, "twice at most, K and V"
	if l.MLA {
		roles, often = 1, "once"
	}
	regions := l.KV[:len(l.KV)-l.DraftRegions]
	if len(l.CompressionRatios) > 0 || len(regions) <= roles {
		return
	}
	id := regions[0].LayerID
	if id == NoLayer || slices.ContainsFunc(regions, func(r Region) bool { return r.LayerID != id }) {
		return
	}
	p.add(index("KV", roles, "LayerID"), nixlkv.ErrRegions,
		"expected NoLayer everywhere, or each layer %s, got layer %d everywhere", often, id)
}

func (l *Layout) validateAux(p *problems) {
	for i := range l.Aux {
		b := &l.Aux[i]
		if why := checkBuffer(b.Base, b.Len, b.ItemLen); why != nil {
			p.add(index("Aux", i, why.field), nixlkv.ErrAuxIndex, "%s", why.text)
		}
		if b.Len == 0 {
			p.add(index("Aux", i, "Len"), nixlkv.ErrAuxIndex, "expected at least a slot, got 0")
		}
	}
}

// validateLimits keeps the lists within what a peer of this library parses.
func (l *Layout) validateLimits(p *problems) {
	limits := wire.DefaultLimits()
	most := func(field string, got, limit int) {
		if got > limit {
			p.add(field, nixlkv.ErrLimit, "expected at most %d, got %d", limit, got)
		}
	}
	most("KV", len(l.KV), limits.Regions)
	most("Aux", len(l.Aux), limits.AuxBuffers)
	most("State", len(l.State), limits.StateComponents)
	for i := range l.State {
		most(index("State", i, "Tensors"), len(l.State[i].Tensors), limits.StateTensors)
	}
}

func (l *Layout) validateModel(p *problems) {
	if l.PageSize < 1 || l.PageSize > maxPageSize {
		p.add("PageSize", nixlkv.ErrRegions, "expected 1 to %d tokens, got %d", maxPageSize, l.PageSize)
	}
	if l.GPU > maxNumber {
		p.add("GPU", nixlkv.ErrTopology, "expected a CUDA ordinal, at most %d, got %d", maxNumber, l.GPU)
	}
	switch l.SWALayout {
	case "", "nhd", "hnd", "vectorized_5d":
	default:
		p.add("SWALayout", nixlkv.ErrState, "expected nhd, hnd, vectorized_5d or nothing, got %.40q", l.SWALayout)
	}
	if l.MLA && l.HybridMLA {
		p.add("HybridMLA", nixlkv.ErrTopology, "expected one of MLA and HybridMLA, got both")
	}
	if l.SplitLayers && l.ShardKV {
		p.add("SplitLayers", nixlkv.ErrTopology, "expected one of SplitLayers and ShardKV, got both")
	}
	l.validateHeads(p)
	l.validateLayers(p)
}

// validateHeads checks KV heads where they are told; with MLA they mean nothing.
func (l *Layout) validateHeads(p *problems) {
	heads, total := l.KVHeads, l.TotalKVHeads
	if heads < 0 || heads > maxNumber {
		p.add("KVHeads", nixlkv.ErrTopology, "expected 0 to %d, got %d", maxNumber, heads)
		return
	}
	if total < 0 || total > maxNumber {
		p.add("TotalKVHeads", nixlkv.ErrTopology, "expected 0 to %d, got %d", maxNumber, total)
		return
	}
	if heads == 0 || total == 0 || l.MLA || l.HybridMLA {
		return
	}
	// Every head is on some rank. Several ranks may have the same, if there are fewer heads.
	tp := l.Ranks.Normalized().TP
	if tp < 1 || tp > maxRanks {
		return // told elsewhere
	}
	if total < heads || int64(total) > int64(heads)*int64(tp) {
		p.add("TotalKVHeads", nixlkv.ErrTopology, "expected %d to %d, with %d KV heads on each of TP %d ranks, got %d", heads, int64(heads)*int64(tp), heads, tp, total)
	}
}

// validateLayers checks the PP stage. Region layer ids are not held against it: StartLayer
// counts full-attention layers in some pools (_transfer_start_layer in SGLang's prefill.py),
// and drafts are numbered after the model's layers.
func (l *Layout) validateLayers(p *problems) {
	if l.StartLayer < 0 || l.StartLayer > maxNumber {
		p.add("StartLayer", nixlkv.ErrTopology, "expected 0 to %d, got %d", maxNumber, l.StartLayer)
	} else if l.EndLayer != 0 && (l.EndLayer <= l.StartLayer || l.EndLayer > maxNumber) {
		p.add("EndLayer", nixlkv.ErrTopology, "expected more than StartLayer %d, or 0, got %d", l.StartLayer, l.EndLayer)
	}
	if len(l.CompressionRatios) == 0 {
		return
	}
	if !l.MLA {
		p.add("CompressionRatios", nixlkv.ErrTopology, "expected none without MLA, got %d", len(l.CompressionRatios))
	}
	for i, ratio := range l.CompressionRatios {
		switch ratio {
		case 0, 1, 2, 4, 128:
		default:
			p.add(index("CompressionRatios", i, ""), nixlkv.ErrTopology, "expected 0, 1, 2, 4 or 128, got %d", ratio)
		}
	}
	if n := len(l.CompressionRatios); l.EndLayer > n {
		p.add("CompressionRatios", nixlkv.ErrTopology, "expected one for each layer up to EndLayer %d, got %d", l.EndLayer, n)
	}
}

// validateLayerIDs asks that all n entries of a list have layer ids, or none.
func validateLayerIDs(p *problems, list string, sentinel error, n int, id func(int) int) {
	for i := range n {
		switch got := id(i); {
		case got < NoLayer || got > maxLayerID:
			p.add(index(list, i, "LayerID"), sentinel, "expected 0 to %d, or NoLayer, got %d", uint32(maxLayerID), got)
		case (got == NoLayer) != (id(0) == NoLayer):
			p.add(index(list, i, "LayerID"), sentinel, "expected layer ids everywhere or nowhere, got %d, and %d at 0", got, id(0))
		}
	}
}

// bufferFault is what is wrong with a buffer of items.
type bufferFault struct{ field, text string }

// checkBuffer checks address, length and item length; a length of 0 passes.
func checkBuffer(base, length, item uint64) *bufferFault {
	switch {
	case base == 0:
		return &bufferFault{"Base", "expected an address, got 0"}
	case item == 0:
		return &bufferFault{"ItemLen", "expected a length, got 0"}
	case length%item != 0:
		return &bufferFault{"Len", fmt.Sprintf("expected a multiple of ItemLen %d, got %d", item, length)}
	case !fits(base, length):
		return &bufferFault{"Len", fmt.Sprintf("expected an end below 2^64, got %d bytes at %#x", length, base)}
	}
	return nil
}

// fits says whether length bytes from base end within the address space.
func fits(base, length uint64) bool {
	_, carry := bits.Add64(base, max(length, 1)-1, 0)
	return carry == 0
}

// extent is the memory of one buffer, first and last byte.
type extent struct {
	first, last uint64
	list        string
	index       int
}

// validateOverlaps refuses buffers that share memory where a write to one would corrupt
// another. State may lie in the memory of KV regions and of other components: SGLang's
// unified pools hand out the pages of one allocation to all of them. Kinds are looked at one
// by one, as not every accelerator shares an address space with the host.
func (l *Layout) validateOverlaps(p *problems) {
	for _, kind := range [...]Kind{VRAM, DRAM} {
		var extents []extent
		for i := range l.KV {
			if r := &l.KV[i]; r.Kind == kind {
				extents = appendExtent(extents, "KV", i, r.Base, r.Len)
			}
		}
		if kind == DRAM {
			for i := range l.Aux {
				extents = appendExtent(extents, "Aux", i, l.Aux[i].Base, l.Aux[i].Len)
			}
		}
		checkDisjoint(p, nixlkv.ErrRegions, extents)
	}
	for i := range l.State {
		var extents []extent
		list := index("State", i, "Tensors")
		for j, t := range l.State[i].Tensors {
			if !t.Absent() {
				extents = appendExtent(extents, list, j, t.Base, t.Len)
			}
		}
		checkDisjoint(p, nixlkv.ErrState, extents)
	}
}

// appendExtent leaves out what other checks refuse.
func appendExtent(extents []extent, list string, i int, base, length uint64) []extent {
	if base == 0 || length == 0 || !fits(base, length) {
		return extents
	}
	return append(extents, extent{base, base + length - 1, list, i})
}

// checkDisjoint tells of the first overlap, and of how many more there are: buffers that were cut
// from the wrong memory all overlap.
func checkDisjoint(p *problems, sentinel error, extents []extent) {
	slices.SortStableFunc(extents, func(a, b extent) int {
		if a.first < b.first {
			return -1
		}
		if a.first > b.first {
			return 1
		}
		return 0
	})
	field, text, more := "", "", 0
	for i := 1; i < len(extents); i++ {
		reach, e := &extents[i-1], &extents[i]
		switch {
		case e.first > reach.last:
		case field != "":
			more++
		default:
			field = index(e.list, e.index, "Base")
			text = fmt.Sprintf("expected memory of its own, got %#x, which %s covers (%#x to %#x)",
				e.first, index(reach.list, reach.index, ""), reach.first, reach.last)
		}
		if reach.last > e.last {
			extents[i] = *reach // whatever starts later has to clear the farthest end so far
		}
	}
	if more > 0 {
		text += fmt.Sprintf("; %d more overlap", more)
	}
	if field != "" {
		p.add(field, sentinel, "%s", text)
	}
}
