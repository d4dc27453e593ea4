package kvreceiver

import (
	"errors"
	"math"
	"slices"
	"testing"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/internal/wire"
	"github.com/nixlkv/nixlkv/nixl"
	"github.com/nixlkv/nixlkv/registry"
	"pgregory.net/rapid"
)

// A destination that cannot be fails the room on both sides, and no prefill is told of it.
func TestWrongDestinations(t *testing.T) {
	q := newPairOf(t, openEngine(t, nixl.Embedded), shape{}, func(*registry.Layout) {}, []memoryOption{withState(2)}, WithHostVRAM())
	p := q.p.ranks[0]
	for i, tc := range []struct {
		name string
		d    Destination
		want error
		text string
	}{
		{"page past the end", Destination{Pages: []int32{0, kitPages}, Aux: Aux(0)}, nixlkv.ErrPageRange, "page index out of range: page 64 at position 1, there are 64"},
		{"negative page", Destination{Pages: []int32{-1}, Aux: Aux(0)}, nixlkv.ErrPageRange, "page index out of range: page -1"},
		{"least page", Destination{Pages: []int32{math.MinInt32}, Aux: Aux(0)}, nixlkv.ErrPageRange, "out of range"},
		{"greatest page", Destination{Pages: []int32{math.MaxInt32}, Aux: Aux(0)}, nixlkv.ErrPageRange, "out of range"},
		{"a page twice", Destination{Pages: []int32{5, 5}, Aux: Aux(0)}, nixlkv.ErrPageRange, "page 5 is given twice"},
		{"a page twice, far apart", Destination{Pages: []int32{1, 5, 6, 7, 1}, Aux: Aux(0)}, nixlkv.ErrPageRange, "page 1 is given twice"},
		{"no aux slot", Destination{Pages: []int32{1}}, nixlkv.ErrAuxIndex, "missing aux index"},
		{"aux slot past the end", Destination{Pages: []int32{1}, Aux: Aux(kitSlots)}, nixlkv.ErrAuxIndex, "aux index out of range: slot 16 of 16"},
		{"negative aux slot", Destination{Pages: []int32{1}, Aux: Aux(-1)}, nixlkv.ErrAuxIndex, "aux index out of range"},
		{"greatest aux slot", Destination{Pages: []int32{1}, Aux: Aux(math.MaxInt)}, nixlkv.ErrAuxIndex, "aux index out of range"},
		{"too many components", Destination{Aux: Aux(0), State: make([][]int32, 3)}, nixlkv.ErrState, "slots of 3 components, the layout has 2"},
		{"state slot past the end", Destination{Aux: Aux(0), State: [][]int32{{0}, {kitSlots}}}, nixlkv.ErrState, "component 1 (swa): slot index out of range: 16"},
		{"negative state slot", Destination{Aux: Aux(0), State: [][]int32{{-2}}}, nixlkv.ErrState, "slot index out of range: -2"},
		{"negative prefix", Destination{Aux: Aux(0), Prefix: -1}, nixlkv.ErrPageCount, "prefix of -1"},
		{"greatest prefix", Destination{Aux: Aux(0), Prefix: math.MaxInt}, nixlkv.ErrPageCount, "prefix of"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			id := nixlkv.Room(i + 1)
			r := q.open(id)
			ok(t, r.Connect(within(t)))
			err := r.Publish(tc.d)
			te := checkError(t, r, err, tc.want, tc.text)
			if len(te.Ranks) != 1 {
				t.Errorf("ranks %v", te.Ranks)
			}
			ok(t, r.Released(within(t)))
			if err := r.Publish(Destination{Aux: Aux(0)}); !errors.Is(err, tc.want) {
				t.Errorf("published again: %v", err)
			}
			p.aborted(id)
			ok(t, r.Close())
		})
	}
	if n := has(p, func(*wire.Metadata) bool { return true }); n != 0 {
		t.Errorf("%d rooms were told their pages", n)
	}
	q.oneRoom(1, byStatus, 63, 63)
}

