package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"

	"github.com/nixlkv/nixlkv/hostmem"
)

// errSlot: a slot that the memory does not have.
var errSlot = errors.New("no such slot")

// memory is all that a rank has: KV regions, aux buffers and state components.
type memory struct {
	kv, aux []slotted
	state   [][]slotted
}

// slotted is memory divided into slots of equal length. One of a state component may be
// missing; it then has no bytes.
type slotted struct {
	buf     *hostmem.Buffer
	itemLen int
}

func newMemory(c *config) (_ *memory, err error) {
	m := &memory{}
	defer func() {
		if err != nil {
			err = errors.Join(err, m.free())
		}
	}()
	alloc := func(to *[]slotted, itemLen, slots int) error {
		s := slotted{itemLen: itemLen}
		if itemLen > 0 {
			if s.buf, err = hostmem.Alloc(itemLen*slots, hostmem.Name("kvpeer")); err != nil {
				return err
			}
		}
		*to = append(*to, s)
		if s.buf == nil {
			return nil
		}
		// The first write into a page costs a fault, which a bench would time.
		return s.buf.Touch()
	}
	for i, n := range c.KV.ItemLens {
		if err := alloc(&m.kv, n, c.KV.NumSlots.of(i)); err != nil {
			return nil, err
		}
	}
	for _, n := range c.KV.AuxItemLens {
		if err := alloc(&m.aux, n, c.KV.AuxSlots); err != nil {
			return nil, err
		}
	}
	m.state = make([][]slotted, len(c.KV.State))
	for i, s := range c.KV.State {
		for _, n := range s.ItemLens {
			if err := alloc(&m.state[i], n, s.NumSlots); err != nil {
				return nil, err
			}
		}
	}
	return m, nil
}

// all yields every part of the memory.
func (m *memory) all(yield func(slotted) bool) {
	for _, list := range append([][]slotted{m.kv, m.aux}, m.state...) {
		for _, s := range list {
			if !yield(s) {
				return
			}
		}
	}
}

func (m *memory) free() error {
	var errs []error
	for s := range m.all {
		if s.buf != nil {
			errs = append(errs, s.buf.Free())
		}
	}
	return errors.Join(errs...)
}

// bytes gives the memory, nil for what is missing.
func (s slotted) bytes() []byte {
	if s.buf == nil {
		return nil
	}
	return s.buf.Bytes()
}

func (s slotted) slots() int {
	if s.itemLen == 0 {
		return 0
	}
	return len(s.bytes()) / s.itemLen
}

// slot gives the bytes of slot i, which must be there.
func (s slotted) slot(i int) []byte {
	return s.bytes()[i*s.itemLen : (i+1)*s.itemLen]
}

func (s slotted) addr() uint64 {
	if s.buf == nil {
		return 0
	}
	return uint64(s.buf.Addr())
}

// digest is SHA-256 over slots, buffer by buffer in order, the slots in the order given.
func digest(list []slotted, slots []int32) (string, error) {
	h := sha256.New()
	for r, s := range list {
		if s.buf == nil {
			continue
		}
		for _, i := range slots {
			if i < 0 || int(i) >= s.slots() {
				return "", fmt.Errorf("%w: %d of %d, in buffer %d", errSlot, i, s.slots(), r)
			}
			h.Write(s.slot(int(i)))
		}
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// stray counts the bytes that are not zero outside of some slots.
func stray(list []slotted, but []int32) int {
	n := 0
	for _, s := range list {
		named := make([]bool, s.slots())
		for _, i := range but {
			if i >= 0 && int(i) < len(named) {
				named[i] = true
			}
		}
		for i, skip := range named {
			if !skip {
				n += s.itemLen - bytes.Count(s.slot(i), []byte{0})
			}
		}
	}
	return n
}

// buffers lists what the memory consists of.
func (m *memory) buffers() (all []*hostmem.Buffer) {
	for s := range m.all {
		if s.buf != nil {
			all = append(all, s.buf)
		}
	}
	return all
}
