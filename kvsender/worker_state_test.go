package kvsender

import (
	"slices"
	"testing"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/internal/wire"
	"github.com/nixlkv/nixlkv/nixl"
	"github.com/nixlkv/nixlkv/registry"
)

// stateTags gives the components of the state tags that have come, and whether aux has.
func stateTags(t *testing.T, d *decode, id nixlkv.Room) (components []int, aux bool) {
	t.Helper()
	for _, g := range d.tags {
		switch g.Kind {
		case wire.TagState:
			if g.Room != id || g.Source != 0 {
				t.Errorf("tag %+v", g)
			}
			components = append(components, g.Component)
		case wire.TagAux:
			aux = true
		}
	}
	slices.Sort(components)
	return components, aux
}

// State arrives with the last chunk, and a decode that waits for tags gets them.
func TestRoomWithState(t *testing.T) {
	eachDialect(t, func(t *testing.T, e *nixl.Engine, frames int) {
		u := newStatePair(t, e, frames, nil, registry.StateMamba, registry.StateSWA)
		for i, tc := range []struct {
			name     string
			src, dst [][]int32
			tags     []int // components told
		}{
			{"both", [][]int32{{7}, {1, 2, 5}}, [][]int32{{0}, {6, 7, 3}}, []int{0, 1}},
			{"the first", [][]int32{{7}}, [][]int32{{1}, {}}, []int{0}},
			{"the second", [][]int32{nil, {2}}, [][]int32{{}, {4}}, []int{1}},
			{"none, with empty lists", nil, [][]int32{{}, {}}, []int{0}},
			{"none", nil, nil, nil},
		} {
			id := nixlkv.Room(10 + i)
			s := u.begin(t, id, tc.src, tc.dst)
			ok(t, s.Wait(within(t)))
			if frames == 25 {
				u.d.status(id)
			} else {
				u.d.until("the notifications", func() bool { return len(u.d.tags) == 2+len(tc.tags) })
				if got, aux := stateTags(t, u.d, id); !slices.Equal(got, tc.tags) || !aux {
					t.Errorf("%s: told of components %v, expected %v, aux %t", tc.name, got, tc.tags, aux)
				}
				u.d.tags = nil
			}
			u.compareState(t, tc.src, tc.dst)
			u.d.compare(u.src, []int32{4}, []int32{3}, 2, 1)
			u.d.clear()
			slots := 0
			for _, l := range tc.src {
				slots += len(l)
			}
			if m := s.Metrics(); m.StateBytes != uint64(slots*kitTensors*kitState) || m.Bytes != m.StateBytes+4*kitPage+kitAux || m.Chunks != 1 {
				t.Errorf("%s: metrics %+v", tc.name, m)
			}
			ok(t, s.Close())
		}
		if frames == 24 && len(u.d.statuses) != 0 || frames == 25 && len(u.d.tags) != 0 {
			t.Errorf("told in the other dialect: %+v, %+v", u.d.statuses, u.d.tags)
		}
		if s := u.m.Stats(); s.Succeeded != 5 || s.Rooms != 0 || s.StateBytes == 0 || s.StateBytes > s.Bytes {
			t.Errorf("stats %+v", s)
		}
	})
}

// A full prefix hit has state but no pages.
func TestStateWithoutPages(t *testing.T) {
	eachDialect(t, func(t *testing.T, e *nixl.Engine, frames int) {
		u := newStatePair(t, e, frames, nil, registry.StateSWA)
		s := open(t, u.m, 1)
		dst := [][]int32{{4, 5}}
		u.d.tell(1, nil, 1, func(m *wire.Metadata) { m.Prefix, m.StateIndices = 16, dst })
		ok(t, s.Begin(Plan{Aux: Aux(2)}))
		ok(t, s.Finish(nil, [][]int32{{2, 3}}))
		ok(t, s.Wait(within(t)))
		ok(t, s.Close())
		if frames == 24 {
			u.d.until("two notifications", func() bool { return len(u.d.tags) == 2 })
		} else {
			u.d.status(1)
		}
		u.compareState(t, [][]int32{{2, 3}}, dst)
	})
}