// Publishing twice, or too early, leaves the room as it is.
func TestPublishOutOfOrder(t *testing.T) {
	q := newPair(t, openEngine(t, nixl.Embedded), shape{})
	r := q.open(1)
	if err := r.Publish(Destination{Pages: []int32{1}, Aux: Aux(0)}); !errors.Is(err, nixlkv.ErrNotReady) {
		t.Errorf("before Connect: %v", err)
	}
	ok(t, r.Connect(within(t)))
	pages := []int32{3}
	ok(t, r.Publish(Destination{Pages: pages, Aux: Aux(0)}))
	pages[0] = 9 // it was copied
	m := q.p.ranks[0].metadata(1)
	if !slices.Equal(m.KVIndices, []int32{3}) {
		t.Errorf("metadata %+v", m)
	}
	if err := r.Publish(Destination{Pages: []int32{kitPages}}); err == nil || errors.As(err, new(*KVTransferError)) {
		t.Errorf("published twice: %v", err)
	}
	q.p.ranks[0].serve(m, byStatus, work{src: []int32{1}})
	ok(t, r.Wait(within(t)))
	if err := r.Publish(Destination{Aux: Aux(0)}); err == nil || errors.As(err, new(*KVTransferError)) {
		t.Errorf("published after success: %v", err)
	}
	ok(t, r.Err())
	ok(t, r.Close())
}

// Whatever a destination is, it is refused with its reason, or every index in it is one of
// the layout's and no page is there twice.
func TestCheckDestination(t *testing.T) {
	mem := newKitMemory(t, withState(3))
	l := mem.layout()
	l.State[1].Tensors = append(l.State[1].Tensors, registry.StateTensor{Base: l.State[1].Tensors[0].Base, Len: 3 * kitState, ItemLen: kitState, LayerID: registry.NoLayer})
	l.State[2].Type = registry.StateDSATail
	m := &Manager{layout: l}
	slots := []uint64{kitSlots, 3, math.MaxInt32}
	index := rapid.OneOf(rapid.Int32Range(0, 20), rapid.Int32Range(0, 20), rapid.Int32Range(-2, kitPages+1), rapid.Int32())
	rapid.Check(t, func(t *rapid.T) {
		d := Destination{
			Pages:  rapid.SliceOfN(index, 0, 6).Draw(t, "pages"),
			Prefix: rapid.OneOf(rapid.IntRange(0, 64), rapid.Int()).Draw(t, "prefix"),
			State:  rapid.SliceOfN(rapid.SliceOfN(index, 0, 3), 0, 4).Draw(t, "state"),
		}
		if rapid.IntRange(0, 9).Draw(t, "has a slot") > 0 {
			d.Aux = Aux(rapid.OneOf(rapid.IntRange(0, kitSlots), rapid.Int()).Draw(t, "slot"))
		}
		good := d.Prefix >= 0 && d.Prefix <= math.MaxInt32 && d.Aux.set && d.Aux.slot >= 0 && d.Aux.slot < kitSlots && len(d.State) <= 3
		seen := map[int32]bool{}
		for _, p := range d.Pages {
			good = good && p >= 0 && p < kitPages && !seen[p]
			seen[p] = true
		}
		for i, list := range d.State {
			for _, s := range list {
				good = good && s >= 0 && uint64(s) < slots[i]
			}
		}
		err := m.checkDestination(&d)
		if good != (err == nil) {
			t.Fatalf("%+v: %v", d, err)
		}
		if err != nil && !errors.Is(err, nixlkv.ErrPageRange) && !errors.Is(err, nixlkv.ErrPageCount) && !errors.Is(err, nixlkv.ErrAuxIndex) && !errors.Is(err, nixlkv.ErrState) {
			t.Fatalf("%+v: an error without a name: %v", d, err)
		}
	})
}

// Without KV regions any page number that can be will do, without aux buffers slot 0.
func TestDestinationsOfBareLayouts(t *testing.T) {
	l := newKitMemory(t).layout()
	l.KV = nil
	m := &Manager{layout: l}
	ok(t, m.checkDestination(&Destination{Aux: Aux(0), Pages: []int32{0, math.MaxInt32}}))
	for _, pages := range [][]int32{{-1}, {1, 1}} {
		if err := m.checkDestination(&Destination{Aux: Aux(0), Pages: pages}); !errors.Is(err, nixlkv.ErrPageRange) {
			t.Errorf("pages %v of no region: %v", pages, err)
		}
	}
	l = newKitMemory(t).layout()
	l.Aux = nil
	m = &Manager{layout: l}
	ok(t, m.checkDestination(&Destination{Aux: Aux(0)}))
	if err := m.checkDestination(&Destination{Aux: Aux(1)}); !errors.Is(err, nixlkv.ErrAuxIndex) {
		t.Errorf("slot 1 of no buffer: %v", err)
	}
}
