// Package kvreceiver is the decode side: it receives the KV cache of requests from prefill
// workers over NIXL, on SGLang's own wire. The prefill workers may be SGLang's, of release
// 0.5.18 or later, or this library's, in any mix and at the same time.
//
// A [Manager] stands for one decode rank: it registers the rank's memory with NIXL and listens
// for prefill workers. Each request is a room at one prefill, and each room a [Receiver]:
//
//	r, err := m.Open(room, "10.0.0.1:8998")  // the prefill's bootstrap server
//	err = r.Connect(ctx)                     // finds the prefill ranks and registers with them
//	err = r.Publish(kvreceiver.Destination{Pages: pages, Aux: kvreceiver.Aux(3)})
//	err = r.Wait(ctx)                        // the pages are there
//	err = r.Close()
//
// Connect asks the prefill's bootstrap server, once for all rooms, which of its ranks hold what
// this rank needs. Publish never blocks. Nobody polls per room: one loop drains NIXL's
// notifications, one reads the control socket, and both feed each room's tracker.
//
// # When pages are the caller's again
//
// A prefill writes to published pages on its own. After success nothing is written any more.
// After a failure something may be: the prefill is told with an ABORT at once, and answers when
// it has nothing in flight. [Receiver.Released] waits for that; pages must not be given to
// another request before it has returned nil. A prefill of SGLang 0.5.18 never answers, one of
// 0.5.19 or 0.5.20 only where it is configured to, and a dead one cannot: then Released gives
// nixlkv.ErrReleaseUnconfirmed after the release timeout, and what to do is the caller's
// decision.
//
// The package needs cgo, for libzmq.
package kvreceiver
