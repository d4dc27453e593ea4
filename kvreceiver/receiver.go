package kvreceiver

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/internal/reasons"
	"github.com/nixlkv/nixlkv/metadata"
)

// Destination says where a room's KV cache goes in this rank's layout.
type Destination struct {
	// Pages are the pages after the decode's prefix, in the order of the sequence; none on a
	// full prefix hit. Page p of every KV region belongs to the room.
	//
	// There must be as many as the prefill will send. With fewer the room fails. With more it
	// succeeds, as in SGLang, and the pages after those that were sent keep what was in them:
	// neither the wire nor Wait tells how many came. So prefill and decode have to work the number
	// out alike, from the same prompt, prefix and page size; a decode that cannot be certain of that
	// tells its prefill by other means, and compares.
	Pages []int32
	// Aux is the metadata slot. It is required. A prefill that has another number of metadata
	// buffers writes the leading ones that both have (this library's, and SGLang's from 0.5.23;
	// earlier ones fail): the others keep what was in them.
	Aux AuxSlot
	// State are the slots of each state component of the layout, in its order; nil, or shorter,
	// where a room has none.
	State [][]int32
	// Prefix counts the tokens that this rank has already. The prefill computes the rest: any
	// number is taken, and whole pages are the caller's business, but decode context parallelism
	// (DCP) needs a multiple of the page size times its ranks, or the prefill fails the room.
	Prefix int
}

// AuxSlot is the number of an aux slot; the zero value is none. Aux makes one.
type AuxSlot struct {
	slot int
	set  bool
}

// Aux is aux slot n of this rank's metadata buffers.
func Aux(n int) AuxSlot { return AuxSlot{n, true} }

// Receiver receives one room. Its methods may be called from many goroutines.
type Receiver struct{ r *room }

// RoomOption configures Manager.Open. A nil one changes nothing.
type RoomOption func(*room)

// WithDPRank names the prefill's DP rank that serves the room, where the request says so.
func WithDPRank(rank int) RoomOption { return func(r *room) { r.dpRank = rank } }

// Room gives the room's number.
func (v *Receiver) Room() nixlkv.Room { return v.r.id }

// Ready is closed when the room's pages can be published, or never will be: after Connect, or
// under bootstrap.PrefillCompleteAllocation when the prefill has computed the room.
func (v *Receiver) Ready() <-chan struct{} { return v.r.ready }

// WaitReady waits for Ready. It returns the room's error if it fails first, and the context's
// if that ends first, which leaves the room as it is.
func (v *Receiver) WaitReady(ctx context.Context) error {
	select {
	case <-v.r.ready:
		return v.Err()
	default:
	}
	select {
	case <-v.r.ready:
		return v.Err()
	case <-ctx.Done():
		return fmt.Errorf("kvreceiver: room %d: waiting for its prefill: %w", v.r.id, ctx.Err())
	}
}

// Publish tells the prefill ranks where the pages go, which are copied. It never blocks. From
// then on the pages, the aux slot and the state slots are written to, until the room is
// complete, or its pages are released.
//
// A destination that cannot be fails the room, on both sides, and is its *KVTransferError:
// nixlkv.ErrPageRange, ErrAuxIndex or ErrState. Publishing twice, or before the room is ready,
// is an error that leaves the room as it is.
func (v *Receiver) Publish(d Destination) error {
	r := v.r
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.failure != nil:
		return r.failure
	case r.published:
		return fmt.Errorf("kvreceiver: room %d: Publish called twice", r.id)
	case r.status < nixlkv.WaitingForInput:
		return fmt.Errorf("kvreceiver: room %d: %w: Publish before the room is ready", r.id, nixlkv.ErrNotReady)
	}
	r.published = true
	if err := r.m.checkDestination(&d); err != nil {
		r.fail(err)
		return r.failure
	}
	if b := r.m.cfg.metadata; b != nil {
		if err := b.Clear(d.Aux.slot); err != nil {
			r.fail(fmt.Errorf("%w: %w", nixlkv.ErrAuxIndex, err))
			return r.failure
		}
	}
	r.dest = Destination{Pages: slices.Clone(d.Pages), Aux: d.Aux, Prefix: d.Prefix}
	for _, s := range d.State {
		r.dest.State = append(r.dest.State, slices.Clone(s))
	}
	r.metrics.Pages = len(d.Pages)
	r.startWaiting()
	r.goOn(r.flush)
	if r.failure != nil {
		return r.failure
	}
	return nil
}

// Status says how far the room has come: Bootstrapping until its pages can be published, then
// WaitingForInput until it ends. A decode cannot see whether pages are on their way.
func (v *Receiver) Status() nixlkv.Status {
	v.r.mu.Lock()
	defer v.r.mu.Unlock()
	return v.r.status
}

