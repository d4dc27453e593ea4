package wire

import (
	"reflect"
	"strings"
	"testing"

	"github.com/nixlkv/nixlkv"
)

var tagCases = []struct {
	text string
	want Tag
}{
	{"0_kv_0_0_0", Tag{Kind: TagKV}},
	{"9223372036854775807_kv_12_1_3", Tag{Kind: TagKV, Room: nixlkv.MaxRoom, Chunk: 12, Last: true, Source: 3}},
	{"5_kv_2147483647_0_2147483647", Tag{Kind: TagKV, Room: 5, Chunk: maxInt, Source: maxInt}},
	{"5_kv_1_1_3_part_0_1", Tag{Kind: TagKVPart, Room: 5, Chunk: 1, Last: true, Source: 3, Parts: 1}},
	{"5_kv_1_0_3_part_6_7", Tag{Kind: TagKVPart, Room: 5, Chunk: 1, Source: 3, Part: 6, Parts: 7}},
	{"5_aux", Tag{Kind: TagAux, Room: 5}},
	{"5_aux_nokv_3_0", Tag{Kind: TagAuxNoKV, Room: 5, Source: 3}},
	{"5_aux_nokv_0_17", Tag{Kind: TagAuxNoKV, Room: 5, Chunks: 17}},
	{"5_state_3_1", Tag{Kind: TagState, Room: 5, Source: 3, Component: 1}},
	{"5_stg_1_1_3_4_64_6_agent", Tag{Kind: TagStaging, Room: 5, Chunk: 1, Last: true, Source: 3, ChunkIndex: 4, PageStart: 64, Pages: 6, Agent: []byte("agent")}},
	{"5_stg_1_0_3_4_64_6_an_agent__of_kv_1", Tag{Kind: TagStaging, Room: 5, Chunk: 1, Source: 3, ChunkIndex: 4, PageStart: 64, Pages: 6, Agent: []byte("an_agent__of_kv_1")}},
}

func TestTags(t *testing.T) {
	for _, c := range tagCases {
		got, err := ParseTag([]byte(c.text))
		if err != nil || !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: %+v, %v, want %+v", c.text, got, err, c.want)
		}
		if again := c.want.Append([]byte("x")); string(again) != "x"+c.text {
			t.Errorf("appended %s, want %s", again, c.text)
		}
	}
}

func TestTagsRefused(t *testing.T) {
	for _, c := range []struct {
		text   string
		target error
		says   string
	}{
		{"", ErrUnknown, `notification ""`},
		{"5", ErrUnknown, ""},
		{"5_", ErrUnknown, ""},
		{"5_KV_0_0_0", ErrUnknown, ""},
		{"5_kvx_0_0_0", ErrUnknown, ""},
		{"kv_5_0_0_0", ErrUnknown, ""},
		{"_kv_0_0_0", nixlkv.ErrMalformed, `field 0 of kv: ""`},
		{"x_kv_0_0_0", nixlkv.ErrMalformed, "field 0"},
		{"-5_kv_0_0_0", nixlkv.ErrMalformed, "field 0"},
		{" 5_kv_0_0_0", nixlkv.ErrMalformed, "field 0"},
		{"05_kv_0_0_0", nixlkv.ErrMalformed, "field 0"},
		{"9223372036854775808_kv_0_0_0", nixlkv.ErrMalformed, "field 0"},
		{"99999999999999999999_aux", nixlkv.ErrMalformed, "field 0"},
		{"5_kv", nixlkv.ErrMalformed, "kv of 2 fields, expected 5"},
		{"5_kv_0_0", nixlkv.ErrMalformed, "kv of 4 fields"},
		{"5_kv_0_0_", nixlkv.ErrMalformed, `field 4 of kv: ""`},
		{"5_kv_0_0_0_", nixlkv.ErrMalformed, "kv of 6 fields"},
		{"5_kv_0_2_0", nixlkv.ErrMalformed, `field 3 of kv: "2"`},
		{"5_kv_0_01_0", nixlkv.ErrMalformed, "field 3"},
		{"5_kv_+1_0_0", nixlkv.ErrMalformed, `field 2 of kv: "+1"`},
		{"5_kv_2147483648_0_0", nixlkv.ErrMalformed, "field 2"},
		{"5_kv_1_1_3_part", nixlkv.ErrMalformed, "kv part of 6 fields, expected 8"},
		{"5_kv_1_1_3_part_0_1_", nixlkv.ErrMalformed, "kv part of 9 fields"},
		{"5_kv_1_1_3_Part_0_1", nixlkv.ErrMalformed, "kv of 8 fields"},
		{"5_kv_1_1_3_part_1_1", nixlkv.ErrMalformed, "part index out of range: 1 of 1"},
		{"5_kv_1_1_3_part_0_0", nixlkv.ErrMalformed, "part index out of range: 0 of 0"},
		{"5_kv_1_1_3_part_0_x", nixlkv.ErrMalformed, `field 7 of kv part: "x"`},
		{"5_aux_", nixlkv.ErrMalformed, "aux of 3 fields, expected 2"},
		{"5_aux_nokv", nixlkv.ErrMalformed, "aux nokv of 3 fields, expected 5"},
		{"5_aux_nokv_1", nixlkv.ErrMalformed, "aux nokv of 4 fields"},
		{"5_aux_nokv_1_", nixlkv.ErrMalformed, "field 4"},
		{"5_state", nixlkv.ErrMalformed, "state of 2 fields"},
		{"5_state_1", nixlkv.ErrMalformed, "state of 3 fields"},
		{"5_state_1_1_1", nixlkv.ErrMalformed, "state of 5 fields"},
		{"5_stg_1_1_3_4_64_6", nixlkv.ErrMalformed, "stg of 8 fields"},
		{"5_stg_1_1_3_4_64_6_", nixlkv.ErrMalformed, `field 8 of stg: ""`},
		{"5_stg_1_1_3_4_64_6_\x00", nixlkv.ErrMalformed, "field 8"},
		{strings.Repeat("1", 513), nixlkv.ErrLimit, "513 bytes, at most 512"},
	} {
		got, err := ParseTag([]byte(c.text))
		if !isAll(err, c.target) || !strings.Contains(err.Error(), c.says) || !reflect.DeepEqual(got, Tag{}) {
			t.Errorf("%q: %+v, %v, want %v and %q", c.text, got, err, c.target, c.says)
		}
	}
}

func TestTagsDoNotAllocate(t *testing.T) {
	buf := make([]byte, 0, maxTag)
	for _, c := range tagCases {
		text := []byte(c.text)
		n := testing.AllocsPerRun(100, func() {
			tag, err := ParseTag(text)
			if err != nil {
				t.Fatal(err)
			}
			buf = tag.Append(buf[:0])
		})
		if n != 0 {
			t.Errorf("%s: %v allocations", c.text, n)
		}
	}
}
