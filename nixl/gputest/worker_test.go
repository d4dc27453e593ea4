//go:build gpu && linux

package gputest

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math/rand/v2"

	"github.com/nixlkv/nixlkv/hostmem"
	"github.com/nixlkv/nixlkv/internal/gpu/cudamem"
	"github.com/nixlkv/nixlkv/nixl"
)

// The memory of each kind that a worker has, in pages of a KV cache.
const (
	pageSize = 16 << 10
	pages    = 256
	size     = pages * pageSize
)

// worker is an agent with size bytes of GPU memory and as many of host memory, both
// registered. Either process of a test is one.
type worker struct {
	cuda   *cudamem.Context
	engine *nixl.Engine
	agent  *nixl.Agent
	vram   *cudamem.Memory
	dram   *hostmem.Buffer
	reg    *nixl.Registration
}

// newWorker makes the CUDA context of the device current on the calling thread, to which
// the goroutine must be locked: UCX registers and posts GPU memory in the context of the
// thread that calls it.
func newWorker(name string, ordinal int) (_ *worker, err error) {
	w := new(worker)
	defer func() {
		if err != nil {
			err = errors.Join(err, w.close())
		}
	}()
	if w.cuda, err = cudamem.Open(ordinal); err != nil {
		return nil, err
	}
	if err := w.cuda.MakeCurrent(); err != nil {
		return nil, err
	}
	if w.vram, err = w.cuda.Alloc(size); err != nil {
		return nil, err
	}
	if w.dram, err = hostmem.Alloc(size); err != nil {
		return nil, err
	}
	if w.engine, err = nixl.Open(nixl.Native); err != nil {
		return nil, err
	}
	if w.agent, err = w.engine.NewAgent(name); err != nil {
		return nil, err
	}
	vram := nixl.Foreign(nixl.VRAM, uintptr(w.vram.Addr()), size, uint64(ordinal))
	w.reg, err = w.agent.Register(vram, nixl.Host(w.dram))
	if err != nil {
		return nil, err
	}
	return w, nil
}

// close ends the engine and then frees the memory. Of an engine that cannot be closed the
// memory stays: something may still write to it.
func (w *worker) close() error {
	if w.engine != nil {
		if err := w.engine.Close(); err != nil {
			return err
		}
	}
	var errs []error
	if w.dram != nil {
		errs = append(errs, w.dram.Free())
	}
	if w.vram != nil {
		errs = append(errs, w.vram.Free())
	}
	if w.cuda != nil {
		errs = append(errs, w.cuda.Close())
	}
	return errors.Join(errs...)
}

// start gives the descriptor of a memory's first byte, Len left out.
func (w *worker) start(m nixl.Mem) nixl.Desc {
	if m == nixl.DRAM {
		return nixl.Desc{Addr: uint64(w.dram.Addr())}
	}
	return nixl.Desc{Addr: w.vram.Addr(), Dev: uint64(w.vram.Ordinal())}
}

func (w *worker) fill(m nixl.Mem, b []byte) error {
	if m == nixl.DRAM {
		copy(w.dram.Bytes(), b)
		return nil
	}
	_, err := w.vram.WriteAt(b, 0)
	return err
}

// contents copies the whole memory out.
func (w *worker) contents(m nixl.Mem) ([]byte, error) {
	if m == nixl.DRAM {
		return bytes.Clone(w.dram.Bytes()), nil
	}
	b := make([]byte, size)
	_, err := w.vram.ReadAt(b, 0)
	return b, err
}

// pattern gives size bytes that differ from those of every other seed.
func pattern(seed uint64) []byte {
	var key [32]byte
	binary.LittleEndian.PutUint64(key[:], seed)
	b := make([]byte, size)
	rand.NewChaCha8(key).Read(b)
	return b
}
