package kvsender

import (
	"fmt"
	"hash/fnv"
	"slices"
	"testing"

	"github.com/nixlkv/nixlkv/registry"
	"pgregory.net/rapid"
)

// The oracles here know what a byte of state means (which tensor, which layer, which row,
// head or element of a dimension, of which slot) and where a rank keeps it. They know nothing
// of plans: a transfer is right if the decode has the right byte in every place of its slots,
// and nothing elsewhere.

// stateWorld is one component with the memories of both sides.
type stateWorld struct {
	layout   registry.Layout
	peer     registry.Peer
	from     memory
	src, dst []int32
}

// meaning is a byte that stands for what it means; it is never 0.
func meaning(parts ...any) byte {
	h := fnv.New32a()
	fmt.Fprint(h, parts...)
	return byte(h.Sum32()) | 1
}

// tpSizes draws two sizes, the larger one at least so many times the smaller.
func tpSizes(t *rapid.T, least int) (p, d int) {
	small := rapid.SampledFrom([]int{1, 1, 2, 3}).Draw(t, "smaller TP")
	large := small * rapid.IntRange(least, 4).Draw(t, "times")
	if rapid.Bool().Draw(t, "prefill has more") {
		return large, small
	}
	return small, large
}

// serving gives the prefill ranks that send to a decode rank.
func serving(p, d, to int) (from []int) {
	for r := range p {
		if p >= d && r*d/p == to || p < d && to*p/d == r {
			from = append(from, r)
		}
	}
	return from
}

// drawSlots draws slots for both sides, as many on each, none twice at the decode.
func (w *stateWorld) drawSlots(t *rapid.T, n int, srcLimit, dstLimit int32) {
	w.dst = rapid.SliceOfNDistinct(rapid.Int32Range(0, dstLimit-1), n, n, rapid.ID[int32]).Draw(t, "decode slots")
	w.src = rapid.SliceOfN(rapid.Int32Range(0, srcLimit-1), n, n).Draw(t, "prefill slots")
	if rapid.Bool().Draw(t, "neighbours") {
		for i := range w.src {
			w.src[i] = (w.src[0] + int32(i)) % srcLimit
		}
		slices.Sort(w.dst)
	}
}

// send applies what is planned.
func (w *stateWorld) send(t failer, dst *memory) {
	t.Helper()
	from, to, err := sendState(&w.layout, &w.peer, w.src, w.dst)
	if err != nil {
		t.Fatalf("%v", err)
	}
	for i := range from {
		if from[i].Dev != w.layout.GPU || to[i].Dev != w.peer.GPU {
			t.Fatalf("descriptor %d: devices %d and %d", i, from[i].Dev, to[i].Dev)
		}
	}
	copyDescs(t, dst, &w.from, to, from)
}

// sizedTensor is a tensor of one side and where its memory is.
func (w *stateWorld) addSource(base, item, slots uint64) registry.StateTensor {
	w.from.add(base, int(item*slots))
	return registry.StateTensor{Base: base, Len: item * slots, ItemLen: item, LayerID: registry.NoLayer}
}

func addTarget(s *registry.PeerState, m *memory, base, item, slots uint64, told bool) {
	m.add(base, int(item*slots))
	s.Ptrs, s.ItemLens = append(s.Ptrs, base), append(s.ItemLens, item)
	if told {
		s.DataLens = append(s.DataLens, item*slots)
	}
}

// mambaShape is a tensor as the model has it: outer rows of the dimension, which is sharded
// group by group, with so many bytes for each of it.
type mambaShape struct {
	outer, unit int
	groups      []int
}

// shard gives, in order, which of the whole dimension a rank has.
func (m mambaShape) shard(rank, size int) (dims []int) {
	first := 0
	for _, g := range m.groups {
		n := g / size
		for k := range n {
			dims = append(dims, first+rank*n+k)
		}
		first += g
	}
	return dims
}

