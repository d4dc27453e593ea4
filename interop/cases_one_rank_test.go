package interop

import (
	"strings"
	"time"

	"github.com/nixlkv/nixlkv"
)

// oneRankSetups have one rank on either side.
func oneRankSetups() []*setup {
	return []*setup{plain(), bootstrapTimeout(), mla(), moreRegions(), moreLayers()}
}

// oneRank is a side with one rank.
func oneRank(c rankConfig) []rankConfig { return []rankConfig{c} }

// plain is the simplest geometry, with all that does not depend on one.
func plain() *setup {
	c := rankConfig{KV: regions(4, 256)}
	return &setup{
		name: "plain", prefill: oneRank(c), decode: oneRank(c),
		cases: append([]testCase{
			{name: "foreign_frames", foreign: foreignMessages(), foreignAtDecode: foreignAtDecode(), rooms: []room{
				{number: 6, send: [][]int32{{50, 51}}, aux: 1, to: []int32{0, 2}, toAux: 0},
			}},
			{name: "equal_tp", rooms: []room{
				{number: 7, send: [][]int32{{1, 2, 3}, {8, 9}}, aux: 5, to: []int32{3, 4, 9, 10, 11}, toAux: 2},
			}},
			{name: "three_rooms", rooms: []room{
				{number: 100, send: [][]int32{{0, 7}, {20}}, aux: 3, to: []int32{12, 14, 16}, toAux: 3},
				{number: 101, send: [][]int32{{1, 8}, {21}}, aux: 4, to: []int32{13, 15, 17}, toAux: 4},
				{number: 102, send: [][]int32{{2, 9}, {22}}, aux: 5, to: []int32{20, 19, 18}, toAux: 5},
			}},
			{name: "prefix_full_hit", rooms: []room{
				{number: 9, send: [][]int32{{}}, aux: 4, prefix: 16, toAux: 6},
			}},
			{name: "prefix_partial", rooms: []room{
				{number: 10, send: [][]int32{{20, 21}, {24}}, aux: 6, to: []int32{21, 22, 25}, prefix: 8, toAux: 7},
			}},
			{name: "contiguous_chunks", rooms: []room{
				{number: 11, send: [][]int32{{30, 31, 32, 33}, {34, 35, 36, 37}, {38, 39}}, aux: 7,
					to: []int32{40, 41, 42, 43, 44, 45, 46, 47, 48, 49}, toAux: 8},
			}},
			{name: "scattered_chunks", rooms: []room{
				{number: 12, send: [][]int32{{90, 3, 77}, {15, 60}, {127, 0, 64, 1}}, aux: 8,
					to: []int32{59, 50, 57, 51, 127, 52, 55, 54, 53}, toAux: 9},
			}},
			{name: "contiguous_to_scattered", rooms: []room{
				{number: 13, send: [][]int32{{70, 71, 72}, {73, 74, 75}}, aux: 9, to: []int32{60, 62, 64, 66, 68, 70}, toAux: 10},
			}},
			{name: "chunks_of_a_page", rooms: []room{
				{number: 14, send: [][]int32{{80}, {79}, {78}, {77}, {76}, {75}, {74}, {73}}, aux: 10,
					to: []int32{72, 73, 74, 75, 76, 77, 78, 79}, toAux: 11, gap: 20 * time.Millisecond},
			}},
			{name: "room_again", rooms: []room{
				{number: 7, send: [][]int32{{40, 41}}, aux: 11, to: []int32{80, 81}, toAux: 12},
			}},
			{name: "greatest_room", rooms: []room{
				{number: uint64(nixlkv.MaxRoom), send: [][]int32{{42}}, aux: 12, to: []int32{82}, toAux: 13},
			}},
		}, failures()...),
	}
}

// failures are rooms that do not succeed, and good ones after them. SGLang's prefill tells
// nothing of most of them, and cuts a chunk that does not fit.
func failures() []testCase {
	good := func(name string, number uint64, page int32, slot int) testCase {
		return testCase{name: name, rooms: []room{
			{number: number, send: [][]int32{{page}, {page + 1}}, aux: slot, to: []int32{page + 2, page + 1}, toAux: slot},
		}}
	}
	return []testCase{
		{name: "abort_by_prefill", want: told("Aborted by AbortReq."), rooms: []room{
			{number: 20, send: [][]int32{{43}, {44}}, aux: 13, to: []int32{84, 85}, toAux: 14, gap: time.Minute, abort: "prefill"},
		}},
		good("good_after_abort_by_prefill", 21, 86, 15),
		{name: "abort_by_decode", rooms: []room{
			{number: 22, send: [][]int32{{43}, {44}}, aux: 13, to: []int32{90, 91}, toAux: 16, gap: time.Minute, abort: "decode"},
		}, want: func(release) want {
			return want{prefill: "Failed", prefillReason: "Aborted by decode-side abort notification", decode: "Failed", decodeReason: "Aborted by AbortReq"}
		}},
		good("good_after_abort_by_decode", 23, 92, 17),
		{name: "more_pages_than_asked_for", want: told("insufficient destination pages"), rooms: []room{
			{number: 24, send: [][]int32{{43}, {44, 45}}, aux: 13, to: []int32{96, 97}, toAux: 18},
		}},
		{name: "page_out_of_range", want: told("page index out of range"), rooms: []room{
			{number: 25, send: [][]int32{{43, 128}}, aux: 13, to: []int32{98, 99}, toAux: 19},
		}},
		good("good_after_bad_pages", 26, 100, 20),
	}
}

