package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/nixlkv/nixlkv/hostmem"
	"github.com/nixlkv/nixlkv/kvreceiver"
	"github.com/nixlkv/nixlkv/metadata"
	"github.com/nixlkv/nixlkv/registry"
)

// shape is what a model's KV cache looks like: one K and one V region a layer.
type shape struct{ layers, pages, pageSize, tokenBytes int }

func (s shape) itemLen() int { return s.pageSize * s.tokenBytes }

const auxSlots = 64

// worker owns the memory of a decode rank and has it written to.
type worker struct {
	shape    shape
	kv       *hostmem.Buffer
	aux      []*hostmem.Buffer
	slots    *metadata.Buffers
	pages    *pool // free pages
	free     *pool // free aux slots
	receiver *kvreceiver.Manager
	log      *zap.Logger
	check    bool // the prefills are examples/prefill

	releases sync.WaitGroup // of pages that are waited for
}

func newWorker(ctx context.Context, s shape, log *zap.Logger, opts ...kvreceiver.Option) (_ *worker, err error) {
	w := &worker{shape: s, log: log, pages: newPool(s.pages), free: newPool(auxSlots)}
	defer func() {
		if err != nil {
			err = errors.Join(err, w.freeMemory())
		}
	}()
	if s.layers < 1 || s.pages < 1 || s.pageSize < 1 || s.tokenBytes < 1 {
		return nil, fmt.Errorf("shape %+v: everything must be positive", s)
	}
	regionLen := s.pages * s.itemLen()
	if w.kv, err = hostmem.Alloc(2 * s.layers * regionLen); err != nil {
		return nil, err
	}
	layout := &registry.Layout{PageSize: s.pageSize, KVHeads: 1, TotalKVHeads: 1}
	for i := range 2 * s.layers { // all K, then all V
		layout.KV = append(layout.KV, registry.Region{
			Base: uint64(w.kv.Addr()) + uint64(i*regionLen), Len: uint64(regionLen), ItemLen: uint64(s.itemLen()),
			LayerID: registry.NoLayer, Kind: registry.DRAM,
		})
	}
	if err := w.makeSlots(layout); err != nil {
		return nil, err
	}
	w.receiver, err = kvreceiver.NewManager(ctx, layout, append(opts, kvreceiver.WithMetadata(w.slots), kvreceiver.WithMemory(append(w.aux, w.kv)...))...)
	return w, err
}

// makeSlots makes the metadata buffers, as a SGLang server of the newest release has them. The
// prefill must have the same: their lengths are not on the wire.
func (w *worker) makeSlots(layout *registry.Layout) error {
	meta, err := metadata.NewLayout(metadata.SGLang0523, metadata.Options{})
	if err != nil {
		return err
	}
	var memory [][]byte
	for _, n := range meta.ItemLens() {
		b, err := hostmem.Alloc(auxSlots * int(n))
		if err != nil {
			return err
		}
		w.aux = append(w.aux, b)
		memory = append(memory, b.Bytes())
		layout.Aux = append(layout.Aux, registry.AuxBuffer{Base: uint64(b.Addr()), Len: uint64(b.Len()), ItemLen: n})
	}
	w.slots, err = metadata.NewBuffers(meta, auxSlots, memory)
	return err
}

// Close ends the worker. The memory is freed only once nothing writes to it any more.
func (w *worker) Close() error {
	err := w.receiver.Close()
	w.releases.Wait()
	if err != nil {
		return err
	}
	return w.freeMemory()
}

func (w *worker) freeMemory() error {
	var errs []error
	for _, b := range append(w.aux, w.kv) {
		if b != nil {
			errs = append(errs, b.Free())
		}
	}
	return errors.Join(errs...)
}

