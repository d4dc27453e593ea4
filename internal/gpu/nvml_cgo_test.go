//go:build linux && cgo

package gpu

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/fstest"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock/gpus"

	"github.com/nixlkv/nixlkv/internal/gpu/cuda"
	"github.com/nixlkv/nixlkv/internal/gpu/cuda/cudatest"
)

// The mocks are go-nvml's own. A function that is not set panics when it is called.

// mockLibrary is an NVML of these devices; nil stands for one that cannot be opened.
func mockLibrary(devices ...*mock.Device) *mock.Interface {
	return &mock.Interface{
		InitFunc:           func() nvml.Return { return nvml.SUCCESS },
		ShutdownFunc:       func() nvml.Return { return nvml.SUCCESS },
		DeviceGetCountFunc: func() (int, nvml.Return) { return len(devices), nvml.SUCCESS },
		DeviceGetHandleByIndexFunc: func(i int) (nvml.Device, nvml.Return) {
			if devices[i] == nil {
				return nil, nvml.ERROR_GPU_IS_LOST
			}
			return devices[i], nvml.SUCCESS
		},
		ExtensionsFunc: func() nvml.ExtendedInterface { return symbols() },
	}
}

// symbols is a library that has all functions but these.
func symbols(missing ...string) nvml.ExtendedInterface {
	return &mock.ExtendedInterface{LookupSymbolFunc: func(name string) error {
		if slices.Contains(missing, name) {
			return errors.New("undefined symbol: " + name)
		}
		return nil
	}}
}

func mockCommon(uuid, name string, memory uint64) *mock.Device {
	return &mock.Device{
		GetUUIDFunc:       func() (string, nvml.Return) { return uuid, nvml.SUCCESS },
		GetNameFunc:       func() (string, nvml.Return) { return name, nvml.SUCCESS },
		GetMemoryInfoFunc: func() (nvml.Memory, nvml.Return) { return nvml.Memory{Total: memory}, nvml.SUCCESS },
	}
}

var a100 = gpus.A100_SXM4_40GB

// mockGPU is test GPU i, an A100 that is not in MIG mode, near to node i.
func mockGPU(i int) *mock.Device {
	d := mockCommon(gpuText(i), a100.Name, a100.MemoryMB<<20)
	d.GetPciInfoFunc = func() (nvml.PciInfo, nvml.Return) {
		var pci nvml.PciInfo
		for k, c := range fmt.Sprintf("00000000:%02X:00.0", 0xa0+i) {
			pci.BusId[k] = int8(c)
		}
		return pci, nvml.SUCCESS
	}
	d.GetMigModeFunc = func() (int, int, nvml.Return) { return nvml.DEVICE_MIG_DISABLE, nvml.DEVICE_MIG_ENABLE, nvml.SUCCESS }
	d.GetMemoryAffinityFunc = func(nodes int, scope nvml.AffinityScope) ([]uint, nvml.Return) {
		set := make([]uint, 16)
		set[i/64] = 1 << (i % 64)
		return set, nvml.SUCCESS
	}
	return d
}

// mockMIG is test GPU i with instances in these of 7 slots.
func mockMIG(i int, slots ...int) *mock.Device {
	d := mockGPU(i)
	d.GetMigModeFunc = func() (int, int, nvml.Return) { return nvml.DEVICE_MIG_ENABLE, nvml.DEVICE_MIG_ENABLE, nvml.SUCCESS }
	d.GetMaxMigDeviceCountFunc = func() (int, nvml.Return) { return 7, nvml.SUCCESS }
	d.GetMigDeviceHandleByIndexFunc = func(j int) (nvml.Device, nvml.Return) {
		if !slices.Contains(slots, j) {
			return nil, nvml.ERROR_NOT_FOUND
		}
		inst := mockCommon(migText(i, j), a100.Name+" MIG 1g.5gb", 5<<30)
		inst.GetGpuInstanceIdFunc = func() (int, nvml.Return) { return 7 + j, nvml.SUCCESS }
		inst.GetComputeInstanceIdFunc = func() (int, nvml.Return) { return 0, nvml.SUCCESS }
		return inst, nvml.SUCCESS
	}
	return d
}

// readGPU is what must be read of mockGPU(i).
func readGPU(i int) nvmlGPU {
	return nvmlGPU{
		index: i, uuid: gpuText(i), name: a100.Name, pciBusID: fmt.Sprintf("00000000:%02X:00.0", 0xa0+i),
		memory: a100.MemoryMB << 20, numaNode: i,
	}
}

