package main

import (
	"bytes"
	"encoding/hex"
	"errors"
	"testing"

	"pgregory.net/rapid"
)

// filled gives memory of some shape, with the pattern that the configuration names.
func filled(t *testing.T, seed string) *memory {
	t.Helper()
	c, err := parseConfig([]byte(`{"role":"prefill",` + seed + `"kv":{"item_lens":[100,32,7],"num_slots":6,"aux_item_lens":[64,40],"aux_slots":3,
		"state":[{"type":"mamba","item_lens":[96],"num_slots":2},{"type":"swa","item_lens":[33,160],"num_slots":4}]}}`))
	if err != nil {
		t.Fatal(err)
	}
	m, err := newMemory(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.free(); err != nil {
			t.Error(err)
		}
	})
	m.fill(c)
	return m
}

// TestFill compares with what Python's hashlib gives:
//
//	slot = lambda text, n: (sha256(text.encode()).digest() * (n // 32 + 1))[:n]
func TestFill(t *testing.T) {
	m := filled(t, `"fill_seed":"p0",`)
	if got := hex.EncodeToString(m.kv[0].slot(0)[:8]); got != "673dfa1f91685151" {
		t.Errorf("the first slot begins with %s", got)
	}
	for _, tc := range []struct {
		name  string
		list  []slotted
		slots []int32
		want  string
	}{
		{"KV", m.kv, []int32{3, 0, 5}, "175c8d9f1733bba85a7bd6283a3c391246d6a1fd1048601c17d31f0be66d3047"},
		{"aux", m.aux, []int32{2}, "9e22914ba6fcd0f7906cb699e6ee949b838c63915c6d551b66c84526fa565c2b"},
		{"state 0", m.state[0], []int32{1, 0}, "3552680b8018f9050eb30618da749a46da8fbc6ab66b8053a0cc47bdfd445e2a"},
		{"state 1", m.state[1], []int32{3}, "3b5d87ad8ca2122f52f1e60b7fec3bbd5329ed1e5856e77bc8495d3f0af16eb9"},
		{"nothing", m.kv, nil, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
	} {
		if got, err := digest(tc.list, tc.slots); got != tc.want || err != nil {
			t.Errorf("%s: %s, %v, want %s", tc.name, got, err, tc.want)
		}
	}
	for _, slots := range [][]int32{{6}, {-1}, {0, 1 << 30}} {
		if got, err := digest(m.kv, slots); !errors.Is(err, errSlot) {
			t.Errorf("slots %v: %s, %v", slots, got, err)
		}
	}
}

func TestFillSlotRepeats(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		slot := make([]byte, rapid.IntRange(0, 300).Draw(t, "length"))
		fillSlot(slot, rapid.String().Draw(t, "text"))
		for i := 32; i < len(slot); i++ {
			if slot[i] != slot[i-32] {
				t.Fatalf("byte %d is not that of 32 before", i)
			}
		}
	})
}

func TestUnfilledIsZero(t *testing.T) {
	m := filled(t, "")
	for s := range m.all {
		if n := bytes.Count(s.bytes(), []byte{0}); n != len(s.bytes()) {
			t.Errorf("%d of %d bytes are zero", n, len(s.bytes()))
		}
	}
}

func TestStray(t *testing.T) {
	m := filled(t, "")
	m.kv[0].slot(2)[99] = 1 // the last byte of a slot, and the first of the next
	m.kv[0].slot(3)[0] = 1
	m.kv[2].slot(5)[3] = 1
	for _, tc := range []struct {
		but  []int32
		want int
	}{
		{nil, 3}, {[]int32{2}, 2}, {[]int32{3}, 2}, {[]int32{2, 3, 5}, 0}, {[]int32{0, 1, 4}, 3}, {[]int32{-1, 6, 1 << 30}, 3},
	} {
		if got := stray(m.kv, tc.but); got != tc.want {
			t.Errorf("%d bytes outside of slots %v, want %d", got, tc.but, tc.want)
		}
	}
}
