package kvsender

import (
	"errors"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/nixl"
	"github.com/nixlkv/nixlkv/registry"
)

// auxSides is a prefill with metadata buffers of these item lengths and 16 slots, and a
// decode with m buffers.
func auxSides(lens []uint64, m int) (*registry.Layout, *registry.Peer) {
	l, p := &registry.Layout{GPU: 1}, &registry.Peer{GPU: 3}
	for i, n := range lens {
		l.Aux = append(l.Aux, registry.AuxBuffer{Base: 1<<40 + uint64(i)<<20, Len: 16 * n, ItemLen: n})
	}
	for j := range m {
		p.Aux = append(p.Aux, 2<<40+uint64(j)<<20)
	}
	return l, p
}

// The buffers that SGLang copies, where it does.
func TestAuxGolden(t *testing.T) {
	cases := readGolden(t).Aux
	if len(cases) == 0 {
		t.Fatal("no cases")
	}
	for _, c := range cases {
		l, p := auxSides(c.lens, c.buffers)
		a, err := planAux(l, p)
		if err != nil {
			t.Errorf("%v to %d: %v", c.lens, c.buffers, err)
			continue
		}
		if a.unequal != (len(c.lens) != c.buffers) {
			t.Errorf("%v to %d: unequal %t", c.lens, c.buffers, a.unequal)
		}
		from, to, err := a.appendDescs(nil, nil, 3, 5)
		if err != nil {
			t.Errorf("%v to %d: %v", c.lens, c.buffers, err)
		}
		last := c.outcomes[len(c.outcomes)-1].result
		if last == nil {
			t.Fatalf("%v to %d: 0.5.23 refuses", c.lens, c.buffers)
		}
		for _, o := range c.outcomes {
			if o.result != nil && !slices.Equal(*o.result, *last) {
				t.Fatalf("%v to %d: releases %v copy otherwise", c.lens, c.buffers, o.releases)
			}
		}
		var wantFrom, wantTo []nixl.Desc
		for _, b := range *last {
			i, n := b[0], b[1]
			wantFrom = append(wantFrom, nixl.Desc{Addr: l.Aux[i].Base + 3*n, Len: n})
			wantTo = append(wantTo, nixl.Desc{Addr: p.Aux[i] + 5*n, Len: n})
		}
		if !slices.Equal(from, wantFrom) || !slices.Equal(to, wantTo) {
			t.Errorf("%v to %d: %v to %v, expected %v to %v", c.lens, c.buffers, from, to, wantFrom, wantTo)
		}
	}
}

func TestAuxSlots(t *testing.T) {
	l, p := auxSides([]uint64{64, 512}, 2)
	l.Aux[1].Len = 512 * 12
	p.Aux[1] = math.MaxUint64 - 512*100
	a, err := planAux(l, p)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name     string
		src, dst int
		text     string // empty if it is possible
	}{
		{"first", 0, 0, ""},
		{"last of the shortest", 11, 99, ""},
		{"not told", noSlot, 1, "Missing aux index for last chunk"},
		{"negative", -2, 1, "slot -2 of the prefill's 12"},
		{"past the shortest", 12, 1, "slot 12 of the prefill's 12"},
		{"far", math.MaxInt, 1, "of the prefill's 12"},
		{"decode negative", 1, -1, "slot -1 of the decode"},
		{"decode past the end of memory", 1, 100, "slot 100 of the decode's 512 bytes a slot"},
		{"decode far", 1, math.MaxInt, "of the decode"},
	} {
		t.Run(c.name, func(t *testing.T) {
			mark := []nixl.Desc{{Len: 1}}
			from, to, err := a.appendDescs(mark, mark, c.src, c.dst)
			if c.text == "" {
				if err != nil || len(from) != 3 || len(to) != 3 || from[0] != mark[0] {
					t.Fatalf("%v to %v, %v", from, to, err)
				}
				for i, d := range to[1:] {
					if d.Addr != p.Aux[i]+d.Len*uint64(c.dst) {
						t.Errorf("buffer %d at %#x", i, d.Addr)
					}
				}
				return
			}
			if !errors.Is(err, nixlkv.ErrAuxIndex) || !strings.Contains(err.Error(), c.text) {
				t.Errorf("%v, expected %q", err, c.text)
			}
			if len(from) != 1 || len(to) != 1 {
				t.Errorf("%d and %d descriptors beside the error", len(from), len(to))
			}
		})
	}
}

func TestAuxRefuses(t *testing.T) {
	for _, c := range []struct {
		name string
		lens []uint64
		m    int
		edit func(*registry.Layout, *registry.Peer)
		want error
	}{
		{"none on either side", nil, 0, nil, nil},
		{"none at the prefill", nil, 2, nil, nixlkv.ErrMismatch},
		{"none at the decode", []uint64{64}, 0, nil, nixlkv.ErrMismatch},
		{"an empty buffer", []uint64{64, 0, 8}, 3, nil, nil},
		{"one byte", []uint64{1}, 1, func(l *registry.Layout, _ *registry.Peer) { l.Aux[0].Len = 1 }, nil},
		{"no slots", []uint64{64}, 1, func(l *registry.Layout, _ *registry.Peer) { l.Aux[0].Len = 63 }, nixlkv.ErrRegions},
		{"no address", []uint64{64}, 1, func(l *registry.Layout, _ *registry.Peer) { l.Aux[0].Base = 0 }, nixlkv.ErrRegions},
		{"no address at the decode", []uint64{64, 8}, 2, func(_ *registry.Layout, p *registry.Peer) { p.Aux[1] = 0 }, nixlkv.ErrRegions},
		{"past the end of memory", []uint64{64}, 1, func(l *registry.Layout, _ *registry.Peer) { l.Aux[0].Base = math.MaxUint64 - 64 }, nixlkv.ErrRegions},
	} {
		t.Run(c.name, func(t *testing.T) {
			l, p := auxSides(c.lens, c.m)
			if c.edit != nil {
				c.edit(l, p)
			}
			a, err := planAux(l, p)
			if !errors.Is(err, c.want) || (err == nil) != (c.want == nil) {
				t.Fatalf("%v, expected %v", err, c.want)
			}
			if err != nil {
				return
			}
			from, _, err := a.appendDescs(nil, nil, 0, 2)
			if want := slices.DeleteFunc(slices.Clone(c.lens), func(n uint64) bool { return n == 0 }); err != nil || len(from) != len(want) {
				t.Errorf("%v, %v", from, err)
			}
		})
	}
}