func readMIG(i int, slots ...int) nvmlGPU {
	g := readGPU(i)
	g.mig = true
	for _, j := range slots {
		g.instances = append(g.instances, nvmlInstance{
			uuid: migText(i, j), name: a100.Name + " MIG 1g.5gb", memory: 5 << 30, gpuInstance: 7 + j,
		})
	}
	return g
}

func TestReadNVML(t *testing.T) {
	for _, tc := range []struct {
		name     string
		devices  []*mock.Device
		want     []nvmlGPU
		warnings []string
	}{
		{name: "none"},
		{name: "two", devices: []*mock.Device{mockGPU(0), mockGPU(1)}, want: []nvmlGPU{readGPU(0), readGPU(1)}},
		{name: "MIG", devices: []*mock.Device{mockGPU(0), mockMIG(1, 0, 2, 6)}, want: []nvmlGPU{readGPU(0), readMIG(1, 0, 2, 6)}},
		{
			name:     "one lost",
			devices:  []*mock.Device{nil, mockGPU(1)},
			want:     []nvmlGPU{readGPU(1)},
			warnings: []string{"nvmlDeviceGetHandleByIndex(0): " + says(nvml.ERROR_GPU_IS_LOST)},
		},
		{
			name: "silent on most",
			devices: []*mock.Device{changed(mockGPU(0), func(d *mock.Device) {
				d.GetUUIDFunc = func() (string, nvml.Return) { return "", nvml.ERROR_NO_PERMISSION }
				d.GetNameFunc = func() (string, nvml.Return) { return "", nvml.ERROR_NO_PERMISSION }
				d.GetMemoryInfoFunc = func() (nvml.Memory, nvml.Return) { return nvml.Memory{}, nvml.ERROR_NOT_SUPPORTED }
				d.GetPciInfoFunc = func() (nvml.PciInfo, nvml.Return) { return nvml.PciInfo{}, nvml.ERROR_UNKNOWN }
				d.GetMigModeFunc = func() (int, int, nvml.Return) { return 0, 0, nvml.ERROR_NOT_SUPPORTED }
				d.GetMemoryAffinityFunc = func(int, nvml.AffinityScope) ([]uint, nvml.Return) { return nil, nvml.ERROR_NOT_SUPPORTED }
			})},
			want: []nvmlGPU{{numaNode: Unknown}},
			warnings: []string{
				"NVML index 0: nvmlDeviceGetUUID: " + says(nvml.ERROR_NO_PERMISSION),
				"NVML index 0: nvmlDeviceGetName: " + says(nvml.ERROR_NO_PERMISSION),
				"NVML index 0: nvmlDeviceGetPciInfo: " + says(nvml.ERROR_UNKNOWN),
			},
		},
		{
			name: "MIG, half of it refused",
			devices: []*mock.Device{changed(mockMIG(0, 1), func(d *mock.Device) {
				inner := d.GetMigDeviceHandleByIndexFunc
				d.GetMigDeviceHandleByIndexFunc = func(j int) (nvml.Device, nvml.Return) {
					if j == 0 {
						return nil, nvml.ERROR_NO_PERMISSION
					}
					inst, ret := inner(j)
					if ret == nvml.SUCCESS {
						inst.(*mock.Device).GetGpuInstanceIdFunc = func() (int, nvml.Return) { return 0, nvml.ERROR_UNKNOWN }
						inst.(*mock.Device).GetComputeInstanceIdFunc = func() (int, nvml.Return) { return 0, nvml.ERROR_UNKNOWN }
					}
					return inst, ret
				}
			})},
			want: []nvmlGPU{with(readMIG(0, 1), func(g *nvmlGPU) {
				g.instances[0].gpuInstance, g.instances[0].computeInstance = Unknown, Unknown
			})},
			warnings: []string{
				"NVML index 0, MIG device 0: nvmlDeviceGetMigDeviceHandleByIndex: " + says(nvml.ERROR_NO_PERMISSION),
				"NVML index 0, MIG device 1: nvmlDeviceGetGpuInstanceId: " + says(nvml.ERROR_UNKNOWN),
				"NVML index 0, MIG device 1: nvmlDeviceGetComputeInstanceId: " + says(nvml.ERROR_UNKNOWN),
			},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			lib := mockLibrary(tc.devices...)
			got, warnings, err := readNVML(lib)
			if err != nil || !reflect.DeepEqual(got, tc.want) {
				t.Errorf("got  %+v, %v\nwant %+v", got, err, tc.want)
			}
			if !slices.Equal(warnings, tc.warnings) {
				t.Errorf("warnings\ngot  %q\nwant %q", warnings, tc.warnings)
			}
			if i, s := len(lib.InitCalls()), len(lib.ShutdownCalls()); i != 1 || s != 1 {
				t.Errorf("%d Init, %d Shutdown", i, s)
			}
		})
	}
}

