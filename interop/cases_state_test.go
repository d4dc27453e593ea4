package interop

// stateSetups have state beside the KV cache, which goes with the last chunk, slot by slot.
func stateSetups() []*setup {
	return []*setup{
		hybridState(), dsaState(), dsaTwoDestinations(),
		dsaTail(), blockScale(), requestRow(),
	}
}

// hybridState has layers with a sliding window, layers with a state of a slot each, and layers with
// an index of keys.
func hybridState() *setup {
	c := rankConfig{KV: regions(4, 256).state(
		stateConfig{Type: "swa", ItemLens: []int{128, 128}, NumSlots: 16},
		stateConfig{Type: "mamba", ItemLens: []int{96, 160}, NumSlots: 8},
		stateConfig{Type: "minimax_index_k", ItemLens: []int{64, 32, 64}, NumSlots: 32},
	)}
	return &setup{
		name: "swa_mamba_minimax", prefill: oneRank(c), decode: oneRank(c),
		cases: []testCase{
			{name: "all_components", rooms: []room{{number: 1, send: [][]int32{{4}, {5}}, aux: 1, to: []int32{1, 2}, toAux: 1,
				sendState: [][]int32{{6, 1}, {0}, {4, 5}}, toState: [][]int32{{3, 4}, {7}, {1, 2}}}}},
			{name: "side_by_side", rooms: []room{
				{number: 2, send: [][]int32{{10, 11}}, aux: 2, to: []int32{3, 4}, toAux: 2,
					sendState: [][]int32{{2}, {1}, {31, 0}}, toState: [][]int32{{0}, {0}, {3, 4}}},
				{number: 3, send: [][]int32{{12}, {13}}, aux: 3, to: []int32{6, 5}, toAux: 3,
					sendState: [][]int32{{15, 9, 8}, {2}, {12, 13}}, toState: [][]int32{{5, 6, 15}, {1}, {6, 5}}},
			}},
			{name: "one_component", rooms: []room{{number: 4, send: [][]int32{{14}}, aux: 4, to: []int32{7}, toAux: 4,
				sendState: [][]int32{{7}, {}, {}}, toState: [][]int32{{8}, {}, {}}}}},
			{name: "without_state", rooms: []room{{number: 5, send: [][]int32{{15}}, aux: 5, to: []int32{8}, toAux: 5}}},
			{name: "prefix_full_hit", rooms: []room{{number: 6, send: [][]int32{{}}, aux: 6, prefix: 8, toAux: 6,
				sendState: [][]int32{{11}, {3}, {9}}, toState: [][]int32{{9}, {2}, {31}}}}},
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

// dsaTail has the compressed keys of sparse attention and their tail, a ring for every request; and
// keys that are still to be compressed and that are, which both sides hold in an order of their own.
func dsaTail() *setup {
	side := func(ring int, layers ...int) []rankConfig {
		lens := map[int]int{3: 40, 7: 24, 9: 16, 11: 48}
		compressed := stateConfig{Type: "qsa_compressed", NumSlots: 32, LayerIDs: layers}
		for _, id := range layers {
			compressed.ItemLens = append(compressed.ItemLens, lens[id])
		}
		c := dsa()
		c.KV.State = append(c.KV.State,
			stateConfig{Type: "dsa_tail", ItemLens: []int{ring * 16, ring * 8}, NumSlots: 16},
			stateConfig{Type: "qsa_pending", ItemLens: []int{48, 32}, NumSlots: 8, LayerIDs: []int{3, 7}},
			compressed)
		return oneRank(c)
	}
	return &setup{
		name: "dsa_tail_qsa", since: 20, why: "it does not know the tail of compressed keys, nor compressed keys with those pending",
		prefill: side(10, 3, 7, 9), decode: side(7, 9, 11, 3, 7),
		cases: []testCase{
			// A row, the first token and the number of two pieces, and the tokens of the ring.
			{name: "tail_in_two_pieces", rooms: []room{{number: 1, send: [][]int32{{4, 5}, {9}}, aux: 1, to: []int32{1, 2, 3}, toAux: 1,
				sendState: [][]int32{{4, 5, 9}, {3, 8, 2, 0, 3, 10}, {5}, {3, 4, 9}},
				toState:   [][]int32{{1, 2, 3}, {13, 2, 5, 0, 0, 7}, {7}, {8, 9, 2}}}}},
			{name: "two_rooms", rooms: []room{
				{number: 2, send: [][]int32{{10}}, aux: 2, to: []int32{4}, toAux: 2,
					sendState: [][]int32{{10}, {0, 9, 1, 0, 1, 10}, {0}, {10}}, toState: [][]int32{{4}, {15, 6, 1, 0, 1, 7}, {0}, {31}}},
				{number: 3, send: [][]int32{{11, 12}}, aux: 3, to: []int32{6, 5}, toAux: 3,
					sendState: [][]int32{{11, 12}, {15, 3, 4, 0, 0, 10}, {7}, {11, 12}}, toState: [][]int32{{6, 5}, {8, 0, 4, 0, 0, 7}, {1}, {6, 5}}},
			}},
			{name: "no_tail", rooms: []room{{number: 4, send: [][]int32{{13}}, aux: 4, to: []int32{7}, toAux: 4,
				sendState: [][]int32{{13}, {}, {1}, {13}}, toState: [][]int32{{7}, {}, {2}, {7}}}}},
		},
	}
}

// blockScale has KV cache and windows in blocks with scales of their own, and dense layers beside
// those with an index of keys.
func blockScale() *setup {
	c := rankConfig{KV: regions(4, 256).state(
		stateConfig{Type: "block_scale", ItemLens: []int{32, 32, 32, 32}, NumSlots: 64},
		stateConfig{Type: "swa", ItemLens: []int{128, 128}, NumSlots: 16},
		stateConfig{Type: "block_scale_swa", ItemLens: []int{16, 16}, NumSlots: 16},
		stateConfig{Type: "minimax_index_k", ItemLens: []int{64, 32, 64}, NumSlots: 32},
		stateConfig{Type: "minimax_dense_kv", ItemLens: []int{128, 128}, NumSlots: 32},
	)}
	return &setup{
		name: "block_scale_minimax", since: 21, why: "it does not know scales of blocks, nor dense layers beside an index of keys",
		prefill: oneRank(c), decode: oneRank(c),
		cases: []testCase{
			{name: "chunks", rooms: []room{{number: 1, send: [][]int32{{4, 5}, {9}}, aux: 1, to: []int32{1, 2, 3}, toAux: 1,
				sendState: [][]int32{{4, 5, 9}, {6, 7}, {6, 7}, {4, 5, 9}, {1, 4, 5, 9}},
				toState:   [][]int32{{1, 2, 3}, {3, 15}, {3, 15}, {1, 2, 3}, {0, 1, 2, 3}}}}},
			{name: "two_rooms", rooms: []room{
				{number: 2, send: [][]int32{{63}}, aux: 2, to: []int32{4}, toAux: 2,
					sendState: [][]int32{{63}, {0}, {0}, {31}, {31}}, toState: [][]int32{{4}, {1}, {1}, {4}, {4}}},
				{number: 3, send: [][]int32{{10}, {12}}, aux: 3, to: []int32{6, 5}, toAux: 3,
					sendState: [][]int32{{10, 12}, {9, 8}, {9, 8}, {10, 12}, {10, 12}}, toState: [][]int32{{6, 5}, {5, 6}, {5, 6}, {6, 5}, {6, 5}}},
			}},
		},
	}
}

// requestRow has a row for every request beside windows.
func requestRow() *setup {
	c := rankConfig{IsMLA: true, KV: regions(3, 256).state(
		stateConfig{Type: "swa", ItemLens: []int{96, 96}, NumSlots: 16},
		stateConfig{Type: "request_row", ItemLens: []int{8}, NumSlots: 16},
	)}
	return &setup{
		name: "request_row", since: 23, why: "it does not know rows for requests",
		prefill: oneRank(c), decode: oneRank(c),
		cases: []testCase{
			{name: "chunks", rooms: []room{{number: 1, send: [][]int32{{4, 5}, {9}}, aux: 1, to: []int32{1, 2, 3}, toAux: 1,
				sendState: [][]int32{{1, 2}, {5}}, toState: [][]int32{{3, 6}, {11}}}}},
		},
	}
}