// Every decode rank gets its shard of every group, from all prefill ranks that serve it.
func TestMambaSlices(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p, d := tpSizes(t, 1)
		to := rapid.IntRange(0, d-1).Draw(t, "decode rank")
		var shapes []mambaShape
		for range rapid.IntRange(1, 3).Draw(t, "tensors") {
			m := mambaShape{outer: rapid.IntRange(1, 3).Draw(t, "rows"), unit: rapid.IntRange(1, 6).Draw(t, "bytes")}
			for range rapid.SampledFrom([]int{1, 1, 2, 3}).Draw(t, "groups") {
				m.groups = append(m.groups, max(p, d)*rapid.IntRange(1, 3).Draw(t, "length"))
			}
			shapes = append(shapes, m)
		}
		srcSlot, dstSlot := rapid.Int32Range(0, 3).Draw(t, "prefill slot"), rapid.Int32Range(0, 3).Draw(t, "decode slot")
		told := rapid.Bool().Draw(t, "lengths told")
		base := rapid.SampledFrom([]uint64{4096, 0xffff_81ab_54e0_1000}).Draw(t, "base")
		var got, want memory
		var peer registry.PeerState
		for i, m := range shapes {
			dims := m.shard(to, d)
			row := len(dims) * m.unit
			at := base + uint64(i)<<20
			addTarget(&peer, &got, at, uint64(m.outer*row), 4, told)
			peer.Dims = append(peer.Dims, len(dims))
			want.add(at, m.outer*row*4)
			for o := range m.outer {
				for k, dim := range dims {
					for b := range m.unit {
						x := int(dstSlot)*m.outer*row + o*row + k*m.unit + b
						want.blocks[i].data[x], want.blocks[i].writes[x] = meaning(i, o, dim, b), 1
					}
				}
			}
		}
		for _, from := range serving(p, d, to) {
			w := &stateWorld{src: []int32{srcSlot}, dst: []int32{dstSlot}}
			w.layout = registry.Layout{GPU: 1, Ranks: registry.Ranks{TP: p, TPRank: from, EngineRank: from + p*rapid.IntRange(0, 1).Draw(t, "group")}}
			w.peer = registry.Peer{GPU: 2, State: []registry.PeerState{peer}, Ranks: registry.Ranks{TP: d, EngineRank: to}}
			c := registry.StateComponent{Type: registry.StateMamba}
			for i, m := range shapes {
				dims := m.shard(from, p)
				row := len(dims) * m.unit
				x := w.addSource(base+uint64(i)<<20, uint64(m.outer*row), 4)
				x.Dim, x.OuterCount = len(dims), m.outer
				if len(m.groups) > 1 {
					x.ConvGroups = m.groups
				}
				c.Tensors = append(c.Tensors, x)
				for o := range m.outer {
					for k, dim := range dims {
						for b := range m.unit {
							w.from.blocks[i].data[int(srcSlot)*m.outer*row+o*row+k*m.unit+b] = meaning(i, o, dim, b)
						}
					}
				}
			}
			w.layout.State = []registry.StateComponent{c}
			w.send(t, &got)
		}
		sameBytes(t, &got, &want)
	})
}

// headsOf gives which KV heads a rank keeps: its share of them, or one that it shares with
// its neighbours.
func headsOf(total, rank, size int) (heads []int) {
	if total < size {
		return []int{rank * total / size}
	}
	for h := range total {
		if h*size/total == rank {
			heads = append(heads, h)
		}
	}
	return heads
}