// says is how a code shows in a warning: in go-nvml's words or, while a library is loaded,
// in that one's.
func says(ret nvml.Return) string { return fmt.Sprintf("%s (%d)", ret.Error(), int(ret)) }

// changed is with for a mock, which must not be copied.
func changed[T any](v *T, change func(*T)) *T {
	change(v)
	return v
}

// TestReadOldNVML has drivers that lack functions. The mock panics where a real one would
// end the process.
func TestReadOldNVML(t *testing.T) {
	d := mockMIG(0, 0)
	d.GetMemoryAffinityFunc, d.GetMigModeFunc = nil, nil
	lib := mockLibrary(d)
	lib.ExtensionsFunc = func() nvml.ExtendedInterface {
		return symbols("nvmlDeviceGetMemoryAffinity", "nvmlDeviceGetComputeInstanceId")
	}
	got, warnings, err := readNVML(lib)
	want := []nvmlGPU{with(readGPU(0), func(g *nvmlGPU) { g.numaNode = Unknown })}
	if err != nil || len(warnings) != 0 || !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, %q, %v\nwant %+v", got, warnings, err, want)
	}
}

func TestNVMLNUMANode(t *testing.T) {
	for _, tc := range []struct {
		set  []uint
		want int
	}{
		{nil, Unknown}, {[]uint{0, 0}, Unknown}, {[]uint{1}, 0}, {[]uint{1 << 5, 0}, 5}, {[]uint{0, 2}, 65},
		{[]uint{3}, Unknown}, {[]uint{1, 1}, Unknown},
	} {
		d := &mock.Device{GetMemoryAffinityFunc: func(int, nvml.AffinityScope) ([]uint, nvml.Return) { return tc.set, nvml.SUCCESS }}
		if got := (&nvmlReader{lib: mockLibrary()}).numaNode(d); got != tc.want {
			t.Errorf("%b: node %d, want %d", tc.set, got, tc.want)
		}
	}
}

func TestReadNVMLFails(t *testing.T) {
	noInit := mockLibrary(mockGPU(0))
	noInit.InitFunc = func() nvml.Return { return nvml.ERROR_DRIVER_NOT_LOADED }
	noCount := mockLibrary(mockGPU(0))
	noCount.DeviceGetCountFunc = func() (int, nvml.Return) { return 3, nvml.ERROR_UNKNOWN }
	for _, tc := range []struct {
		name      string
		lib       nvml.Interface
		want      NVMLError
		shutdowns int
	}{
		{"Init", noInit, NVMLError{"nvmlInit", 9, nvml.ERROR_DRIVER_NOT_LOADED.Error()}, 0},
		{"DeviceGetCount", noCount, NVMLError{"nvmlDeviceGetCount", 999, nvml.ERROR_UNKNOWN.Error()}, 1},
		{"no library", nvml.New(nvml.WithLibraryPath("libno-such-nvml.so.1")), NVMLError{"nvmlInit", 12, nvml.ERROR_LIBRARY_NOT_FOUND.Error()}, 0},
	} {
		gpus, _, err := readNVML(tc.lib)
		var nvmlErr *NVMLError
		if gpus != nil || !errors.As(err, &nvmlErr) || *nvmlErr != tc.want || !strings.HasPrefix(err.Error(), "libnvidia-ml.so.1: ") {
			t.Errorf("%s: %v, %v", tc.name, gpus, err)
		}
		if m, ok := tc.lib.(*mock.Interface); ok && len(m.ShutdownCalls()) != tc.shutdowns {
			t.Errorf("%s: %d Shutdown", tc.name, len(m.ShutdownCalls()))
		}
	}
}

