package kvsender

import (
	"context"
	"fmt"
	"time"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/internal/reasons"
)

// Plan says what a room will send.
//
// It is the caller who knows how many pages the decode's prefix (Sender.WaitBootstrapped) leaves. A
// decode that has told fewer pages than Pages fails the room, with nixlkv.ErrPageCount. One that has
// told more does not, as in SGLang: its first Pages pages are written, the others keep what was in
// them, and both sides see Success. So prefill and decode have to work the number out alike, from
// the same prompt, prefix and page size.
type Plan struct {
	// Pages is how many pages Send and Finish will give in all: those after the decode's
	// prefix, none on a full prefix hit. The prefix counts tokens, and is whatever the decode
	// tells: only between ranks of context parallelism must it be whole pages.
	Pages int
	// Tokens is how many tokens the pages hold, all but the last of them full; 0 if not told. Begin
	// refuses a number that takes more pages, or fewer, with nixlkv.ErrPageCount. A decode of
	// context parallelism (DCP) needs it: tokens go to it one by one.
	Tokens int
	// Aux is the metadata slot that goes with the last chunk. It is required. Where the decode has
	// another number of metadata buffers, the leading ones that both have are copied, as in SGLang
	// 0.5.23, and a warning is logged when it registers: the others keep what was in them.
	Aux AuxSlot
}

// AuxSlot is the number of an aux slot; the zero value is none. Aux makes one.
type AuxSlot struct {
	slot int
	set  bool
}

// Aux is aux slot n of this rank's metadata buffers.
func Aux(n int) AuxSlot { return AuxSlot{n, true} }

// Sender sends one room. Its methods may be called from many goroutines; Begin, Send and
// Finish say what goes out in which order, so they are one goroutine's.
type Sender struct {
	r *room
	// Guarded by r.mu.
	closed bool
	booted chan struct{} // closed once bootstrapped or ended
	done   chan struct{} // closed once ended
}

// notify wakes whoever waits for the status. The caller holds r.mu.
func (s *Sender) notify(st nixlkv.Status) {
	if st != nixlkv.Bootstrapping {
		closeOnce(s.booted)
	}
	if st.Ended() {
		closeOnce(s.done)
	}
}

// closeOnce closes a channel unless it is closed. Callers hold the room's lock.
func closeOnce(c chan struct{}) {
	select {
	case <-c:
	default:
		close(c)
	}
}

// Room gives the room's number.
func (s *Sender) Room() nixlkv.Room { return s.r.id }

// WaitBootstrapped waits until every decode rank of the room has told where its pages go,
// and gives the tokens that the decode has already: the pages to send start after them. It
// returns the room's error if it fails first, and the context's if that ends first, which
// leaves the room as it is.
func (s *Sender) WaitBootstrapped(ctx context.Context) (prefix int, err error) {
	select {
	case <-s.booted:
	default:
		select {
		case <-s.booted:
		case <-ctx.Done():
			return 0, fmt.Errorf("kvsender: room %d: waiting for its decode: %w", s.r.id, ctx.Err())
		}
	}
	s.r.mu.Lock()
	defer s.r.mu.Unlock()
	if e := s.r.transferError(); e != nil {
		return 0, e
	}
	return s.r.prefix, nil
}

// Begin says what the room will send. It is checked against what the decodes told: an error
// fails the room on both sides, unless it says that Begin was called twice.
func (s *Sender) Begin(p Plan) error {
	r := s.r
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.refuses("Begin"); err != nil {
		return err
	}
	if r.begun {
		return fmt.Errorf("kvsender: room %d: Begin called twice", r.id)
	}
	r.plan, r.begun = p, true
	if err := r.checkPlan(); err != nil {
		r.fail(err)
		return r.transferError()
	}
	return nil
}

