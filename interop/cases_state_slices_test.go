package interop

// stateSliceSetups have state of which a rank has a part: by channel or by head, as many as it takes.
func stateSliceSetups() []*setup {
	return []*setup{
		mambaSlices("mamba_tp1_to_tp2", 1, 2), mambaSlices("mamba_tp2_to_tp1", 2, 1),
		swaSlices("swa_tp1_to_tp2", 1, 2), swaSlices("swa_tp2_to_tp1", 2, 1),
		hybridMLA(),
	}
}

// mambaSlices has a model with two heads and sixteen channels on each side's ranks. The tensors
// are a convolution of three groups of channels, a state by head, and a convolution with a row a
// step.
func mambaSlices(name string, p, d int) *setup {
	side := func(n int) []rankConfig {
		return rank(n, func(r int) rankConfig {
			return rankConfig{KV: regions(4, 512/n).heads(2/n, 2).state(stateConfig{
				Type: "mamba", NumSlots: 8,
				ItemLens:    []int{96 / n, 320 / n, 96 / n},
				Dims:        []int{16 / n, 8 / n, 16 / n},
				OuterCounts: []int{1, 1, 3},
				ConvGroups:  [][]int{{4, 4, 8}, {}, {8, 8}},
			})}.tp(r, n)
		})
	}
	return &setup{
		name: name, prefill: side(p), decode: side(d),
		cases: []testCase{
			{name: "chunks", rooms: []room{{number: 1, send: [][]int32{{4, 5}, {9}}, aux: 1, to: []int32{1, 2, 3}, toAux: 1,
				sendState: [][]int32{{6}}, toState: [][]int32{{2}}}}},
			{name: "two_rooms", rooms: []room{
				{number: 2, send: [][]int32{{6}}, aux: 2, to: []int32{4}, toAux: 2, sendState: [][]int32{{0}}, toState: [][]int32{{7}}},
				{number: 3, send: [][]int32{{7}}, aux: 3, to: []int32{5}, toAux: 3, sendState: [][]int32{{7}}, toState: [][]int32{{0}}},
			}},
		},
	}
}

// swaSlices has layers with a sliding window, whose heads are on one rank or two.
func swaSlices(name string, p, d int) *setup {
	side := func(n int) []rankConfig {
		return rank(n, func(r int) rankConfig {
			c := rankConfig{KV: regions(4, 512/n).heads(2/n, 2).state(stateConfig{
				Type: "swa", ItemLens: []int{512 / n, 512 / n, 512 / n, 512 / n}, NumSlots: 16,
			})}.tp(r, n)
			c.KVArgs.SWALayout = "nhd"
			return c
		})
	}
	return &setup{
		name: name, since: 22, why: "its prefill refuses to slice the heads of a sliding window",
		prefill: side(p), decode: side(d),
		cases: []testCase{
			{name: "chunks", rooms: []room{{number: 1, send: [][]int32{{4, 5}, {9}}, aux: 1, to: []int32{1, 2, 3}, toAux: 1,
				sendState: [][]int32{{6, 7}}, toState: [][]int32{{2, 15}}}}},
		},
	}
}

// hybridMLA has two prefill ranks with the same pages and index, and each with half of a state. All
// of it comes from both.
func hybridMLA() *setup {
	side := func(n int) []rankConfig {
		return rank(n, func(r int) rankConfig {
			c := rankConfig{KV: regions(3, 256).state(stateConfig{
				Type: "mamba", ItemLens: []int{96 / n, 320 / n}, NumSlots: 8, Dims: []int{16 / n, 8 / n}, OuterCounts: []int{1, 1},
			})}.tp(r, n)
			c.KVArgs.HybridMLA = true
			return c
		})
	}
	prefill := side(2)
	for i := range prefill {
		prefill[i].FillSeed = "both"
	}
	return &setup{
		name: "hybrid_mla_tp2_to_tp1", prefill: prefill, decode: side(1),
		cases: []testCase{
			{name: "chunks", rooms: []room{{number: 1, send: [][]int32{{4, 5}, {9}}, aux: 1, to: []int32{1, 2, 3}, toAux: 1,
				sendState: [][]int32{{6}}, toState: [][]int32{{2}}}}},
			{name: "two_rooms", rooms: []room{
				{number: 2, send: [][]int32{{6}}, aux: 2, to: []int32{4}, toAux: 2, sendState: [][]int32{{0}}, toState: [][]int32{{7}}},
				{number: 3, send: [][]int32{{7}}, aux: 3, to: []int32{5}, toAux: 3, sendState: [][]int32{{7}}, toState: [][]int32{{0}}},
			}},
		},
	}
}
