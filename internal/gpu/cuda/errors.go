//go:build linux

package cuda

import (
	"errors"
	"strconv"
)

var (
	// ErrNoDriver: libcuda.so.1 cannot be loaded, lacks a function, or refuses to
	// initialise (then a [*Error] is wrapped beside it; [NoDevice] where it finds no GPU).
	ErrNoDriver = errors.New("no usable NVIDIA driver")
	// ErrNoSymbol: the library lacks a function.
	ErrNoSymbol = errors.New("symbol not found")
)

// Code is a result of the CUDA driver API (CUresult). Other than Success they are errors,
// and a Code can be compared with errors.Is to what an error wraps.
type Code int32

// The codes that callers and tests branch on; cuda.h has them all.
const (
	Success        Code = 0   // CUDA_SUCCESS
	InvalidValue   Code = 1   // CUDA_ERROR_INVALID_VALUE
	OutOfMemory    Code = 2   // CUDA_ERROR_OUT_OF_MEMORY
	NoDevice       Code = 100 // CUDA_ERROR_NO_DEVICE
	InvalidDevice  Code = 101 // CUDA_ERROR_INVALID_DEVICE
	InvalidContext Code = 201 // CUDA_ERROR_INVALID_CONTEXT
)

// Error gives the number. The name is the library's to tell, see [Error].
func (c Code) Error() string { return "CUDA result " + strconv.Itoa(int(c)) }

// Error is a call to the driver that failed. It wraps its Code.
type Error struct {
	Call string // the function, such as cuMemAlloc_v2
	Code Code
	Name string // CUDA's name of the code, empty if the library does not know it
}

func (e *Error) Error() string {
	if e.Name == "" {
		return e.Call + ": " + e.Code.Error()
	}
	return e.Call + ": " + e.Name + " (" + strconv.Itoa(int(e.Code)) + ")"
}

// Unwrap gives the Code.
func (e *Error) Unwrap() error { return e.Code }
