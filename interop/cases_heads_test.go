package interop

import "fmt"

// headsSetups have as many heads a rank as it takes, not the same on both sides: slices of pages
// are sent.
func headsSetups() []*setup {
	return []*setup{
		headsTP1To("heads_tp1_to_tp2", 2), headsTP1To("heads_tp1_to_tp4", 4), headsDraft(),
		headsTP2ToTP1(), headsTP2ToTP4(), headsTP4To("heads_tp4_to_tp2", 2), headsTP4To("heads_tp4_to_tp1", 1),
		oneHeadTP1ToTP2(), oneHeadTP2ToTP1(), oneHeadTP2ToTP4(), headsPP2(),
	}
}

// slicedCases are for one prefill or several, and all ranks of a decode.
func slicedCases() []testCase {
	return []testCase{
		{name: "chunks", rooms: []room{{number: 31, send: [][]int32{{5, 6}, {7}}, aux: 2, to: []int32{2, 3, 4}, toAux: 1}}},
		{name: "two_rooms", rooms: []room{
			{number: 32, send: [][]int32{{20, 9}}, aux: 3, to: []int32{127, 0}, toAux: 2},
			{number: 33, send: [][]int32{{11}, {10}, {12}}, aux: 4, to: []int32{31, 30, 32}, toAux: 3},
		}},
		{name: "prefix_partial", rooms: []room{{number: 34, send: [][]int32{{40, 41, 42}}, aux: 5, to: []int32{50, 52, 51}, prefix: 8, toAux: 4}}},
		{name: "prefix_full_hit", rooms: []room{{number: 35, send: [][]int32{{}}, aux: 6, prefix: 16, toAux: 5}}},
	}
}

// headsTP1To has a prefill with both heads of a model. Of four decode ranks two have the same.
func headsTP1To(name string, n int) *setup {
	return &setup{
		name:    name,
		prefill: oneRank(rankConfig{KV: regions(4, 512).heads(2, 2)}),
		decode:  rank(n, func(r int) rankConfig { return rankConfig{KV: regions(4, 256).heads(1, 2)}.tp(r, n) }),
		cases:   slicedCases(),
	}
}

// headsTP2ToTP1 has two prefill ranks with a head each; the decode has both.
func headsTP2ToTP1() *setup {
	return &setup{
		name: "heads_tp2_to_tp1", prefill: tp2("").prefill,
		decode: oneRank(rankConfig{KV: regions(4, 512).heads(2, 2)}),
		cases:  slicedCases(),
	}
}

// oneHeadTP1ToTP2 has two decode ranks with the only head.
func oneHeadTP1ToTP2() *setup {
	return &setup{
		name: "one_head_tp1_to_tp2", prefill: plain().prefill,
		decode: rank(2, func(r int) rankConfig { return rankConfig{KV: regions(4, 256)}.tp(r, 2) }),
		cases:  slicedCases(),
	}
}

// oneHeadTP2ToTP1 has two prefill ranks with the only head, which both send.
func oneHeadTP2ToTP1() *setup {
	return &setup{
		name: "one_head_tp2_to_tp1",
		prefill: rank(2, func(r int) rankConfig {
			return rankConfig{KV: regions(4, 256), FillSeed: "both"}.tp(r, 2)
		}),
		decode: oneRank(rankConfig{KV: regions(4, 256)}),
		cases:  slicedCases(),
	}
}

// headsPP2 has two pipeline stages with both heads, which go to a decode rank each.
func headsPP2() *setup {
	return &setup{
		name: "heads_pp2_to_tp2", prefill: pp2().prefill,
		decode: rank(2, func(r int) rankConfig {
			return rankConfig{KV: regions(8, 128).heads(1, 2).layers(0, 1, 2, 3, 0, 1, 2, 3)}.tp(r, 2)
		}),
		cases: slicedCases(),
	}
}

// headsDraft has a decode with a layer more, of a draft model: its K and V follow all others.
func headsDraft() *setup {
	s := headsTP1To("heads_draft", 2)
	for i := range s.decode {
		kv := &s.decode[i].KV
		kv.ItemLens = append(kv.ItemLens, kv.ItemLens[:2]...)
	}
	return s
}

// headsTP4To has four prefill ranks with two heads, each on two ranks that both send it.
func headsTP4To(name string, n int) *setup {
	return &setup{
		name: name,
		prefill: rank(4, func(r int) rankConfig {
			return rankConfig{KV: regions(4, 256).heads(1, 2), FillSeed: fmt.Sprintf("head%d", r/2)}.tp(r, 4)
		}),
		decode: rank(n, func(r int) rankConfig {
			return rankConfig{KV: regions(4, 512/n).heads(2/n, 2)}.tp(r, n)
		}),
		cases: slicedCases(),
	}
}

// headsTP2ToTP4 has two prefill ranks with a head each, which two decode ranks each take.
func headsTP2ToTP4() *setup {
	return &setup{
		name: "heads_tp2_to_tp4", prefill: tp2("").prefill,
		decode: rank(4, func(r int) rankConfig { return rankConfig{KV: regions(4, 256).heads(1, 2)}.tp(r, 4) }),
		cases:  slicedCases(),
	}
}

// oneHeadTP2ToTP4 has the only head on all ranks of both sides.
func oneHeadTP2ToTP4() *setup {
	return &setup{
		name: "one_head_tp2_to_tp4", golden: "one_head_tp2_to_tp1", alike: true,
		why:     "its prefill divides by zero if there are fewer heads than ranks on both sides, and the decode has more ranks",
		prefill: oneHeadTP2ToTP1().prefill,
		decode:  rank(4, func(r int) rankConfig { return rankConfig{KV: regions(4, 256)}.tp(r, 4) }),
		cases:   slicedCases(),
	}
}
