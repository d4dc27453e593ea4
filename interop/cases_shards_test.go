package interop

// shardSetups have a prefill whose ranks share one KV cache: page n is rank n mod ranks's, which
// calls it n / ranks.
func shardSetups() []*setup {
	cp := &setup{
		name: "shards_cp2",
		prefill: rank(2, func(r int) rankConfig {
			return rankConfig{IsMLA: true, KV: regions(3, 256)}.cp(r, 2).shard()
		}),
		decode: oneRank(rankConfig{IsMLA: true, KV: regions(3, 256)}),
		cases:  shardCases(),
	}
	tp := &setup{
		name: "shards_tp2",
		prefill: rank(2, func(r int) rankConfig {
			return rankConfig{IsMLA: true, KV: regions(3, 256)}.tp(r, 2).shard()
		}),
		decode: rank(2, func(r int) rankConfig { return rankConfig{IsMLA: true, KV: regions(3, 256)}.tp(r, 2) }),
		cases:  shardCases(),
	}
	for _, s := range []*setup{cp, tp} {
		s.since, s.alone, s.why = 23, true, "KV cache sharding came with 0.5.23, and earlier decodes refuse a prefill that tells of it"
	}
	return []*setup{cp, tp}
}

func shardCases() []testCase {
	return []testCase{
		{name: "chunks", rooms: []room{{number: 1, send: [][]int32{{5, 6, 2}, {8, 15}}, aux: 1, to: []int32{3, 4, 9, 10, 1}, toAux: 1}}},
		// One of the ranks has nothing of a chunk, or of a room.
		{name: "two_rooms", rooms: []room{
			{number: 2, send: [][]int32{{20, 22}, {33, 24}}, aux: 2, to: []int32{20, 21, 22, 23}, toAux: 2},
			{number: 3, send: [][]int32{{127}}, aux: 3, to: []int32{127}, toAux: 3},
		}},
		{name: "prefix_partial", rooms: []room{{number: 4, send: [][]int32{{40, 43, 41}}, aux: 4, to: []int32{30, 32, 31}, prefix: 8, toAux: 4}}},
		{name: "prefix_full_hit", rooms: []room{{number: 5, send: [][]int32{{}}, aux: 5, prefix: 8, toAux: 5}}},
	}
}
