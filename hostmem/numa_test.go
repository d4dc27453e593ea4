//go:build linux

package hostmem

import (
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
	"unsafe"

	"golang.org/x/sys/unix"
)

func TestParseNodes(t *testing.T) {
	for list, want := range map[string][]int{
		"":             nil,
		"\n":           nil,
		"0\n":          {0},
		"0-1\n":        {0, 1},
		"1,3-5,1023":   {1, 3, 4, 5, 1023},
		"0-3,8-8 \n":   {0, 1, 2, 3, 8},
		"00,01":        {0, 1},
		"1024":         nil,
		"0-1024":       nil,
		"3-1":          nil,
		"1,1":          nil,
		"2,1":          nil,
		"0-":           nil,
		"-1":           nil,
		"0,,1":         nil,
		"node0":        nil,
		"0-3:1/2":      nil,
		"99999999999 ": nil,
	} {
		got, err := parseNodes(list)
		bad := want == nil && strings.TrimSpace(list) != ""
		if !slices.Equal(got, want) || (err != nil) != bad || bad && !errors.Is(err, errNodeList) {
			t.Errorf("%q: %v, %v; want %v", list, got, err, want)
		}
	}
}

func FuzzParseNodes(f *testing.F) {
	for _, s := range []string{"0", "0-1", "1,3-5,1023\n", "0-1024", "-", ","} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, list string) {
		nodes, err := parseNodes(list)
		if err != nil {
			return
		}
		for i, n := range nodes {
			if n < 0 || n >= maxNodes || i > 0 && n <= nodes[i-1] {
				t.Fatalf("%q: %v", list, nodes)
			}
		}
	})
}

func TestNodesIn(t *testing.T) {
	const has, status = "sys/devices/system/node/has_memory", "proc/thread-self/status"
	file := func(s string) *fstest.MapFile { return &fstest.MapFile{Data: []byte(s)} }
	for _, tc := range []struct {
		name string
		root fstest.MapFS
		want []int
		err  error
	}{
		{"no NUMA", fstest.MapFS{}, []int{0}, nil},
		{"one", fstest.MapFS{has: file("0\n"), status: file("Name:\tx\nMems_allowed:\t1\nMems_allowed_list:\t0\n")}, []int{0}, nil},
		{"node 0 without memory", fstest.MapFS{has: file("1-2\n"), status: file("Mems_allowed_list:\t0-2\n")}, []int{1, 2}, nil},
		{"a cpuset", fstest.MapFS{has: file("0-3\n"), status: file("Mems_allowed_list:\t2-3\n")}, []int{2, 3}, nil},
		{"a cpuset with none of them", fstest.MapFS{has: file("0\n"), status: file("Mems_allowed_list:\t1\n")}, []int{}, nil},
		{"no cpusets", fstest.MapFS{has: file("0-1\n"), status: file("Name:\tx\n")}, []int{0, 1}, nil},
		{"not a list", fstest.MapFS{has: file("all\n")}, nil, errNodeList},
		{"not a list of the allowed", fstest.MapFS{has: file("0\n"), status: file("Mems_allowed_list:\t?\n")}, nil, errNodeList},
		{"no status", fstest.MapFS{has: file("0\n")}, nil, fs.ErrNotExist},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, err := nodesIn(tc.root)
			if !slices.Equal(got, tc.want) || !errors.Is(err, tc.err) {
				t.Errorf("%v, %v; want %v, %v", got, err, tc.want, tc.err)
			}
		})
	}
}

// needNUMA skips where the kernel does not place memory at all.
func needNUMA(t *testing.T) []int {
	t.Helper()
	nodes, err := NUMANodes()
	if err != nil {
		t.Fatal(err)
	}
	var mode int
	if _, _, errno := unix.Syscall6(unix.SYS_GET_MEMPOLICY, uintptr(unsafe.Pointer(&mode)), 0, 0, 0, 0, 0); errno != 0 {
		t.Skipf("skip: needs a kernel with NUMA, and the right to use it: get_mempolicy: %v", errno)
	}
	return nodes
}

// policyAt is how the kernel shows the policy of the mapping at an address.
func policyAt(t *testing.T, addr uintptr) string {
	t.Helper()
	raw, err := os.ReadFile("/proc/self/numa_maps")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(raw)) {
		if fields := strings.Fields(line); len(fields) > 1 && fields[0] == fmt.Sprintf("%08x", addr) {
			return fields[1]
		}
	}
	t.Fatalf("no mapping at %#x", addr)
	return ""
}

