package sentinels

import (
	"errors"
	"fmt"
	"testing"

	"github.com/nixlkv/nixlkv"
)

func TestRepeated(t *testing.T) {
	for _, err := range []error{
		fmt.Errorf("%w: %w", nixlkv.ErrPageRange, errors.New("page index out of range: 7")),
		fmt.Errorf("%w: Limit Reached", nixlkv.ErrLimit),
		errors.New("connecting: Could not fetch prefill parallel info from a: Could not fetch prefill parallel info from b"),
	} {
		if Repeated(err) == nil {
			t.Errorf("%v is not seen", err)
		}
	}
	for _, err := range []error{nil, nixlkv.ErrLimit, errors.Join(nixlkv.ErrLimit, nixlkv.ErrLimit)} {
		if again := Repeated(err); again != nil {
			t.Error(again)
		}
	}
}

// No sentinel's text is part of another's.
func TestSentinelsDiffer(t *testing.T) {
	for i, a := range All() {
		if err := Repeated(a); err != nil {
			t.Error(err)
		}
		for _, b := range All()[i+1:] {
			if a.Error() == b.Error() {
				t.Errorf("%v twice", a)
			}
		}
	}
}
