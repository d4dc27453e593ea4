package main

import "testing"

// A room's stamp is in all of its pages and its slot, and in nobody else's.
func TestStamps(t *testing.T) {
	m, err := newMemory(&plan{Regions: 3, Pages: 2, PageBytes: 16, Pool: 5}, 4)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := m.buf.Free(); err != nil {
			t.Error(err)
		}
	}()
	if err := m.layout().Validate(); err != nil {
		t.Fatal(err)
	}
	for k := range 4 {
		m.stamp(k, firstRoom)
	}
	m.stamp(2, firstRoom+1)
	for k := range 4 {
		room := firstRoom
		if k == 2 {
			room++
		}
		if err := m.check(k, room); err != nil || !m.begun(k, room) || m.begun(k, room+7) {
			t.Errorf("stream %d: %v", k, err)
		}
	}
	places := 0
	for b := range m.places(1) {
		places++
		b[0]++
		if err := m.check(1, firstRoom); err == nil {
			t.Errorf("place %d of another room was not noticed", places)
		}
		b[0]--
	}
	if places != 3*2+1 {
		t.Errorf("%d places", places)
	}
}