// TestNUMANode places a buffer on every node there is; on most machines that is one.
func TestNUMANode(t *testing.T) {
	const size = 5 << 20
	for _, node := range needNUMA(t) {
		for name, opt := range map[string]Option{"bind": NUMANode(node), "prefer": PreferNUMANode(node)} {
			t.Run(fmt.Sprintf("%s=%d", name, node), func(t *testing.T) {
				b := mustAlloc(t, size, opt)
				defer b.Free()
				if b.NUMANode() != node {
					t.Errorf("node %d", b.NUMANode())
				}
				if got := policyAt(t, b.Addr()); !strings.HasPrefix(got, name) || !strings.HasSuffix(got, fmt.Sprint(":", node)) {
					t.Errorf("policy %q, want %s and node %d", got, name, node)
				}
				if got, err := b.Placement(); err != nil || len(got) != 0 {
					t.Errorf("placement before the first touch: %v, %v", got, err)
				}
				b.Bytes()[0] = 1
				if got, err := b.Placement(); err != nil || len(got) != 1 || got[node] == 0 {
					t.Errorf("placement after the first touch: %v, %v", got, err)
				}
				if err := b.Touch(); err != nil {
					t.Fatal(err)
				}
				// Room or not, what is bound is there; the other only prefers.
				if got, err := b.Placement(); err != nil || name == "bind" && got[node] != b.Cap() {
					t.Errorf("placement %v, %v", got, err)
				}
				// What a peer process maps obeys too.
				peer, err := unix.Mmap(b.FD(), 0, b.Cap(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
				if err != nil {
					t.Fatal(err)
				}
				defer unix.Munmap(peer)
				peer[0] = 1
				if got := policyAt(t, uintptr(unsafe.Pointer(&peer[0]))); !strings.HasPrefix(got, name) {
					t.Errorf("policy of a second mapping %q", got)
				}
			})
		}
	}
}

func TestNUMANodeHuge(t *testing.T) {
	nodes := needNUMA(t)
	if free, _ := hugePool(t); free < 1 {
		t.Skipf("skip: not tested: needs a free huge page of 2 MiB, there is none (vm.nr_hugepages)")
	}
	b := mustAlloc(t, hugePageSize, HugePages(), NUMANode(nodes[0]))
	defer b.Free()
	if !b.Huge() {
		t.Skipf("skip: not tested: the huge pages are on other nodes, or somebody took them: %v", b.HugeErr())
	}
	// The page is there; in this process's tables it is only now.
	if err := b.Touch(); err != nil {
		t.Fatal(err)
	}
	if got, err := b.Placement(); err != nil || got[nodes[0]] != b.Cap() {
		t.Errorf("placement %v, %v", got, err)
	}
}

func TestNoSuchNode(t *testing.T) {
	nodes, err := NUMANodes()
	if err != nil {
		t.Fatal(err)
	}
	last := nodes[len(nodes)-1]
	for _, node := range []int{-1, last + 1, maxNodes - 1, maxNodes, math.MaxInt, math.MinInt} {
		for _, opt := range []Option{NUMANode(node), PreferNUMANode(node)} {
			b, err := Alloc(1, opt, Name("hostmem-no-node"))
			if b != nil || !errors.Is(err, ErrNUMANode) {
				t.Errorf("node %d: %v, %v", node, b, err)
			}
			if err != nil && !strings.Contains(err.Error(), fmt.Sprint(nodes)) {
				t.Errorf("the error does not say which there are: %v", err)
			}
		}
	}
	if n := descriptors(t, "hostmem-no-node"); n != 0 {
		t.Errorf("%d descriptors left", n)
	}
	// What the kernel refuses after that is told as well, and leaves nothing behind.
	o := options{name: "hostmem-no-node", placed: true, node: maxNodes - 1, mode: unix.MPOL_BIND}
	b, err := newBuffer(&o, 1, os.Getpagesize(), 0)
	if b != nil || !errors.Is(err, ErrNUMANode) && !errors.Is(err, ErrNUMA) {
		t.Errorf("refused by the kernel: %v, %v", b, err)
	}
	if n, m := descriptors(t, "hostmem-no-node"), len(mapsLines(t, "hostmem-no-node")); n != 0 || m != 0 {
		t.Errorf("%d descriptors and %d mappings left", n, m)
	}
}

func TestNotPlaced(t *testing.T) {
	b := mustAlloc(t, 1)
	if b.NUMANode() != -1 {
		t.Errorf("node %d", b.NUMANode())
	}
	if err := b.Free(); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Placement(); !errors.Is(err, ErrFreed) {
		t.Errorf("placement of a freed buffer: %v", err)
	}
}
