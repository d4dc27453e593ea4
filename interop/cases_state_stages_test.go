package interop

import "slices"

// stateStageSetups have state of the layers of two pipeline stages.
func stateStageSetups() []*setup {
	return []*setup{dsaMambaPP2(), compressedPP2()}
}

// dsaMambaPP2 has an index for every layer of a stage, and a state for some, which name theirs.
func dsaMambaPP2() *setup {
	side := func(dsaLayers int, kvLayers []int, mambaLayers ...int) rankConfig {
		mamba := stateConfig{Type: "mamba", NumSlots: 8, LayerIDs: mambaLayers}
		for i := range mambaLayers {
			mamba.ItemLens = append(mamba.ItemLens, []int{64, 96}[2*i/len(mambaLayers)])
		}
		return rankConfig{IsMLA: true, KV: regions(len(kvLayers), 256).layers(kvLayers...).state(
			stateConfig{Type: "dsa", ItemLens: slices.Repeat([]int{132}, dsaLayers), NumSlots: 32}, mamba)}
	}
	return &setup{
		name: "dsa_mamba_pp2",
		prefill: []rankConfig{
			side(2, []int{0, 1}, 0, 1, 0, 1).pp(0, 2, 0, 2),
			side(2, []int{2, 3}, 3, 3).pp(1, 2, 2, 4),
		},
		decode: oneRank(side(4, []int{0, 1, 2, 3}, 0, 1, 3, 0, 1, 3)),
		cases: []testCase{
			{name: "chunks", rooms: []room{{number: 1, send: [][]int32{{4, 5}, {9}}, aux: 1, to: []int32{1, 2, 3}, toAux: 1,
				sendState: [][]int32{{4, 5, 9}, {6}}, toState: [][]int32{{1, 2, 3}, {2}}}}},
			{name: "two_rooms", rooms: []room{
				{number: 2, send: [][]int32{{31, 0}}, aux: 2, to: []int32{0, 31}, toAux: 2, sendState: [][]int32{{31, 0}, {0}}, toState: [][]int32{{0, 31}, {7}}},
				{number: 3, send: [][]int32{{7}}, aux: 3, to: []int32{8}, toAux: 3, sendState: [][]int32{{7}, {7}}, toState: [][]int32{{8}, {0}}},
			}},
		},
	}
}

// compressedPP2 has layers that compress their keys by 4, by 128, or not, in stages of three and of
// five layers. Windows have a tensor a layer, and two more for a layer that compresses by 4, one of
// each kind after the other.
func compressedPP2() *setup {
	ratios := []int{0, 4, 128, 4, 0, 128, 4, 128}
	side := func(start, end int, kvLayers ...int) rankConfig {
		layers := func(ratio int) (n int) {
			for _, r := range ratios[start:end] {
				if r == ratio {
					n++
				}
			}
			return n
		}
		c := rankConfig{IsMLA: true, KV: regions(len(kvLayers), 256).layers(kvLayers...).state(
			stateConfig{Type: "swa", NumSlots: 16, ItemLens: slices.Concat(slices.Repeat([]int{96}, end-start),
				slices.Repeat([]int{160}, layers(4)), slices.Repeat([]int{64}, layers(4)))},
			stateConfig{Type: "swa_ring", NumSlots: 32, ItemLens: slices.Repeat([]int{80}, end-start)},
			stateConfig{Type: "c128_state", NumSlots: 16, ItemLens: slices.Repeat([]int{48}, layers(128))},
		)}
		c.KVArgs.Ratios = ratios
		return c
	}
	return &setup{
		name:    "compressed_pp2",
		prefill: []rankConfig{side(0, 3, 0, 1).pp(0, 2, 0, 3), side(3, 8, 2, 3).pp(1, 2, 3, 8)},
		decode:  oneRank(side(0, 8, 0, 1, 2, 3)),
		cases: []testCase{
			{name: "chunks", rooms: []room{{number: 1, send: [][]int32{{4, 5}, {9}}, aux: 1, to: []int32{1, 2, 3}, toAux: 1,
				sendState: [][]int32{{1, 2, 6}, {10, 11, 12, 3}, {2}}, toState: [][]int32{{9, 10, 4}, {20, 21, 22, 8}, {5}}}}},
			{name: "two_rooms", rooms: []room{
				{number: 2, send: [][]int32{{31, 0}}, aux: 2, to: []int32{0, 31}, toAux: 2,
					sendState: [][]int32{{0}, {0, 1}, {0}}, toState: [][]int32{{15}, {31, 30}, {15}}},
				{number: 3, send: [][]int32{{7}}, aux: 3, to: []int32{8}, toAux: 3,
					sendState: [][]int32{{15, 14}, {31}, {15}}, toState: [][]int32{{0, 1}, {0}, {0}}},
			}},
		},
	}
}
