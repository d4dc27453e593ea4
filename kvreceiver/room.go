package kvreceiver

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/internal/wire"
)

// room is one request at this rank. It is in the manager's table from Open to Close, and after
// that among the lingering ones until its pages are released.
//
// Its methods are called with mu held, unless they say otherwise. A room sends messages and
// reads its aux slot, and does no other I/O. Locks are taken in the order room, manager, link.
type room struct {
	m        *Manager
	id       nixlkv.Room
	dpRank   int
	receiver *Receiver
	prefill  *prefill

	mu          sync.Mutex
	stopConnect context.CancelCauseFunc // of the one Connect; nil before
	targets     []*roomTarget
	group       *group
	ranks       []rankProgress // until track is there
	track       *tracker       // from when the metadata goes out
	dest        Destination
	asked       bool // the prefill was asked to tell when it has computed the room
	published   bool
	open        bool        // the metadata went out: messages for the number are this use's
	timer       *time.Timer // waiting timeout
	timeouts    int         // started so far
	held        func()      // what goes out once no earlier use of the number can be meant any more
	release     *time.Timer

	status    nixlkv.Status
	failure   *KVTransferError
	confirmed bool // pages are released for certain
	closed    bool
	gone      bool // out of the table; guarded by the manager's roomsMu, as is over
	over      bool // nothing of this use of the number can come any more, or it was waited long enough
	changed   bool // in the manager's list of changed rooms
	metrics   Metrics
	ready     chan struct{} // closed once pages can be published, or never will be
	done      chan struct{} // closed once ended
	released  chan struct{} // closed once pages are released, or it was waited long enough
}

// roomTarget is a prefill rank of a room.
type roomTarget struct {
	target
	link       *link
	out        *outgoing // metadata or BOOTSTRAP, until it was sent
	told       bool      // the metadata have reached the rank, or may have
	generation uint64    // of the connection that they went over
	abort      uint64    // by which the rank's answer names the abort; 0: none is asked for
	abortOver  uint64    // the connection that the abort went over
	detour     bool      // another one than the metadata's
	answered   bool      // the rank has said that it writes nothing any more
}

// advance gives the room a later status.
func (r *room) advance(s nixlkv.Status) {
	if r.status >= s || r.status.Ended() {
		return
	}
	r.status = s
	closeOnce(r.ready)
	r.m.noteChanged(r)
}

// closeOnce closes a channel unless it is closed. Callers hold the room's lock.
func closeOnce(c chan struct{}) {
	select {
	case <-c:
	default:
		close(c)
	}
}

func stopTimer(t **time.Timer) {
	if *t != nil {
		(*t).Stop()
		*t = nil
	}
}

// end ends the room.
func (r *room) end(s nixlkv.Status) {
	r.status = s
	r.metrics.Ended = time.Now()
	stopTimer(&r.timer)
	r.held = nil
	r.dest = Destination{}
	if r.stopConnect != nil {
		r.stopConnect(nixlkv.ErrAborted)
	}
	closeOnce(r.ready)
	closeOnce(r.done)
	r.m.stats.ended(s)
	r.m.noteChanged(r)
}

// fail records the first cause of failure and gives the room up: its prefill ranks are told at
// once, whoever failed. Later causes are consequences.
func (r *room) fail(cause error) {
	if r.status.Ended() {
		return
	}
	r.failure = r.transferError(cause)
	r.end(nixlkv.Failed)
	r.giveUp()
	r.settle()
}

// transferError gives the room's error for its caller.
func (r *room) transferError(cause error) *KVTransferError {
	e := &KVTransferError{Room: r.id, Reason: cause.Error(), Peer: r.prefill.addr, Cause: cause}
	var given *KVTransferError
	if errors.As(cause, &given) {
		*e = *given
		e.Room, e.Peer = r.id, r.prefill.addr
	}
	if len(e.Ranks) == 0 {
		e.Ranks = r.reports()
	}
	return e
}