// Every decode rank gets its heads of every token of every page.
func TestSWAHeadSlices(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p, d := tpSizes(t, 2)
		total := p * d
		for range rapid.IntRange(0, 2).Draw(t, "fewer heads") {
			if n := total / 2; n > 0 && max(n, p)%min(n, p) == 0 && max(n, d)%min(n, d) == 0 {
				total = n
			}
		}
		to := rapid.IntRange(0, d-1).Draw(t, "decode rank")
		tokens := rapid.IntRange(1, 4).Draw(t, "tokens")
		layers := rapid.IntRange(1, 2).Draw(t, "layers")
		headLen := [2]int{rapid.IntRange(1, 5).Draw(t, "K bytes"), rapid.IntRange(1, 5).Draw(t, "V bytes")}
		const pages = 6
		w := &stateWorld{}
		w.drawSlots(t, rapid.IntRange(1, 4).Draw(t, "pages"), pages, pages)
		told := rapid.Bool().Draw(t, "lengths told")
		heads := headsOf(total, to, d)
		var got, want memory
		var peer registry.PeerState
		for i := range 2 * layers {
			n := headLen[i/layers]
			row := len(heads) * n
			base := uint64(4096 + i<<20)
			addTarget(&peer, &got, base, uint64(tokens*row), pages, told)
			want.add(base, tokens*row*pages)
			for x, page := range w.dst {
				for tok := range tokens {
					for k, h := range heads {
						for b := range n {
							want.blocks[i].data[int(page)*tokens*row+tok*row+k*n+b] = meaning(i, w.src[x], tok, h, b)
						}
					}
				}
			}
		}
		for _, from := range serving(p, d, to) {
			v := &stateWorld{src: w.src, dst: w.dst}
			v.layout = registry.Layout{GPU: 1, PageSize: tokens, SWALayout: "nhd", Ranks: registry.Ranks{TP: p, TPRank: from, EngineRank: from}}
			mine := headsOf(total, from, p)
			if total >= p && rapid.Bool().Draw(t, "heads of a rank told") {
				v.layout.KVHeads = len(mine)
			} else {
				v.layout.TotalKVHeads = total
			}
			v.peer = registry.Peer{GPU: 2, State: []registry.PeerState{peer}, Ranks: registry.Ranks{TP: d, EngineRank: to}}
			c := registry.StateComponent{Type: registry.StateSWA}
			for i := range 2 * layers {
				n := headLen[i/layers]
				row := len(mine) * n
				c.Tensors = append(c.Tensors, v.addSource(uint64(4096+i<<20), uint64(tokens*row), pages))
				for page := range int32(pages) {
					for tok := range tokens {
						for k, h := range mine {
							for b := range n {
								v.from.blocks[i].data[int(page)*tokens*row+tok*row+k*n+b] = meaning(i, page, tok, h, b)
							}
						}
					}
				}
			}
			v.layout.State = []registry.StateComponent{c}
			v.send(t, &got)
		}
		replicas := uint8(1)
		if total < p {
			replicas = uint8(min(p/total, p/min(d, p)))
		}
		for i := range want.blocks {
			for k, b := range want.blocks[i].data {
				if b != 0 {
					want.blocks[i].writes[k] = replicas
				}
			}
		}
		sameBytes(t, &got, &want)
	})
}

// slotShape is a component of whole slots: each tensor holds something, and takes its bytes
// from the one that holds the same.
type slotShape struct {
	kind     registry.StateType
	mla      bool
	pp       int
	perLayer []string // what a layer has, in the order of the groups
	ratios   []int
}

// holds lists what a stage has: group by group, its layers in order.
func (s slotShape) holds(first, end int) (names []string, layers []int) {
	for _, g := range s.perLayer {
		for l := first; l < end; l++ {
			if s.has(g, l) {
				names, layers = append(names, fmt.Sprint(g, l)), append(layers, l)
			}
		}
	}
	return names, layers
}

// has says whether a layer has a group: of compressed MLA those of its ratio alone.
func (s slotShape) has(group string, layer int) bool {
	switch group {
	case "c4", "indexer":
		return s.ratios[layer] == 4
	case "c128":
		return s.ratios[layer] == 128
	}
	return true
}