// A decode takes the first tag of a source for all of its state: with several transfers none
// may come before the last has landed, nor aux after which the room would be complete.
func TestStateTagsWaitForAllComponents(t *testing.T) {
	st, e := stallingEngine(t)
	u := newStatePair(t, e, 24, nil, registry.StateMamba, registry.StateSWA)
	src, dst := [][]int32{{7}, {1, 2}}, [][]int32{{0}, {6, 3}}
	ok(t, u.begin(t, 1, src, dst).Wait(within(t))) // so that the decode has been taken up
	u.d.until("the first room", func() bool { return len(u.d.tags) == 4 })
	u.d.tags = nil

	st.stall()
	s := u.begin(t, 2, src, dst)
	st.waitForWrites(t, 3) // pages and two components
	if got, aux := stateTags(t, u.d, 2); len(got) > 0 || aux || s.Status() != nixlkv.Transferring {
		t.Errorf("told of components %v, aux %t, status %v, with state in flight", got, aux, s.Status())
	}
	// The engine has them a moment before they are counted.
	u.d.until("three transfers to be counted", func() bool { return s.Metrics().Transfers >= 3 })
	if m := s.Metrics(); m.Transfers != 3 || m.Chunks != 1 {
		t.Errorf("metrics %+v", m)
	}
	st.letGo()
	ok(t, s.Wait(within(t)))
	u.d.until("the tags", func() bool { got, aux := stateTags(t, u.d, 2); return aux && len(got) == 2 })
	if m := s.Metrics(); m.Transfers != 4 || m.Chunks != 1 {
		t.Errorf("metrics %+v", m)
	}

	// A room that fails meanwhile gets neither tags nor aux.
	u.d.tags = nil
	st.stall()
	s = u.begin(t, 3, src, dst)
	st.waitForWrites(t, 3)
	s.Abort("enough")
	st.letGo()
	wantFailure(t, s, u.d, nixlkv.ErrAborted, "enough")
	if got, aux := stateTags(t, u.d, 3); len(got) > 0 || aux {
		t.Errorf("told of components %v, aux %t", got, aux)
	}
	if n := s.Metrics().Transfers; n != 3 {
		t.Errorf("%d transfers, want 3", n)
	}
}

// One transfer carries its tag, and aux does not wait for it.
func TestOneComponentDoesNotWait(t *testing.T) {
	st, e := stallingEngine(t)
	u := newStatePair(t, e, 24, nil, registry.StateMamba, registry.StateSWA)
	src, dst := [][]int32{nil, {1, 2}}, [][]int32{{}, {6, 3}}
	ok(t, u.begin(t, 1, src, dst).Wait(within(t)))
	st.stall()
	s := u.begin(t, 2, src, dst)
	st.waitForWrites(t, 3) // pages, state and aux
	st.letGo()
	ok(t, s.Wait(within(t)))
}

// A stage without such layers writes nothing, and its decode is told all the same.
func TestStateOfAnEmptyStage(t *testing.T) {
	eachDialect(t, func(t *testing.T, e *nixl.Engine, frames int) {
		u := newStatePair(t, e, frames, func(l *registry.Layout, _ *wire.Registration) { l.State[0].Tensors = nil }, registry.StateMamba)
		s := u.begin(t, 1, [][]int32{{3}}, [][]int32{{5}})
		ok(t, s.Wait(within(t)))
		if frames == 24 {
			u.d.until("the tag", func() bool { got, aux := stateTags(t, u.d, 1); return aux && len(got) == 1 })
		} else {
			u.d.status(1)
		}
		u.compareState(t, nil, nil)
	})
}

