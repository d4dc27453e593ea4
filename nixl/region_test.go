package nixl

import (
	"testing"

	"github.com/nixlkv/nixlkv/hostmem"
)

// A region becomes a part of the buffer that it lies in, all of it, and of no other.
func TestRegionIn(t *testing.T) {
	var bufs []*hostmem.Buffer
	for range 2 {
		b, err := hostmem.Alloc(3 << 12)
		if err != nil {
			t.Fatal(err)
		}
		defer b.Free()
		bufs = append(bufs, b)
	}
	freed, err := hostmem.Alloc(1)
	if err != nil {
		t.Fatal(err)
	}
	if err := freed.Free(); err != nil {
		t.Fatal(err)
	}
	base, end := bufs[1].Addr(), bufs[1].Addr()+uintptr(bufs[1].Len())
	for name, tc := range map[string]struct {
		addr uintptr
		n    uint64
		in   bool
	}{
		"whole":          {base, 3 << 12, true},
		"part":           {base + 5, 1 << 12, true},
		"last byte":      {end - 1, 1, true},
		"before":         {base - 1, 2, false},
		"past the end":   {end - 1, 2, false},
		"behind":         {end, 1, false},
		"all memory":     {base, ^uint64(0), false},
		"address 0":      {0, 1, false},
		"longer than it": {base, 3<<12 + 1, false},
	} {
		r := Foreign(DRAM, tc.addr, tc.n, 0)
		got := r.In(freed, bufs[0], bufs[1])
		if !tc.in && bufs[0].Addr() <= tc.addr && tc.addr < bufs[0].Addr()+uintptr(bufs[0].Len()) {
			continue // the two buffers touch
		}
		want := r
		if tc.in {
			want = HostRange(bufs[1], int(tc.addr-base), int(tc.n))
		}
		if got != want {
			t.Errorf("%s: %+v, want %+v", name, got, want)
		}
	}
	if r := Foreign(VRAM, base, 8, 3).In(bufs[1]); r != HostRange(bufs[1], 0, 8).As(VRAM, 3) {
		t.Errorf("VRAM: %+v", r)
	}
}
