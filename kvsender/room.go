package kvsender

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/internal/wire"
	"github.com/nixlkv/nixlkv/registry"
)

// room is one request at this rank. It comes to be when it is opened or when a decode tells
// where its pages go, whichever is first, and it is in the manager's table until it was
// closed and nothing of it is in flight.
//
// A room does no I/O. Its methods are called with mu held, unless they say otherwise, and
// say what has to be done next through the manager's queues.
type room struct {
	m  *Manager
	id nixlkv.Room

	mu     sync.Mutex
	sender *Sender // nil until opened

	// What the decodes told.
	dests        []*dest
	need         int // decode ranks that have to tell; 0 until the first has
	prefix       int // tokens that the decode has already
	announce     *time.Timer
	unregistered error // one told something without having registered
	asker        asker

	// What the caller told.
	computed bool
	plan     Plan
	begun    bool
	finished bool
	given    int // pages given so far
	numbered int // chunks that carry pages
	queue    []*chunk
	timer    *time.Timer // bootstrap timeout

	// What is under way.
	scheduled bool // on the run queue, or with a worker
	parked    bool // waits for a peer to be taken up
	inFlight  int  // transfers posted and not settled
	allPosted bool // the last chunk is posted

	// How it goes.
	status    nixlkv.Status
	failure   error // the first cause; the room is Failed once nothing is in flight
	release   release
	settle    *time.Timer // bounds the wait of a room that has failed
	acks      []*ackTarget
	metrics   Metrics
	forgotten bool // never opened, and not to be
	detached  bool // out of the table
	changed   bool // in the manager's list of changed rooms

	charged charge // guarded by the manager's roomsMu
}

// release is how far the memory of a room's decodes is released, which goes behind the status
// that the sender sees.
type release uint8

const (
	// Held: the room has not ended, or what ended it waits for its writes to settle.
	_ release = iota
	// quarantined: the sender was told the end while writes were in flight, as they still are.
	quarantined
	// released: nothing of the room can be written any more. Its decodes were told, and their
	// leases are given back.
	released
)

// dest is one decode rank of a room.
type dest struct {
	meta   *wire.Metadata
	lease  *registry.Lease[*wiredPeer] // held from when it is first needed until the room's end
	gaveUp bool                        // this decode aborted the room and need not be told
}

// chunk is a piece of a room: pages that go out together. Page k of it stands at position
// positions[k] of the destination lists or, if there are none, at offset + k.
type chunk struct {
	pages     []int32
	offset    int
	positions []int32
	number    int // by which notifications name it; -1 if it carries no pages
	last      bool
	state     [][]int32 // slots, a list a component; of the last one
	landed    bool      // pages and state were posted, and wait to land before the rest goes
}

// ackTarget is a decode that wants to know when nothing of a room is written any more.
type ackTarget struct {
	to            wire.Endpoint
	generation    uint64
	hasGeneration bool
	// rooms counts the rooms of the number that have to be quiet first: one, or more when the
	// number was used again while writes of an earlier use had not settled.
	rooms *atomic.Int32
}

// addMetadata takes what a decode told. It returns an error when it cannot be, and then the
// room fails with it.
func (r *room) addMetadata(meta *wire.Metadata) error {
	at := slices.IndexFunc(r.dests, func(d *dest) bool { return d.meta.Agent == meta.Agent })
	switch {
	case r.bootstrapped() && at >= 0:
		return nil // a repeat; the pages may be written by now
	case r.bootstrapped():
		return fmt.Errorf("%w: %w: a decode rank more than the %d announced: %s", errIntruder, nixlkv.ErrTopology, r.need, meta.Agent)
	case r.need != 0 && r.need != meta.Destinations:
		return fmt.Errorf("%w: decode ranks disagree on how many they are: %d and %d", nixlkv.ErrTopology, r.need, meta.Destinations)
	case meta.Destinations > r.m.cfg.limits.Peers:
		return fmt.Errorf("%w: %d decode ranks for one room", nixlkv.ErrLimit, meta.Destinations)
	}
	r.need = meta.Destinations
	if at >= 0 {
		r.dests[at].meta = meta
	} else {
		r.dests = append(r.dests, &dest{meta: meta})
	}
	r.prefix = 0
	for _, d := range r.dests {
		r.prefix = max(r.prefix, d.meta.Prefix)
	}
	if r.bootstrapped() {
		r.metrics.Bootstrapped = time.Now()
	}
	return nil
}

