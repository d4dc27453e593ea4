package nixl

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/nixlkv/nixlkv/internal/gpu"
)

// gpuProbeTimeout bounds the first look at the GPUs; a driver that loads firmware takes
// seconds.
const gpuProbeTimeout = 30 * time.Second

var errGPUProbe = errors.New("the driver did not answer in time")

// gpus looks for GPUs once, when the first VRAM is registered.
type gpus struct {
	once sync.Once
	inv  *gpu.Inventory
	err  error
}

// checkDevice refuses VRAM on a device that is not there, saying what is. NIXL would fail
// too, but with a number alone.
func (a *Agent) checkDevice(r Region) error {
	if r.mem != VRAM || a.opts.cfg.HostVRAM {
		return nil
	}
	g := &a.eng.gpus
	g.once.Do(func() {
		ctx, cancel := context.WithTimeoutCause(context.Background(), gpuProbeTimeout, errGPUProbe)
		defer cancel()
		g.inv, g.err = gpu.Probe(ctx)
		if g.err == nil {
			for _, w := range g.inv.Warnings {
				a.log.Warn("GPUs", zap.String("warning", w))
			}
		}
	})
	if g.err != nil {
		return fmt.Errorf("VRAM on CUDA device %d: %w", r.dev, g.err)
	}
	if _, err := g.inv.Ordinal(int(min(r.dev, math.MaxInt32))); err != nil {
		return fmt.Errorf("VRAM: %w", err)
	}
	return nil
}
