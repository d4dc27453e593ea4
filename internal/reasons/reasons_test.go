package reasons

import (
	"slices"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"github.com/nixlkv/nixlkv"
	"pgregory.net/rapid"
)

func TestBound(t *testing.T) {
	for name, tc := range map[string]struct {
		text  string
		limit int
		want  string
	}{
		"short":                  {"it failed: 页\n\tso", 100, "it failed: 页\n\tso"},
		"as long as may be":      {"12345", 5, "12345"},
		"no UTF-8":               {"a\xffb\xc3", 100, "a\uFFFDb\uFFFD"},
		"control characters":     {"a\x00b\x1b[2Jc\u0085d\x7f", 100, "a\uFFFDb\uFFFD[2Jc\uFFFDd\uFFFD"},
		"long":                   {strings.Repeat("x", 100), 30, strings.Repeat("x", 7) + "… (cut, of 100 bytes)"},
		"long, in a rune":        {"xxxxx" + strings.Repeat("页", 100), 30, "xxxxx… (cut, of 305 bytes)"},
		"grows over it":          {strings.Repeat("a\x00", 15), 30, "a\uFFFDa\uFFFD… (cut, of 30 bytes)"},
		"no room for the mark":   {"12345", 3, "123"},
		"none of it":             {"12345", 0, ""},
		"continuation bytes all": {strings.Repeat("\x80", 1000), 100, "\uFFFD… (cut, of 1000 bytes)"},
	} {
		if got := Bound(tc.text, tc.limit); got != tc.want {
			t.Errorf("%s: %q, want %q", name, got, tc.want)
		}
		if got := Bound([]byte(tc.text), tc.limit); got != tc.want {
			t.Errorf("%s, as bytes: %q, want %q", name, got, tc.want)
		}
	}
}

func TestBoundProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := string(rapid.SliceOfN(rapid.OneOf(rapid.Byte(), rapid.SampledFrom([]byte("\x00\xe9\xa1\xb5ab"))), 0, 200).Draw(t, "text"))
		limit := rapid.IntRange(0, 150).Draw(t, "limit")
		got := Bound(s, limit)
		if len(got) > limit || !utf8.ValidString(got) || strings.ContainsFunc(got, func(r rune) bool { return unicode.IsControl(r) && r != '\n' && r != '\t' }) {
			t.Fatalf("%q, at most %d bytes, gives %q", s, limit, got)
		}
		if again := Bound(got, limit); again != got {
			t.Fatalf("%q gives %q, and that %q", s, got, again)
		}
		if len(s) > limit && limit > 40 && !strings.HasSuffix(got, " bytes)") {
			t.Fatalf("%q, cut to %q, does not say so", s, got)
		}
	})
}

func TestReports(t *testing.T) {
	if Reports(nil) != nil {
		t.Error("none are some")
	}
	given := []nixlkv.RankReport{{Rank: 1, Peer: "p", State: nixlkv.RankFailed, Reason: strings.Repeat("r", 1<<20)}, {Rank: 2, Peer: strings.Repeat("p", 1<<20)}}
	before := slices.Clone(given)
	got := Reports(given)
	if !slices.Equal(given, before) || len(got) != 2 || got[0].Peer != "p" || got[0].State != nixlkv.RankFailed || len(got[0].Reason) != Given || len(got[1].Peer) != Given {
		t.Errorf("%d reports, of %d and %d bytes", len(got), len(got[0].Reason), len(got[1].Peer))
	}
}

func FuzzBound(f *testing.F) {
	f.Add("it failed", 5)
	f.Add("\xe9\xa1\xb5\xe9\xa1", 4)
	f.Fuzz(func(t *testing.T, s string, limit int) {
		limit = max(0, limit)
		if got := Bound(s, limit); len(got) > limit || !utf8.ValidString(got) {
			t.Errorf("%q, at most %d bytes, gives %q", s, limit, got)
		}
	})
}
