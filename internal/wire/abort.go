package wire

import (
	"math"

	"github.com/nixlkv/nixlkv"
)

var (
	abortFields     = [...]string{fieldTag, fieldRoom, fieldIP, fieldPort, "generation"}
	abortAckFields  = [...]string{fieldTag, fieldRoom, fieldRank, "generation"}
	bootstrapFields = [...]string{fieldTag, fieldRoom, fieldIP, fieldPort}
)

// Abort tells a prefill rank that the decode gave a room up
// (CommonKVReceiver._send_abort_notification; AbortNotification from 0.5.22).
type Abort struct {
	Room nixlkv.Room
	From Endpoint // where the acknowledgement goes; zero if none is wanted
	// Generation tells this abort of the room from an earlier one. HasGeneration is false
	// from peers before 0.5.22, and from later ones whose pages cannot be written yet; it
	// needs an endpoint.
	Generation    uint64
	HasGeneration bool

	Extra int // frames that were ignored; not encoded
}

// parseAbort takes the three forms that have senders: the room alone, with an address, and
// with an address and a generation.
func parseAbort(r *reader) *Abort {
	r.open(tagAbort, abortFields[:], 2)
	a := &Abort{Room: r.room(1), Extra: r.extra()}
	if len(r.frames) > 2 {
		a.From = r.endpoint(2)
	}
	if len(r.frames) > 4 {
		a.Generation, a.HasGeneration = r.number(4, math.MaxUint64), true
	}
	return a
}

// Abort encodes an abort in 2, 4 or 5 frames.
func (e *Encoder) Abort(a *Abort) ([][]byte, error) {
	err := checkRoom(a.Room)
	switch {
	case err != nil:
	case !a.From.IsZero():
		err = a.From.check()
	case a.HasGeneration:
		err = malformed("a generation without an address")
	}
	if err != nil {
		return nil, encodeError(tagAbort, a.Room, err)
	}
	e.begin(tagAbort)
	e.number(uint64(a.Room))
	if !a.From.IsZero() {
		e.endpoint(a.From)
	}
	if a.HasGeneration {
		e.number(a.Generation)
	}
	return e.frames(), nil
}

// AbortAck tells a decode that a prefill rank writes nothing more into a room
// (CommonKVManager._send_abort_ack; AbortAck from 0.5.22).
type AbortAck struct {
	Room          nixlkv.Room
	PrefillRank   int    // see PrefillPosition
	Generation    uint64 // the abort's, if it had one
	HasGeneration bool

	Extra int // frames that were ignored; not encoded
}

func parseAbortAck(r *reader) *AbortAck {
	r.open(tagAbortAck, abortAckFields[:], 3)
	a := &AbortAck{Room: r.room(1), PrefillRank: r.count(2), Extra: r.extra()}
	if len(r.frames) > 3 {
		a.Generation, a.HasGeneration = r.number(3, math.MaxUint64), true
	}
	return a
}

// AbortAck encodes an acknowledgement in 3 or 4 frames.
func (e *Encoder) AbortAck(a *AbortAck) ([][]byte, error) {
	err := checkRoom(a.Room)
	if err == nil {
		err = checkRank(a.PrefillRank)
	}
	if err != nil {
		return nil, encodeError(tagAbortAck, a.Room, err)
	}
	e.begin(tagAbortAck)
	e.number(uint64(a.Room))
	e.number(uint64(a.PrefillRank))
	if a.HasGeneration {
		e.number(a.Generation)
	}
	return e.frames(), nil
}

// Bootstrap asks a prefill to tell when it has computed a room, before the decode has pages
// for it: only where the topology says prefill_complete (CommonKVReceiver.init from
// 0.5.22). The prefill answers with a KVStatus of PollWaitingForInput.
type Bootstrap struct {
	Room nixlkv.Room
	From Endpoint // where the decode's PULL socket listens

	Extra int // frames that were ignored; not encoded
}

func parseBootstrap(r *reader) *Bootstrap {
	r.open(tagBootstrap, bootstrapFields[:], len(bootstrapFields))
	return &Bootstrap{Room: r.room(1), From: r.endpoint(2), Extra: r.extra()}
}

// Bootstrap encodes the question in 4 frames.
func (e *Encoder) Bootstrap(b *Bootstrap) ([][]byte, error) {
	err := checkRoom(b.Room)
	if err == nil {
		err = b.From.check()
	}
	if err != nil {
		return nil, encodeError(tagBootstrap, b.Room, err)
	}
	e.begin(tagBootstrap)
	e.number(uint64(b.Room))
	e.endpoint(b.From)
	return e.frames(), nil
}
