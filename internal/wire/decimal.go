package wire

import (
	"fmt"
	"math"

	"github.com/nixlkv/nixlkv"
)

// Most numbers of the wire are counts and ranks, which SGLang keeps in Python integers.
// This bound keeps sums and products of two of them within 64 bits.
const maxInt = math.MaxInt32

// decimalFault says why bytes are not a number of the wire; zero if they are.
type decimalFault uint8

const (
	decimalOK decimalFault = iota
	decimalForm
	decimalRange
)

// parseDecimal reads an ASCII decimal without sign or leading zeros, at most limit. It
// makes no error itself, so that parsing notifications does not allocate.
func parseDecimal(b []byte, limit uint64) (uint64, decimalFault) {
	if len(b) == 0 || (b[0] == '0' && len(b) > 1) {
		return 0, decimalForm
	}
	const safe = 19 // so many digits always fit
	var n uint64
	over := false
	for i, c := range b {
		d := uint64(c - '0')
		if d > 9 {
			return 0, decimalForm
		}
		if i >= safe && n > (math.MaxUint64-d)/10 {
			over = true
		}
		n = n*10 + d
	}
	if over || n > limit {
		return 0, decimalRange
	}
	return n, decimalOK
}

// err describes the fault found in b.
func (f decimalFault) err(b []byte, limit uint64) error {
	switch f {
	case decimalOK:
		return nil
	case decimalRange:
		return fmt.Errorf("%w: %s is above %d", nixlkv.ErrMalformed, quoted(b), limit)
	default:
		return fmt.Errorf("%w: %s is not a decimal number", nixlkv.ErrMalformed, quoted(b))
	}
}

func checkRoom(r nixlkv.Room) error {
	if r > nixlkv.MaxRoom {
		return malformed("room %d does not fit 63 bits", r)
	}
	return nil
}
