package nixlkv

import (
	"crypto/rand"
	"encoding/binary"
	"fmt"
)

// NewRoom draws a room number for a request, as a router of SGLang does: 63 random bits, never
// 0. It cannot be guessed, which matters where not everybody who reaches a control socket is
// trusted.
func NewRoom() Room {
	for {
		if r := random(); r != 0 {
			return r
		}
	}
}

// NewRoomAt draws a room number that a prefill of so many data-parallel ranks serves at the
// given rank, by room % size, where it follows rooms (SGLang: follow_bootstrap_room, the
// default). It gives ErrTopology for a rank outside of the size.
func NewRoomAt(rank, size int) (Room, error) {
	if size < 1 || rank < 0 || rank >= size {
		return 0, fmt.Errorf("%w: data-parallel rank %d of %d", ErrTopology, rank, size)
	}
	for {
		r := random()
		if r -= r % Room(size); r > MaxRoom-Room(rank) {
			continue
		}
		if r += Room(rank); r != 0 {
			return r, nil
		}
	}
}

// random gives 63 random bits.
func random() Room {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails
	return Room(binary.LittleEndian.Uint64(b[:])) & MaxRoom
}