// refuses says why a call cannot be: the room has failed, or was closed.
func (r *room) refuses(call string) error {
	switch {
	case r.sender.closed:
		return fmt.Errorf("kvsender: room %d: %s: %w", r.id, call, nixlkv.ErrClosed)
	case r.failure != nil:
		return r.transferError()
	case r.finished:
		return fmt.Errorf("kvsender: room %d: %s after Finish", r.id, call)
	}
	return nil
}

// checkPlan checks what can be known before the first page: the aux slot, and room for the
// pages at every decode.
func (r *room) checkPlan() error {
	p := r.plan
	slots := r.m.layout.AuxSlots()
	switch {
	case p.Pages < 0 || p.Tokens < 0:
		return fmt.Errorf("%w: a plan of %d pages and %d tokens", nixlkv.ErrPageCount, p.Pages, p.Tokens)
	case p.Tokens > 0 && (p.Tokens-1)/r.m.layout.PageSize+1 != p.Pages:
		return fmt.Errorf("%w: %d tokens in %d pages of %d: all pages but the last are full", nixlkv.ErrPageCount, p.Tokens, p.Pages, r.m.layout.PageSize)
	case !p.Aux.set:
		return fmt.Errorf("%w: Missing aux index for last chunk", nixlkv.ErrAuxIndex)
	case p.Aux.slot < 0 || uint64(p.Aux.slot) >= slots:
		return fmt.Errorf("%w: aux index out of range: slot %d of %d", nixlkv.ErrAuxIndex, p.Aux.slot, slots)
	}
	return nil
}

// Send gives the next pages, which are copied. It never blocks: they are posted when the
// decode has told where they go, in the order given. An error fails the room on both sides, unless
// it says that the call comes before Begin or after Finish: then nothing has changed.
func (s *Sender) Send(pages []int32) error { return s.give("Send", pages, nil, false) }

// Finish gives the last pages, and with them the state, where the model has some. The aux
// slot follows. The pages of all calls together must be as many as Begin said.
//
// state has a list for each component of the layout, in its order; lists at the end may be
// left out, and one that is empty brings nothing of its component. The lists are copied. A
// list names slots, and the k-th goes to the k-th that the decode has told for the component:
//
//   - mamba: the request's one slot;
//   - dsa_tail: six numbers: row, first token and tokens of a piece, of another (0, 0 if there
//     is none), and the tokens of the ring;
//   - all others: any number of slots.
//
// The room fails, before anything of its last chunk is posted, if slots are not there or the
// decode has told other numbers of them; and before anything at all is, if the decode asks
// for state that cannot be sent to it. Errors wrap nixlkv.ErrState.
func (s *Sender) Finish(pages []int32, state [][]int32) error {
	return s.give("Finish", pages, state, true)
}

func (s *Sender) give(call string, pages []int32, state [][]int32, last bool) error {
	r := s.r
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.refuses(call); err != nil {
		return err
	}
	if !r.begun {
		return fmt.Errorf("kvsender: room %d: %s before Begin", r.id, call)
	}
	if err := r.addChunk(pages, state, last); err != nil {
		r.fail(err)
		return r.transferError()
	}
	if r.m.sendsNothing() && last {
		// No decode talks to this rank: there is nothing to wait for.
		r.queue, r.allPosted = nil, true
		r.advance()
	}
	r.schedule()
	return nil
}

// addChunk checks pages and queues them.
func (r *room) addChunk(pages []int32, state [][]int32, last bool) error {
	if n := r.given + len(pages); n > r.plan.Pages || last && n != r.plan.Pages {
		return fmt.Errorf("%w: %d pages given, Begin said %d", nixlkv.ErrPageCount, n, r.plan.Pages)
	}
	if len(r.queue) >= r.m.cfg.limits.Chunks {
		return fmt.Errorf("%w: %d chunks wait to be posted", nixlkv.ErrLimit, len(r.queue))
	}
	if err := checkStateSource(r.m.layout, state); err != nil {
		return err
	}
	if err := checkRange("source", pages, r.m.share.pages(r.m.layout.Pages())); err != nil {
		return err
	}
	c := &chunk{number: -1, last: last}
	c.pages, c.positions, c.offset = r.m.share.of(pages, r.given, r.plan.Pages)
	r.given += len(pages)
	r.finished = last
	if len(c.pages) == 0 && !last {
		return nil
	}
	if len(c.pages) > 0 {
		c.number = r.numbered
		r.numbered++
	}
	c.state = copyLists(state)
	r.queue = append(r.queue, c)
	return nil
}

