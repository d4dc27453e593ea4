package interop

import "slices"

// ranksSetups have several ranks on a side.
func ranksSetups() []*setup {
	return []*setup{
		pp2(), pp2ToPP2(), pp2Unequal(), mlaPP2(),
		mlaDummy(), mlaTwoDestinations(),
		tp2("tp2"), mixed(tp2("tp2_sglang_serves"), "tp2", 0),
		cp2Dummy(), cp2All("cp2_all"), mixed(cp2All("cp2_all_go_serves"), "cp2_all", 1), mixed(cp2All("cp2_all_sglang_serves"), "cp2_all", 0),
		cp2Layers(),
	}
}

// rank gives every rank of a side its configuration.
func rank(n int, f func(r int) rankConfig) []rankConfig {
	side := make([]rankConfig, n)
	for r := range side {
		side[r] = f(r)
	}
	return side
}

// mixed puts SGLang's ranks among this library's.
func mixed(s *setup, golden string, ranks ...int) *setup {
	s.golden, s.sglang = golden, ranks
	return s
}

// pp2 has two pipeline stages at the prefill, which name their layers.
func pp2() *setup {
	return &setup{
		name: "pp2",
		prefill: rank(2, func(r int) rankConfig {
			return rankConfig{KV: regions(4, 256).heads(2, 2).layers(2*r, 2*r+1, 2*r, 2*r+1)}.pp(r, 2, 2*r, 2*r+2)
		}),
		decode: oneRank(rankConfig{KV: regions(8, 256).heads(2, 2).layers(0, 1, 2, 3, 0, 1, 2, 3)}),
		cases: []testCase{
			{name: "one_chunk", rooms: []room{{number: 13, send: [][]int32{{4, 5}}, aux: 1, to: []int32{1, 2}, toAux: 1}}},
			{name: "two_rooms", rooms: []room{
				{number: 14, send: [][]int32{{6}, {8, 10}}, aux: 2, to: []int32{3, 4, 5}, toAux: 2},
				{number: 15, send: [][]int32{{7, 9}, {11}}, aux: 3, to: []int32{8, 7, 6}, toAux: 3},
			}},
			{name: "prefix_full_hit", rooms: []room{{number: 16, send: [][]int32{{}}, aux: 4, prefix: 8, toAux: 4}}},
		},
	}
}

// pp2ToPP2 has as many stages on both sides, which pair.
func pp2ToPP2() *setup {
	s := pp2()
	s.name = "pp2_to_pp2"
	s.decode = slices.Clone(s.prefill)
	return s
}

// pp2Unequal has stages of three layers and of one.
func pp2Unequal() *setup {
	return &setup{
		name: "pp2_unequal",
		prefill: []rankConfig{
			rankConfig{KV: regions(6, 256).layers(0, 1, 2, 0, 1, 2)}.pp(0, 2, 0, 3),
			rankConfig{KV: regions(2, 256).layers(3, 3)}.pp(1, 2, 3, 4),
		},
		decode: oneRank(rankConfig{KV: regions(8, 256).layers(0, 1, 2, 3, 0, 1, 2, 3)}),
		cases: []testCase{
			{name: "chunks", rooms: []room{{number: 1, send: [][]int32{{4, 5}, {9}}, aux: 1, to: []int32{1, 2, 4}, toAux: 1}}},
		},
	}
}

// mlaPP2 has stages that do not name their layers: the span of a stage says which they are.
func mlaPP2() *setup {
	return &setup{
		name: "mla_pp2", since: 21, why: "its prefill refuses stages that do not name their layers",
		prefill: []rankConfig{
			rankConfig{IsMLA: true, KV: regions(3, 256)}.pp(0, 2, 0, 3),
			rankConfig{IsMLA: true, KV: regions(1, 256)}.pp(1, 2, 3, 4),
		},
		decode: oneRank(rankConfig{IsMLA: true, KV: regions(4, 256)}),
		cases: []testCase{
			{name: "chunks", rooms: []room{{number: 1, send: [][]int32{{4, 5}, {9}}, aux: 1, to: []int32{1, 2, 4}, toAux: 1}}},
		},
	}
}

