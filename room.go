package nixlkv

import (
	"fmt"
	"strconv"
)

// Room names one request on both sides (SGLang's bootstrap_room). On the wire it is a
// decimal number; SGLang draws it from 63 bits, and zero means "no room" in the metadata
// slots that the decode side reads.
type Room uint64

// MaxRoom is the largest room that every release can carry: SGLang keeps rooms in signed
// 64-bit numbers.
const MaxRoom Room = 1<<63 - 1

// String gives the decimal form used on the wire.
func (r Room) String() string { return strconv.FormatUint(uint64(r), 10) }

// ParseRoom reads the decimal form. It refuses signs, spaces and values above MaxRoom with
// an error that wraps ErrMalformed.
func ParseRoom[S ~string | ~[]byte](s S) (Room, error) {
	if len(s) == 0 || len(s) > 19 {
		return 0, fmt.Errorf("%w: room of %d digits", ErrMalformed, len(s))
	}
	var n uint64
	for i := range len(s) {
		d := s[i] - '0'
		if d > 9 {
			return 0, fmt.Errorf("%w: room %q is not a decimal number", ErrMalformed, string(s))
		}
		n = n*10 + uint64(d)
	}
	if n > uint64(MaxRoom) {
		return 0, fmt.Errorf("%w: room %d does not fit 63 bits", ErrMalformed, n)
	}
	return Room(n), nil
}
