// Package registry holds what is known of the workers on both sides: a worker's own memory,
// model and place ([Layout]), and the decode peers that a prefill has met ([Peer], [Table]).
//
// A worker describes itself once. [Layout.Validate] says everything that is wrong with it;
// [Layout.Spans] is the memory to register with NIXL, and a decode sends [Layout.Registration]
// to each prefill rank that will serve it.
//
// A prefill turns such a registration, of this library or of SGLang 0.5.18 to 0.5.23, into a
// Peer ([PeerFromRegistration]) and keeps it in a Table, together with the plan that it
// prepared for sending to that peer. A room takes a [Lease] on peer and plan for as long as it
// may write to the peer: a plan is dropped when no room holds it, never before.
//
// Nothing here does I/O or starts a goroutine. Addresses are numbers: the memory behind them
// belongs to whoever wrote the layout. A Layout or Peer may be read by many goroutines and is
// not changed once it is in use; a Table is safe for concurrent use.
package registry
