// Package reasons bounds the texts that say why a room failed. They come from callers and from
// peers, and are kept, logged and sent on.
package reasons

import (
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/nixlkv/nixlkv"
)

const (
	// Sent is how many bytes of a reason go out, and are taken from outside.
	Sent = 4096
	// Given is how many bytes a caller may give: with the words around them they can be sent.
	Given = 3072
)

// Bound gives a text of at most limit bytes of UTF-8: what is none, and control characters
// other than tabs and line feeds, are replaced by U+FFFD, and a text that is too long is cut at
// a rune and says so at its end.
func Bound[S ~string | ~[]byte](s S, limit int) string {
	n := len(s)
	text := string(s[:whole(s, limit)])
	text = strings.Map(printable, strings.ToValidUTF8(text, string(utf8.RuneError)))
	if n <= limit && len(text) <= limit {
		return text
	}
	mark := "… (cut, of " + strconv.Itoa(n) + " bytes)"
	if len(mark) > limit {
		mark = ""
	}
	return text[:whole(text, limit-len(mark))] + mark
}

// whole gives the most bytes up to limit that cut no rune in half.
func whole[S ~string | ~[]byte](s S, limit int) int {
	if len(s) <= limit {
		return len(s)
	}
	for i := limit; i >= max(0, limit-utf8.UTFMax+1); i-- {
		if utf8.RuneStart(s[i]) {
			return i
		}
	}
	return limit // not UTF-8
}

func printable(r rune) rune {
	if unicode.IsControl(r) && r != '\n' && r != '\t' {
		return utf8.RuneError
	}
	return r
}

// Reports copies what ranks have told, their texts bounded.
func Reports(ranks []nixlkv.RankReport) []nixlkv.RankReport {
	if ranks == nil {
		return nil
	}
	bounded := make([]nixlkv.RankReport, len(ranks))
	for i, r := range ranks {
		r.Peer, r.Reason = Bound(r.Peer, Given), Bound(r.Reason, Given)
		bounded[i] = r
	}
	return bounded
}
