//go:build linux

package gpu

import (
	"fmt"
	"slices"
	"strings"

	"github.com/nixlkv/nixlkv/internal/gpu/cuda"
)

// nvmlGPU is a GPU as NVML describes it.
type nvmlGPU struct {
	index     int
	uuid      string
	name      string
	pciBusID  string
	memory    uint64
	numaNode  int // or Unknown
	mig       bool
	instances []nvmlInstance
}

// nvmlInstance is a MIG instance as NVML describes it.
type nvmlInstance struct {
	uuid            string
	name            string
	memory          uint64
	gpuInstance     int // or Unknown
	computeInstance int // likewise
}

// place is a GPU in NVML's list or, with instance >= 0, a MIG instance of it.
type place struct{ gpu, instance int }

// matcher joins what CUDA and NVML see.
type matcher struct {
	gpus   []nvmlGPU // PCI bus ids as in Device
	byUUID map[uuid]place
	byPCI  map[string]int // index into gpus
	seen   map[place]int  // CUDA ordinal of what was matched
	inv    Inventory
}

// match joins CUDA's devices with NVML's. It does no I/O and refuses no input: every
// CUDA device is in the result, whatever NVML says.
func match(devices []cuda.Device, gpus []nvmlGPU, asked bool) *Inventory {
	m := &matcher{
		gpus:   slices.Clone(gpus),
		byUUID: make(map[uuid]place),
		byPCI:  make(map[string]int),
		seen:   make(map[place]int),
	}
	for i := range gpus {
		m.index(i)
	}
	var renumbered []string
	for i := range devices {
		d := m.device(&devices[i], asked)
		m.inv.Devices = append(m.inv.Devices, d)
		if d.NVMLIndex != Unknown && d.NVMLIndex != d.Ordinal {
			renumbered = append(renumbered, fmt.Sprintf("%d is %d", d.Ordinal, d.NVMLIndex))
		}
	}
	slices.SortStableFunc(m.inv.Devices, func(a, b Device) int { return a.Ordinal - b.Ordinal })
	if len(renumbered) > 0 {
		m.inv.warnf("CUDA ordinals, which NIXL uses, are not NVML's indices: %s", strings.Join(renumbered, ", "))
	}
	m.hidden()
	return &m.inv
}

// index notes where the names of a GPU and its instances lead.
func (m *matcher) index(i int) {
	g := &m.gpus[i]
	m.indexUUID(g.uuid, place{i, -1})
	for j := range g.instances {
		m.indexUUID(g.instances[j].uuid, place{i, j})
	}
	pci, err := canonicalPCI(g.pciBusID)
	g.pciBusID = pci
	if err != nil {
		m.inv.warnf("NVML index %d: %v", g.index, err)
		return
	}
	if first, ok := m.byPCI[pci]; ok {
		m.inv.warnf("NVML indices %d and %d are both at %s", m.gpus[first].index, g.index, pci)
		return
	}
	m.byPCI[pci] = i
}

func (m *matcher) indexUUID(text string, p place) {
	g := m.gpus[p.gpu]
	id, kind, err := parseUUID(text)
	switch {
	case err != nil:
		m.inv.warnf("NVML index %d: %v", g.index, err)
	case kind == legacyMIGUUID:
		// Names the GPU and two numbers that CUDA does not tell; nothing to match by.
	case (kind == migUUID) != (p.instance >= 0):
		m.inv.warnf("NVML index %d: %s names something of another kind", g.index, text)
	default:
		if first, ok := m.byUUID[id]; ok {
			m.inv.warnf("NVML indices %d and %d both have %s", m.gpus[first.gpu].index, g.index, text)
			return
		}
		m.byUUID[id] = p
	}
}

