package interop

// stateSetups have state beside the KV cache, which goes with the last chunk.
func stateSetups() []*setup {
	return []*setup{
		hybridState(), dsaState(), dsaTwoDestinations(),
		mambaSlices("mamba_tp1_to_tp2", 1, 2), mambaSlices("mamba_tp2_to_tp1", 2, 1),
		swaSlices("swa_tp1_to_tp2", 1, 2), swaSlices("swa_tp2_to_tp1", 2, 1),
	}
}

// hybridState has layers with a sliding window and layers with a state of a slot each.
func hybridState() *setup {
	c := rankConfig{KV: regions(4, 256).state(
		stateConfig{Type: "swa", ItemLens: []int{128, 128}, NumSlots: 16},
		stateConfig{Type: "mamba", ItemLens: []int{96, 160}, NumSlots: 8},
	)}
	return &setup{
		name: "swa_mamba", prefill: oneRank(c), decode: oneRank(c),
		cases: []testCase{
			{name: "both", rooms: []room{{number: 1, send: [][]int32{{4}, {5}}, aux: 1, to: []int32{1, 2}, toAux: 1,
				sendState: [][]int32{{6, 1}, {0}}, toState: [][]int32{{3, 4}, {7}}}}},
			{name: "side_by_side", rooms: []room{
				{number: 2, send: [][]int32{{10, 11}}, aux: 2, to: []int32{3, 4}, toAux: 2,
					sendState: [][]int32{{2}, {1}}, toState: [][]int32{{0}, {0}}},
				{number: 3, send: [][]int32{{12}, {13}}, aux: 3, to: []int32{6, 5}, toAux: 3,
					sendState: [][]int32{{15, 9, 8}, {2}}, toState: [][]int32{{5, 6, 15}, {1}}},
			}},
			{name: "one_component", rooms: []room{{number: 4, send: [][]int32{{14}}, aux: 4, to: []int32{7}, toAux: 4,
				sendState: [][]int32{{7}, {}}, toState: [][]int32{{8}, {}}}}},
			{name: "without_state", rooms: []room{{number: 5, send: [][]int32{{15}}, aux: 5, to: []int32{8}, toAux: 5}}},
			{name: "prefix_full_hit", rooms: []room{{number: 6, send: [][]int32{{}}, aux: 6, prefix: 8, toAux: 6,
				sendState: [][]int32{{11}, {3}}, toState: [][]int32{{9}, {2}}}}},
		},
	}
}

// dsa has MLA with an index of its own a layer (DeepSeek sparse attention).
func dsa() rankConfig {
	return rankConfig{IsMLA: true, KV: regions(2, 576).state(stateConfig{Type: "dsa", ItemLens: []int{132, 132}, NumSlots: 64})}
}

func dsaState() *setup {
	return &setup{
		name: "dsa", prefill: oneRank(dsa()), decode: oneRank(dsa()),
		cases: []testCase{
			{name: "chunks", rooms: []room{{number: 1, send: [][]int32{{4, 5}, {9}}, aux: 1, to: []int32{1, 2, 3}, toAux: 1,
				sendState: [][]int32{{4, 5, 9}}, toState: [][]int32{{1, 2, 3}}}}},
			{name: "two_rooms", rooms: []room{
				{number: 2, send: [][]int32{{63, 0}}, aux: 2, to: []int32{0, 63}, toAux: 2, sendState: [][]int32{{63, 0}}, toState: [][]int32{{0, 63}}},
				{number: 3, send: [][]int32{{7}}, aux: 3, to: []int32{8}, toAux: 3, sendState: [][]int32{{7}}, toState: [][]int32{{8}}},
			}},
		},
	}
}

func dsaTwoDestinations() *setup {
	s := dsaState()
	s.name = "dsa_tp1_to_tp2"
	s.decode = rank(2, func(r int) rankConfig { return dsa().tp(r, 2) })
	return s
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
		name: name, since: 22, prefill: side(p), decode: side(d),
		cases: []testCase{
			{name: "chunks", rooms: []room{{number: 1, send: [][]int32{{4, 5}, {9}}, aux: 1, to: []int32{1, 2, 3}, toAux: 1,
				sendState: [][]int32{{6, 7}}, toState: [][]int32{{2, 15}}}}},
		},
	}
}
