//go:build gpu && linux

package gputest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nixlkv/nixlkv/internal/cgo"
	"github.com/nixlkv/nixlkv/internal/gpu"
	"github.com/nixlkv/nixlkv/internal/gpu/cuda/cudatest"
	"github.com/nixlkv/nixlkv/nixl"
)

// need gives the GPUs of this machine. Without one, or without NIXL, the test is skipped,
// unless the environment promises what is missing: then it fails.
func need(t *testing.T) *gpu.Inventory {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	inv, err := gpu.Probe(ctx)
	if err == nil && len(inv.Devices) == 0 {
		_, err = inv.Ordinal(0)
	}
	if err != nil {
		cudatest.NoGPU(t, err)
	}
	e, err := nixl.Open(nixl.Native)
	if err != nil {
		if os.Getenv(cgo.EnvLibrary) != "" || os.Getenv(cudatest.RequireEnv) != "" {
			t.Fatal(err)
		}
		t.Skipf("skip: not tested, needs NIXL's library (make test-gpu fetches it): %v", err)
	}
	check(t, e.Close())
	return inv
}

// startWorker makes a worker that is closed when the test ends. The goroutine is locked to
// its thread and stays so: the thread ends with it, and its CUDA context with the thread.
func startWorker(t *testing.T, ordinal int) *worker {
	t.Helper()
	runtime.LockOSThread()
	w := must(newWorker(uniqueName("worker"), ordinal))(t)
	t.Cleanup(func() { check(t, w.close()) })
	return w
}

var names atomic.Int64

func uniqueName(s string) string {
	return fmt.Sprintf("gputest-%s-%d-%d", s, os.Getpid(), names.Add(1))
}

// TestEachGPU prints what CUDA's ordinals stand for, and registers memory on each.
func TestEachGPU(t *testing.T) {
	inv := need(t)
	for _, d := range inv.Hidden {
		t.Logf("hidden: %s", describe(d))
	}
	for _, w := range inv.Warnings {
		t.Logf("warning: %s", w)
	}
	for _, d := range inv.Devices {
		t.Run(fmt.Sprintf("ordinal %d", d.Ordinal), func(t *testing.T) {
			t.Log(describe(d))
			w := startWorker(t, d.Ordinal)
			t.Logf("NIXL %s through %s, from %s", w.engine.Info().Version, w.engine.Info().Calls, w.engine.Info().Path)
			if s := w.agent.Stats(); s.Registrations != 1 || s.RegisteredBytes != 2*size {
				t.Errorf("registered: %+v", s)
			}
			want := pattern(uint64(d.Ordinal))
			check(t, w.fill(nixl.VRAM, want))
			same(t, "registered memory", must(w.contents(nixl.VRAM))(t), want)
			check(t, w.reg.Deregister())
			same(t, "deregistered memory", must(w.contents(nixl.VRAM))(t), want)
		})
	}
}

func describe(d gpu.Device) string {
	s := fmt.Sprintf("CUDA ordinal %d is %s, NVML index %d, PCI %s, NUMA node %d, %d MiB",
		d.Ordinal, d, d.NVMLIndex, d.PCIBusID, d.NUMANode, d.MemoryBytes>>20)
	if d.MIG != nil {
		s += fmt.Sprintf(", MIG instance %d/%d of %s", d.MIG.GPUInstance, d.MIG.ComputeInstance, d.MIG.GPU)
	}
	return s
}

// TestWrongOrdinal registers memory on GPUs that are not there.
func TestWrongOrdinal(t *testing.T) {
	inv := need(t)
	first := inv.Devices[0]
	w := startWorker(t, first.Ordinal)
	before := w.agent.Stats()
	for _, ordinal := range []uint64{uint64(inv.Devices[len(inv.Devices)-1].Ordinal) + 1, 1 << 20} {
		reg, err := w.agent.Register(nixl.Foreign(nixl.VRAM, uintptr(w.vram.Addr()), size, ordinal))
		if reg != nil || !errors.Is(err, gpu.ErrNoDevice) {
			t.Fatalf("ordinal %d: %v, %v", ordinal, reg, err)
		}
		for _, part := range []string{w.agent.Name(), fmt.Sprintf("CUDA ordinal %d", ordinal), fmt.Sprintf("%d %s", first.Ordinal, first)} {
			if !strings.Contains(err.Error(), part) {
				t.Errorf("the error does not say %q: %v", part, err)
			}
		}
		t.Log(err)
	}
	if after := w.agent.Stats(); after != before {
		t.Errorf("agent: %+v, was %+v", after, before)
	}
}