// told is a room that fails at the prefill with a reason, which a decode that listens learns.
func told(reason string) func(release) want {
	return func(decode release) want {
		w := want{prefill: "Failed", prefillReason: reason, decode: "Failed", decodeReason: reason}
		if !readsStatus(decode) {
			w.decode, w.decodeReason = "WaitingForInput", ""
		}
		return w
	}
}

// foreignMessages are what nobody should send to a prefill, each of a kind.
func foreignMessages() [][]string {
	const guard = "NixlMsgGuard"
	return [][]string{
		{"hello"},
		{""},
		{guard},
		{guard, "None"},
		{guard, "None", "127.0.0.1", "1", "somebody", "", "123", "", "", "0", "1", "0", "64"}, // pointers of 3 bytes
		{guard, "None", "127.0.0.1", "port", "somebody", "", "", "", "", "", "", "", ""},
		{guard, "42", "127.0.0.1", "1", "nobody", "1234", "one", "1"},
		{guard, "room", "127.0.0.1", "1", "nobody", "", "None", "1", "", "", "1"},
		{guard, strings.Repeat("9", 40), "127.0.0.1", "1", "nobody", "", "0", "1"},
		{"BOOTSTRAP", "42", "127.0.0.1", "1"},
		{"ABORT", "42"},
		{"ABORT", "minus one", "127.0.0.1", "1", "x"},
		{"STAGING_REQ", "42", "0", "1", "nobody"},
		{"WATERMARK", "0", "0", "nobody"},
		{"KV_STATUS", "42", "4", "0", ""},
		{strings.Repeat("x", 1<<20)},
	}
}

// foreignAtDecode are what nobody should send to a decode, about room 6 too.
func foreignAtDecode() [][]string {
	return [][]string{
		{"hello"},
		{""},
		{"KV_STATUS"},
		{"KV_STATUS", "6", "4", "0"},
		{"KV_STATUS", "6", "4", "0", ""}, // nobody waits for it yet
		{"KV_STATUS", "6", "five", "0", ""},
		{"KV_STATUS", "-1", "0", "0", "reason"},
		{"KV_STATUS", strings.Repeat("9", 40), "4", "0", ""},
		{"ABORT_ACK"},
		{"ABORT_ACK", "6", "0"},
		{"ABORT_ACK", "6", "0", "generation"},
		{"ABORT", "6"},
		{"NixlMsgGuard", "6", "127.0.0.1", "1", "nobody", "", "0", "1"},
		{"STAGING_RSP", "6", "0", "0", "0", "0", "nobody"},
		{"CHUNK_READY", "6", "0", "0", "1", "nobody", "0"},
		{strings.Repeat("x", 1<<20)},
	}
}

// bootstrapTimeout has a prefill that waits for its decode for a second.
func bootstrapTimeout() *setup {
	c := rankConfig{KV: regions(4, 256)}
	return &setup{
		name: "bootstrap_timeout", prefillOnly: true, prefill: oneRank(c.env(envBootstrapTimeout, "1")), decode: oneRank(c),
		cases: []testCase{
			{name: "without_decode", rooms: []room{
				{number: 1, send: [][]int32{{1}}, aux: 1, prefillOnly: true},
			}, want: func(release) want {
				return want{prefill: "Failed", prefillReason: `timed out after .*s in KVPoll\.Bootstrapping`}
			}},
			{name: "without_prefill", rooms: []room{{number: 2, to: []int32{2}, toAux: 2}},
				want: func(r release) want {
					w := told("")(r)
					w.prefill = ""
					return w
				}},
			{name: "good", rooms: []room{{number: 3, send: [][]int32{{3}}, aux: 3, to: []int32{4}, toAux: 3}}},
		},
	}
}

// mla has one region a layer, whole pages for every rank.
func mla() *setup {
	c := rankConfig{IsMLA: true, KV: regions(4, 576)}
	return &setup{
		name: "mla", prefill: oneRank(c), decode: oneRank(c),
		cases: []testCase{
			{name: "ends_of_the_cache", rooms: []room{
				{number: 1<<40 + 3, send: [][]int32{{127, 0}}, aux: 63, to: []int32{0, 127}, toAux: 0},
			}},
			{name: "chunks", rooms: []room{
				{number: 2, send: [][]int32{{10, 11, 12}, {20}, {31, 30}}, aux: 1, to: []int32{5, 6, 7, 8, 20, 30}, toAux: 63},
			}},
		},
	}
}

// moreRegions has a decode with layers of its own, for speculative decoding.
func moreRegions() *setup {
	d := rankConfig{IsMLA: true, KV: regions(6, 576)}
	return &setup{
		name: "more_regions", prefill: mla().prefill, decode: oneRank(d),
		cases: []testCase{
			{name: "chunks", rooms: []room{
				{number: 1, send: [][]int32{{1, 2, 3}, {9}}, aux: 1, to: []int32{10, 20, 21, 12}, toAux: 1},
			}},
		},
	}
}

// moreLayers is the same with K and V regions, which their layers pair.
func moreLayers() *setup {
	return &setup{
		name:    "more_layers",
		prefill: oneRank(rankConfig{KV: regions(4, 256).layers(0, 1, 0, 1)}),
		decode:  oneRank(rankConfig{KV: regions(6, 256).layers(0, 1, 2, 0, 1, 2)}),
		cases: []testCase{
			{name: "chunks", rooms: []room{
				{number: 1, send: [][]int32{{1, 2, 3}, {9}}, aux: 1, to: []int32{10, 20, 21, 12}, toAux: 1},
			}},
		},
	}
}