// Status says how far the room has come.
func (s *Sender) Status() nixlkv.Status {
	s.r.mu.Lock()
	defer s.r.mu.Unlock()
	return s.r.status
}

// Err gives the error of a room that has failed, a *KVTransferError, and nil otherwise. It
// may be asked again and again.
func (s *Sender) Err() error {
	s.r.mu.Lock()
	defer s.r.mu.Unlock()
	if s.r.status != nixlkv.Failed {
		return nil
	}
	return s.r.transferError()
}

// Done is closed when the room has ended.
func (s *Sender) Done() <-chan struct{} { return s.done }

// Wait waits until the room has ended: nil when everything that the plan named is at the decode,
// which may have told more pages (see Plan), else a
// *KVTransferError. When the context ends first it gives the context's error and leaves the
// room as it is.
func (s *Sender) Wait(ctx context.Context) error {
	select {
	case <-s.done:
	default:
		select {
		case <-s.done:
		case <-ctx.Done():
			return fmt.Errorf("kvsender: room %d: waiting for its end: %w", s.r.id, ctx.Err())
		}
	}
	return s.Err()
}

// Abort gives the room up: the decode is told, with the reason, once nothing is in flight
// any more; without one, with SGLang's text. A reason of more than 3 KiB is cut, and says so; what
// is not UTF-8, or is a control character other than a tab or a line feed, is replaced. A room
// that has ended stays as it is.
func (s *Sender) Abort(reason string) {
	if reason == "" {
		reason = abortedHere
	}
	s.r.mu.Lock()
	defer s.r.mu.Unlock()
	s.r.fail(fmt.Errorf("%w: %s", nixlkv.ErrAborted, reasons.Bound(reason, reasons.Given)))
}

// FailedElsewhere fails a room that nothing here explains: another rank of this prefill
// failed, as the server learned from its group. ranks is what each has told, as far as it is
// known; its texts are bounded as Abort's. The room's error is marked FromAnotherRank.
func (s *Sender) FailedElsewhere(ranks []nixlkv.RankReport) {
	s.r.mu.Lock()
	defer s.r.mu.Unlock()
	s.r.fail(&KVTransferError{Room: s.r.id, Reason: "NIXL KVSender Exception", FromAnotherRank: true,
		Ranks: reasons.Reports(ranks), Cause: nixlkv.ErrAnotherRank})
}

// Close ends the use of the sender. A room that has not ended is aborted. The manager
// forgets the room when nothing of it is in flight any more; its number may be opened again
// at once.
func (s *Sender) Close() error {
	r := s.r
	r.mu.Lock()
	defer r.mu.Unlock()
	if s.closed {
		return nil
	}
	if !r.status.Ended() {
		r.fail(fmt.Errorf("%w: the sender was closed", nixlkv.ErrAborted))
	}
	s.closed = true
	r.m.detach(r)
	r.quiesce()
	return nil
}

// Metrics gives what was measured of the room so far.
func (s *Sender) Metrics() Metrics {
	s.r.mu.Lock()
	defer s.r.mu.Unlock()
	return s.r.metrics
}

// Metrics are what was measured of a room.
type Metrics struct {
	Bytes       uint64 // posted to all decodes
	StateBytes  uint64 // of these, state
	Descriptors uint64 // posted, neighbours merged
	Pages       uint64 // page copies posted: pages × regions × decodes
	Chunks      int
	Transfers   int

	Opened       time.Time // by the caller
	Bootstrapped time.Time // the last decode told its pages
	Posted       time.Time // first transfer
	Ended        time.Time
}
