package kvsender

import (
	"errors"
	"fmt"
	"time"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/internal/wire"
	"github.com/nixlkv/nixlkv/nixl"
	"github.com/nixlkv/nixlkv/registry"
)

// worker posts the chunks of rooms. What it builds lists in is its own and used again, so
// that a chunk allocates nothing.
type worker struct {
	m              *Manager
	parts          []part
	runs           []run
	pages          []int32
	from, to       []nixl.Desc
	fromIdx, toIdx []int32
	tag            []byte
	scratch        []int32
	local, remote  [2]*nixl.List // by kind of memory
}

// part is a segment of a chunk that carries something: one transfer, and one part of what the
// decode is told. Its units are runs[from:to] of the worker.
type part struct{ segment, from, to int }

// work is a worker's loop.
func (m *Manager) work() {
	w := &worker{m: m}
	for r := m.runQueue.get(); r != nil; r = m.runQueue.get() {
		w.step(r)
		w.trim()
	}
	for _, l := range append(w.local[:], w.remote[:]...) {
		if l != nil {
			m.peers.logIf("freeing a list", l.Free())
		}
	}
}

// keptPieces is how many pieces a worker keeps memory for between chunks.
const keptPieces = 1 << 20

// trim lets go of what an unusually large chunk has left.
func (w *worker) trim() {
	if max(cap(w.fromIdx), cap(w.toIdx)) > keptPieces {
		w.fromIdx, w.toIdx = nil, nil
	}
	if max(cap(w.from), cap(w.to)) > keptPieces {
		w.from, w.to = nil, nil
	}
}

// step posts the next chunk of a room, if there is one and its peers are ready.
func (w *worker) step(r *room) {
	r.mu.Lock()
	defer r.mu.Unlock()
	c, err := w.next(r)
	if c != nil {
		// Posting can take long. The room stays marked as scheduled, so nobody else posts for it
		// and it does not end meanwhile.
		r.mu.Unlock()
		var later bool
		later, err = w.post(r, c)
		r.mu.Lock()
		r.allPosted = err == nil && c.last && !later
		if later && r.failure == nil {
			c.landed = true
			r.queue = append(r.queue, c)
		}
	}
	r.scheduled = false
	if err != nil {
		r.fail(err)
	}
	r.schedule()
	r.advance()
}

// next gives the chunk to post: nil without an error if the room has failed or has to wait.
// The caller holds r.mu.
func (w *worker) next(r *room) (*chunk, error) {
	if r.failure != nil || len(r.queue) == 0 {
		return nil, nil
	}
	if ready, err := w.lease(r); !ready || err != nil {
		return nil, err
	}
	if r.metrics.Posted.IsZero() {
		if err := w.checkRoom(r); err != nil {
			return nil, err
		}
		r.metrics.Posted = time.Now()
		r.advance()
	}
	c := r.queue[0]
	r.queue[0] = nil
	r.queue = r.queue[1:]
	if !c.landed {
		r.metrics.Chunks++
	}
	return c, nil
}

// lease takes hold of the room's peers. While one is being taken up the room waits for it,
// and ready is false. The caller holds r.mu.
func (w *worker) lease(r *room) (ready bool, err error) {
	for _, d := range r.dests {
		if d.meta.Dummy {
			continue
		}
		if d.lease != nil {
			if err := d.lease.Err(); err != nil {
				return false, d.failed("", fmt.Errorf("%w: the decode changed: %w", nixlkv.ErrMissingMemoryKind, err))
			}
			continue
		}
		if d.lease, err = w.acquire(r, d.meta.Agent); err != nil {
			return false, d.failed("", err)
		}
		if d.lease == nil {
			return false, nil
		}
	}
	return true, nil
}