// errIntruder: the message is not for this room, which goes on as if it had not come.
var errIntruder = errors.New("room under way")

// bootstrapped says whether every decode rank has told where its pages go.
func (r *room) bootstrapped() bool { return r.need > 0 && len(r.dests) == r.need }

// advance moves the status on as far as it goes. It is the only place where a room becomes
// Success or Failed.
func (r *room) advance() {
	before := r.status
	switch {
	case r.status.Ended():
	case r.failure != nil:
		if r.quiet() {
			r.end(nixlkv.Failed)
		} else if r.settle == nil {
			r.settle = time.AfterFunc(r.m.cfg.settleTimeout, r.unsettled)
		}
	case r.allPosted && r.inFlight == 0:
		r.end(nixlkv.Success)
	case r.metrics.Posted.IsZero() && r.sender != nil && r.bootstrapped() && r.status == nixlkv.Bootstrapping:
		r.status = nixlkv.WaitingForInput
		r.stopTimer(&r.timer)
	case !r.metrics.Posted.IsZero():
		r.status = nixlkv.Transferring
	}
	if r.status != before && r.sender != nil {
		r.sender.notify(r.status)
		r.m.noteChanged(r)
	}
	r.quiesce()
}

// quiet says whether nothing of the room is being written, or about to be.
func (r *room) quiet() bool { return r.inFlight == 0 && !r.scheduled }

// end ends the room.
func (r *room) end(s nixlkv.Status) {
	r.status = s
	r.metrics.Ended = time.Now()
	r.stopTimer(&r.timer)
	r.stopTimer(&r.settle)
	r.m.stats.ended(s)
}

// quiesce does what has to wait until nothing of an ended room can be written any more:
// telling the decodes, acknowledging aborts, letting the peers go.
func (r *room) quiesce() {
	if !r.status.Ended() || !r.quiet() {
		return
	}
	if r.release != released {
		r.letGo()
	}
	for _, a := range r.acks {
		if a.rooms.Add(-1) == 0 {
			r.m.tellAck(r.id, *a, tellTimeout, r.stranger(a.to))
		}
	}
	r.acks = r.acks[:0]
	// A room that failed before it was opened is kept for whoever opens it, for a while.
	if r.abandoned() {
		r.stopTimer(&r.announce)
		r.remember()
		r.m.dropRoom(r)
	}
}

// letGo tells the decodes the end, and gives back what the room holds of them.
func (r *room) letGo() {
	if r.release == quarantined {
		r.m.stats.quarantined.Add(-1)
	}
	r.release = released
	r.m.tellEnd(r)
	for _, d := range r.dests {
		if d.lease != nil {
			d.lease.Release()
		}
		d.meta.KVIndices, d.meta.StateIndices = nil, nil // the room may be looked at long after
	}
	r.queue = nil
	r.m.discharge(r)
}

// abandoned says whether nobody holds the room, or will.
func (r *room) abandoned() bool { return r.forgotten || r.sender != nil && r.sender.closed }

// fail records the first cause of failure. Later ones are consequences. What was posted is
// waited for; what was not is not posted any more.
func (r *room) fail(cause error) {
	if r.failure != nil || r.status.Ended() {
		return
	}
	r.failure = cause
	r.queue = nil
	r.advance()
}

