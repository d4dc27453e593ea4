// Package cgo is the native engine: NVIDIA's NIXL through its C library
// (libnixl_capi.so), which is loaded at run time.
//
// Nothing of NIXL is needed to build. The library is looked for by [Open], opened and
// resolved symbol by symbol with purego; symbols that an older release lacks stay unset
// and their calls report [engine.ErrUnsupported].
//
// Calls that set things up go through purego one by one. Calls on a transfer's path are
// batched (see hotCalls): in a build with cgo by a small C shim over the same function
// pointers, which crosses into C once for a whole list; without cgo by a loop of purego
// calls. Both do the same and are tested by the same tests.
//
// Facts about the C API in this package's comments were read in NIXL's
// src/bindings/rust/wrapper.h, wrapper.cpp and src/core/nixl_agent.cpp, releases 0.7 to
// 1.5, and observed with the wheel of release 1.5.1.
package cgo
