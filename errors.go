package nixlkv

import "errors"

// Sentinels for what callers branch on. They arrive wrapped, with what was expected and
// what was found; the texts that operators of SGLang search for are kept.
var (
	// ErrClosed: the manager, sender or receiver was closed.
	ErrClosed = errors.New("nixlkv: closed")
	// ErrMalformed: bytes from outside do not have the form that the protocol asks for.
	ErrMalformed = errors.New("nixlkv: malformed")
	// ErrTimeout: a deadline of the protocol passed (bootstrap or waiting timeout).
	ErrTimeout = errors.New("nixlkv: timeout")
	// ErrAborted: the caller, or the other side, gave the room up.
	ErrAborted = errors.New("nixlkv: room given up")
	// ErrPeerLost: the other side's process or connection is gone.
	ErrPeerLost = errors.New("nixlkv: peer gone")
	// ErrPeerFailed: the other side told that it failed.
	ErrPeerFailed = errors.New("nixlkv: peer reported failure")
	// ErrAnotherRank: nothing local explains the failure, another rank failed.
	ErrAnotherRank = errors.New("nixlkv: failure in another rank")
	// ErrReleaseUnconfirmed: an aborted room's pages may still be written; not every prefill
	// rank acknowledged in time.
	ErrReleaseUnconfirmed = errors.New("nixlkv: release of pages not confirmed")
	// ErrLimit: a bound on rooms, peers, frames or registrations was reached.
	ErrLimit = errors.New("nixlkv: limit reached")
	// ErrRoomInUse: the room is open already.
	ErrRoomInUse = errors.New("nixlkv: room in use")
	// ErrSendBlocked: a control message could not be sent in time.
	ErrSendBlocked = errors.New("nixlkv: control message not sent")
	// ErrInternal: a fault of this library. A panic was recovered, and is in the log with its stack.
	ErrInternal = errors.New("nixlkv: internal error")
	// ErrUnsupported: a feature that this library does not have, or not in this topology.
	ErrUnsupported = errors.New("nixlkv: not supported")
)

// What can be wrong with the geometry that the two sides bring.
var (
	// ErrMissingMemoryKind: a side has no memory kind to send from or to: a layout without KV
	// regions, a peer whose kinds are unset, or one that was replaced meanwhile.
	ErrMissingMemoryKind = errors.New("nixlkv: no KV memory kind")
	// ErrMemoryKinds: kinds that are unknown, or not one per region.
	ErrMemoryKinds = errors.New("nixlkv: invalid KV memory kinds")
	// ErrRegions: the two sides' regions cannot be paired.
	ErrRegions = errors.New("nixlkv: KV regions do not match")
	// ErrStride: a page of the source does not fit a page of the destination.
	ErrStride = errors.New("nixlkv: transfer length exceeds item stride")
	// ErrPageRange: a page index outside its region, negative, or given twice.
	ErrPageRange = errors.New("nixlkv: page index out of range")
	// ErrPageCount: more or fewer pages than the other side has room for or was promised.
	ErrPageCount = errors.New("nixlkv: page count mismatch")
	// ErrAuxIndex: the aux slot is missing or out of range.
	ErrAuxIndex = errors.New("nixlkv: metadata slots")
	// ErrState: state components, indices or slots that do not match.
	ErrState = errors.New("nixlkv: state mismatch")
	// ErrTopology: ranks and sizes that cannot work together.
	ErrTopology = errors.New("nixlkv: unsupported topology")
	// ErrMismatch: page size, KV dtype, layout or policy differ.
	ErrMismatch = errors.New("nixlkv: prefill and decode are configured differently")
	// ErrCorruptMetadata: an aux slot tells of another room.
	ErrCorruptMetadata = errors.New("nixlkv: metadata corruption")
)

// What can be wrong with a peer.
var (
	// ErrNotRegistered: the peer has not told its geometry.
	ErrNotRegistered = errors.New("nixlkv: peer not registered")
	// ErrPeerStale: the peer was marked stale or replaced since.
	ErrPeerStale = errors.New("nixlkv: peer stale or replaced")
	// ErrNotAllowed: an address outside of the networks that peers may be in, or, where that is
	// asked for, other than the one that the message came from. Or the peer does not let this side
	// in: the address is outside of its networks, or the two have no CURVE keys in common.
	ErrNotAllowed = errors.New("nixlkv: peer not allowed")
	// ErrNoSuchRank: no prefill rank has these numbers.
	ErrNoSuchRank = errors.New("nixlkv: no such prefill rank")
	// ErrNotReady: not all prefill ranks have registered yet.
	ErrNotReady = errors.New("nixlkv: prefill not ready")
)