// acquire gives a lease on a peer; none without an error if the room was parked.
func (w *worker) acquire(r *room, agent string) (*registry.Lease[*wiredPeer], error) {
	peers := w.m.peers
	l, err := peers.Acquire(agent)
	if errors.Is(err, nixlkv.ErrPeerStale) {
		// NIXL dropped it after a disconnect; the registration that it gave is still good.
		switch prep, e := peers.Reload(agent); {
		case e == nil:
			peers.prepare(agent, prep)
		case errors.Is(e, registry.ErrPreparing), errors.Is(e, registry.ErrNotStale):
			// Another room, or a look, was first.
		default:
			return nil, e
		}
		l, err = peers.Acquire(agent)
	}
	if !errors.Is(err, registry.ErrPreparing) {
		return l, err
	}
	peers.park(agent, r)
	// It may have been taken up in between, and then nobody would wake the room.
	if l, err = peers.Acquire(agent); errors.Is(err, registry.ErrPreparing) {
		return nil, nil
	}
	r.parked = false
	return l, err
}

// checkRoom checks all of a room that can be checked before anything of it is posted. The
// caller holds r.mu and the leases.
func (w *worker) checkRoom(r *room) error {
	for _, d := range r.dests {
		if d.meta.Dummy {
			continue
		}
		if err := w.checkDest(r, d); err != nil {
			return d.failed("", err)
		}
	}
	return nil
}

func (w *worker) checkDest(r *room, d *dest) (err error) {
	p, pages := d.lease.Plan(), d.meta.KVIndices
	if err := p.kv.checkRoom(r.plan, r.m.layout.PageSize, d.meta.Prefix, pages); err != nil {
		return err
	}
	if w.scratch, err = checkDistinct(pages, w.scratch); err != nil {
		return err
	}
	if err := w.checkState(r, d); err != nil {
		return err
	}
	w.from, w.to, err = p.aux.appendDescs(w.from[:0], w.to[:0], r.plan.Aux.slot, d.meta.AuxIndex)
	return err
}

// post posts a chunk to every decode of a room; after the pages of the last one goes state,
// then aux. later says that all of it has to land before the rest can be posted: the chunk is
// then posted anew, with landed set.
func (w *worker) post(r *room, c *chunk) (later bool, err error) {
	if !c.landed {
		if later, err = w.postPages(r, c); err != nil || later {
			return later, err
		}
	}
	if !c.last {
		return false, nil
	}
	for _, d := range r.dests {
		if d.meta.Dummy {
			continue
		}
		if c.landed {
			if err := w.tellState(r, d, c); err != nil {
				return false, d.failed("state", err)
			}
		}
		if err := w.postAux(r, d, c); err != nil {
			return false, d.failed("aux", err)
		}
	}
	return false, nil
}

// postPages posts the pages of a chunk and, with the last one, state.
func (w *worker) postPages(r *room, c *chunk) (later bool, err error) {
	if c.last {
		if err := w.checkLast(r, c); err != nil {
			return false, err
		}
	}
	for _, d := range r.dests {
		if d.meta.Dummy {
			continue
		}
		if err := w.postKV(r, d, c); err != nil {
			return false, d.failed("KV", err)
		}
		if !c.last {
			continue
		}
		wait, err := w.postState(r, d, c)
		if err != nil {
			return false, d.failed("state", err)
		}
		later = later || wait
	}
	return later, nil
}

// postKV posts the pages of a chunk to one decode, a transfer for each segment that carries
// some of them. A decode that gets no token of them is told nevertheless, as it counts chunks
// (send_kvcache_dcp in SGLang's nixl/conn.py).
func (w *worker) postKV(r *room, d *dest, c *chunk) error {
	if len(c.pages) == 0 {
		return nil
	}
	if err := d.lease.Err(); err != nil {
		return fmt.Errorf("%w: the decode changed: %w", nixlkv.ErrMissingMemoryKind, err)
	}
	plan := d.lease.Plan().kv
	pages, err := w.place(r, d, c, plan)
	if err != nil {
		return err
	}
	if err := checkPages(plan, pages); err != nil {
		return err
	}
	w.divide(plan, pages)
	if len(w.parts) == 0 {
		return w.notify(d, w.kvTag(r, d, c, 0))
	}
	for i := range w.parts {
		if err := w.postPart(r, d, c, pages, i); err != nil {
			return err
		}
	}
	return nil
}

