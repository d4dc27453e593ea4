package wire

import (
	"bytes"
	"errors"
	"strings"
	"testing"
)

// isAll says whether err wraps every target.
func isAll(err error, targets ...error) bool {
	for _, t := range targets {
		if !errors.Is(err, t) {
			return false
		}
	}
	return err != nil
}

// split makes frames of a text: `|` separates frames.
func split(s string) [][]byte { return bytes.Split([]byte(s), []byte{'|'}) }

// refused checks that err is a *FrameError about a frame that wraps target, if given, and
// says text.
func refused(t *testing.T, err error, frame int, target error, text string) *FrameError {
	t.Helper()
	var fe *FrameError
	if !errors.As(err, &fe) {
		t.Fatalf("error %v, want a *FrameError", err)
	}
	if fe.Frame != frame {
		t.Errorf("frame %d, want %d: %v", fe.Frame, frame, err)
	}
	if target != nil && !errors.Is(err, target) {
		t.Errorf("%v does not wrap %v", err, target)
	}
	if !strings.Contains(err.Error(), text) {
		t.Errorf("%q does not say %q", err.Error(), text)
	}
	return fe
}

func clone(frames [][]byte) [][]byte {
	out := make([][]byte, len(frames))
	for i, f := range frames {
		out[i] = bytes.Clone(f)
	}
	return out
}
