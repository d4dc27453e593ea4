package interop

// dcpSetups have decode ranks that share the tokens of a sequence.
func dcpSetups() []*setup {
	return []*setup{{
		name:  "dcp2",
		until: 18, why: "decode context parallelism needs a GPU: its prefill packs the tokens with a kernel",
		prefill: mla().prefill,
		decode:  rank(2, func(r int) rankConfig { return rankConfig{IsMLA: true, KV: regions(4, 576)}.tp(r, 2).dcp(r, 2) }),
		cases: []testCase{
			{name: "chunks", rooms: []room{{number: 1, send: [][]int32{{1, 2}, {3, 4}}, tokens: 8, aux: 1, to: []int32{10, 9}, toAux: 1}}},
			{name: "chunks_of_a_page", rooms: []room{{number: 2, send: [][]int32{{5}, {7}, {6}}, tokens: 4, aux: 2, to: []int32{11, 12}, toAux: 2}}},
			// The last page is not full.
			{name: "odd_tokens", rooms: []room{{number: 3, send: [][]int32{{20, 22, 21}}, tokens: 11, aux: 3, to: []int32{13, 15}, toAux: 3}}},
			// One of the ranks has nothing of it.
			{name: "one_token", rooms: []room{{number: 4, send: [][]int32{{30}}, tokens: 1, aux: 4, to: []int32{16}, toAux: 4}}},
			{name: "prefix_partial", rooms: []room{{number: 5, send: [][]int32{{31, 32}}, tokens: 8, aux: 5, to: []int32{17}, prefix: 16, toAux: 5}}},
		},
	}}
}
