//go:build linux

package gpu

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"go.uber.org/goleak"

	"github.com/nixlkv/nixlkv/internal/gpu/cuda"
	"github.com/nixlkv/nixlkv/internal/gpu/cuda/cudatest"
)

var errSilent = &NVMLError{Call: "nvmlInit", Code: 9, Text: "ERROR_DRIVER_NOT_LOADED"}

func TestCollect(t *testing.T) {
	noDriver := func() ([]cuda.Device, error) {
		_, err := cuda.OpenLibrary("libno-such-driver.so.1")
		return nil, err
	}
	refuses := &cuda.Error{Call: "cuDeviceGetCount", Code: 999, Name: "CUDA_ERROR_UNKNOWN"}
	two := func() ([]cuda.Device, error) { return []cuda.Device{cudaGPU(0, 0), cudaGPU(1, 1)}, nil }
	nvml := func(err error, gpus ...nvmlGPU) func() ([]nvmlGPU, []string, error) {
		return func() ([]nvmlGPU, []string, error) { return gpus, nil, err }
	}
	for _, tc := range []struct {
		name     string
		from     sources
		devices  int
		hidden   int
		warnings []string
		is       []error // all of them; none if there is an inventory
		text     string
	}{
		{
			name: "no driver at all",
			from: sources{cuda: noDriver, nvml: nvml(errSilent)},
			is:   []error{ErrNoDriver, errSilent},
			text: "gpu: no usable NVIDIA driver: libno-such-driver.so.1: cannot open shared object file: No such file or directory; " +
				"NVML: nvmlInit: ERROR_DRIVER_NOT_LOADED (9)",
		},
		{
			name: "no driver, no cgo",
			from: sources{cuda: noDriver, nvml: nvml(ErrNoCgo)},
			is:   []error{ErrNoDriver, ErrNoCgo},
			text: "libno-such-driver.so.1",
		},
		{
			name: "a driver that tells nothing",
			from: sources{cuda: func() ([]cuda.Device, error) { return nil, refuses }, nvml: nvml(errSilent)},
			is:   []error{ErrNoDriver, refuses, errSilent},
			text: "cuDeviceGetCount: CUDA_ERROR_UNKNOWN (999)",
		},
		{
			name:     "no cgo",
			from:     sources{cuda: two, nvml: nvml(ErrNoCgo)},
			devices:  2,
			warnings: []string{"NVML was not asked: built without cgo"},
		},
		{
			name:     "no NVML",
			from:     sources{cuda: two, nvml: nvml(errSilent)},
			devices:  2,
			warnings: []string{"NVML does not answer: nvmlInit: ERROR_DRIVER_NOT_LOADED (9)"},
		},
		{
			name: "CUDA tells half",
			from: sources{
				cuda: func() ([]cuda.Device, error) {
					return []cuda.Device{cudaGPU(1, 1)}, errors.Join(errors.New("CUDA ordinal 0: one"), errors.New("CUDA ordinal 2: two"))
				},
				nvml: nvml(nil, nvmlWhole(0), nvmlWhole(1)),
			},
			devices: 1, hidden: 1,
			warnings: []string{"CUDA does not answer in full: CUDA ordinal 0: one", "in full: CUDA ordinal 2: two", "not visible"},
		},
		{
			name:     "CUDA sees none, NVML two",
			from:     sources{cuda: noDriver, nvml: nvml(nil, nvmlWhole(0), nvmlWhole(1))},
			hidden:   2,
			warnings: []string{"libno-such-driver.so.1", "not visible"},
		},
		{
			name: "a driver without GPUs",
			from: sources{cuda: func() ([]cuda.Device, error) { return nil, nil }, nvml: nvml(nil)},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			tc.from.pci = fstest.MapFS{"0000:a1:00.0/numa_node": {Data: []byte("7\n")}}
			inv, err := tc.from.collect()
			if len(tc.is) > 0 {
				for _, is := range tc.is {
					if !errors.Is(err, is) {
						t.Errorf("%v is not %v", err, is)
					}
				}
				if inv != nil || !strings.Contains(err.Error(), tc.text) {
					t.Errorf("%+v, %v; want %q", inv, err, tc.text)
				}
				return
			}
			if err != nil || len(inv.Devices) != tc.devices || len(inv.Hidden) != tc.hidden ||
				!slices.EqualFunc(inv.Warnings, tc.warnings, strings.Contains) {
				t.Fatalf("%+v, %v", inv, err)
			}
			for _, d := range append(slices.Clone(inv.Devices), inv.Hidden...) {
				if d.PCIBusID == "0000:a1:00.0" && d.NUMANode != 7 {
					t.Errorf("sysfs says node 7, the inventory %d", d.NUMANode)
				}
			}
		})
	}
}

func TestProbeEndsWithContext(t *testing.T) {
	defer goleak.VerifyNone(t)
	release := make(chan struct{})
	defer close(release)
	entered := make(chan struct{})
	from := sources{
		cuda: func() ([]cuda.Device, error) { return nil, nil },
		nvml: func() ([]nvmlGPU, []string, error) { close(entered); <-release; return nil, nil, nil },
		pci:  fstest.MapFS{},
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	cause := errors.New("enough")
	go func() { <-entered; cancel(cause) }()
	if inv, err := probe(ctx, from); inv != nil || !errors.Is(err, cause) {
		t.Errorf("%+v, %v", inv, err)
	}
}

// TestProbeWithoutDriver is this module's usual test machine.
func TestProbeWithoutDriver(t *testing.T) {
	if _, err := cuda.Open(); err == nil {
		t.Skip("skip: not tested, needs a machine without an NVIDIA driver")
	}
	inv, err := Probe(t.Context())
	if err == nil {
		t.Skipf("skip: not tested, needs a machine without an NVIDIA driver; NVML answers: %+v", inv)
	}
	if inv != nil || !errors.Is(err, ErrNoDriver) || !strings.Contains(err.Error(), "libcuda.so.1") {
		t.Errorf("%+v, %v", inv, err)
	}
	if !errors.Is(err, ErrNoCgo) && !strings.Contains(err.Error(), "libnvidia-ml.so.1") {
		t.Errorf("NVML is not named: %v", err)
	}
	t.Log(err)
}

// TestProbeRealGPU holds the inventory of this machine against what CUDA says.
func TestProbeRealGPU(t *testing.T) {
	devices, err := cudatest.Driver(t).Devices()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	inv, err := Probe(ctx)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("devices %s\nhidden %s\nwarnings %q", show(inv.Devices), show(inv.Hidden), inv.Warnings)
	if len(inv.Devices) != len(devices) {
		t.Fatalf("%d devices, CUDA has %d", len(inv.Devices), len(devices))
	}
	_, _, nvmlErr := listNVML()
	for i, c := range devices {
		d, err := inv.Ordinal(i)
		if err != nil {
			t.Error(err)
			continue
		}
		id, _, err := parseUUID(d.UUID)
		if err != nil || id != c.UUID {
			t.Errorf("ordinal %d has UUID %s, CUDA says %x: %v", i, d.UUID, c.UUID, err)
		}
		if pci, err := canonicalPCI(c.PCIBusID); err != nil || d.PCIBusID != pci {
			t.Errorf("ordinal %d is at %s, CUDA says %s: %v", i, d.PCIBusID, c.PCIBusID, err)
		}
		if nvmlErr == nil && d.NVMLIndex == Unknown {
			t.Errorf("ordinal %d was not found in NVML", i)
		}
	}
	if _, err := inv.Ordinal(len(devices)); !errors.Is(err, ErrNoDevice) {
		t.Errorf("one ordinal too many: %v", err)
	}
}
