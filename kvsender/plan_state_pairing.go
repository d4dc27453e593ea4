package kvsender

import (
	"fmt"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/registry"
)

// Which tensor of the decode takes which of this rank's. A pair is two indices. Where both
// sides tell layers, those decide for every type; SGLang pairs by position where it leaves
// them out (dsa, minimax, and all but mamba and qsa without MLA), and comes to the same as
// long as both sides list their layers in one order.

// pairMamba pairs as build_transfer_entry_pairs in SGLang's disaggregation/utils.py does.
func (s *stateSides) pairMamba() ([][2]int, error) {
	pp, n, m := ranks(s.l.Ranks.PP), len(s.src), len(s.dst)
	if at, done, err := s.pairLayers(true); done {
		return at, err
	}
	if m < n || m > n && pp > 1 {
		return nil, fmt.Errorf("%w: prefill PP %d needs layer ids on both sides: %d tensors at the prefill, %d at the decode", nixlkv.ErrRegions, pp, n, m)
	}
	return pairSpans(spanOf{0, n}), nil
}

// pairSlots pairs the types that go slot by slot. Without layer ids, lists of one length go
// in order, and this stage is looked for in a longer one.
func (s *stateSides) pairSlots(kind registry.StateType) ([][2]int, error) {
	qsa := kind == registry.StateQSAPending || kind == registry.StateQSACompressed
	if at, done, err := s.pairLayers(qsa); done {
		return at, err
	}
	n, m := len(s.src), len(s.dst)
	switch {
	case n == m:
		return pairSpans(spanOf{0, n}), nil
	case m < n:
		return nil, fmt.Errorf("%w: %d tensors at the prefill, %d at the decode", nixlkv.ErrRegions, n, m)
	case s.l.MLA && len(s.l.CompressionRatios) > 0:
		return s.pairCompressed(kind)
	case s.l.MLA || qsa, kind == registry.StateDSA, kind == registry.StateMinimaxIndexK, kind == registry.StateMinimaxDenseKV:
		return s.pairFlat()
	}
	return s.pairHalves()
}

// pairLayers pairs by layer if both sides tell them. If one does and needed says that nothing
// else will do, that is an error with pipeline stages. done is false if position decides.
func (s *stateSides) pairLayers(needed bool) (at [][2]int, done bool, err error) {
	if len(s.src) == 0 {
		return nil, true, nil // a stage without such layers
	}
	src, err := layersOf("prefill", len(s.src), func(i int) int { return s.src[i].LayerID })
	if err != nil {
		return nil, true, err
	}
	dst, err := layersOf("decode", len(s.dst), func(j int) int { return s.dst[j].layer })
	if err != nil {
		return nil, true, err
	}
	if !src || !dst {
		if s.l.SplitLayers {
			return nil, true, splitNeedsLayerIDs(src, dst)
		}
		if pp := ranks(s.l.Ranks.PP); needed && src != dst && pp > 1 {
			return nil, true, fmt.Errorf("%w: layer metadata from one peer only, with prefill PP %d: prefill %t, decode %t", nixlkv.ErrRegions, pp, src, dst)
		}
		return nil, false, nil
	}
	free := make(map[int][]int, len(s.dst))
	for j := range s.dst {
		free[s.dst[j].layer] = append(free[s.dst[j].layer], j)
	}
	for i, t := range s.src {
		js := free[t.LayerID]
		if len(js) == 0 {
			return nil, true, fmt.Errorf("%w: the decode has no tensor left for prefill tensor %d of model layer %d", nixlkv.ErrRegions, i, t.LayerID)
		}
		at, free[t.LayerID] = append(at, [2]int{i, js[0]}), js[1:]
	}
	return at, true, nil
}

// layersOf says whether tensors have layer ids: all of them, or none.
func layersOf(side string, n int, layer func(int) int) (bool, error) {
	told := 0
	for i := range n {
		if layer(i) >= 0 {
			told++
		}
	}
	if told != 0 && told != n {
		return false, fmt.Errorf("%w: %s: layer ids for %d of %d tensors", nixlkv.ErrRegions, side, told, n)
	}
	return told != 0, nil
}

// spanOf are tensors of the decode, the end exclusive.
type spanOf struct{ first, end int }

// pairFlat finds a stage of one tensor a layer (get_mla_kv_ptrs_with_pp in common/conn.py).
// A draft's tensors follow those of the last stage; where those of another stage belong is
// not to be known.
func (s *stateSides) pairFlat() ([][2]int, error) {
	r, n, m, first := s.l.Ranks, len(s.src), len(s.dst), s.l.StartLayer
	if s.l.DraftRegions != 0 && r.PPRank != ranks(r.PP)-1 {
		return nil, fmt.Errorf("%w: the draft of a stage before the last needs layer ids on both sides: %d tensors at the prefill, %d at the decode", nixlkv.ErrRegions, n, m)
	}
	if first < 0 || first > m || n > m-first {
		return nil, fmt.Errorf("%w: tensors %d to %d are not all among the decode's %d", nixlkv.ErrRegions, first, first+n, m)
	}
	return pairSpans(spanOf{first, first + n}), nil
}

