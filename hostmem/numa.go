//go:build linux

package hostmem

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	// maxNodes is the kernel's limit of NUMA nodes (CONFIG_NODES_SHIFT of 10).
	maxNodes = 1 << 10
	// noNode stands for a buffer that was not placed.
	noNode = -1
	// placementChunk bounds what one system call is asked about, in pages.
	placementChunk = 4096
)

// NUMANode binds the buffer to a NUMA node: all of its pages come from that node's memory,
// whichever thread or process touches them first. Alloc gives [ErrNUMANode] for a node that
// this process gets no memory from, and [ErrNUMA] where the kernel cannot or may not place
// memory. On a machine with one node, that node is granted and nothing else.
//
// Binding is strict. When the node is full the kernel does not look elsewhere: it reclaims
// and then ends processes (as under numactl --membind). [PreferNUMANode] gives way instead.
func NUMANode(node int) Option {
	return func(o *options) { o.node, o.mode, o.placed = node, unix.MPOL_BIND, true }
}

// PreferNUMANode is NUMANode for as long as the node has free memory; other pages come from
// the nodes next to it. [Buffer.Placement] tells what became of it.
func PreferNUMANode(node int) Option {
	return func(o *options) { o.node, o.mode, o.placed = node, unix.MPOL_PREFERRED, true }
}

// NUMANodes gives the NUMA nodes that have memory which this process may use, ascending. A
// kernel without NUMA has node 0. Errors are the system's, wrapped.
func NUMANodes() ([]int, error) { return nodesIn(os.DirFS("/")) }

// nodesIn reads what the kernel says of its nodes and of this process's cpuset.
func nodesIn(root fs.FS) ([]int, error) {
	raw, err := fs.ReadFile(root, "sys/devices/system/node/has_memory")
	if errors.Is(err, fs.ErrNotExist) {
		return []int{0}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("hostmem: NUMA nodes: %w", err)
	}
	nodes, err := parseNodes(string(raw))
	if err != nil {
		return nil, fmt.Errorf("hostmem: NUMA nodes: %w", err)
	}
	raw, err = fs.ReadFile(root, "proc/thread-self/status")
	if err != nil {
		return nil, fmt.Errorf("hostmem: NUMA nodes: %w", err)
	}
	for line := range strings.Lines(string(raw)) {
		list, ok := strings.CutPrefix(line, "Mems_allowed_list:")
		if !ok {
			continue
		}
		allowed, err := parseNodes(list)
		if err != nil {
			return nil, fmt.Errorf("hostmem: NUMA nodes: %w", err)
		}
		nodes = slices.DeleteFunc(nodes, func(n int) bool { return !slices.Contains(allowed, n) })
	}
	return nodes, nil
}

// errNodeList: not a list of nodes as the kernel prints them.
var errNodeList = errors.New("not a list of nodes")

// parseNodes reads a list such as 0-1,4 (Linux, bitmap_parselist without its strides). It
// gives the nodes in ascending order.
func parseNodes(list string) ([]int, error) {
	var nodes []int
	list = strings.TrimSpace(list)
	if list == "" {
		return nil, nil
	}
	for entry := range strings.SplitSeq(list, ",") {
		from, to, isRange := strings.Cut(entry, "-")
		if !isRange {
			to = from
		}
		first, err1 := strconv.ParseUint(from, 10, 16)
		last, err2 := strconv.ParseUint(to, 10, 16)
		if err1 != nil || err2 != nil || first > last || last >= maxNodes || len(nodes) > 0 && int(first) <= nodes[len(nodes)-1] {
			return nil, fmt.Errorf("%w: %.80q", errNodeList, list)
		}
		for n := first; n <= last; n++ {
			nodes = append(nodes, int(n))
		}
	}
	return nodes, nil
}

// checkNode says whether memory can come from a node.
func checkNode(node int) error {
	nodes, err := NUMANodes()
	if err != nil {
		return err
	}
	if !slices.Contains(nodes, node) {
		return fmt.Errorf("%w: node %d, this process gets memory from %v", ErrNUMANode, node, nodes)
	}
	return nil
}

// place sets the policy of a fresh mapping. For a memfd the kernel keeps it with the file
// (mbind(2)), so it holds for other processes that map it, too.
func place(mem []byte, node, mode int) error {
	var mask [maxNodes / 64]uint64
	mask[node/64] = 1 << (node % 64)
	// The kernel takes one off the number of bits.
	_, _, errno := unix.Syscall6(unix.SYS_MBIND, uintptr(unsafe.Pointer(unsafe.SliceData(mem))), uintptr(len(mem)),
		uintptr(mode|unix.MPOL_F_STATIC_NODES), uintptr(unsafe.Pointer(&mask)), maxNodes+1, 0)
	switch errno {
	case 0:
		return nil
	case unix.ENOSYS:
		if onlyNode(node) {
			return nil // there is no other place
		}
		return fmt.Errorf("%w: the kernel has no mbind: %w", ErrNUMA, errno)
	case unix.EPERM:
		return fmt.Errorf("%w: mbind is forbidden here (seccomp of a container without CAP_SYS_NICE?): %w", ErrNUMA, errno)
	case unix.EINVAL: // the node left the machine or the cpuset meanwhile
		return fmt.Errorf("%w: node %d: %w", ErrNUMANode, node, os.NewSyscallError("mbind", errno))
	}
	return fmt.Errorf("%w: %w", ErrNUMA, os.NewSyscallError("mbind", errno))
}

func onlyNode(node int) bool {
	nodes, err := NUMANodes()
	return err == nil && len(nodes) == 1 && nodes[0] == node
}

// NUMANode is the node that the buffer was bound to, or was to prefer; -1 without either.
func (b *Buffer) NUMANode() int { return b.node }

// Placement says how many bytes of the buffer lie on which NUMA node. Pages that this
// process has not touched yet are not counted ([Buffer.Touch] touches them all). The buffer
// is pinned meanwhile. It gives [ErrFreed] once the buffer is freed, and [ErrNUMA] where the
// kernel does not tell.
func (b *Buffer) Placement() (bytes map[int]int, err error) {
	if err := b.Pin(); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, b.Unpin()) }()

	bytes = make(map[int]int)
	var pages [placementChunk]unsafe.Pointer
	var status [placementChunk]int32
	for rest := b.mem; len(rest) > 0; {
		n := 0
		for ; n < len(pages) && len(rest) > 0; n++ {
			pages[n] = unsafe.Pointer(unsafe.SliceData(rest))
			rest = rest[b.pageSize:]
		}
		// Without nodes to move to, move_pages(2) only tells.
		_, _, errno := unix.Syscall6(unix.SYS_MOVE_PAGES, 0, uintptr(n),
			uintptr(unsafe.Pointer(&pages)), 0, uintptr(unsafe.Pointer(&status)), 0)
		if errno != 0 {
			return nil, fmt.Errorf("%w: %w", ErrNUMA, os.NewSyscallError("move_pages", errno))
		}
		for _, s := range status[:n] {
			if s >= 0 { // else the reason why there is no page
				bytes[int(s)] += b.pageSize
			}
		}
	}
	return bytes, nil
}
