package nixl

import (
	"testing"

	"github.com/nixlkv/nixlkv/hostmem"
)

// A nil option, an option of nil and a nil buffer are as if they were not there.
func TestNilOptions(t *testing.T) {
	e, err := Open(Embedded, nil, WithLogger(nil), nil)
	if err != nil {
		t.Fatal(err)
	}
	a, err := e.NewAgent("nil-options", nil, WithBackend(DefaultBackend, nil), nil)
	if err != nil {
		t.Fatal(err)
	}
	b, err := hostmem.Alloc(100)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := a.Register(Foreign(DRAM, b.Addr(), 100, 0).In(nil, b, nil)); err != nil {
		t.Error(err)
	}
	if err := e.Close(); err != nil {
		t.Error(err)
	}
	if err := b.Free(); err != nil {
		t.Error(err)
	}
}
