package nixl

import (
	"errors"
	"strconv"
	"strings"
	"time"

	"github.com/nixlkv/nixlkv/internal/cgo"
	"github.com/nixlkv/nixlkv/internal/engine"
	"github.com/nixlkv/nixlkv/internal/gpu"
)

// Status is a result of NIXL's C API, with NIXL's number and name. It implements error, and
// errors.Is finds it in what this package returns.
type Status = engine.Status

// The statuses of NIXL's C API (nixl_capi_status_t).
const (
	InProgress         = engine.InProgress
	Success            = engine.Success
	StatusInvalidParam = engine.ErrInvalidParam
	StatusBackend      = engine.ErrBackend
	StatusInvalidState = engine.ErrInvalidState
	StatusException    = engine.ErrException
	StatusNoTelemetry  = engine.ErrNoTelemetry
	StatusNotFound     = engine.ErrNotFound
	// StatusNotPosted is this package's own: of a transfer that was never posted.
	StatusNotPosted = engine.NotPosted
)

// Sentinels for what callers branch on.
var (
	// ErrLibraryNotFound: no place holds a NIXL library that can be loaded.
	ErrLibraryNotFound = cgo.ErrLibraryNotFound
	// ErrUnsupported: this engine, or this release of NIXL, cannot do it.
	ErrUnsupported = engine.ErrUnsupported
	// ErrPeerLost: the peer's process or connection is gone. Load its metadata again.
	ErrPeerLost = engine.ErrPeerLost
	// ErrNotRegistered: memory outside of what its owner registered. Only the embedded engine
	// tells; NIXL gives StatusBackend or StatusNotFound, and the reason in its log.
	ErrNotRegistered = engine.ErrNotRegistered
	// ErrBusy: a peer still holds the memory; nothing was given up, ask again.
	ErrBusy = engine.ErrBusy
	// ErrNoDriver: VRAM on a machine without an NVIDIA driver.
	ErrNoDriver = gpu.ErrNoDriver
	// ErrNoDevice: no GPU has the CUDA ordinal; the error says which have.
	ErrNoDevice = gpu.ErrNoDevice
	// ErrClosed: the engine or agent was closed.
	ErrClosed = errors.New("closed")
	// ErrReleased: the handle was released before.
	ErrReleased = errors.New("already released")
	// ErrInUse: something depends on the handle, or another goroutine uses it.
	ErrInUse = errors.New("in use")
	// ErrInProgress: the transfer has not settled.
	ErrInProgress = errors.New("transfer in progress")
	// ErrNotCreated: the transfer holds no request.
	ErrNotCreated = errors.New("transfer not created")
	// ErrCreated: the transfer holds a request that has to be released first.
	ErrCreated = errors.New("transfer not released")
	// ErrNotPosted: the transfer was created but never posted.
	ErrNotPosted = errors.New("transfer not posted")
	// ErrStale: the peer's metadata was dropped or loaded anew since.
	ErrStale = errors.New("stale: the peer's metadata was dropped or loaded anew")
	// ErrStillInFlight: closing reached its deadline with writes or calls in flight.
	ErrStillInFlight = errors.New("still in flight")
	// ErrBadDescriptor: a descriptor or region that cannot be: empty, or past 2^64.
	ErrBadDescriptor = errors.New("bad descriptor")
	// ErrBadIndex: an index outside a prepared list, or lists of different lengths.
	ErrBadIndex = errors.New("bad index")
	// ErrForeign: handles of different agents were mixed.
	ErrForeign = errors.New("handle of another agent")
)

// Error says which call failed, of which agent, about which peer.
type Error struct {
	Call  string
	Agent string
	Peer  string // empty where no peer is involved
	Err   error
}

// Error gives everything in one line.
func (e *Error) Error() string {
	var b strings.Builder
	b.WriteString("nixl: ")
	b.WriteString(e.Call)
	if e.Agent != "" {
		b.WriteString(": agent ")
		b.WriteString(e.Agent)
	}
	if e.Peer != "" {
		b.WriteString(": peer ")
		b.WriteString(e.Peer)
	}
	if e.Err != nil {
		b.WriteString(": ")
		b.WriteString(e.Err.Error())
	}
	return b.String()
}

// Unwrap gives the reason.
func (e *Error) Unwrap() error { return e.Err }

// InFlightError is what closing returns at its deadline. It wraps ErrStillInFlight.
type InFlightError struct {
	Transfers int           // posted and not settled
	Calls     int           // native calls that have not returned
	Waited    time.Duration // since closing began
}

// Error gives the counts.
func (e *InFlightError) Error() string {
	if e.Transfers == 0 && e.Calls == 0 {
		return ErrStillInFlight.Error() + " after " + e.Waited.Round(time.Millisecond).String() + ": everything has settled and is being given back"
	}
	return ErrStillInFlight.Error() + " after " + e.Waited.Round(time.Millisecond).String() + ": " +
		strconv.Itoa(e.Transfers) + " transfers, " + strconv.Itoa(e.Calls) + " calls; agent and memory stay in quarantine until they settle"
}

// Unwrap gives ErrStillInFlight.
func (e *InFlightError) Unwrap() error { return ErrStillInFlight }