// unsettled ends a failed room for its sender while writes of it are still in flight. The
// decodes are not told: their pages are not free. It takes mu.
func (r *room) unsettled() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.status.Ended() || r.quiet() {
		return
	}
	unconfirmed := fmt.Errorf("%w: %d transfers have not settled %v after: %w", nixlkv.ErrReleaseUnconfirmed, r.inFlight, r.m.cfg.settleTimeout, r.failure)
	if e, ok := r.failure.(*KVTransferError); ok {
		told := *e
		told.Cause = unconfirmed
		r.failure = &told
	} else {
		r.failure = unconfirmed
	}
	r.release = quarantined
	r.m.stats.unsettled.Add(1)
	r.m.stats.quarantined.Add(1)
	r.end(nixlkv.Failed)
	if r.sender != nil {
		r.sender.notify(r.status)
		r.m.noteChanged(r)
	}
}

// timedOut fails a room whose decodes have not all told where its pages go. It takes mu.
func (r *room) timedOut() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.bootstrapped() {
		return
	}
	if r.unregistered != nil {
		r.fail(r.unregistered)
		return
	}
	r.fail(fmt.Errorf("%w: Request %d timed out after %gs in KVPoll.Bootstrapping: %d of %d decode ranks have told where its pages go",
		nixlkv.ErrTimeout, r.id, r.m.cfg.bootstrapTimeout.Seconds(), len(r.dests), max(r.need, 1)))
}

// expired drops a room that a decode announced and nobody opened. It takes mu.
func (r *room) expired() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.sender == nil {
		r.forget(fmt.Errorf("%w: room %d was never opened at this prefill", nixlkv.ErrTimeout, r.id))
	}
}

// forget drops a room that is not open, as soon as nothing of it is in flight.
func (r *room) forget(cause error) {
	r.forgotten = true
	r.fail(cause)
	r.quiesce()
}

func (r *room) stopTimer(t **time.Timer) {
	if *t != nil {
		(*t).Stop()
		*t = nil
	}
}

// Texts that operators of SGLang search for.
const (
	abortedByDecode = "Aborted by decode-side abort notification."
	abortedHere     = "Aborted by AbortReq."
)

// errAbortedThere: a decode ended the room.
var errAbortedThere = fmt.Errorf("%w: %s", nixlkv.ErrAborted, abortedByDecode)

// aborted takes an abort of a decode. ack is what it is owed, nil if it wants none.
func (r *room) aborted(a *wire.Abort, ack *ackTarget) {
	if ack != nil && !slices.Contains(r.acks, ack) {
		ack.rooms.Add(1)
		if len(r.acks) < r.m.cfg.limits.AbortAcks {
			r.acks = append(r.acks, ack)
		} // else it is never sent: the decode gives up waiting by itself
	}
	for _, d := range r.dests {
		if d.meta.From == a.From {
			d.gaveUp = true
		}
	}
	if r.asker.at == a.From {
		r.asker.gaveUp = true
	}
	if !r.status.Ended() {
		r.fail(errAbortedThere)
	}
	r.quiesce()
}

// answers says whether two acknowledgements are for the same abort.
func (a *ackTarget) answers(b *ackTarget) bool {
	return a.to == b.to && a.generation == b.generation && a.hasGeneration == b.hasGeneration
}

// transferError gives the room's error for its caller.
func (r *room) transferError() *KVTransferError {
	if r.failure == nil {
		return nil
	}
	if e, ok := r.failure.(*KVTransferError); ok {
		return e
	}
	e := &KVTransferError{Room: r.id, Reason: r.failure.Error(), Cause: r.failure}
	var de *destError
	if errors.As(r.failure, &de) {
		e.Peer = de.agent
	}
	return e
}

// runnable says whether a worker could post something of the room now.
func (r *room) runnable() bool {
	return !r.scheduled && !r.parked && r.failure == nil && r.bootstrapped() && len(r.queue) > 0 &&
		r.inFlight < r.m.cfg.limits.InFlight && !(r.queue[0].landed && r.inFlight > 0)
}

// schedule puts the room on the run queue if there is something to do for it.
func (r *room) schedule() {
	if r.runnable() {
		r.scheduled = true
		r.m.runQueue.put(r)
	}
}
