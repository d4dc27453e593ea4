package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/hostmem"
	"github.com/nixlkv/nixlkv/kvsender"
	"github.com/nixlkv/nixlkv/metadata"
	"github.com/nixlkv/nixlkv/registry"
)

// shape is what a model's KV cache looks like: one K and one V region a layer.
type shape struct{ layers, pages, pageSize, tokenBytes int }

func (s shape) itemLen() int { return s.pageSize * s.tokenBytes }

const auxSlots = 64

// chunkPages is how many pages are computed before they are sent.
const chunkPages = 8

// worker owns the memory of a prefill rank and sends from it.
type worker struct {
	shape  shape
	kv     *hostmem.Buffer
	aux    []*hostmem.Buffer
	slots  *metadata.Buffers
	pages  *pool // free pages
	free   *pool // free aux slots
	sender *kvsender.Manager
}

func newWorker(ctx context.Context, s shape, opts ...kvsender.Option) (_ *worker, err error) {
	w := &worker{shape: s, pages: newPool(s.pages), free: newPool(auxSlots)}
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
	w.sender, err = kvsender.NewManager(ctx, layout, append(opts, kvsender.WithMemory(append(w.aux, w.kv)...))...)
	return w, err
}

// makeSlots makes the metadata buffers, as a SGLang server of the newest release has them.
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

// Close ends the worker. The memory is freed only once nothing reads it any more.
func (w *worker) Close() error {
	if err := w.sender.Close(); err != nil {
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

// prefill computes a prompt and sends its KV cache to the room's decode.
func (w *worker) prefill(ctx context.Context, p prompt) (kvsender.Metrics, error) {
	var none kvsender.Metrics
	s, err := w.sender.Open(p.Room)
	if err != nil {
		return none, err
	}
	prefix, err := s.WaitBootstrapped(ctx)
	if err != nil {
		return none, errors.Join(err, s.Close())
	}
	tokens := p.Tokens[min(prefix, len(p.Tokens)):] // the decode has the others
	pages, slot, err := w.reserve((len(tokens) + w.shape.pageSize - 1) / w.shape.pageSize)
	if err != nil {
		s.Abort(err.Error())
		return none, errors.Join(err, s.Close())
	}
	err = w.send(ctx, s, p, tokens, pages, slot)
	metrics := s.Metrics()
	err = errors.Join(err, s.Close()) // aborts the room if it has not ended
	// The pages are read until the room has ended, which may be after Close, and even longer
	// when its writes do not settle: then they are not used again.
	<-s.Done()
	if !errors.Is(s.Err(), nixlkv.ErrReleaseUnconfirmed) {
		w.pages.put(pages...)
		w.free.put(slot)
	}
	return metrics, err
}

func (w *worker) send(ctx context.Context, s *kvsender.Sender, p prompt, tokens, pages []int32, slot int32) error {
	if err := s.Begin(kvsender.Plan{Pages: len(pages), Tokens: len(tokens), Aux: kvsender.Aux(int(slot))}); err != nil {
		return err
	}
	for len(pages) > chunkPages {
		n := chunkPages * w.shape.pageSize
		w.compute(tokens[:n], pages[:chunkPages])
		if err := s.Send(pages[:chunkPages]); err != nil {
			return err
		}
		tokens, pages = tokens[n:], pages[chunkPages:]
	}
	first := w.compute(tokens, pages)
	if err := w.slots.Encode(int(slot), &metadata.Record{Room: p.Room, OutputID: first}); err != nil {
		return err
	}
	if err := s.Finish(pages, nil); err != nil {
		return err
	}
	return s.Wait(ctx)
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

// compute stands where a model would be: it writes each token's number, with the layer's,
// all over the token's row, and gives a "first output token".
func (w *worker) compute(tokens, pages []int32) (next int32) {
	mem, s := w.kv.Bytes(), w.shape
	for region := range 2 * s.layers {
		for i, token := range tokens {
			at := (region*s.pages+int(pages[i/s.pageSize]))*s.itemLen() + i%s.pageSize*s.tokenBytes
			row := mem[at : at+s.tokenBytes]
			for k := 0; k+8 <= len(row); k += 8 {
				binary.LittleEndian.PutUint64(row[k:], uint64(uint32(token))<<32|uint64(region))
			}
		}
	}
	if len(tokens) > 0 {
		next = tokens[len(tokens)-1] + 1
	}
	return next
}