// place says where the pages of a chunk go.
func (w *worker) place(r *room, d *dest, c *chunk, plan *peerPlan) (pages chunkPages, err error) {
	pages.src = c.pages
	if plan.dealsTokens() {
		pages.dst, pages.at = d.meta.KVIndices, c.tokens(d.meta.Prefix, r.plan.Tokens, w.m.layout.PageSize)
		return pages, nil
	}
	pages.dst, w.pages, err = c.destinations(d.meta.KVIndices, w.pages)
	return pages, err
}

// divide lists the parts of a chunk. Segments whose pages are dealt out alike share the runs.
func (w *worker) divide(plan *peerPlan, c chunkPages) {
	w.parts, w.runs = w.parts[:0], w.runs[:0]
	from := 0
	for i := range plan.segments {
		if s := plan.segments; i == 0 || s[i].deal != s[i-1].deal {
			from = len(w.runs)
			w.runs = s[i].appendRuns(w.runs, c)
		}
		if to := len(w.runs); to > from {
			w.parts = append(w.parts, part{i, from, to})
		}
	}
}

// kvTag makes the notification of a part of a chunk, nil for a decode that drains none.
func (w *worker) kvTag(r *room, d *dest, c *chunk, i int) []byte {
	if d.lease.Peer().Dialect != registry.Notifications {
		return nil
	}
	if parts := len(w.parts); parts > 1 {
		w.tag = wire.AppendKVPart(w.tag[:0], r.id, c.number, c.last, w.m.source, i, parts)
	} else {
		w.tag = wire.AppendKV(w.tag[:0], r.id, c.number, c.last, w.m.source)
	}
	return w.tag
}

// notify tells a decode something without a write. No tag is nothing to tell.
func (w *worker) notify(d *dest, tag []byte) error {
	if tag == nil {
		return nil
	}
	err := d.lease.Plan().remote.Notify(tag)
	if err != nil {
		w.m.peerFailed(d, err)
	}
	return err
}

// postPart posts one part of a chunk.
func (w *worker) postPart(r *room, d *dest, c *chunk, pages chunkPages, i int) (err error) {
	p, x := d.lease.Plan(), w.parts[i]
	s, runs := &p.kv.segments[x.segment], w.runs[x.from:x.to]
	o := nixl.TransferOptions{Post: true, Notif: w.kvTag(r, d, c, i)}
	f := w.m.flight(r, d, "KV")
	units := unitsIn(runs)
	descs := s.rows() * units
	if src := p.sources[x.segment]; src == nil || s.cheaperByDesc(units, len(runs)) {
		w.from, w.to = s.appendDescs(w.from[:0], w.to[:0], runs)
		descs = len(w.from)
		err = w.flyLists(f, p.remote, memOf(s.srcKind), memOf(s.dstKind), o)
	} else {
		w.fromIdx, w.toIdx = s.appendIndices(w.fromIdx[:0], w.toIdx[:0], pages)
		err = w.fly(f, func() error {
			return f.t.CreateIndexed(nixl.Write, src.list, w.fromIdx, p.targets[x.segment], w.toIdx, o)
		})
	}
	if err != nil {
		return err
	}
	w.count(r, s.bytes(units), descs, len(s.pairs)*len(pages.src))
	return nil
}

// bytes counts the bytes of so many units.
func (s *segment) bytes(units int) uint64 {
	var n uint64
	for i := range s.pairs {
		n += s.pairs[i].len * s.pairs[i].rows
	}
	return n * uint64(units)
}

// flyLists posts a transfer between what w.from and w.to describe.
func (w *worker) flyLists(f *flight, remote *nixl.Remote, src, dst nixl.Mem, o nixl.TransferOptions) error {
	local, err := w.fill(&w.local[src], src, w.from)
	if err != nil {
		return err
	}
	target, err := w.fill(&w.remote[dst], dst, w.to)
	if err != nil {
		return err
	}
	return w.fly(f, func() error { return f.t.Create(nixl.Write, local, remote, target, o) })
}

