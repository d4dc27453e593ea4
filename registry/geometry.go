package registry

import "github.com/nixlkv/nixlkv"

// Pages gives the pages that every KV region has: the fewest of any. 0 without KV regions.
// Prepared lists address page p of every region by one number, so a page that only some
// regions have cannot be sent (num_kv_slots in SGLang's nixl/conn.py).
func (l *Layout) Pages() uint64 { return pages(l.KV) }

// Pages gives the pages that every KV region has; 0 if the peer did not tell them, or has no
// KV regions. Up to SGLang 0.5.21 a decode tells the first region's count, and a later region
// that is shorter has fewer than this says.
func (p *Peer) Pages() uint64 { return pages(p.KV) }

func pages(regions []Region) uint64 {
	var least uint64
	for i := range regions {
		if n := regions[i].Pages(); i == 0 || n < least {
			least = n
		}
	}
	return least
}

// HasLayerIDs says whether the KV regions have layer ids; all have, or none.
func (l *Layout) HasLayerIDs() bool { return hasLayerIDs(l.KV) }

// HasLayerIDs says whether the KV regions have layer ids; all have, or none.
func (p *Peer) HasLayerIDs() bool { return hasLayerIDs(p.KV) }

func hasLayerIDs(regions []Region) bool {
	return len(regions) > 0 && regions[0].LayerID != NoLayer
}

// AuxSlots gives the slots that every aux buffer has; 0 without aux buffers.
func (l *Layout) AuxSlots() uint64 {
	var least uint64
	for i := range l.Aux {
		if n := l.Aux[i].Slots(); i == 0 || n < least {
			least = n
		}
	}
	return least
}

// Slots counts the slots of the buffer.
func (a AuxBuffer) Slots() uint64 {
	if a.ItemLen == 0 {
		return 0
	}
	return a.Len / a.ItemLen
}

// Absent says that the tensor is not there: a layer that keeps no such state. It keeps its
// place in the component, so that positions and layers still match, and nothing is sent for
// it (SGLang: is_elided_entry).
func (t StateTensor) Absent() bool { return t.Base == 0 || t.ItemLen == 0 }

// Slots counts the whole slots of the tensor; bytes after the last one are not counted, as
// pools that share one allocation have some. 0 if the tensor is absent.
func (t StateTensor) Slots() uint64 {
	if t.Absent() {
		return 0
	}
	return t.Len / t.ItemLen
}

// CheckTokens says whether every KV page divides into PageSize tokens of equal length. Only
// transfers that address tokens ask for it, between different TP sizes and to decode context
// parallelism; pages that go whole need not divide, as packed ones (NVFP4 with its scales) do
// not. The error wraps nixlkv.ErrRegions.
func (l *Layout) CheckTokens() error {
	var p problems
	if l.PageSize < 1 {
		p.add("PageSize", nixlkv.ErrRegions, "expected at least 1, got %d", l.PageSize)
		return p.err()
	}
	for i := range l.KV {
		if n := l.KV[i].ItemLen; n%uint64(l.PageSize) != 0 {
			p.add(index("KV", i, "ItemLen"), nixlkv.ErrRegions, "expected a multiple of PageSize %d, got %d", l.PageSize, n)
		}
	}
	return p.err()
}