// mlaDummy has two prefill ranks that hold the same; the second sends nothing.
func mlaDummy() *setup {
	return &setup{
		name:    "mla_tp2_to_tp1",
		prefill: rank(2, func(r int) rankConfig { return rankConfig{IsMLA: true, KV: regions(3, 256)}.tp(r, 2) }),
		decode:  oneRank(rankConfig{IsMLA: true, KV: regions(3, 256)}),
		cases: []testCase{
			{name: "chunks", rooms: []room{{number: 1, send: [][]int32{{4, 5}, {9}}, aux: 1, to: []int32{1, 2, 4}, toAux: 1}}},
			{name: "two_rooms", rooms: []room{
				{number: 2, send: [][]int32{{6, 7}}, aux: 2, to: []int32{5, 6}, toAux: 2},
				{number: 3, send: [][]int32{{8}}, aux: 3, to: []int32{7}, toAux: 3},
			}},
		},
	}
}

// mlaTwoDestinations has two decode ranks that take the same, each into pages of its own.
func mlaTwoDestinations() *setup {
	return &setup{
		name:    "mla_tp1_to_tp2",
		prefill: mla().prefill,
		decode:  rank(2, func(r int) rankConfig { return rankConfig{IsMLA: true, KV: regions(4, 576)}.tp(r, 2) }),
		cases: []testCase{
			{name: "chunks", rooms: []room{
				{number: 1, send: [][]int32{{4, 5}, {9}}, aux: 1, toRank: [][]int32{{1, 2, 4}, {10, 11, 12}}, toAux: 1},
			}},
			{name: "two_rooms", rooms: []room{
				{number: 2, send: [][]int32{{6, 7}}, aux: 2, to: []int32{5, 6}, toAux: 2},
				{number: 3, send: [][]int32{{8}}, aux: 3, to: []int32{7}, toAux: 3},
			}},
		},
	}
}

// tp2 has as many ranks on both sides, each with its own heads.
func tp2(name string) *setup {
	c := func(r int) rankConfig {
		return rankConfig{KV: regions(4, 256).heads(1, 2)}.tp(r, 2)
	}
	return &setup{
		name: name, prefill: rank(2, c), decode: rank(2, c),
		cases: []testCase{
			{name: "chunks", rooms: []room{{number: 1, send: [][]int32{{4, 5}, {9}}, aux: 1, to: []int32{1, 2, 4}, toAux: 1}}},
		},
	}
}

// cp2Dummy has two context-parallel ranks, the first of which sends everything.
func cp2Dummy() *setup {
	return &setup{
		name:    "cp2",
		prefill: rank(2, func(r int) rankConfig { return rankConfig{IsMLA: true, KV: regions(3, 256)}.cp(r, 2) }),
		decode:  oneRank(rankConfig{IsMLA: true, KV: regions(3, 256)}),
		cases: []testCase{
			{name: "chunks", rooms: []room{{number: 1, send: [][]int32{{4, 5}, {9}}, aux: 1, to: []int32{1, 2, 4}, toAux: 1}}},
		},
	}
}

// cp2All has two context-parallel ranks that send their share of the pages each.
func cp2All(name string) *setup {
	return &setup{
		name: name,
		prefill: rank(2, func(r int) rankConfig {
			return rankConfig{IsMLA: true, KV: regions(3, 256)}.cp(r, 2).env(envAllCPRanks, "1")
		}),
		decode: oneRank(rankConfig{IsMLA: true, KV: regions(3, 256)}.env(envAllCPRanks, "1")),
		cases: []testCase{
			// Both ranks have pages of every chunk, or SGLang up to 0.5.22 would count chunks that it
			// does not send.
			{name: "one_chunk", rooms: []room{{number: 1, send: [][]int32{{4, 5, 9, 11}}, aux: 1, to: []int32{1, 2, 4, 5}, toAux: 1}}},
			{name: "odd_pages", rooms: []room{{number: 2, send: [][]int32{{20, 22, 24, 26, 28}}, aux: 2, to: []int32{10, 12, 14, 16, 18}, toAux: 2}}},
		},
	}
}

// cp2Layers has two context-parallel ranks with the cache of some layers each.
func cp2Layers() *setup {
	return &setup{
		name: "cp2_layers",
		prefill: rank(2, func(r int) rankConfig {
			c := rankConfig{IsMLA: true, KV: regions(2, 256).layers(2*r, 2*r+1)}.cp(r, 2)
			c.Parallel.LayerSplit = true
			return c
		}),
		decode: oneRank(rankConfig{IsMLA: true, KV: regions(4, 256).layers(0, 1, 2, 3)}),
		cases: []testCase{
			{name: "chunks", rooms: []room{{number: 1, send: [][]int32{{4, 5}, {9}}, aux: 1, to: []int32{1, 2, 4}, toAux: 1}}},
			{name: "prefix_full_hit", rooms: []room{{number: 2, send: [][]int32{{}}, aux: 2, prefix: 8, toAux: 2}}},
		},
	}
}