// reports says what each prefill rank has told.
func (r *room) reports() []nixlkv.RankReport {
	ranks := r.ranks
	if r.track != nil {
		ranks = r.track.ranks
	}
	reports := make([]nixlkv.RankReport, len(ranks))
	for i, p := range ranks {
		reports[i] = nixlkv.RankReport{Rank: p.number, Peer: r.targets[i].to.String(), State: p.state, Reason: p.reason}
	}
	return reports
}

// connected takes the prefill ranks of the room.
func (r *room) connected(g *group, targets []*roomTarget) {
	r.group, r.targets = g, targets
	for _, t := range targets {
		// Up to 0.5.21 the topology has no policy, and this library tells only one that is not
		// the default.
		r.ranks = append(r.ranks, rankProgress{number: t.number, dummy: t.dummy, settles: g.topology.DecodeAllocationPolicy == ""})
	}
}

// goOn runs what is to go out to the prefill, at once or when no earlier use of the number can
// be meant any more.
func (r *room) goOn(send func()) {
	if r.m.lingers(r) {
		r.held = send
		return
	}
	send()
}

// resume runs what was held back, if nothing holds it back any more. It takes mu.
func (r *room) resume() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if send := r.held; send != nil && !r.m.lingers(r) {
		r.held = nil
		send()
	}
}

// flush sends the metadata to every prefill rank, dummies too.
func (r *room) flush() {
	d := &r.dest
	var components []int
	for i, s := range d.State {
		if len(s) > 0 {
			components = append(components, i)
		}
	}
	r.track = newTracker(r.ranks, r.group.mapping.Responses, components, trackerLimits{
		chunks: r.m.cfg.limits.Chunks,
		parts:  len(r.m.layout.KV) + 1,
	})
	r.open = true
	r.m.watching(1)
	r.metrics.Published = time.Now()
	frames, dummies, err := r.metadata()
	for _, t := range r.targets {
		if err == nil {
			f := frames
			if t.dummy {
				f = dummies
			}
			err = r.tell(t, f)
		}
		if err != nil {
			r.fail(r.untold(t, err))
			return
		}
	}
	r.dest.Pages, r.dest.State = nil, nil
}

// metadata gives the messages for ranks that send, and for dummies.
func (r *room) metadata() (frames, dummies [][]byte, err error) {
	d := &r.dest
	meta := wire.Metadata{
		Room: r.id, From: r.m.self, Agent: r.m.agent.Name(), KVIndices: d.Pages, AuxIndex: d.Aux.slot,
		Destinations: r.group.mapping.Destinations, StateIndices: d.State, Prefix: d.Prefix,
	}
	var enc, dummyEnc wire.Encoder // let go with the frames, which stay queued
	if frames, err = enc.Metadata(&meta); err != nil {
		return nil, nil, err
	}
	meta.Dummy = true
	dummies, err = dummyEnc.Metadata(&meta)
	return frames, dummies, err
}

// tell sends the metadata to one rank.
func (r *room) tell(t *roomTarget, frames [][]byte) error {
	o := &outgoing{frames: frames}
	o.done = func(generation uint64, err error) { r.sent(t, generation, err) }
	t.out, t.told = o, true
	err := t.link.send(o)
	if err != nil {
		t.out, t.told = nil, false
	}
	return err
}

// sent takes the outcome of sending the metadata to a rank. It takes mu.
func (r *room) sent(t *roomTarget, generation uint64, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	t.out = nil
	if err == nil {
		t.generation = generation
		return
	}
	t.told = false // it was not taken for any connection
	r.fail(r.untold(t, err))
	r.settle()
}

// untold says that a rank could not be told where the pages go.
func (r *room) untold(t *roomTarget, err error) error {
	r.prefill.forget()
	return fmt.Errorf("send_metadata to prefill %s failed: %w", t.to, err)
}

// verdict acts on what the tracker made of a message.
func (r *room) verdict(v verdict, err error) {
	switch v {
	case complete:
		r.complete()
	case broken:
		r.fail(err)
	case ignored:
		r.m.stats.ignored.Add(1)
	}
	r.settle()
}

