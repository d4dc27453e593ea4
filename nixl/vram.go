package nixl

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/nixlkv/nixlkv/hostmem"
	"github.com/nixlkv/nixlkv/internal/gpu"
)

// gpuProbeTimeout bounds the first look at the GPUs; a driver that loads firmware takes
// seconds.
const gpuProbeTimeout = 30 * time.Second

var errGPUProbe = errors.New("the driver did not answer in time")

// gpus looks for GPUs once, when they are first asked about.
type gpus struct {
	once sync.Once
	inv  *gpu.Inventory
	err  error
}

// inventory gives the GPUs that CUDA sees.
func (e *Engine) inventory() (*gpu.Inventory, error) {
	g := &e.gpus
	g.once.Do(func() {
		ctx, cancel := context.WithTimeoutCause(context.Background(), gpuProbeTimeout, errGPUProbe)
		defer cancel()
		g.inv, g.err = gpu.Probe(ctx)
		if g.err == nil {
			for _, w := range g.inv.Warnings {
				e.log.Warn("GPUs", zap.String("warning", w))
			}
		}
	})
	return g.inv, g.err
}

// checkDevice refuses VRAM on a device that is not there, saying what is. NIXL would fail
// too, but with a number alone.
func (a *Agent) checkDevice(r Region) error {
	if r.mem != VRAM || a.opts.cfg.HostVRAM {
		return nil
	}
	inv, err := a.eng.inventory()
	if err != nil {
		return fmt.Errorf("VRAM on CUDA device %d: %w", r.dev, err)
	}
	if _, err := inv.Ordinal(int(min(r.dev, math.MaxInt32))); err != nil {
		return fmt.Errorf("VRAM: %w", err)
	}
	return nil
}

// NearGPU gives the NUMA node that a GPU is attached to, by its CUDA ordinal, for
// hostmem.NUMANode: memory there reaches the GPU without crossing to another socket. The
// first call looks for GPUs, which can take seconds. Errors: ErrNoDriver, ErrNoDevice, and
// hostmem.ErrNUMANode where the machine does not say, as one with a single node may not.
func (e *Engine) NearGPU(device uint64) (node int, err error) {
	fail := func(err error) (int, error) {
		return 0, &Error{Call: fmt.Sprintf("NUMA node near CUDA device %d", device), Err: err}
	}
	inv, err := e.inventory()
	if err != nil {
		return fail(err)
	}
	d, err := inv.Ordinal(int(min(device, math.MaxInt32)))
	switch {
	case err != nil:
		return fail(err)
	case d.NUMANode == gpu.Unknown:
		return fail(fmt.Errorf("%w: %s is attached to none that is known", hostmem.ErrNUMANode, d))
	}
	return d.NUMANode, nil
}
