package nixl

import (
	"errors"
	"strings"
	"testing"

	"github.com/nixlkv/nixlkv/hostmem"
	"github.com/nixlkv/nixlkv/internal/gpu"
)

func TestNearGPU(t *testing.T) {
	// An engine that has found these GPUs already.
	found := func(inv *gpu.Inventory, err error) *Engine {
		e := must[*Engine](t)(Open(Embedded))
		t.Cleanup(func() { check(t, e.Close()) })
		e.gpus.once.Do(func() { e.gpus.inv, e.gpus.err = inv, err })
		return e
	}
	two := found(&gpu.Inventory{Devices: []gpu.Device{
		{Ordinal: 0, UUID: "GPU-a", NUMANode: 1}, {Ordinal: 1, UUID: "GPU-b", NUMANode: gpu.Unknown},
	}}, nil)
	for _, tc := range []struct {
		e      *Engine
		device uint64
		want   int
		err    error
		says   string
	}{
		{two, 0, 1, nil, ""},
		{two, 1, 0, hostmem.ErrNUMANode, "GPU-b"},
		{two, 2, 0, ErrNoDevice, "GPU-a"},
		{two, 1 << 63, 0, ErrNoDevice, "GPU-a"},
		{found(nil, gpu.ErrNoDriver), 0, 0, ErrNoDriver, "device 0"},
	} {
		node, err := tc.e.NearGPU(tc.device)
		if node != tc.want || !errors.Is(err, tc.err) || err != nil && !strings.Contains(err.Error(), tc.says) {
			t.Errorf("device %d: node %d, %v", tc.device, node, err)
		}
	}
}
