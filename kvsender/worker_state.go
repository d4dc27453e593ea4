package kvsender

import (
	"slices"

	"github.com/nixlkv/nixlkv/internal/wire"
	"github.com/nixlkv/nixlkv/nixl"
	"github.com/nixlkv/nixlkv/registry"
)

// State goes with the last chunk, one transfer a component. A decode that waits for
// notifications takes the first one of a source for all of its state (TransferStatus.is_done
// in SGLang's nixl/conn.py, up to 0.5.22), so it may get none before all has landed: with one
// transfer the tag is attached to that, with several it goes by itself, when they have landed.
// A decode that expects state gets a tag even if there was nothing to write: lists without
// slots, or a pipeline stage without such layers. SGLang's own prefill sends none then, and
// its decode waits in vain.

// copyLists copies the lists of a caller.
func copyLists(lists [][]int32) [][]int32 {
	out := make([][]int32, len(lists))
	for i, l := range lists {
		out[i] = slices.Clone(l)
	}
	return out
}

// checkState checks the state of a room against a decode, before anything of the room is
// posted: what the decode tells and, if the last chunk is there, what goes to it. The caller
// holds r.mu.
func (w *worker) checkState(r *room, d *dest) (err error) {
	p := d.lease.Plan().state
	if w.scratch, err = p.checkDestination(d.meta.StateIndices, w.scratch); err != nil {
		return err
	}
	if c := r.queue[len(r.queue)-1]; c.last {
		return p.check(c.state, d.meta.StateIndices)
	}
	return nil
}

// checkLast checks the state of the last chunk against every decode, before anything of the
// chunk is posted.
func (w *worker) checkLast(r *room, c *chunk) error {
	for _, d := range r.dests {
		if d.meta.Dummy {
			continue
		}
		if err := d.lease.Plan().state.check(c.state, d.meta.StateIndices); err != nil {
			return d.failed("state", err)
		}
	}
	return nil
}

// postState posts the state of a room to one decode, before aux. later says that the decode
// has to be told when it has landed.
func (w *worker) postState(r *room, d *dest, c *chunk) (later bool, err error) {
	p := d.lease.Plan()
	transfers := w.stateTransfers(p.state, c)
	notify := takesStateTags(d)
	for i := range p.state.components {
		w.from, w.to, w.runs = p.state.appendDescs(w.from[:0], w.to[:0], w.runs[:0], i, listAt(c.state, i), listAt(d.meta.StateIndices, i))
		if len(w.from) == 0 {
			continue
		}
		o := nixl.TransferOptions{Post: true}
		if notify && transfers == 1 {
			w.tag = wire.AppendState(w.tag[:0], r.id, w.m.source, i)
			o.Notif = w.tag
		}
		bytes := uint64(0)
		for _, x := range w.from {
			bytes += x.Len
		}
		if err := w.flyLists(w.m.flight(r, d, "state"), p.remote, nixl.VRAM, nixl.VRAM, o); err != nil {
			return false, err
		}
		w.count(r, bytes, len(w.from), 0)
		w.countState(r, bytes)
	}
	if notify && transfers == 0 {
		return false, w.tellComponent(r, d, 0)
	}
	return notify && transfers > 1, nil
}

// takesStateTags says whether a decode waits for notifications of a room's state: it has told
// a list for every component of its own.
func takesStateTags(d *dest) bool {
	return d.lease.Peer().Dialect == registry.Notifications && len(d.meta.StateIndices) > 0
}

// stateTransfers counts the components of a room that have something to write.
func (w *worker) stateTransfers(p *statePlan, c *chunk) int {
	n := 0
	for i := range p.components {
		n += one(p.components[i].writes(listAt(c.state, i)))
	}
	return n
}

// tellState tells a decode that a room's state has landed, with a tag for each component.
func (w *worker) tellState(r *room, d *dest, c *chunk) error {
	if !takesStateTags(d) {
		return nil
	}
	for i, slots := range c.state {
		if len(slots) == 0 {
			continue
		}
		if err := w.tellComponent(r, d, i); err != nil {
			return err
		}
	}
	return nil
}

func (w *worker) tellComponent(r *room, d *dest, component int) error {
	w.tag = wire.AppendState(w.tag[:0], r.id, w.m.source, component)
	return w.notify(d, w.tag)
}

// countState adds what was posted of state to the metrics.
func (w *worker) countState(r *room, bytes uint64) {
	w.m.stats.stateBytes.Add(bytes)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.metrics.StateBytes += bytes
}
