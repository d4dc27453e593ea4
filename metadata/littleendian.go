package metadata

import (
	"encoding/binary"
	"math"
	"slices"
)

// Element i of a row, and whole rows. Floats go by their bits, so that a NaN keeps its payload.

var le = binary.LittleEndian

func putInt32(b []byte, i int, v int32)     { le.PutUint32(b[4*i:], uint32(v)) }
func putInt64(b []byte, i int, v int64)     { le.PutUint64(b[8*i:], uint64(v)) }
func putFloat32(b []byte, i int, v float32) { le.PutUint32(b[4*i:], math.Float32bits(v)) }

func getInt32(b []byte, i int) int32     { return int32(le.Uint32(b[4*i:])) }
func getInt64(b []byte, i int) int64     { return int64(le.Uint64(b[8*i:])) }
func getUint64(b []byte, i int) uint64   { return le.Uint64(b[8*i:]) }
func getFloat32(b []byte, i int) float32 { return math.Float32frombits(le.Uint32(b[4*i:])) }

// Rows are walked by cutting off their front, which spares the bounds checks of an index.

// putInt32s fills a row: the values, then zeros.
func putInt32s(b []byte, vs ...int32) {
	for _, v := range vs {
		le.PutUint32(b, uint32(v))
		b = b[4:]
	}
	clear(b)
}

// putFloat32s fills a row: the values, then zeros.
func putFloat32s(b []byte, vs ...float32) {
	for _, v := range vs {
		le.PutUint32(b, math.Float32bits(v))
		b = b[4:]
	}
	clear(b)
}

// putUint64s fills a row: the values, then zeros.
func putUint64s(b []byte, vs ...uint64) {
	for _, v := range vs {
		le.PutUint64(b, v)
		b = b[8:]
	}
	clear(b)
}

// getInt32s reads len(dst) values and says whether any is not negative.
func getInt32s(dst []int32, b []byte) bool {
	signs := int32(-1)
	for i := range dst {
		dst[i] = int32(le.Uint32(b))
		signs &= dst[i]
		b = b[4:]
	}
	return signs >= 0
}

// getFloat32s reads len(dst) values.
func getFloat32s(dst []float32, b []byte) {
	for i := range dst {
		dst[i] = math.Float32frombits(le.Uint32(b))
		b = b[4:]
	}
}

// resize gives a slice of n elements, s itself if it is large enough.
func resize[T any](s []T, n int) []T { return slices.Grow(s[:0], n)[:n] }
