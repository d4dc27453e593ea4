// Package kvsender is the prefill side: it sends the KV cache of requests to decode workers
// over NIXL, on SGLang's own wire. The decode workers may be SGLang's, of release 0.5.18 or
// later, or this library's, in any mix.
//
// A [Manager] stands for one prefill rank. It registers the rank at the bootstrap server,
// listens for decode workers, keeps what they tell of their memory, and sends. Each request
// is a room, and each room a [Sender]:
//
//	s, err := m.Open(room)
//	prefix, err := s.WaitBootstrapped(ctx)   // tokens that the decode has already
//	err = s.Begin(kvsender.Plan{Pages: n, Aux: kvsender.Aux(3)})
//	err = s.Send(pages)                      // as chunks are computed
//	err = s.Finish(pages, nil)               // the last ones
//	err = s.Wait(ctx)
//	err = s.Close()
//
// Finish also takes the state of models that have some beside their KV cache: Mamba states,
// sliding windows, index keys. It goes with the last chunk, before the metadata slot.
//
// Chunks of a room are posted in the order given; rooms go side by side, and one that waits
// for its peer holds up no other. Send copies the page numbers and never blocks. The pages
// themselves are read until the room has ended: they belong to the caller again when Wait
// returns or Done is closed, unless the error wraps nixlkv.ErrReleaseUnconfirmed.
//
// Every room that fails does so on both sides, with the reason: the decode is told as soon
// as nothing can be written any more, wherever its release has a way to be told.
//
// The package needs cgo, for libzmq.
package kvsender
