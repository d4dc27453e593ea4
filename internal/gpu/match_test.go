//go:build linux

package gpu

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/nixlkv/nixlkv/internal/gpu/cuda"
)

// Test GPUs are numbered from 0; instance j of GPU i has the UUID of byte 0xE0 + 16 i + j.

func gpuID(i int) uuid    { return uuid(bytes.Repeat([]byte{byte(0x10 + i)}, 16)) }
func migID(i, j int) uuid { return uuid(bytes.Repeat([]byte{byte(0x80 + 16*i + j)}, 16)) }

func gpuText(i int) string    { return gpuID(i).text(gpuUUID) }
func migText(i, j int) string { return migID(i, j).text(migUUID) }

func cudaGPU(ordinal, i int) cuda.Device {
	return cuda.Device{
		Ordinal: ordinal, UUID: gpuID(i), GPUUUID: gpuID(i), Name: "A100",
		PCIBusID: fmt.Sprintf("0000:%02X:00.0", 0xa0+i), Memory: 40 << 30,
	}
}

func cudaMIG(ordinal, i, j int) cuda.Device {
	d := cudaGPU(ordinal, i)
	d.UUID, d.Name, d.Memory = migID(i, j), "A100 MIG 1g.5gb", 5<<30
	return d
}

func nvmlWhole(i int) nvmlGPU {
	return nvmlGPU{
		index: i, uuid: gpuText(i), name: "NVIDIA A100", numaNode: i % 2,
		pciBusID: fmt.Sprintf("00000000:%02X:00.0", 0xa0+i), memory: 41 << 30,
	}
}

// nvmlMIG is a GPU in MIG mode with n instances.
func nvmlMIG(i, n int) nvmlGPU {
	g := nvmlWhole(i)
	g.mig = true
	for j := range n {
		g.instances = append(g.instances, nvmlInstance{
			uuid: migText(i, j), name: "NVIDIA A100 MIG 1g.5gb", memory: 6 << 30, gpuInstance: 7 + j, computeInstance: 0,
		})
	}
	return g
}

// found is what the inventory must say of cudaGPU(ordinal, i).
func found(ordinal, i int) Device {
	return Device{
		Ordinal: ordinal, UUID: gpuText(i), Name: "A100", PCIBusID: fmt.Sprintf("0000:%02x:00.0", 0xa0+i),
		NVMLIndex: i, NUMANode: i % 2, MemoryBytes: 40 << 30,
	}
}

func foundMIG(ordinal, i, j int) Device {
	d := found(ordinal, i)
	d.UUID, d.Name, d.MemoryBytes = migText(i, j), "A100 MIG 1g.5gb", 5<<30
	d.MIG = &MIG{GPU: gpuText(i), GPUInstance: 7 + j, ComputeInstance: 0}
	return d
}

func hiddenGPU(i int) Device {
	d := found(Unknown, i)
	d.Name, d.MemoryBytes = "NVIDIA A100", 41<<30
	return d
}

func hiddenMIG(i, j int) Device {
	d := foundMIG(Unknown, i, j)
	d.Name, d.MemoryBytes = "NVIDIA A100 MIG 1g.5gb", 6<<30
	return d
}

func with[T any](v T, change func(*T)) T {
	change(&v)
	return v
}

