// Package sentinels helps tests to see that an error says a thing once.
package sentinels

import (
	"errors"
	"fmt"
	"strings"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/nixl"
)

// All are the sentinels of packages nixlkv and nixl that callers branch on.
func All() []error {
	return []error{
		nixlkv.ErrClosed, nixlkv.ErrMalformed, nixlkv.ErrTimeout, nixlkv.ErrAborted, nixlkv.ErrPeerLost, nixlkv.ErrPeerFailed,
		nixlkv.ErrAnotherRank, nixlkv.ErrReleaseUnconfirmed, nixlkv.ErrLimit, nixlkv.ErrRoomInUse, nixlkv.ErrSendBlocked,
		nixlkv.ErrUnsupported, nixlkv.ErrMissingMemoryKind, nixlkv.ErrMemoryKinds, nixlkv.ErrRegions, nixlkv.ErrStride,
		nixlkv.ErrPageRange, nixlkv.ErrPageCount, nixlkv.ErrAuxIndex, nixlkv.ErrState, nixlkv.ErrTopology, nixlkv.ErrMismatch,
		nixlkv.ErrCorruptMetadata, nixlkv.ErrNotRegistered, nixlkv.ErrPeerStale, nixlkv.ErrNotAllowed, nixlkv.ErrNoSuchRank,
		nixlkv.ErrNotReady, nixl.ErrPeerLost, nixl.ErrNotRegistered,
	}
}

// searched are texts of SGLang that operators search for.
var searched = []string{
	"could not fetch prefill parallel info", "could not fetch bootstrap info", "lost connection with", "timed out after",
	"index out of range", "missing nixl", "send_metadata to prefill", "_register_kv_args to prefill",
}

// Repeated says which text stands more than once in an error's, in whatever case: a sentinel's,
// without the package that it begins with, or one that operators search for. Joined errors, a line
// each, are looked at one by one. It is nil if there is none.
func Repeated(err error) error {
	if err == nil {
		return nil
	}
	for line := range strings.Lines(err.Error()) {
		line = strings.ToLower(line)
		for _, s := range All() {
			text := s.Error()
			if _, rest, ok := strings.Cut(text, ": "); ok {
				text = rest
			}
			if errors.Is(err, s) && strings.Count(line, strings.ToLower(text)) > 1 {
				return fmt.Errorf("%q stands twice in %q", text, line)
			}
		}
		for _, text := range searched {
			if strings.Count(line, text) > 1 {
				return fmt.Errorf("%q stands twice in %q", text, line)
			}
		}
	}
	return nil
}
