//go:build linux

package gpu

import (
	"errors"
	"fmt"
	"io/fs"
	"strconv"
	"strings"
)

var errPCIBusID = errors.New("malformed PCI bus id")

// canonicalPCI writes a PCI bus id as sysfs does: 0000:3b:00.0. CUDA gives capital
// letters, NVML a domain of eight digits.
func canonicalPCI(s string) (string, error) {
	malformed := fmt.Errorf("%w: %q", errPCIBusID, s)
	domain, rest, ok := strings.Cut(s, ":")
	if !ok {
		return "", malformed
	}
	bus, rest, ok := strings.Cut(rest, ":")
	if !ok {
		return "", malformed
	}
	device, function, ok := strings.Cut(rest, ".")
	if !ok {
		return "", malformed
	}
	var n [4]uint64
	for i, part := range [...]struct {
		text string
		bits int
	}{{domain, 32}, {bus, 8}, {device, 5}, {function, 3}} {
		v, err := strconv.ParseUint(part.text, 16, part.bits)
		if err != nil {
			return "", malformed
		}
		n[i] = v
	}
	return fmt.Sprintf("%04x:%02x:%02x.%x", n[0], n[1], n[2], n[3]), nil
}

// numaNode reads the node of a device from sysfs, laid out as /sys/bus/pci/devices is.
// Unknown stands for a machine without NUMA, too: the kernel writes -1.
func numaNode(devices fs.FS, pci string) int {
	if pci == "" {
		return Unknown
	}
	raw, err := fs.ReadFile(devices, pci+"/numa_node")
	if err != nil {
		return Unknown
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(raw)))
	if err != nil || n < 0 {
		return Unknown
	}
	return n
}
