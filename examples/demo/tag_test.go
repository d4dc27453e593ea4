package main

import (
	"testing"

	"pgregory.net/rapid"
)

func TestTag(t *testing.T) {
	if got := string(tag(17)); got != "17_kv_0_1_0" {
		t.Errorf("tag of room 17: %q", got)
	}
	rapid.Check(t, func(t *rapid.T) {
		room := rapid.Uint64Range(1, 1<<63-1).Draw(t, "room")
		if got, err := parseTag(tag(room)); got != room || err != nil {
			t.Fatalf("room %d becomes %d, %v", room, got, err)
		}
	})
	for _, bad := range []string{"", "17", "_kv_0_1_0", "17_kv_1_1_0", "17_kv_0_0_0", "x_kv_0_1_0", "-1_kv_0_1_0", "9223372036854775808_kv_0_1_0", "17_kv_0_1_0 "} {
		if room, err := parseTag([]byte(bad)); err == nil {
			t.Errorf("%q gives room %d", bad, room)
		}
	}
}

func FuzzParseTag(f *testing.F) {
	for _, s := range []string{"17_kv_0_1_0", "9223372036854775807_kv_0_1_0", "_kv_0_1_0", "17_aux"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		room, err := parseTag(b)
		if err != nil {
			return
		}
		if again, err := parseTag(tag(room)); err != nil || again != room {
			t.Errorf("%q: room %d becomes %d, %v", b, room, again, err)
		}
	})
}