var anySlotShape = rapid.Custom(func(t *rapid.T) slotShape {
	s := rapid.SampledFrom([]slotShape{
		{kind: registry.StateMamba, perLayer: []string{"conv", "state"}},
		{kind: registry.StateSWA, perLayer: []string{"K", "V"}},
		{kind: registry.StateBlockScale, perLayer: []string{"K", "V"}},
		{kind: registry.StateBlockScaleSWA, perLayer: []string{"K", "V"}},
		{kind: registry.StateDSA, mla: true, perLayer: []string{"index"}},
		{kind: registry.StateDSA, perLayer: []string{"index"}},
		{kind: registry.StateQSAPending, perLayer: []string{"pending"}},
		{kind: registry.StateQSACompressed, perLayer: []string{"compressed"}},
		{kind: registry.StateMinimaxIndexK, perLayer: []string{"index"}},
		{kind: registry.StateMinimaxDenseKV, perLayer: []string{"dense"}},
		{kind: registry.StateRequestRow, mla: true, perLayer: []string{"row"}},
		{kind: registry.StateSWA, mla: true, perLayer: []string{"swa", "c4", "indexer"}, ratios: []int{}},
		{kind: registry.StateSWARing, mla: true, perLayer: []string{"ring"}, ratios: []int{}},
		{kind: registry.StateC128, mla: true, perLayer: []string{"c128"}, ratios: []int{}},
	}).Draw(t, "type")
	s.pp = rapid.IntRange(1, 3).Draw(t, "stages")
	switch s.kind {
	case registry.StateMinimaxIndexK, registry.StateMinimaxDenseKV:
		s.pp = 1
	}
	return s
})

// All stages together give the decode every slot that it asked for, each byte once; absent
// tensors and other slots stay as they are.
func TestWholeSlots(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := anySlotShape.Draw(t, "shape")
		layers := rapid.IntRange(s.pp, 8).Draw(t, "layers")
		if s.ratios != nil {
			s.ratios = rapid.SliceOfN(rapid.SampledFrom([]int{0, 4, 128}), layers, layers).Draw(t, "ratios")
		}
		cuts := []int{0}
		for i := 1; i < s.pp; i++ {
			cuts = append(cuts, rapid.IntRange(cuts[i-1]+1, layers-s.pp+i).Draw(t, "cut"))
		}
		cuts = append(cuts, layers)
		ids := rapid.Bool().Draw(t, "layer ids") || s.pp > 1 && s.kind == registry.StateMamba
		tp := rapid.IntRange(1, 3).Draw(t, "TP")
		rank := rapid.IntRange(0, tp-1).Draw(t, "rank")
		told := rapid.Bool().Draw(t, "lengths told")

		names, of := s.holds(0, layers)
		at := make([]int, len(names)) // where the decode keeps it in its list
		for i := range at {
			at[i] = i
		}
		if ids {
			// In any order of layers; of one layer the groups keep theirs.
			order := rapid.Permutation(rangeOf(layers)).Draw(t, "order of layers")
			slices.SortStableFunc(at, func(a, b int) int { return slices.Index(order, of[a]) - slices.Index(order, of[b]) })
		}
		lens := map[string]uint64{}
		gone := map[string]bool{}
		for _, n := range names {
			lens[n] = rapid.Uint64Range(1, 12).Draw(t, "bytes")
			gone[n] = rapid.IntRange(0, 9).Draw(t, "absent at the decode") == 0
		}
		const slots = 7
		w := &stateWorld{}
		n := 1
		if s.kind != registry.StateMamba {
			n = rapid.IntRange(1, 5).Draw(t, "slots")
		}
		w.drawSlots(t, n, slots, slots)
		var got, want memory
		var peer registry.PeerState
		for k, i := range at {
			name := names[i]
			if gone[name] {
				addTarget(&peer, &memory{}, 0, 0, 0, told)
			} else {
				base := uint64(4096 + k<<16)
				addTarget(&peer, &got, base, lens[name], slots, told)
				want.add(base, int(lens[name])*slots)
				b := &want.blocks[len(want.blocks)-1]
				for x, slot := range w.dst {
					for c := range lens[name] {
						b.data[uint64(slot)*lens[name]+c], b.writes[uint64(slot)*lens[name]+c] = meaning(name, w.src[x], c), 1
					}
				}
			}
			if ids {
				peer.LayerIDs = append(peer.LayerIDs, of[i])
			}
		}
		for stage := range s.pp {
			v := &stateWorld{src: w.src, dst: w.dst}
			v.layout = registry.Layout{GPU: 1, MLA: s.mla, StartLayer: cuts[stage], EndLayer: cuts[stage+1], CompressionRatios: s.ratios,
				Ranks: registry.Ranks{TP: tp, TPRank: rank, EngineRank: rank, PP: s.pp, PPRank: stage}}
			v.peer = registry.Peer{GPU: 2, State: []registry.PeerState{peer}, Ranks: registry.Ranks{TP: tp, EngineRank: rank}}
			c := registry.StateComponent{Type: s.kind}
			mine, layersOf := s.holds(cuts[stage], cuts[stage+1])
			for i, name := range mine {
				x := v.addSource(uint64(4096+i<<16), lens[name], slots)
				if ids {
					x.LayerID = layersOf[i]
				}
				c.Tensors = append(c.Tensors, x)
				for slot := range int32(slots) {
					for b := range lens[name] {
						v.from.blocks[i].data[uint64(slot)*lens[name]+b] = meaning(name, slot, b)
					}
				}
			}
			v.layout.State = []registry.StateComponent{c}
			v.send(t, &got)
		}
		sameBytes(t, &got, &want)
	})
}

