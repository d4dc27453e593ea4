//go:build linux

// Package gpu tells which GPUs there are: by CUDA ordinal, UUID, PCI bus id and NUMA node.
//
// NIXL's device ids of VRAM are CUDA ordinals. NVML's indices, which nvidia-smi shows,
// are not: CUDA_VISIBLE_DEVICES hides and reorders, CUDA_DEVICE_ORDER sorts by speed or
// by bus, and a MIG instance has an ordinal but no index. So the two views are joined by
// UUID. Where they disagree there is a warning and never a failure: the device id is
// CUDA's word, and NIXL decides what it makes of it.
//
// This is the one package that uses go-nvml. NVML needs cgo; without cgo CUDA is asked
// alone, through purego, and the inventory says so.
package gpu

import (
	"errors"
	"fmt"
	"strings"

	"github.com/nixlkv/nixlkv/internal/gpu/cuda"
)

// The errors of this package come wrapped with details; compare with errors.Is. An answer
// of the driver is a [*cuda.Error] or a [*NVMLError].
var (
	// ErrNoDriver: neither CUDA nor NVML has a usable driver.
	ErrNoDriver = cuda.ErrNoDriver
	// ErrNoDevice: there is no GPU with that CUDA ordinal.
	ErrNoDevice = errors.New("no such GPU")
	// ErrNoCgo: NVML cannot be asked by a program that was built without cgo.
	ErrNoCgo = errors.New("built without cgo")
)

// Unknown stands for a number that nobody could tell: an ordinal, index, NUMA node or
// instance.
const Unknown = -1

// NVMLError is a call to NVML that failed.
type NVMLError struct {
	Call string // the function, such as nvmlInit
	Code int    // nvmlReturn_t
	Text string // NVML's or go-nvml's words for the code
}

func (e *NVMLError) Error() string { return fmt.Sprintf("%s: %s (%d)", e.Call, e.Text, e.Code) }

// Device is a GPU, or a MIG instance of one.
type Device struct {
	// Ordinal is what CUDA and NIXL call it by in this process; Unknown if CUDA does not
	// see it.
	Ordinal int
	// UUID is "GPU-..." or "MIG-...", as nvidia-smi -L prints it; empty if unknown.
	UUID string
	Name string
	// PCIBusID is that of the GPU, as in /sys/bus/pci/devices: 0000:3b:00.0; empty if
	// unknown.
	PCIBusID string
	// NVMLIndex is that of the GPU, also for a MIG instance; Unknown if NVML was not asked
	// or does not list it.
	NVMLIndex int
	// NUMANode is the host's node that the GPU is attached to, Unknown if there is none.
	NUMANode int
	// MemoryBytes is the total as CUDA gives it or, for what CUDA does not see, NVML.
	MemoryBytes uint64
	// MIG is nil for a whole GPU.
	MIG *MIG
}

// MIG says which part of a GPU a device is.
type MIG struct {
	GPU             string // UUID of the GPU, empty if unknown
	GPUInstance     int    // Unknown if NVML did not tell
	ComputeInstance int    // likewise
}

// String names the device for logs and errors: UUID and name.
func (d Device) String() string {
	id := d.UUID
	if id == "" {
		id = "GPU of unknown UUID"
	}
	if d.Name == "" {
		return id
	}
	return id + " (" + d.Name + ")"
}

// Inventory is what Probe found. It is a snapshot, and the caller's.
type Inventory struct {
	// Devices are those that CUDA sees in this process, by ascending ordinal. One that the
	// driver could not open is missing, with a warning.
	Devices []Device
	// Hidden are those that NVML lists and CUDA does not see, by ascending index: left out
	// by CUDA_VISIBLE_DEVICES, say, or MIG instances beside the one in use.
	Hidden []Device
	// Warnings say where CUDA and NVML disagree and what could not be asked, a line each.
	Warnings []string
}

// Ordinal gives the device that NIXL knows by this number. The error wraps [ErrNoDevice]
// and names what there is.
func (inv *Inventory) Ordinal(n int) (Device, error) {
	for _, d := range inv.Devices {
		if d.Ordinal == n {
			return d, nil
		}
	}
	var found []string
	for _, d := range inv.Devices {
		found = append(found, fmt.Sprintf("%d %s", d.Ordinal, d))
	}
	if len(found) > 0 {
		return Device{}, fmt.Errorf("gpu: %w: CUDA ordinal %d; found %s", ErrNoDevice, n, strings.Join(found, ", "))
	}
	detail := "CUDA sees none"
	if len(inv.Warnings) > 0 {
		detail += ": " + strings.Join(inv.Warnings, "; ")
	}
	return Device{}, fmt.Errorf("gpu: %w: CUDA ordinal %d; %s", ErrNoDevice, n, detail)
}

func (inv *Inventory) warnf(format string, args ...any) {
	inv.Warnings = append(inv.Warnings, fmt.Sprintf(format, args...))
}