func TestMatch(t *testing.T) {
	alone := func(d *Device) { d.NVMLIndex, d.NUMANode = Unknown, Unknown }
	for _, tc := range []struct {
		name     string
		cuda     []cuda.Device
		nvml     []nvmlGPU
		notAsked bool
		devices  []Device
		hidden   []Device
		warnings []string // contained, in this order
	}{
		{name: "nothing"},
		{
			name:    "same order",
			cuda:    []cuda.Device{cudaGPU(0, 0), cudaGPU(1, 1)},
			nvml:    []nvmlGPU{nvmlWhole(0), nvmlWhole(1)},
			devices: []Device{found(0, 0), found(1, 1)},
		},
		{
			name:     "reordered",
			cuda:     []cuda.Device{cudaGPU(0, 2), cudaGPU(1, 1), cudaGPU(2, 0)},
			nvml:     []nvmlGPU{nvmlWhole(0), nvmlWhole(1), nvmlWhole(2)},
			devices:  []Device{found(0, 2), found(1, 1), found(2, 0)},
			warnings: []string{"NVML's indices: 0 is 2, 2 is 0"},
		},
		{
			name:    "hidden by CUDA_VISIBLE_DEVICES=3,1",
			cuda:    []cuda.Device{cudaGPU(0, 3), cudaGPU(1, 1)},
			nvml:    []nvmlGPU{nvmlWhole(0), nvmlWhole(1), nvmlWhole(2), nvmlWhole(3)},
			devices: []Device{found(0, 3), found(1, 1)},
			hidden:  []Device{hiddenGPU(0), hiddenGPU(2)},
			warnings: []string{
				"NVML's indices: 0 is 3",
				"not visible to CUDA in this process: " + gpuText(0) + " (NVIDIA A100), NVML index 0; " + gpuText(2) + " (NVIDIA A100), NVML index 2",
			},
		},
		{
			name:     "all hidden",
			nvml:     []nvmlGPU{nvmlWhole(0)},
			hidden:   []Device{hiddenGPU(0)},
			warnings: []string{"not visible"},
		},
		{
			name:     "one MIG instance of several",
			cuda:     []cuda.Device{cudaMIG(0, 1, 1)},
			nvml:     []nvmlGPU{nvmlWhole(0), nvmlMIG(1, 3)},
			devices:  []Device{foundMIG(0, 1, 1)},
			hidden:   []Device{hiddenGPU(0), hiddenMIG(1, 0), hiddenMIG(1, 2)},
			warnings: []string{"0 is 1", "not visible"},
		},
		{
			name:    "MIG, the old UUID function gone from the driver",
			cuda:    []cuda.Device{with(cudaMIG(0, 0, 0), func(d *cuda.Device) { d.GPUUUID = d.UUID })},
			nvml:    []nvmlGPU{nvmlMIG(0, 1)},
			devices: []Device{foundMIG(0, 0, 0)},
		},
		{
			name:     "MIG mode without instances",
			nvml:     []nvmlGPU{nvmlMIG(0, 0)},
			hidden:   []Device{hiddenGPU(0)},
			warnings: []string{"not visible"},
		},
		{
			name: "MIG instance that NVML does not list",
			cuda: []cuda.Device{cudaMIG(0, 0, 5)},
			nvml: []nvmlGPU{nvmlMIG(0, 1)},
			devices: []Device{with(foundMIG(0, 0, 5), func(d *Device) {
				d.MIG = &MIG{GPU: gpuText(0), GPUInstance: Unknown, ComputeInstance: Unknown}
			})},
			warnings: []string{migText(0, 5) + " (A100 MIG 1g.5gb), is a MIG instance that NVML does not list"},
		},
		{
			name: "MIG with a driver before MIG UUIDs",
			cuda: []cuda.Device{cudaGPU(0, 0)},
			nvml: []nvmlGPU{with(nvmlMIG(0, 1), func(g *nvmlGPU) { g.instances[0].uuid = "MIG-" + gpuText(0) + "/1/0" })},
			devices: []Device{with(found(0, 0), func(d *Device) {
				d.MIG = &MIG{GPU: gpuText(0), GPUInstance: Unknown, ComputeInstance: Unknown}
			})},
			warnings: []string{"CUDA ordinal 0 is a MIG instance of " + gpuText(0) + "; the driver does not tell which"},
		},
		{
			name:     "NVML not asked",
			cuda:     []cuda.Device{cudaGPU(0, 0), cudaMIG(1, 1, 0)},
			notAsked: true,
			devices: []Device{with(found(0, 0), alone), with(foundMIG(1, 1, 0), func(d *Device) {
				alone(d)
				d.MIG = &MIG{GPU: gpuText(1), GPUInstance: Unknown, ComputeInstance: Unknown}
			})},
		},
		{
			name:     "NVML does not list it",
			cuda:     []cuda.Device{cudaGPU(0, 0), cudaGPU(1, 1)},
			nvml:     []nvmlGPU{nvmlWhole(0)},
			devices:  []Device{found(0, 0), with(found(1, 1), alone)},
			warnings: []string{"CUDA ordinal 1, " + gpuText(1) + " (A100): NVML does not list it"},
		},
		{
			name:     "UUIDs differ, place on the bus does not",
			cuda:     []cuda.Device{with(cudaGPU(0, 0), func(d *cuda.Device) { d.UUID, d.GPUUUID = gpuID(9), gpuID(9) })},
			nvml:     []nvmlGPU{nvmlWhole(0)},
			devices:  []Device{with(found(0, 0), func(d *Device) { d.UUID = gpuText(9) })},
			warnings: []string{"NVML does not know its UUID; taken for NVML index 0, which is at 0000:a0:00.0 too"},
		},
		{
			name:     "CUDA tells no UUID and no name",
			cuda:     []cuda.Device{with(cudaGPU(0, 0), func(d *cuda.Device) { *d = cuda.Device{PCIBusID: d.PCIBusID, Memory: d.Memory} })},
			nvml:     []nvmlGPU{nvmlWhole(0)},
			devices:  []Device{with(found(0, 0), func(d *Device) { d.Name = "NVIDIA A100" })},
			warnings: []string{"does not know its UUID"},
		},
		{
			name:     "places on the bus differ",
			cuda:     []cuda.Device{cudaGPU(0, 0)},
			nvml:     []nvmlGPU{with(nvmlWhole(0), func(g *nvmlGPU) { g.pciBusID = "00000000:01:00.0" })},
			devices:  []Device{found(0, 0)},
			warnings: []string{"CUDA ordinal 0 is at 0000:a0:00.0, NVML says 0000:01:00.0"},
		},
		{
			name:     "CUDA does not tell its place",
			cuda:     []cuda.Device{with(cudaGPU(0, 0), func(d *cuda.Device) { d.PCIBusID = "" })},
			nvml:     []nvmlGPU{nvmlWhole(0)},
			devices:  []Device{found(0, 0)},
			warnings: []string{`CUDA ordinal 0: malformed PCI bus id: ""`},
		},
		{
			name:     "NVML does not tell its place",
			cuda:     []cuda.Device{cudaGPU(0, 0)},
			nvml:     []nvmlGPU{with(nvmlWhole(0), func(g *nvmlGPU) { g.pciBusID = "" })},
			devices:  []Device{found(0, 0)},
			warnings: []string{`NVML index 0: malformed PCI bus id: ""`},
		},
		{
			name:     "NVML's UUID is none",
			cuda:     []cuda.Device{cudaGPU(0, 0)},
			nvml:     []nvmlGPU{with(nvmlWhole(0), func(g *nvmlGPU) { g.uuid = "?" })},
			devices:  []Device{found(0, 0)},
			warnings: []string{`NVML index 0: malformed UUID: "?"`, "taken for NVML index 0"},
		},
		{
			name:     "GPU that calls itself an instance",
			cuda:     []cuda.Device{cudaGPU(0, 0)},
			nvml:     []nvmlGPU{with(nvmlWhole(0), func(g *nvmlGPU) { g.uuid = gpuID(0).text(migUUID) })},
			devices:  []Device{found(0, 0)},
			warnings: []string{"names something of another kind", "taken for NVML index 0"},
		},
		{
			name:    "two of one name",
			cuda:    []cuda.Device{cudaGPU(0, 0), cudaGPU(1, 0)},
			nvml:    []nvmlGPU{nvmlWhole(0), with(nvmlWhole(0), func(g *nvmlGPU) { g.index = 1 })},
			devices: []Device{found(0, 0), found(1, 0)},
			hidden:  []Device{with(hiddenGPU(0), func(d *Device) { d.NVMLIndex = 1 })},
			warnings: []string{
				"NVML indices 0 and 1 both have " + gpuText(0), "NVML indices 0 and 1 are both at 0000:a0:00.0",
				"CUDA ordinals 0 and 1 are both " + gpuText(0), "1 is 0", "not visible",
			},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got := match(tc.cuda, tc.nvml, !tc.notAsked)
			if !reflect.DeepEqual(got.Devices, tc.devices) {
				t.Errorf("devices\ngot  %+v\nwant %+v", show(got.Devices), show(tc.devices))
			}
			if !reflect.DeepEqual(got.Hidden, tc.hidden) {
				t.Errorf("hidden\ngot  %+v\nwant %+v", show(got.Hidden), show(tc.hidden))
			}
			if !slices.EqualFunc(got.Warnings, tc.warnings, strings.Contains) {
				t.Errorf("warnings\ngot  %q\nwant %q", got.Warnings, tc.warnings)
			}
		})
	}
}