// complete ends a room whose pages are all there, if its aux slot is its own.
func (r *room) complete() {
	if r.status.Ended() {
		return // it had failed; what came now only says who writes nothing any more
	}
	if b := r.m.cfg.metadata; b != nil {
		if err := b.CheckRoom(r.dest.Aux.slot, r.id); err != nil {
			if !errors.Is(err, nixlkv.ErrCorruptMetadata) {
				err = fmt.Errorf("%w: %w", nixlkv.ErrCorruptMetadata, err)
			}
			r.fail(err)
			return
		}
	}
	r.metrics.Slot = r.dest.Aux.slot
	r.end(nixlkv.Success)
}

// rankLost notes the loss of a connection that something of the room went over. It takes mu.
func (r *room) rankLost(l *link, generation uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, t := range r.targets {
		if t.link != l {
			continue
		}
		if t.abort != 0 && t.abortOver == generation && r.awaits(t) {
			r.sendAbort(t) // it may not have been read
		}
		if t.generation != generation {
			continue
		}
		suffers := true
		if r.track != nil {
			suffers = r.track.lost(t.number)
		} else {
			r.note(t.number, nixlkv.RankLost, "")
		}
		if suffers && !r.status.Ended() {
			r.fail(fmt.Errorf("%w: Lost connection with prefill instance (bootstrap_addr: %s): rank %d at %s",
				nixlkv.ErrPeerLost, r.prefill.addr, t.number, t.to))
		}
	}
	r.settle()
}

// note keeps what became of a rank before the metadata went out.
func (r *room) note(number int, s nixlkv.RankState, reason string) {
	for i := range r.ranks {
		if r.ranks[i].number == number {
			r.ranks[i].state, r.ranks[i].reason = s, reason
		}
	}
}

// expire fails a room whose pages did not come in time. n says of which timeout; one that was
// started anew meanwhile does not count. It takes mu.
func (r *room) expire(n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.status.Ended() || n != r.timeouts {
		return
	}
	r.prefill.forget()
	if !r.published {
		r.fail(r.refusedHere(fmt.Errorf("%w: Timed out waiting for prefill completion, or for pages after it: Request %d timed out after %gs in KVPoll.Bootstrapping",
			nixlkv.ErrTimeout, r.id, r.m.cfg.waitingTimeout.Seconds())))
		return
	}
	progress := ""
	if r.track != nil {
		progress = fmt.Sprintf(": %d of %d prefill ranks have told success, notifications are complete from %d", r.track.done, r.track.need, r.track.sourcesDone())
	}
	r.fail(r.refusedHere(fmt.Errorf("%w: Request %d timed out after %gs in KVPoll.WaitingForInput%s", nixlkv.ErrTimeout, r.id, r.m.cfg.waitingTimeout.Seconds(), progress)))
}

// refusedHere adds to a timeout that this side does not let a rank of the room in, where it has
// refused connections from the rank's address meanwhile.
func (r *room) refusedHere(timeout error) error {
	for _, t := range r.targets {
		if err := r.m.ctl.Refused(t.to.AddrPort().Addr(), r.metrics.Opened); err != nil {
			return fmt.Errorf("%w: prefill rank %d: %w", timeout, t.number, err)
		}
	}
	return timeout
}

// startWaiting starts the waiting timeout.
func (r *room) startWaiting() {
	stopTimer(&r.timer)
	r.timeouts++
	n := r.timeouts
	r.timer = time.AfterFunc(r.m.cfg.waitingTimeout, func() { r.m.afterDrain(func() { r.expire(n) }) })
}

// unlink lets go of the prefill and its ranks.
func (r *room) unlink() {
	for _, t := range r.targets {
		if t.link != nil {
			r.m.unlink(t.link, r)
			t.link = nil
		}
	}
	r.m.leave(r.prefill)
}

// target finds a rank by its number.
func (r *room) target(number int) *roomTarget {
	i := slices.IndexFunc(r.targets, func(t *roomTarget) bool { return t.number == number })
	if i < 0 {
		return nil
	}
	return r.targets[i]
}