// TestSharedNVML checks what sharedNVML counts on: the object behind the package's
// functions is to be had.
func TestSharedNVML(t *testing.T) {
	if _, ok := nvml.Extensions().(nvml.Interface); !ok {
		t.Fatal("go-nvml does not give its library object any more")
	}
	// Together, for the race detector.
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			if _, _, err := listNVML(); err != nil {
				var nvmlErr *NVMLError
				if !errors.As(err, &nvmlErr) {
					t.Errorf("untyped error: %v", err)
				}
			}
		})
	}
	wg.Wait()
}

// TestCollectJoins has the driver library of package cudatest on one side, go-nvml's mock
// on the other, and a sysfs.
func TestCollectJoins(t *testing.T) {
	lib := mockLibrary(mockGPU(3), mockMIG(0, 1, 4), mockGPU(1))
	inv, err := (&sources{
		cuda: func() ([]cuda.Device, error) { return fakeDevices(t, "DEVICES=2") },
		nvml: func() ([]nvmlGPU, []string, error) { return readNVML(lib) },
		pci:  fstest.MapFS{"0000:a1:00.0/numa_node": {Data: []byte("5\n")}, "0000:a3:00.0/numa_node": {Data: []byte("-1\n")}},
	}).collect()
	if err != nil {
		t.Fatal(err)
	}
	want := &Inventory{
		Devices: []Device{
			{Ordinal: 0, UUID: gpuText(0), Name: "Fake GPU 0", PCIBusID: "0000:a0:00.0", NVMLIndex: 1, NUMANode: 0, MemoryBytes: 1 << 30,
				MIG: &MIG{GPU: gpuText(0), GPUInstance: Unknown, ComputeInstance: Unknown}},
			{Ordinal: 1, UUID: gpuText(1), Name: "Fake GPU 1", PCIBusID: "0000:a1:00.0", NVMLIndex: 2, NUMANode: 5, MemoryBytes: 1<<30 + 1},
		},
		Hidden: []Device{
			{Ordinal: Unknown, UUID: gpuText(3), Name: a100.Name, PCIBusID: "0000:a3:00.0", NVMLIndex: 0, NUMANode: 3, MemoryBytes: a100.MemoryMB << 20},
		},
		Warnings: []string{
			"CUDA ordinal 0 is a MIG instance of " + gpuText(0) + "; the driver does not tell which",
			"CUDA ordinals, which NIXL uses, are not NVML's indices: 0 is 1, 1 is 2",
			"not visible to CUDA in this process: " + gpuText(3) + " (" + a100.Name + "), NVML index 0",
		},
	}
	if !reflect.DeepEqual(inv, want) {
		t.Errorf("got  %s hidden %s\n%q\nwant %s hidden %s\n%q", show(inv.Devices), show(inv.Hidden), inv.Warnings,
			show(want.Devices), show(want.Hidden), want.Warnings)
	}
}

// TestCollectWithoutCUDA is a container that was given the driver's utilities only.
func TestCollectWithoutCUDA(t *testing.T) {
	inv, err := (&sources{
		cuda: func() ([]cuda.Device, error) { return nil, cudaError(t, "libno-such-driver.so.1") },
		nvml: func() ([]nvmlGPU, []string, error) { return readNVML(mockLibrary(mockGPU(0))) },
		pci:  fstest.MapFS{},
	}).collect()
	if err != nil || len(inv.Devices) != 0 || len(inv.Hidden) != 1 || len(inv.Warnings) != 2 ||
		!strings.Contains(inv.Warnings[0], "libno-such-driver.so.1") {
		t.Fatalf("%+v, %v", inv, err)
	}
	if _, err := inv.Ordinal(0); !errors.Is(err, ErrNoDevice) || !strings.Contains(err.Error(), "libno-such-driver.so.1") ||
		!strings.Contains(err.Error(), gpuText(0)) {
		t.Errorf("the reason is lost: %v", err)
	}
}

func cudaError(t *testing.T, lib string) error {
	t.Helper()
	_, err := cuda.OpenLibrary(lib)
	if err == nil {
		t.Fatalf("%s opens", lib)
	}
	return err
}

// fakeDevices lists the devices of a driver library from package cudatest.
func fakeDevices(t *testing.T, macros ...string) ([]cuda.Device, error) {
	t.Helper()
	d, err := cuda.OpenLibrary(cudatest.Build(t, macros...))
	if err != nil {
		return nil, err
	}
	return d.Devices()
}
