//go:build linux

package gpu

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"github.com/nixlkv/nixlkv/internal/gpu/cuda"
)

// sources are where an inventory comes from.
type sources struct {
	cuda func() ([]cuda.Device, error)
	nvml func() (gpus []nvmlGPU, warnings []string, err error)
	pci  fs.FS // as /sys/bus/pci/devices
}

// Probe asks CUDA, NVML and sysfs for the GPUs of this machine. Without a driver the error
// wraps [ErrNoDriver] and says of both libraries what was wrong. If one of them answers,
// there is an inventory, and a warning for the other one: without CUDA it has no Devices,
// without NVML or without cgo no NVML indices and no Hidden.
//
// CUDA reads CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER at the first Probe, or whatever
// else initialises it, and not again. Probe makes no CUDA context.
//
// The driver can take seconds, and no call into it can be cancelled. When ctx ends Probe
// returns its cause, and a goroutine stays behind until the driver answers.
func Probe(ctx context.Context) (*Inventory, error) {
	return probe(ctx, sources{cuda: listCUDA, nvml: listNVML, pci: os.DirFS("/sys/bus/pci/devices")})
}

func listCUDA() ([]cuda.Device, error) {
	d, err := cuda.Open()
	if err != nil {
		return nil, err
	}
	return d.Devices()
}

func probe(ctx context.Context, from sources) (*Inventory, error) {
	type answer struct {
		inv *Inventory
		err error
	}
	answered := make(chan answer, 1)
	go func() {
		inv, err := from.collect()
		answered <- answer{inv, err}
	}()
	select {
	case a := <-answered:
		return a.inv, a.err
	case <-ctx.Done():
		return nil, fmt.Errorf("gpu: waiting for the NVIDIA driver: %w", context.Cause(ctx))
	}
}

func (s *sources) collect() (*Inventory, error) {
	gpus, warnings, nvmlErr := s.nvml()
	devices, cudaErr := s.cuda()
	if len(devices) == 0 && cudaErr != nil && nvmlErr != nil {
		err := fmt.Errorf("%w; NVML: %w", cudaErr, nvmlErr)
		if !errors.Is(err, ErrNoDriver) { // the driver is there, and says nothing of its devices
			err = fmt.Errorf("%w: %w", ErrNoDriver, err)
		}
		return nil, fmt.Errorf("gpu: %w", err)
	}
	inv := match(devices, gpus, nvmlErr == nil)
	switch {
	case errors.Is(nvmlErr, ErrNoCgo):
		warnings = append(warnings, "NVML was not asked: "+nvmlErr.Error())
	case nvmlErr != nil:
		warnings = append(warnings, "NVML does not answer: "+nvmlErr.Error())
	}
	if cudaErr != nil {
		for line := range strings.SplitSeq(cudaErr.Error(), "\n") {
			warnings = append(warnings, "CUDA does not answer in full: "+line)
		}
	}
	inv.Warnings = append(warnings, inv.Warnings...)
	for _, list := range [][]Device{inv.Devices, inv.Hidden} {
		for i := range list {
			if node := numaNode(s.pci, list[i].PCIBusID); node != Unknown {
				list[i].NUMANode = node
			}
		}
	}
	return inv, nil
}
