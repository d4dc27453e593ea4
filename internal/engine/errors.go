package engine

import "errors"

// What an engine can tell beyond a Status. They come wrapped, with the details.
var (
	// ErrUnsupported: this engine, or this version of the library, cannot do it.
	ErrUnsupported = errors.New("not supported by this engine")
	// ErrPeerLost: the peer's process or its connection is gone.
	ErrPeerLost = errors.New("peer lost")
	// ErrNotRegistered: an address lies outside of what its owner registered.
	ErrNotRegistered = errors.New("memory not registered")
	// ErrBusy: peers still hold the memory; nothing was given up, ask again.
	ErrBusy = errors.New("memory still used by a peer")
)