// decode takes pages for a request, has them filled by its prefill, and gives them back: a
// server would keep them until it has generated the answer.
func (w *worker) decode(ctx context.Context, q request) (a answer, err error) {
	r, err := w.receiver.Open(q.Room, q.Bootstrap)
	if err != nil {
		return a, err
	}
	pages, slot, err := w.reserve((len(q.Tokens) + w.shape.pageSize - 1) / w.shape.pageSize)
	if err != nil {
		return a, errors.Join(err, r.Close())
	}
	a, err = w.receive(ctx, r, q, pages, slot)
	err = errors.Join(err, r.Close()) // aborts the room if it has not ended
	w.releases.Go(func() { w.giveBack(r, pages, slot) })
	return a, err
}

// receive has a request's pages filled.
func (w *worker) receive(ctx context.Context, r *kvreceiver.Receiver, q request, pages []int32, slot int32) (a answer, err error) {
	if err := r.Connect(ctx); err != nil {
		return a, err
	}
	if err := r.WaitReady(ctx); err != nil {
		return a, err
	}
	if err := r.Publish(kvreceiver.Destination{Pages: pages, Aux: kvreceiver.Aux(int(slot))}); err != nil {
		return a, err
	}
	if err := r.Wait(ctx); err != nil {
		return a, err
	}
	var rec metadata.Record
	if err := r.Metadata(&rec, metadata.Want{}); err != nil {
		return a, err
	}
	if w.check {
		if err := w.checkPages(q.Tokens, pages, rec.OutputID); err != nil {
			return a, fmt.Errorf("room %d: %w", q.Room, err)
		}
	}
	m := r.Metrics()
	took := m.Ended.Sub(m.Published)
	return answer{Room: q.Room, FirstToken: rec.OutputID, Pages: len(pages), Checked: w.check, Millis: float64(took) / float64(time.Millisecond)}, nil
}

func (w *worker) reserve(n int) (pages []int32, slot int32, err error) {
	if pages, err = w.pages.take(n); err != nil {
		return nil, 0, fmt.Errorf("KV pages: %w", err)
	}
	slots, err := w.free.take(1)
	if err != nil {
		w.pages.put(pages...)
		return nil, 0, fmt.Errorf("aux slots: %w", err)
	}
	return pages, slots[0], nil
}

// giveBack makes pages free for the next request as soon as the prefill cannot write to them
// any more: at once after success, else when it has said so. If it does not within the release
// timeout nobody knows, and they are not used again; a server may do so once the prefill is
// known to be dead.
func (w *worker) giveBack(r *kvreceiver.Receiver, pages []int32, slot int32) {
	if err := r.Released(context.Background()); err != nil { // bounded by the release timeout
		w.log.Warn("pages are lost", zap.Int("pages", len(pages)), zap.Error(err))
		return
	}
	w.pages.put(pages...)
	w.free.put(slot)
}

// errContents: the pages do not hold what examples/prefill computes.
var errContents = errors.New("wrong contents")

// checkPages compares pages with what examples/prefill makes of the same tokens: each token's
// number, with the region's, all over the token's row, and the number after the last one as
// first token.
func (w *worker) checkPages(tokens, pages []int32, first int32) error {
	mem, s := w.kv.Bytes(), w.shape
	for region := range 2 * s.layers {
		for i, token := range tokens {
			at := (region*s.pages+int(pages[i/s.pageSize]))*s.itemLen() + i%s.pageSize*s.tokenBytes
			row := mem[at : at+s.tokenBytes]
			want := uint64(uint32(token))<<32 | uint64(region)
			for k := 0; k+8 <= len(row); k += 8 {
				if got := binary.LittleEndian.Uint64(row[k:]); got != want {
					return fmt.Errorf("%w: region %d, token %d at page %d: %#x, want %#x", errContents, region, i, pages[i/s.pageSize], got, want)
				}
			}
		}
	}
	if n := len(tokens); n > 0 && first != tokens[n-1]+1 {
		return fmt.Errorf("%w: first token %d, want %d", errContents, first, tokens[n-1]+1)
	}
	return nil
}
