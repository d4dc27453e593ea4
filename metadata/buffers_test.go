package metadata

import (
	"errors"
	"math"
	"slices"
	"testing"

	"github.com/nixlkv/nixlkv"
)

func newMemory(l *Layout, slots int) [][]byte {
	var memory [][]byte
	for _, n := range l.ItemLens() {
		memory = append(memory, make([]byte, slots*int(n)))
	}
	return memory
}

func TestNewBuffersRefuses(t *testing.T) {
	l := mustLayout(t, SGLang0523, allOptions)
	ok := newMemory(l, 3)
	for _, slots := range []int{-1, 0, math.MaxInt} {
		if b, err := NewBuffers(l, slots, ok); b != nil || !errors.Is(err, ErrBuffer) {
			t.Errorf("%d slots: got %v, %v", slots, b, err)
		}
	}
	plain := mustLayout(t, SGLang0523, Options{})
	// Slots times any of its item lengths is 0 in 64 bits.
	if _, err := NewBuffers(plain, 1<<58, newMemory(plain, 1)); !errors.Is(err, ErrBuffer) {
		t.Errorf("slots beyond memory: %v", err)
	}
	if _, err := NewBuffers(nil, 3, ok); !errors.Is(err, ErrBuffer) {
		t.Errorf("no layout: %v", err)
	}
	for _, m := range [][][]byte{nil, ok[1:], append(slices.Clone(ok), nil)} {
		if _, err := NewBuffers(l, 3, m); !errors.Is(err, ErrBuffer) {
			t.Errorf("%d buffers: %v", len(m), err)
		}
	}
	for i, b := range l.Buffers() {
		short := slices.Clone(ok)
		short[i] = short[i][1:]
		var be *BufferError
		if _, err := NewBuffers(l, 3, short); !errors.As(err, &be) || *be != (BufferError{i, b.Name, 3 * b.ItemLen, 3*b.ItemLen - 1}) {
			t.Errorf("short %s: %v", b.Name, err)
		}
	}
}

func TestSlotOutOfRange(t *testing.T) {
	l := mustLayout(t, SGLang0523, Options{})
	b, err := NewBuffers(l, 3, newMemory(l, 4)) // more memory than slots
	if err != nil {
		t.Fatal(err)
	}
	if b.Layout() != l || b.Slots() != 3 {
		t.Errorf("%v, %d slots", b.Layout(), b.Slots())
	}
	for _, i := range []int{-1, 3, math.MaxInt, math.MinInt} {
		row, err := b.AppendRow(nil, i)
		if row != nil {
			t.Errorf("slot %d: a row", i)
		}
		for _, err := range []error{
			err, b.Encode(i, &Record{Room: 1}), b.DecodeInto(&Record{}, i, 1, Want{}), b.CheckRoom(i, 1), b.Clear(i),
		} {
			if !errors.Is(err, nixlkv.ErrAuxIndex) {
				t.Errorf("slot %d: %v", i, err)
			}
		}
	}
}

// AppendRow gives the memory that the other methods work on.
func TestAppendRow(t *testing.T) {
	l := mustLayout(t, SGLang0521, Options{DSATopK: 5, Checksums: true})
	b, err := NewBuffers(l, 3, newMemory(l, 3))
	if err != nil {
		t.Fatal(err)
	}
	want := fullRecord(l, testRand())
	row, err := b.AppendRow(nil, 1)
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Encode(row, want); err != nil {
		t.Fatal(err)
	}
	var got Record
	if err := b.DecodeInto(&got, 1, want.Room, wantOf(want)); err != nil {
		t.Fatal(err)
	}
	sameRecord(t, &got, want)
	if err := b.CheckRoom(1, want.Room); err != nil {
		t.Error(err)
	}
	for _, i := range []int{0, 2} {
		if err := b.CheckRoom(i, want.Room); !errors.Is(err, ErrNotWritten) {
			t.Errorf("slot %d: %v", i, err)
		}
	}
	for _, r := range row {
		if cap(r) != len(r) {
			t.Error("a row can be appended into the next slot")
		}
	}
}
