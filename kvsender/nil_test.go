package kvsender

import (
	"testing"

	"github.com/nixlkv/nixlkv/nixl"
)

// A nil option, an option of nil and a nil buffer are as if they were not there.
func TestNilOptions(t *testing.T) {
	e := embeddedEngine(t)
	mem := newKitMemory(t, 1)
	defer mem.free(t)
	m, err := NewManager(t.Context(), mem.layout(), nil, WithEngine(e), WithLogger(nil), WithThreadInit(nil), WithMemory(nil, mem.kv),
		WithAgentOptions(nil), WithBackend(nixl.DefaultBackend, nil), WithBootstrap("", nil), nil)
	ok(t, err)
	if m.Engine() != e {
		t.Error("another engine")
	}
	closeManager(t, m)
	m, err = NewManager(t.Context(), mem.layout(), WithEngine(nil))
	ok(t, err)
	if m.Engine() == nil {
		t.Error("no engine")
	}
	closeManager(t, m)
	if _, err := NewManager(t.Context(), nil, nil); err == nil {
		t.Error("a manager without a layout")
	}
}
