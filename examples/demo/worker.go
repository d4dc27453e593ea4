package main

import (
	"context"
	"errors"
	"slices"

	"github.com/nixlkv/nixlkv/hostmem"
	"github.com/nixlkv/nixlkv/nixl"
	"github.com/nixlkv/nixlkv/registry"
)

// worker is what both sides have: an engine, a KV cache and metadata slots.
type worker struct {
	engine *nixl.Engine
	pool   *pool
	slots  *slots
}

// openEngine opens the engine that the flags ask for.
func (w *worker) openEngine(p *program) (err error) {
	w.engine, err = nixl.Open(p.kind, nixl.WithNIXLLogLevel(p.nixlLog), nixl.WithLogger(p.log))
	if errors.Is(err, nixl.ErrLibraryNotFound) {
		err = &noLibraryError{err}
	}
	return err
}

// makeMemory makes an empty cache and empty slots, and describes them. Validation and
// registration are the managers'.
func (w *worker) makeMemory(ctx context.Context, name string, p *plan) (l *registry.Layout, err error) {
	if w.pool, err = newPool(ctx, name, p.shape, p.pool); err != nil {
		return nil, err
	}
	if w.slots, err = newSlots(name, p.requests()); err != nil {
		return nil, err
	}
	l = &registry.Layout{
		PageSize: p.shape.pageTokens, KVHeads: p.shape.kvHeads, TotalKVHeads: p.shape.kvHeads, KVDtype: "bfloat16",
	}
	w.pool.layout(l)
	w.slots.layout(l)
	return l, nil
}

// memory lists what the layout lies in.
func (w *worker) memory() []*hostmem.Buffer { return slices.Concat(w.pool.buffers, w.slots.memory) }

// close gives everything back, the manager first. What a manager could not let go of may
// still be written to: then nothing is freed, and the memory ends with the process.
func (w *worker) close(manager func() error) error {
	if manager != nil {
		if err := manager(); err != nil {
			return err
		}
	}
	var errs []error
	if w.engine != nil {
		errs = append(errs, w.engine.Close())
	}
	if w.pool != nil {
		errs = append(errs, w.pool.free())
	}
	if w.slots != nil {
		errs = append(errs, w.slots.free())
	}
	return errors.Join(errs...)
}