func rangeOf(n int) []int {
	out := make([]int, n)
	for i := range out {
		out[i] = i
	}
	return out
}

// The tokens in use of one ring get, in their order, to the places that the other says.
func TestRings(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		srcTokens, dstTokens := rapid.Int32Range(1, 9).Draw(t, "prefill ring"), rapid.Int32Range(1, 9).Draw(t, "decode ring")
		used := rapid.Int32Range(0, min(srcTokens, dstTokens)).Draw(t, "used")
		draw := func(tokens int32, name string) (ring []int32, places []int32) {
			first := rapid.Int32Range(0, tokens-1).Draw(t, name+" first")
			n := min(used, tokens-first)
			for k := range used {
				places = append(places, (first+k)%tokens)
			}
			return []int32{rapid.Int32Range(0, 3).Draw(t, name+" row"), first, n, 0, used - n, tokens}, places
		}
		w := &stateWorld{}
		var from, to []int32
		w.src, from = draw(srcTokens, "prefill")
		w.dst, to = draw(dstTokens, "decode")
		tp := rapid.IntRange(1, 2).Draw(t, "TP")
		w.layout = registry.Layout{GPU: 1, MLA: true, Ranks: registry.Ranks{TP: tp}}
		w.peer = registry.Peer{GPU: 2, State: make([]registry.PeerState, 1), Ranks: registry.Ranks{TP: rapid.IntRange(1, 2).Draw(t, "decode TP")}}
		told := rapid.Bool().Draw(t, "lengths told")
		var got, want memory
		c := registry.StateComponent{Type: registry.StateDSATail}
		for i := range rapid.IntRange(1, 3).Draw(t, "tensors") {
			n := rapid.Uint64Range(1, 5).Draw(t, "token bytes")
			base := uint64(4096 + i<<16)
			c.Tensors = append(c.Tensors, w.addSource(base, n*uint64(srcTokens), 4))
			addTarget(&w.peer.State[0], &got, base, n*uint64(dstTokens), 4, told)
			want.add(base, int(n)*int(dstTokens)*4)
			for k := range w.from.blocks[i].data {
				w.from.blocks[i].data[k] = meaning(i, k)
			}
			for k := range from {
				want.write(t, base+n*uint64(w.dst[0]*dstTokens+to[k]), &w.from, base+n*uint64(w.src[0]*srcTokens+from[k]), n)
			}
		}
		w.layout.State = []registry.StateComponent{c}
		w.send(t, &got)
		sameBytes(t, &got, &want)
	})
}
