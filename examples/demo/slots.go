package main

import (
	"errors"
	"fmt"

	"github.com/nixlkv/nixlkv/hostmem"
	"github.com/nixlkv/nixlkv/metadata"
	"github.com/nixlkv/nixlkv/registry"
)

// slots are one worker's metadata buffers, as a SGLang server of the newest release has them.
type slots struct {
	*metadata.Buffers
	memory []*hostmem.Buffer
}

// newSlots allocates n slots.
func newSlots(name string, n int) (_ *slots, err error) {
	s := &slots{}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("%d metadata slots: %w", n, err), s.free())
		}
	}()
	meta, err := metadata.NewLayout(metadata.SGLang0523, metadata.Options{})
	if err != nil {
		return nil, err
	}
	var rows [][]byte
	for i, itemLen := range meta.ItemLens() {
		b, err := hostmem.Alloc(n*int(itemLen), hostmem.Name(fmt.Sprintf("%s-metadata-%d", name, i)))
		if err != nil {
			return nil, err
		}
		s.memory, rows = append(s.memory, b), append(rows, b.Bytes())
	}
	s.Buffers, err = metadata.NewBuffers(meta, n, rows)
	return s, err
}

// layout adds the buffers to what the library is told of a worker.
func (s *slots) layout(l *registry.Layout) {
	for i, b := range s.memory {
		l.Aux = append(l.Aux, registry.AuxBuffer{Base: uint64(b.Addr()), Len: uint64(b.Len()), ItemLen: s.Layout().ItemLens()[i]})
	}
}

// free gives the memory back. It must not be registered any more.
func (s *slots) free() error {
	var errs []error
	for _, b := range s.memory {
		errs = append(errs, b.Free())
	}
	s.memory = nil
	return errors.Join(errs...)
}
