package main

import (
	"context"
	"errors"
	"fmt"
	"syscall"

	"github.com/nixlkv/nixlkv/hostmem"
	"github.com/nixlkv/nixlkv/registry"
)

// pool is the KV cache of one worker: a buffer for each region, all of the same number of
// pages.
type pool struct {
	shape   shape
	pages   int
	buffers []*hostmem.Buffer
	mem     [][]byte // of each buffer
}

// newPool allocates a pool, zeroed. Every page is there when it returns: a page fault under
// a transfer would be measured as part of it.
func newPool(ctx context.Context, name string, s shape, pages int) (_ *pool, err error) {
	p := &pool{shape: s, pages: pages}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.free())
		}
	}()
	for region := range s.regions() {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		if err := p.addRegion(fmt.Sprintf("%s-%d", name, region)); errors.Is(err, syscall.ENOMEM) {
			return nil, fmt.Errorf("%w: KV cache of %s, region %d: %w", errNoMemory, formatBytes(s.bytes(pages)), region, err)
		} else if err != nil {
			return nil, fmt.Errorf("KV cache of %s, region %d: %w", formatBytes(s.bytes(pages)), region, err)
		}
	}
	return p, nil
}

func (p *pool) addRegion(name string) error {
	b, err := hostmem.Alloc(p.pages*p.shape.pageBytes(), hostmem.Name(name))
	if err != nil {
		return err
	}
	p.buffers, p.mem = append(p.buffers, b), append(p.mem, b.Bytes())
	return b.Touch()
}

// free gives the memory back. It must not be registered any more.
func (p *pool) free() error {
	var errs []error
	for _, b := range p.buffers {
		errs = append(errs, b.Free())
	}
	p.buffers, p.mem = nil, nil
	return errors.Join(errs...)
}

// page is one page of one region.
func (p *pool) page(region int, page int32) []byte {
	n := p.shape.pageBytes()
	return p.mem[region][int(page)*n:][:n:n]
}

// fill writes the pattern to every page, those of no request included: sent by mistake,
// they show.
func (p *pool) fill(ctx context.Context, seed uint64) error {
	for region := range p.mem {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		for page := range int32(p.pages) {
			fillPage(p.page(region, page), pattern(seed, region, page))
		}
	}
	return nil
}

// layout adds the regions to what the library is told of a worker.
func (p *pool) layout(l *registry.Layout) {
	for _, b := range p.buffers {
		l.KV = append(l.KV, registry.Region{
			Base: uint64(b.Addr()), Len: uint64(b.Len()), ItemLen: uint64(p.shape.pageBytes()),
			LayerID: registry.NoLayer, Kind: registry.DRAM,
		})
	}
}