// Rooms with state that cannot be sent fail before anything is posted; others go on.
func TestStateFailures(t *testing.T) {
	eachDialect(t, func(t *testing.T, e *nixl.Engine, frames int) {
		u := newStatePair(t, e, frames, func(_ *registry.Layout, g *wire.Registration) { g.StateItemLens[1][0] = kitState + 32 }, registry.StateMamba, registry.StateSWA)
		id := nixlkv.Room(100)
		for _, tc := range []struct {
			name     string
			src, dst [][]int32
			want     error
			text     string
		}{
			{"the decode's slots are wider", [][]int32{nil, {1}}, [][]int32{nil, {1}}, nixlkv.ErrStride, "128 in decode tensor 0"},
			{"and only it asks", nil, [][]int32{nil, {1}}, nixlkv.ErrStride, "decode: 2 tensors"},
			{"two mamba slots", [][]int32{{1, 2}}, [][]int32{{1, 2}}, nixlkv.ErrState, "single state index"},
			{"two at the decode", [][]int32{{1}}, [][]int32{{1, 2}}, nixlkv.ErrState, "the decode gives 2"},
			{"slot out of range", [][]int32{{kitStateSlots}}, [][]int32{{1}}, nixlkv.ErrState, "prefill slot 8"},
			{"slot out of range at the decode", [][]int32{{1}}, [][]int32{{1000}}, nil, ""},
			{"a component that is not there", [][]int32{nil, nil, {1}}, nil, nixlkv.ErrState, "component 2"},
			{"missing at the decode", [][]int32{{1}}, nil, nixlkv.ErrState, "prefill=1, decode=0"},
			{"missing at the prefill", nil, [][]int32{{1}}, nixlkv.ErrState, "prefill=0, decode=1"},
		} {
			t.Run(tc.name, func(t *testing.T) {
				late := false
				if tc.want == nil {
					// A decode that does not tell its lengths leaves it to NIXL to refuse.
					if tc.text, late = "decode slot 1000", frames == 24; late {
						tc.text = "state"
					}
				}
				u.d.t = t
				id++
				s := u.begin(t, id, tc.src, tc.dst)
				wantFailure(t, s, u.d, tc.want, tc.text)
				if m := s.Metrics(); (m.Transfers != 0) != late || m.StateBytes != 0 {
					t.Errorf("%d transfers, %d bytes of state", m.Transfers, m.StateBytes)
				}
			})
		}
		u.d.t = t
		u.d.clear()
		u.d.tags = nil
		s := u.begin(t, 7, [][]int32{{3}}, [][]int32{{5}})
		ok(t, s.Wait(within(t)))
		ok(t, s.Close())
		u.compareState(t, [][]int32{{3}}, [][]int32{{5}})
	})
}

// What a decode asks for is checked before the first chunk goes, and what the last chunk
// brings before any of that.
func TestStateIsCheckedFirst(t *testing.T) {
	eachDialect(t, func(t *testing.T, e *nixl.Engine, frames int) {
		u := newStatePair(t, e, frames, nil, registry.StateMamba)
		for i, tc := range []struct {
			dst       [][]int32
			transfers int
			text      string
		}{
			{[][]int32{{1, 2}}, 0, "the decode gives 2"},
			{[][]int32{}, 1, "prefill=1, decode=0"},
		} {
			id := nixlkv.Room(1 + i)
			s := open(t, u.m, id)
			u.d.tell(id, []int32{3, 4}, 1, func(m *wire.Metadata) { m.StateIndices = tc.dst })
			ok(t, s.Begin(Plan{Pages: 2, Aux: Aux(2)}))
			if err := s.Send([]int32{4}); err == nil {
				if tc.transfers == 1 {
					u.d.until("the first page", func() bool { return s.Metrics().Transfers == 1 })
				}
				_ = s.Finish([]int32{5}, [][]int32{{1}})
			}
			wantFailure(t, s, u.d, nixlkv.ErrState, tc.text)
			if m := s.Metrics(); m.Transfers != tc.transfers {
				t.Errorf("%d transfers, expected %d", m.Transfers, tc.transfers)
			}
		}
	})
}

// State of several decodes: each gets its own slots.
func TestStateOfTwoDecodes(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *nixl.Engine) {
		u := newStatePair(t, e, 25, nil, registry.StateSWA)
		other := newDecode(t, e, u.m, newKitMemory(t, 4), 24)
		t.Cleanup(func() {
			other.close()
			other.mem.free(t)
		})
		// It registers no state: a room with it fails at both.
		other.register(other.registration())
		s := open(t, u.m, 1)
		two := func(m *wire.Metadata) { m.Destinations = 2 }
		u.d.tell(1, []int32{3}, 1, two, func(m *wire.Metadata) { m.StateIndices = [][]int32{{5}} })
		other.tell(1, []int32{3}, 1, two)
		ok(t, s.Begin(Plan{Pages: 1, Aux: Aux(2)}))
		ok(t, s.Finish([]int32{4}, [][]int32{{2}}))
		wantFailure(t, s, u.d, nixlkv.ErrState, "0 at the decode")
		if m := s.Metrics(); m.Transfers != 0 {
			t.Errorf("%d transfers", m.Transfers)
		}
		u.compareState(t, nil, nil)
	})
}
