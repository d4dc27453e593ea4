package embedded

import (
	"errors"
	"fmt"
	"runtime/debug"
	"unsafe"
)

// errFault: memory that was registered could not be accessed.
var errFault = errors.New("memory cannot be accessed")

// memoryAt gives the n bytes at an address that is inside of registered or mapped memory.
// Such memory is its owner's and not on the Go heap.
func memoryAt(addr, n uint64) []byte {
	p := uintptr(addr)
	// Through its address, because a conversion from a number is for the Go heap's
	// pointers alone.
	return unsafe.Slice(*(**byte)(unsafe.Pointer(&p)), int(n))
}

// guardFaults runs f and gives an error if f touches memory that is not there (unmapped
// by its owner, or a file cut short), instead of the end of the process.
func guardFaults(f func()) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		switch r := recover().(type) {
		case nil:
		case interface {
			error
			Addr() uintptr
		}:
			err = fmt.Errorf("%w: at %#x", errFault, r.Addr())
		default:
			panic(r)
		}
	}()
	f()
	return nil
}
