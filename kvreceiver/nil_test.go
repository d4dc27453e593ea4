package kvreceiver

import (
	"testing"

	"github.com/nixlkv/nixlkv/nixl"
)

// A nil option, an option of nil and a nil buffer are as if they were not there.
func TestNilOptions(t *testing.T) {
	e := openEngine(t, nixl.Embedded)
	mem := newKitMemory(t)
	m, err := NewManager(t.Context(), mem.layout(), nil, WithEngine(e), WithLogger(nil), WithThreadInit(nil), WithMemory(nil),
		WithAgentOptions(nil), WithBackend(nixl.DefaultBackend, nil), WithBootstrapClient(nil), WithMetadata(nil), nil)
	ok(t, err)
	r, err := m.Open(1, "127.0.0.1:1", nil, WithDPRank(0), nil)
	ok(t, err)
	ok(t, r.Close())
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
