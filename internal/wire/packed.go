package wire

import (
	"encoding/binary"
	"fmt"
	"slices"
)

// word is what packed arrays hold: pointers and lengths, ids and dimensions, indices.
type word interface{ int32 | uint32 | uint64 }

func wordSize[T word]() int {
	if _, ok := any(T(0)).(uint64); ok {
		return 8
	}
	return 4
}

// unpackInto fills dst from b, which holds exactly its length.
func unpackInto[T word](dst []T, b []byte) {
	if wordSize[T]() == 8 {
		for i := range dst {
			dst[i] = T(binary.LittleEndian.Uint64(b[8*i : 8*i+8]))
		}
		return
	}
	for i := range dst {
		dst[i] = T(binary.LittleEndian.Uint32(b[4*i : 4*i+4]))
	}
}

// unpack reads a packed array of at most limit words. An empty one is nil.
func unpack[T word](b []byte, limit int) ([]T, error) {
	size := wordSize[T]()
	switch n := len(b) / size; {
	case len(b)%size != 0:
		return nil, fmt.Errorf("%w: %d bytes, not a multiple of %d", ErrTruncated, len(b), size)
	case n > limit:
		return nil, tooMany("entries", n, limit)
	case n == 0:
		return nil, nil
	default:
		out := make([]T, n)
		unpackInto(out, b)
		return out, nil
	}
}

// pack appends a packed array.
func pack[T word](dst []byte, words []T) []byte {
	start, size := len(dst), len(words)*wordSize[T]()
	dst = slices.Grow(dst, size)[:start+size]
	out := dst[start:]
	if wordSize[T]() == 8 {
		for i, w := range words {
			binary.LittleEndian.PutUint64(out[8*i:8*i+8], uint64(w))
		}
		return dst
	}
	for i, w := range words {
		binary.LittleEndian.PutUint32(out[4*i:4*i+4], uint32(w))
	}
	return dst
}

// unpackLists reads a list of packed arrays: uint32 n, n times uint32 byte length, the
// arrays. At most lists arrays of at most limit words each. An empty frame, like n = 0, is
// nil; an empty array is nil within its list. All arrays share one allocation.
func unpackLists[T word](b []byte, lists, limit int) ([][]T, error) {
	if len(b) == 0 {
		return nil, nil
	}
	if len(b) < 4 {
		return nil, fmt.Errorf("%w: %d bytes, no room for a count", ErrTruncated, len(b))
	}
	n := binary.LittleEndian.Uint32(b)
	if uint64(n) > uint64(lists) {
		return nil, tooMany("lists", n, lists)
	}
	header := 4 + 4*int(n)
	if len(b) < header {
		return nil, fmt.Errorf("%w: %d bytes, %d lists have a header of %d", ErrTruncated, len(b), n, header)
	}
	lengths, data := b[4:header], b[header:]
	size, left := wordSize[T](), len(data)
	for i := range int(n) {
		length := binary.LittleEndian.Uint32(lengths[4*i:])
		switch {
		case length%uint32(size) != 0:
			return nil, fmt.Errorf("%w: list %d of %d bytes, not a multiple of %d", ErrTruncated, i, length, size)
		case uint64(length)/uint64(size) > uint64(limit):
			return nil, fmt.Errorf("list %d: %w", i, tooMany("entries", length/uint32(size), limit))
		case uint64(length) > uint64(left):
			return nil, fmt.Errorf("%w: list %d of %d bytes, %d left", ErrTruncated, i, length, left)
		}
		left -= int(length)
	}
	if left != 0 {
		return nil, malformed("%d bytes after the last of %d lists", left, n)
	}
	if n == 0 {
		return nil, nil
	}
	words := make([]T, len(data)/size)
	unpackInto(words, data)
	out := make([][]T, n)
	for i := range out {
		if k := int(binary.LittleEndian.Uint32(lengths[4*i:])) / size; k > 0 {
			out[i], words = words[:k:k], words[k:]
		}
	}
	return out, nil
}

// packLists appends a list of packed arrays; of no arrays, nothing.
func packLists[T word](dst []byte, lists [][]T) []byte {
	if len(lists) == 0 {
		return dst
	}
	dst = binary.LittleEndian.AppendUint32(dst, uint32(len(lists)))
	for _, l := range lists {
		dst = binary.LittleEndian.AppendUint32(dst, uint32(len(l)*wordSize[T]()))
	}
	for _, l := range lists {
		dst = pack(dst, l)
	}
	return dst
}
