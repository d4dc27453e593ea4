// Package nixl moves memory between processes with NVIDIA NIXL, from Go.
//
// [Open] gives an engine: the native one, which is NVIDIA's NIXL library loaded at run
// time, or the embedded one, written in Go for machines without NIXL (Go to Go; between
// hosts with [WithTCP]).
// An engine makes agents. An [Agent] registers memory, hands out metadata that a peer
// loads, and posts transfers to and from the memory that a peer registered; a transfer
// can carry a notification, which the peer sees after the bytes.
//
// # Memory
//
// NIXL writes to memory that a peer names by its address, at any time, without asking. So
// the API takes no slices: memory comes from package hostmem or, by address, from the
// caller ([Foreign]), and it must stay mapped while it is registered. A registration pins
// its hostmem buffers.
//
// # Lifetimes
//
// A transfer that was posted cannot be taken back: it may land until it settles. Every
// handle therefore knows what depends on it. Releasing in the wrong order, twice, or while
// something is in flight gives an error (ErrInUse, ErrReleased, ErrInProgress) and changes
// nothing. Closing an agent waits for what is in flight; at the deadline it returns
// ErrStillInFlight and leaves agent, registrations and memory in quarantine, where they
// stay visible in Stats until everything has settled and they are torn down in order.
//
// # Concurrency
//
// Engines, agents, remotes and registrations may be used from many goroutines at once. A
// List or a Transfer is used by one goroutine at a time; a second one gets ErrInUse, except
// that polling a transfer that is busy reports it as in progress.
//
// # Logs of the library
//
// NIXL writes its own log to standard error. NIXL_LOG_LEVEL sets its level (TRACE, DEBUG,
// INFO, WARN, ERROR, FATAL), as does [WithNIXLLogLevel].
package nixl