// show prints devices with what their MIG points to.
func show(devices []Device) string {
	var b strings.Builder
	for _, d := range devices {
		fmt.Fprintf(&b, "\n\t%+v", d)
		if d.MIG != nil {
			fmt.Fprintf(&b, " MIG: %+v", *d.MIG)
		}
	}
	return b.String()
}

// TestMatchProperty: CUDA shows some of the GPUs and instances in any order. Each must be
// found where it is, and the others be hidden.
func TestMatchProperty(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var gpus []nvmlGPU
		var devices []cuda.Device
		want := make(map[string]int) // UUID to NVML index
		for i := range rapid.IntRange(0, 7).Draw(t, "gpus") {
			n := rapid.IntRange(0, 3).Draw(t, "instances")
			if n == 0 {
				gpus = append(gpus, nvmlWhole(i))
				devices = append(devices, cudaGPU(0, i))
				want[gpuText(i)] = i
				continue
			}
			gpus = append(gpus, nvmlMIG(i, n))
			for j := range n {
				devices = append(devices, cudaMIG(0, i, j))
				want[migText(i, j)] = i
			}
		}
		devices = rapid.Permutation(devices).Draw(t, "order")
		devices = devices[:rapid.IntRange(0, len(devices)).Draw(t, "visible")]
		for o := range devices {
			devices[o].Ordinal = o
		}
		input := rapid.Permutation(gpus).Draw(t, "NVML order")
		before := slices.Clone(input)
		inv := match(devices, input, true)
		if !reflect.DeepEqual(input, before) {
			t.Fatal("match changed its input")
		}
		if len(inv.Devices) != len(devices) || len(inv.Devices)+len(inv.Hidden) != len(want) {
			t.Fatalf("%d devices and %d hidden of %d visible and %d", len(inv.Devices), len(inv.Hidden), len(devices), len(want))
		}
		for o, d := range inv.Devices {
			c := devices[o]
			isMIG := c.UUID != c.GPUUUID
			kind := gpuUUID
			if isMIG {
				kind = migUUID
			}
			if d.Ordinal != o || d.UUID != uuid(c.UUID).text(kind) || (d.MIG != nil) != isMIG || d.MemoryBytes != c.Memory {
				t.Fatalf("ordinal %d: %v from %+v", o, d, c)
			}
			if isMIG && d.MIG.GPU != uuid(c.GPUUUID).text(gpuUUID) {
				t.Fatalf("ordinal %d: instance of %s", o, d.MIG.GPU)
			}
		}
		for _, d := range append(slices.Clone(inv.Devices), inv.Hidden...) {
			index, ok := want[d.UUID]
			if !ok || d.NVMLIndex != index {
				t.Fatalf("%s at NVML index %d, want %d, %v", d.UUID, d.NVMLIndex, index, ok)
			}
			delete(want, d.UUID)
		}
		renumbered := slices.ContainsFunc(inv.Devices, func(d Device) bool { return d.Ordinal != d.NVMLIndex })
		warned := slices.ContainsFunc(inv.Warnings, func(w string) bool { return strings.Contains(w, "indices") })
		if wantN := b2i(renumbered) + b2i(len(inv.Hidden) > 0); warned != renumbered || len(inv.Warnings) != wantN {
			t.Fatalf("renumbered %v, hidden %d: %q", renumbered, len(inv.Hidden), inv.Warnings)
		}
	})
}

