package interop

// dcpSetups have decode ranks that share the tokens of a sequence.
func dcpSetups() []*setup {
	return []*setup{dcp2(), dcpDraft(), dcpDraftDealt()}
}

func dcp2() *setup {
	return &setup{
		name: "dcp2", prefill: mla().prefill, decode: dcpRanks(regions(4, 576), 0),
		cases: append(dcpCases(), []testCase{
			{name: "prefix_partial", rooms: []room{{number: 5, send: [][]int32{{31, 32}}, tokens: 8, aux: 5, to: []int32{17}, prefix: 16, toAux: 5}}},
			{name: "prefix_full_hit", rooms: []room{{number: 6, send: [][]int32{{}}, aux: 6, prefix: 16, toAux: 6}}},
			{name: "prefix_of_no_whole_page", want: told("align"), rooms: []room{
				{number: 7, send: [][]int32{{33}}, tokens: 4, aux: 7, to: []int32{18}, prefix: 4, toAux: 7},
			}},
			{name: "more_pages_than_asked_for", want: told("[Ii]nsufficient destination DCP pages"), rooms: []room{
				{number: 8, send: [][]int32{{34, 35, 36}}, tokens: 12, aux: 8, to: []int32{19}, toAux: 8},
			}},
			{name: "good_after_refused", rooms: []room{{number: 9, send: [][]int32{{37, 38}}, tokens: 8, aux: 9, to: []int32{20}, toAux: 9}}},
		}...),
	}
}

func dcpRanks(kv kvConfig, drafts int) []rankConfig {
	return rank(2, func(r int) rankConfig {
		c := rankConfig{IsMLA: true, KV: kv}.tp(r, 2).dcp(r, 2)
		c.KVArgs.Drafts = drafts
		return c
	})
}

func dcpCases() []testCase {
	return []testCase{
		{name: "chunks", rooms: []room{{number: 1, send: [][]int32{{1, 2}, {3, 4}}, tokens: 8, aux: 1, to: []int32{10, 9}, toAux: 1}}},
		{name: "chunks_of_a_page", rooms: []room{{number: 2, send: [][]int32{{5}, {7}, {6}}, tokens: 4, aux: 2, to: []int32{11, 12}, toAux: 2}}},
		// The last page is not full.
		{name: "odd_tokens", rooms: []room{{number: 3, send: [][]int32{{20, 22, 21}}, tokens: 11, aux: 3, to: []int32{13, 15}, toAux: 3}}},
		// One of the ranks has nothing of it.
		{name: "one_token", rooms: []room{{number: 4, send: [][]int32{{30}}, tokens: 1, aux: 4, to: []int32{16}, toAux: 4}}},
	}
}

// dcpDraft has a draft's region at the end, which goes whole to every rank: its pages hold the
// tokens that both ranks have in one of the others.
func dcpDraft() *setup {
	return &setup{
		name: "dcp2_draft", since: 20, alone: true, why: "a draft's tokens are shared like the others (dcp2_draft_shared)",
		prefill: draftPrefill(), decode: dcpRanks(regions(4, 576).lens(576, 576, 576, 2*576), 1),
		cases: dcpCases(),
	}
}

// dcpDraftDealt has a draft's region that the ranks share like the others.
func dcpDraftDealt() *setup {
	return &setup{
		name: "dcp2_draft_shared", until: 19, alone: true, why: "a draft's tokens go to every rank (dcp2_draft)",
		prefill: draftPrefill(), decode: dcpRanks(regions(4, 576), 1),
		cases: dcpCases(),
	}
}

func draftPrefill() []rankConfig {
	c := rankConfig{IsMLA: true, KV: regions(4, 576)}
	c.KVArgs.Drafts = 1
	return oneRank(c)
}