// Err gives the error of a room that has failed, a *KVTransferError, and nil otherwise. It may
// be asked again and again.
func (v *Receiver) Err() error {
	v.r.mu.Lock()
	defer v.r.mu.Unlock()
	if v.r.failure != nil {
		return v.r.failure
	}
	return nil
}

// Done is closed when the room has ended.
func (v *Receiver) Done() <-chan struct{} { return v.r.done }

// Wait waits until the room has ended: nil when everything that the prefill had to send is there,
// which may be fewer pages than were published (see Destination.Pages), else a *KVTransferError.
// When the context ends first it gives the context's error and leaves the room as it is. It
// may be called again and again.
func (v *Receiver) Wait(ctx context.Context) error {
	select {
	case <-v.r.done:
		return v.Err()
	default:
	}
	select {
	case <-v.r.done:
		return v.Err()
	case <-ctx.Done():
		return fmt.Errorf("kvreceiver: room %d: waiting for its end: %w", v.r.id, ctx.Err())
	}
}

// Metadata reads what the prefill told in the aux slot of a room that has succeeded; want says
// what of it the request asked for. The slot is the caller's: it must not have been given to
// another room since. It needs WithMetadata.
func (v *Receiver) Metadata(rec *metadata.Record, want metadata.Want) error {
	r := v.r
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.m.cfg.metadata == nil:
		return fmt.Errorf("kvreceiver: room %d: %w: the manager was not given metadata buffers", r.id, nixlkv.ErrUnsupported)
	case r.failure != nil:
		return r.failure
	case r.status != nixlkv.Success:
		return fmt.Errorf("kvreceiver: room %d: %w", r.id, nixlkv.ErrNotReady)
	}
	return r.m.cfg.metadata.DecodeInto(rec, r.metrics.Slot, r.id, want)
}

// Texts that operators of SGLang search for.
const (
	abortedHere   = "Aborted by AbortReq."
	failedByOther = "NIXL KVReceiver Exception"
)

// Abort gives the room up, with SGLang's text if no reason is given. One of more than 3 KiB is
// cut, and says so; what is not UTF-8, or is a control character other than a tab or a line feed,
// is replaced. The prefill ranks are told at once; Released says when the pages are the caller's
// again. A room that has ended stays as it is.
func (v *Receiver) Abort(reason string) {
	if reason == "" {
		reason = abortedHere
	}
	v.r.mu.Lock()
	defer v.r.mu.Unlock()
	v.r.fail(fmt.Errorf("%w: %s", nixlkv.ErrAborted, reasons.Bound(reason, reasons.Given)))
}

// FailedElsewhere fails a room that nothing here explains: another rank of this decode failed,
// as the server learned from its group. ranks is what each has told, as far as it is known; its
// texts are bounded as Abort's. The room's error is marked FromAnotherRank.
func (v *Receiver) FailedElsewhere(ranks []nixlkv.RankReport) {
	v.r.mu.Lock()
	defer v.r.mu.Unlock()
	v.r.fail(&KVTransferError{Room: v.r.id, Reason: failedByOther, FromAnotherRank: true,
		Ranks: reasons.Reports(ranks), Cause: nixlkv.ErrAnotherRank})
}

// Released waits until nothing can be written to the room's pages and slots any more. It
// returns nil then, at once for a room that has succeeded or that was never published. It
// gives an error wrapping nixlkv.ErrReleaseUnconfirmed when not every prefill rank has
// answered within the release timeout: the pages may be written to at any later time. It waits
// for the room's end first; when the context ends it gives the context's error.
func (v *Receiver) Released(ctx context.Context) error {
	r := v.r
	select {
	case <-r.released:
	default:
		select {
		case <-r.released:
		case <-ctx.Done():
			return fmt.Errorf("kvreceiver: room %d: waiting for the release of its pages: %w", r.id, ctx.Err())
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.releaseError()
}

// Close ends the use of the receiver. A room that has not ended is aborted. Its number may be
// opened again at once; where its pages are not released yet, the manager goes on waiting for
// that, and so may Released.
func (v *Receiver) Close() error {
	r := v.r
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return nil
	}
	r.fail(fmt.Errorf("%w: the receiver was closed", nixlkv.ErrAborted))
	r.closed = true
	r.m.detach(r)
	return nil
}

// Metrics gives what was measured of the room so far.
func (v *Receiver) Metrics() Metrics {
	v.r.mu.Lock()
	defer v.r.mu.Unlock()
	return v.r.metrics
}

// Metrics are what was measured of a room. Times of what has not happened are zero.
type Metrics struct {
	Pages int // published
	Slot  int // the aux slot of a room that has succeeded

	Opened    time.Time
	Connected time.Time // the prefill ranks were found
	Published time.Time // the metadata went out
	Ended     time.Time
	Released  time.Time // of a room that has failed: every prefill rank has confirmed it
}