// device describes a CUDA device, with what NVML has to add.
func (m *matcher) device(c *cuda.Device, asked bool) Device {
	d := Device{
		Ordinal: c.Ordinal, UUID: uuid(c.UUID).text(gpuUUID), Name: c.Name, MemoryBytes: c.Memory,
		NVMLIndex: Unknown, NUMANode: Unknown,
	}
	if c.UUID != c.GPUUUID {
		d.UUID = uuid(c.UUID).text(migUUID)
		d.MIG = &MIG{GPU: uuid(c.GPUUUID).text(gpuUUID), GPUInstance: Unknown, ComputeInstance: Unknown}
	}
	pci, err := canonicalPCI(c.PCIBusID)
	if err != nil {
		m.inv.warnf("CUDA ordinal %d: %v", c.Ordinal, err)
	}
	d.PCIBusID = pci
	p, ok := m.find(c, pci)
	if !ok {
		if asked {
			m.inv.warnf("CUDA ordinal %d, %s: NVML does not list it", d.Ordinal, d)
		}
		return d
	}
	m.merge(&d, p)
	if other, twice := m.seen[p]; twice {
		m.inv.warnf("CUDA ordinals %d and %d are both %s", other, d.Ordinal, d)
	} else {
		m.seen[p] = d.Ordinal
	}
	return d
}

// find looks for the device in NVML's list: by its own UUID, by that of its GPU, at last
// by its place on the bus.
func (m *matcher) find(c *cuda.Device, pci string) (place, bool) {
	if p, ok := m.byUUID[c.UUID]; ok {
		return p, true
	}
	if p, ok := m.byUUID[c.GPUUUID]; ok {
		return p, true
	}
	i, ok := m.byPCI[pci]
	if !ok {
		return place{}, false
	}
	m.inv.warnf("CUDA ordinal %d: NVML does not know its UUID; taken for NVML index %d, which is at %s too",
		c.Ordinal, m.gpus[i].index, pci)
	return place{i, -1}, true
}

// merge adds to a CUDA device what NVML says of its place.
func (m *matcher) merge(d *Device, p place) {
	g := &m.gpus[p.gpu]
	d.NVMLIndex, d.NUMANode = g.index, g.numaNode
	switch {
	case d.PCIBusID == "":
		d.PCIBusID = g.pciBusID
	case g.pciBusID != "" && d.PCIBusID != g.pciBusID:
		m.inv.warnf("CUDA ordinal %d is at %s, NVML says %s", d.Ordinal, d.PCIBusID, g.pciBusID)
	}
	if d.Name == "" {
		d.Name = g.name
	}
	switch {
	case p.instance >= 0:
		i := &g.instances[p.instance]
		d.UUID = i.uuid
		d.MIG = &MIG{GPU: g.uuid, GPUInstance: i.gpuInstance, ComputeInstance: i.computeInstance}
	case d.MIG != nil:
		m.inv.warnf("CUDA ordinal %d, %s, is a MIG instance that NVML does not list", d.Ordinal, d)
	case g.mig:
		// In MIG mode CUDA opens nothing but instances, so the UUID is the GPU's for want of
		// a better one.
		d.MIG = &MIG{GPU: g.uuid, GPUInstance: Unknown, ComputeInstance: Unknown}
		m.inv.warnf("CUDA ordinal %d is a MIG instance of %s; the driver does not tell which", d.Ordinal, g.uuid)
	case d.UUID == "":
		d.UUID = g.uuid
	}
}

// hidden lists what NVML has and CUDA does not. A GPU in MIG mode counts by its instances
// if it has any, and not at all where a device is one of them and the driver does not
// tell which.
func (m *matcher) hidden() {
	var names []string
	add := func(g *nvmlGPU, d Device) {
		d.Ordinal, d.NVMLIndex, d.PCIBusID, d.NUMANode = Unknown, g.index, g.pciBusID, g.numaNode
		m.inv.Hidden = append(m.inv.Hidden, d)
		names = append(names, fmt.Sprintf("%s, NVML index %d", d, g.index))
	}
	for i := range m.gpus {
		g := &m.gpus[i]
		if _, ok := m.seen[place{i, -1}]; ok {
			continue
		}
		if !g.mig || len(g.instances) == 0 {
			add(g, Device{UUID: g.uuid, Name: g.name, MemoryBytes: g.memory})
			continue
		}
		for j, inst := range g.instances {
			if _, ok := m.seen[place{i, j}]; ok {
				continue
			}
			add(g, Device{UUID: inst.uuid, Name: inst.name, MemoryBytes: inst.memory, MIG: &MIG{
				GPU: g.uuid, GPUInstance: inst.gpuInstance, ComputeInstance: inst.computeInstance,
			}})
		}
	}
	if len(names) > 0 {
		m.inv.warnf("not visible to CUDA in this process: %s", strings.Join(names, "; "))
	}
}