func b2i(b bool) int {
	if b {
		return 1
	}
	return 0
}

func TestOrdinal(t *testing.T) {
	inv := match([]cuda.Device{cudaGPU(2, 2), cudaGPU(0, 1)}, []nvmlGPU{nvmlWhole(1), nvmlWhole(2)}, true)
	if !slices.IsSortedFunc(inv.Devices, func(a, b Device) int { return cmp.Compare(a.Ordinal, b.Ordinal) }) {
		t.Errorf("not in order of ordinals: %v", inv.Devices)
	}
	for ordinal, i := range map[int]int{0: 1, 2: 2} {
		if d, err := inv.Ordinal(ordinal); err != nil || d != found(ordinal, i) {
			t.Errorf("ordinal %d: %+v, %v", ordinal, d, err)
		}
	}
	for _, n := range []int{-1, 1, 3} {
		d, err := inv.Ordinal(n)
		want := fmt.Sprintf("gpu: no such GPU: CUDA ordinal %d; found 0 %s (A100), 2 %s (A100)", n, gpuText(1), gpuText(2))
		if d != (Device{}) || !errors.Is(err, ErrNoDevice) || err.Error() != want {
			t.Errorf("ordinal %d: %+v, %v; want %s", n, d, err, want)
		}
	}
	_, err := match(nil, []nvmlGPU{nvmlWhole(0)}, true).Ordinal(0)
	if !errors.Is(err, ErrNoDevice) || !strings.HasSuffix(err.Error(),
		"CUDA sees none: not visible to CUDA in this process: "+gpuText(0)+" (NVIDIA A100), NVML index 0") {
		t.Errorf("all hidden: %v", err)
	}
	if _, err := new(Inventory).Ordinal(0); !errors.Is(err, ErrNoDevice) {
		t.Errorf("empty inventory: %v", err)
	}
	if got := (Device{}).String(); got != "GPU of unknown UUID" {
		t.Error(got)
	}
}
