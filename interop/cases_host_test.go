package interop

// hostSetups have KV cache in host memory.
func hostSetups() []*setup {
	return []*setup{mixedKinds(), hostPool(), hostToMixed(), headsToMixed(), headsToHost()}
}

// mixedKinds has a decode with some regions in host memory, with room for more in a page: three
// pieces, a transfer each.
func mixedKinds() *setup {
	return &setup{
		name: "mixed_kinds", prefill: plain().prefill,
		decode: oneRank(rankConfig{KV: regions(4, 256).lens(256, 320, 272, 256).kinds("VRAM", "DRAM", "DRAM", "VRAM")}),
		cases: []testCase{
			{name: "chunks", rooms: []room{{number: 1, send: [][]int32{{4, 5}, {6}}, aux: 1, to: []int32{1, 2, 3}, toAux: 1}}},
			{name: "two_rooms", rooms: []room{
				{number: 2, send: [][]int32{{7}, {8}, {90, 3, 77}}, aux: 2, to: []int32{4, 127, 9, 0, 64}, toAux: 2},
				{number: 3, send: [][]int32{{9}}, aux: 3, to: []int32{6}, toAux: 3},
			}},
			{name: "prefix_full_hit", rooms: []room{{number: 4, send: [][]int32{{}}, aux: 4, prefix: 4, toAux: 4}}},
		},
	}
}

// hostPool has a decode whose pool is host memory, with room for more in a page (HiSparse).
func hostPool() *setup {
	d := rankConfig{IsMLA: true, KV: regions(4, 640).kinds("DRAM")}
	return &setup{
		name: "host_pool", prefill: mla().prefill, decode: oneRank(d),
		cases: []testCase{
			{name: "contiguous", rooms: []room{
				{number: 1, send: [][]int32{{1, 2, 3}, {4, 5}}, aux: 1, to: []int32{10, 11, 12, 13, 14}, toAux: 1},
			}},
			{name: "scattered", rooms: []room{
				{number: 2, send: [][]int32{{9, 3, 7}}, aux: 2, to: []int32{20, 127, 0}, toAux: 2},
			}},
		},
	}
}

// hostToMixed has a prefill whose cache is host memory.
func hostToMixed() *setup {
	return &setup{
		name:    "host_to_mixed",
		prefill: oneRank(rankConfig{KV: regions(4, 256).kinds("DRAM")}),
		decode:  oneRank(rankConfig{KV: regions(4, 256).kinds("DRAM", "DRAM", "VRAM", "DRAM")}),
		cases: []testCase{
			{name: "chunks", rooms: []room{
				{number: 1, send: [][]int32{{1, 2, 3}, {9, 7}}, aux: 1, to: []int32{10, 20, 21, 12, 0}, toAux: 1},
			}},
		},
	}
}

// headsToMixed has decode ranks with a head each, for some layers in host memory.
func headsToMixed() *setup {
	s := headsTP1To("heads_tp1_to_tp2_mixed", 2)
	for i := range s.decode {
		s.decode[i].KV = s.decode[i].KV.kinds("DRAM", "VRAM", "DRAM", "DRAM")
	}
	return refusedIntoHost(s, "heads_tp1_to_tp2")
}

// headsToHost has a decode with both heads in host memory.
func headsToHost() *setup {
	s := headsTP2ToTP1()
	s.name = "heads_tp2_to_tp1_host"
	s.decode[0].KV = s.decode[0].KV.kinds("DRAM")
	return refusedIntoHost(s, "heads_tp2_to_tp1")
}

// refusedIntoHost is for heads into host memory. What has to be there in the end is the same as in
// a GPU's.
func refusedIntoHost(s *setup, golden string) *setup {
	s.golden, s.why = golden, "its prefill refuses to slice heads into host memory"
	return s
}