func (w *worker) fill(l **nixl.List, mem nixl.Mem, descs []nixl.Desc) (*nixl.List, error) {
	if *l == nil {
		var err error
		if *l, err = w.m.agent.NewList(mem); err != nil {
			return nil, err
		}
	}
	if err := (*l).Clear(); err != nil {
		return nil, err
	}
	return *l, (*l).Append(descs...)
}

// postAux posts the aux slot, after the last chunk's pages were posted.
func (w *worker) postAux(r *room, d *dest, c *chunk) (err error) {
	p := d.lease.Plan()
	var o nixl.TransferOptions
	if d.lease.Peer().Dialect == registry.Notifications {
		if c.number >= 0 {
			w.tag = wire.AppendAux(w.tag[:0], r.id)
		} else {
			w.tag = wire.AppendAuxNoKV(w.tag[:0], r.id, w.m.source, r.numberedChunks())
		}
		o.Notif = w.tag
	}
	o.Post = true
	w.from, w.to, err = p.aux.appendDescs(w.from[:0], w.to[:0], r.plan.Aux.slot, d.meta.AuxIndex)
	if err != nil {
		return err
	}
	if len(w.from) == 0 {
		return w.notify(d, o.Notif) // nothing to write, but the decode waits to be told
	}
	bytes := uint64(0)
	for _, x := range w.from {
		bytes += x.Len
	}
	if err := w.flyLists(w.m.flight(r, d, "aux"), p.remote, nixl.DRAM, nixl.DRAM, o); err != nil {
		return err
	}
	w.count(r, bytes, len(w.from), 0)
	return nil
}

// fly counts a flight in, creates and posts its transfer, and hands it to the completion
// loop unless it has settled already.
func (w *worker) fly(f *flight, create func() error) error {
	r := f.room
	r.mu.Lock()
	if r.failure != nil { // it failed while this was being built
		defer r.mu.Unlock()
		w.m.reuse(f)
		return r.failure
	}
	r.inFlight++
	r.mu.Unlock()
	if err := create(); err != nil {
		// What was made but could not be posted has settled; it is released like any other.
		d := f.dest
		var rel error
		if f.t.Held() {
			rel = f.t.Release()
		}
		if !f.t.Held() {
			w.m.reuse(f)
		}
		w.m.peerFailed(d, err)
		r.mu.Lock()
		r.inFlight--
		r.mu.Unlock()
		return errors.Join(err, rel)
	}
	// Whatever else it says: in progress is not settled.
	if st, _ := f.t.Status(); st == nixl.InProgress {
		w.m.landing.add(f)
		return nil
	}
	w.m.landed(f)
	return nil
}

// count adds what was posted to the metrics.
func (w *worker) count(r *room, bytes uint64, descs, pieces int) {
	c := &w.m.stats
	c.bytes.Add(bytes)
	c.descriptors.Add(uint64(descs))
	c.transfers.Add(1)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.metrics.Bytes += bytes
	r.metrics.Descriptors += uint64(descs)
	r.metrics.Pages += uint64(pieces)
	r.metrics.Transfers++
}

// numberedChunks counts the chunks that carry pages. It takes mu.
func (r *room) numberedChunks() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.numbered
}

// failed says which decode an error is about.
func (d *dest) failed(what string, err error) error {
	if errors.Is(err, nixl.ErrPeerLost) && !errors.Is(err, nixlkv.ErrPeerLost) {
		err = fmt.Errorf("%w: %w", nixlkv.ErrPeerLost, err)
	}
	if what != "" {
		err = fmt.Errorf("%s transfer: %w", what, err)
	}
	return &destError{d.meta.Agent, d.meta.From, err}
}

// destError is an error of one decode of a room.
type destError struct {
	agent string
	at    wire.Endpoint
	err   error
}

func (e *destError) Error() string { return fmt.Sprintf("decode %s at %s: %v", e.agent, e.at, e.err) }

func (e *destError) Unwrap() error { return e.err }
