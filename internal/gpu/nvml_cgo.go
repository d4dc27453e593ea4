//go:build linux && cgo

package gpu

import (
	"fmt"
	"math/bits"
	"sync"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// nvmlMu keeps this package's calls of NVML apart: loading and unloading the library,
// go-nvml writes variables of its package that every call reads.
var nvmlMu sync.Mutex

// listNVML describes the GPUs of this machine.
func listNVML() ([]nvmlGPU, []string, error) {
	nvmlMu.Lock()
	defer nvmlMu.Unlock()
	return readNVML(sharedNVML())
}

// sharedNVML is the library object behind go-nvml's package functions. A second object
// would load, and later reset, those variables under the hands of a program that uses
// go-nvml as well; the shared one counts its users.
func sharedNVML() nvml.Interface {
	if lib, ok := nvml.Extensions().(nvml.Interface); ok {
		return lib
	}
	return nvml.New()
}

// nvmlReader collects what could not be read.
type nvmlReader struct {
	lib      nvml.Interface
	warnings []string
}

// readNVML lists what lib knows, with a warning for each thing it does not tell. It
// leaves lib as it was.
func readNVML(lib nvml.Interface) (gpus []nvmlGPU, warnings []string, err error) {
	if err := nvmlError("nvmlInit", lib.Init()); err != nil {
		return nil, nil, fmt.Errorf("libnvidia-ml.so.1: %w", err)
	}
	r := &nvmlReader{lib: lib}
	defer func() {
		r.check("nvmlShutdown", lib.Shutdown())
		warnings = r.warnings
	}()
	n, ret := lib.DeviceGetCount()
	if err := nvmlError("nvmlDeviceGetCount", ret); err != nil {
		return nil, nil, fmt.Errorf("libnvidia-ml.so.1: %w", err)
	}
	for i := range n {
		dev, ret := lib.DeviceGetHandleByIndex(i)
		if r.check(fmt.Sprintf("nvmlDeviceGetHandleByIndex(%d)", i), ret) {
			gpus = append(gpus, r.gpu(i, dev))
		}
	}
	return gpus, nil, nil
}

func (r *nvmlReader) gpu(index int, dev nvml.Device) nvmlGPU {
	g := nvmlGPU{index: index, numaNode: Unknown}
	g.uuid, g.name, g.memory = r.common(fmt.Sprintf("NVML index %d", index), dev)
	pci, ret := dev.GetPciInfo()
	if r.check(fmt.Sprintf("NVML index %d: nvmlDeviceGetPciInfo", index), ret) {
		g.pciBusID = charString(pci.BusId[:])
	}
	g.numaNode = r.numaNode(dev)
	g.mig, g.instances = r.instances(index, dev)
	return g
}

// common reads what GPUs and MIG instances alike have.
func (r *nvmlReader) common(what string, dev nvml.Device) (uuid, name string, memory uint64) {
	uuid, ret := dev.GetUUID()
	r.check(what+": nvmlDeviceGetUUID", ret)
	name, ret = dev.GetName()
	r.check(what+": nvmlDeviceGetName", ret)
	info, ret := dev.GetMemoryInfo()
	if ret != nvml.ERROR_NOT_SUPPORTED { // where the GPU has no memory of its own
		r.check(what+": nvmlDeviceGetMemoryInfo", ret)
	}
	return uuid, name, info.Total
}

// maxNUMANodes is how many nodes numaNode asks about; the kernel's limit is 1024.
const maxNUMANodes = 1024

// numaNode is the host's node nearest to the GPU. nvmlDeviceGetNumaNodeId, by its name
// the function to ask, tells where the GPU's own memory is a node (Grace) which one.
func (r *nvmlReader) numaNode(dev nvml.Device) int {
	if !r.has("nvmlDeviceGetMemoryAffinity") {
		return Unknown
	}
	set, ret := dev.GetMemoryAffinity(maxNUMANodes, nvml.AFFINITY_SCOPE_NODE)
	if ret != nvml.SUCCESS {
		return Unknown
	}
	node := Unknown
	for i, word := range set {
		if word == 0 {
			continue
		}
		if node != Unknown || bits.OnesCount(word) != 1 {
			return Unknown // near to several: no single answer
		}
		node = i*bits.UintSize + bits.TrailingZeros(word)
	}
	return node
}

// instances lists the MIG instances of a GPU, and says whether it is in MIG mode.
func (r *nvmlReader) instances(index int, dev nvml.Device) (mig bool, list []nvmlInstance) {
	for _, symbol := range []string{
		"nvmlDeviceGetMigMode", "nvmlDeviceGetMaxMigDeviceCount", "nvmlDeviceGetMigDeviceHandleByIndex",
		"nvmlDeviceGetGpuInstanceId", "nvmlDeviceGetComputeInstanceId",
	} {
		if !r.has(symbol) {
			return false, nil
		}
	}
	mode, _, ret := dev.GetMigMode()
	if ret == nvml.ERROR_NOT_SUPPORTED || !r.check(fmt.Sprintf("NVML index %d: nvmlDeviceGetMigMode", index), ret) ||
		mode != nvml.DEVICE_MIG_ENABLE {
		return false, nil
	}
	n, ret := dev.GetMaxMigDeviceCount()
	r.check(fmt.Sprintf("NVML index %d: nvmlDeviceGetMaxMigDeviceCount", index), ret)
	for i := range n {
		inst, ret := dev.GetMigDeviceHandleByIndex(i)
		if ret == nvml.ERROR_NOT_FOUND {
			continue // slots are numbered, not all are taken
		}
		what := fmt.Sprintf("NVML index %d, MIG device %d", index, i)
		if !r.check(what+": nvmlDeviceGetMigDeviceHandleByIndex", ret) {
			continue
		}
		entry := nvmlInstance{gpuInstance: Unknown, computeInstance: Unknown}
		entry.uuid, entry.name, entry.memory = r.common(what, inst)
		if id, ret := inst.GetGpuInstanceId(); r.check(what+": nvmlDeviceGetGpuInstanceId", ret) {
			entry.gpuInstance = id
		}
		if id, ret := inst.GetComputeInstanceId(); r.check(what+": nvmlDeviceGetComputeInstanceId", ret) {
			entry.computeInstance = id
		}
		list = append(list, entry)
	}
	return true, list
}

// has says whether the library has a function. Calling one that an older driver lacks
// would not fail but end the process: go-nvml leaves its symbols to the lazy linker.
func (r *nvmlReader) has(symbol string) bool {
	return r.lib.Extensions().LookupSymbol(symbol) == nil
}

// check notes a failure and says whether there was none.
func (r *nvmlReader) check(call string, ret nvml.Return) bool {
	if err := nvmlError(call, ret); err != nil {
		r.warnings = append(r.warnings, err.Error())
		return false
	}
	return true
}

// nvmlError keeps the words of the library, which it can only give while it is loaded.
func nvmlError(call string, ret nvml.Return) error {
	if ret == nvml.SUCCESS {
		return nil
	}
	return &NVMLError{Call: call, Code: int(ret), Text: ret.Error()}
}

// charString is the Go string in a C array of char.
func charString(chars []int8) string {
	b := make([]byte, 0, len(chars))
	for _, c := range chars {
		if c == 0 {
			break
		}
		b = append(b, byte(c))
	}
	return string(b)
}