// pairHalves finds a stage of K tensors and V tensors (get_mha_kv_ptrs_with_pp in
// common/conn.py). Without stages the decode has the layers of a draft besides; where the
// draft's follow, V begins after the K of the model.
func (s *stateSides) pairHalves() ([][2]int, error) {
	pp, first, end := ranks(s.l.Ranks.PP), s.l.StartLayer, s.l.EndLayer
	n, m := len(s.src)/2, len(s.dst)/2
	switch {
	case len(s.src) == len(s.dst):
		return pairSpans(spanOf{0, len(s.src)}), nil
	case len(s.src) != 2*n || len(s.dst) != 2*m:
		return nil, fmt.Errorf("%w: no equal numbers of K and V: %d tensors at the prefill, %d at the decode", nixlkv.ErrRegions, len(s.src), len(s.dst))
	case pp > 1 && end != 0 && end-first != n:
		// SGLang takes the stage's first layer for the position in the list, which it is only if
		// every layer has such state; of a list of some layers it takes the wrong ones.
		return nil, fmt.Errorf("%w: prefill PP %d needs such state in every layer: %d K tensors for layers %d to %d", nixlkv.ErrRegions, pp, n, first, end)
	case first < 0 || first > m || n > m-first:
		return nil, fmt.Errorf("%w: layers %d to %d are not all among the decode's %d", nixlkv.ErrRegions, first, first+n, m)
	}
	v := m
	if pp == 1 && m%n != 0 {
		v = m / n * n
	}
	if v+first+n > 2*m {
		return nil, fmt.Errorf("%w: V of layers %d to %d is not among the decode's %d tensors", nixlkv.ErrRegions, first, first+n, 2*m)
	}
	return pairSpans(spanOf{first, first + n}, spanOf{v + first, v + first + n}), nil
}

// pairCompressed finds a stage of compressed MLA, whose tensors are grouped by kind of buffer
// (_mla_slice_ptrs_for_pp in common/conn.py): c128_state has one for each layer of ratio 128,
// swa_ring one for each layer, swa those of the SWA layers, then the compressor's and the
// indexer's of the layers of ratio 4.
func (s *stateSides) pairCompressed(kind registry.StateType) ([][2]int, error) {
	ratios, first, end := s.l.CompressionRatios, s.l.StartLayer, s.l.EndLayer
	n, m := len(s.src), len(s.dst)
	if first < 0 || end <= first || end > len(ratios) {
		return nil, fmt.Errorf("%w: compressed MLA needs the stage's layers: %d to %d of %d; %d tensors at the prefill, %d at the decode",
			nixlkv.ErrRegions, first, end, len(ratios), n, m)
	}
	before := func(ratio, layer int) (k int) {
		for _, r := range ratios[:layer] {
			k += one(r == ratio)
		}
		return k
	}
	var spans []spanOf
	switch kind {
	case registry.StateC128:
		spans = []spanOf{{before(128, first), before(128, end)}}
	case registry.StateSWARing:
		if n == len(ratios) && m == 2*n {
			return nil, fmt.Errorf("%w: PD peers disagree on the compressed-MLA KV layout: %d rings at the prefill (one pool a layer), %d at the decode (two)", nixlkv.ErrRegions, n, m)
		}
		spans = []spanOf{{min(first, m), min(end, m)}}
	case registry.StateSWA:
		c4 := before(4, len(ratios))
		swa := m - 2*c4 // layers of the next-token head may have none
		if swa < 0 || swa > len(ratios) {
			return nil, fmt.Errorf("%w: unexpected compressed-MLA pointer count: %d tensors at the decode, %d layers, %d of ratio 4", nixlkv.ErrRegions, m, len(ratios), c4)
		}
		lo, hi := before(4, first), before(4, end)
		spans = []spanOf{{min(first, swa), min(end, swa)}, {swa + lo, swa + hi}, {swa + c4 + lo, swa + c4 + hi}}
	default:
		return nil, fmt.Errorf("%w: state type not supported for this topology: compressed MLA, %d tensors at the prefill, %d at the decode", nixlkv.ErrTopology, n, m)
	}
	total := 0
	for _, x := range spans {
		if x.end > m {
			return nil, fmt.Errorf("%w: tensors %d to %d are not all among the decode's %d", nixlkv.ErrRegions, x.first, x.end, m)
		}
		total += x.end - x.first
	}
	if total != n {
		return nil, fmt.Errorf("%w: unexpected compressed-MLA pointer count: %d tensors at the prefill, layers %d to %d have %d of the decode's %d", nixlkv.ErrRegions, n, first, end, total, m)
	}
	return pairSpans(spans...), nil
}

// pairTails pairs the tails of dsa_tail: keys, then scores, of this stage's layers
// (slice_dsa_tail_dst_ptrs_for_pp in disaggregation/utils.py).
func (s *stateSides) pairTails() ([][2]int, error) {
	if at, done, err := s.pairLayers(false); done {
		return at, err
	}
	n, m, first := len(s.src)/2, len(s.dst)/2, s.l.StartLayer
	switch {
	case len(s.src) == len(s.dst):
		return pairSpans(spanOf{0, len(s.src)}), nil
	case len(s.src) != 2*n || len(s.dst) != 2*m || first < 0 || first > m || n > m-first:
		return nil, fmt.Errorf("%w: keys and scores of layers %d to %d: %d tensors at the prefill, %d at the decode", nixlkv.ErrRegions, first, first+n, len(s.src), len(s.dst))
	}
	return pairSpans(spanOf{first, first + n}, spanOf{m + first, m + first + n}), nil
}

// pairSpans pairs this rank's tensors, in order, with spans of the decode's.
func pairSpans(spans ...spanOf) [][2]int {
	var at [][2]int
	for _, x := range spans {
		for j := x.first; j < x.end; j++ {
			at = append(at, [2]int{len(at), j})
		}
	}
	return at
}
