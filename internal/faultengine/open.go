package faultengine

import (
	"os"
	"testing"

	"go.uber.org/zap"

	"github.com/nixlkv/nixlkv/internal/cgo"
	"github.com/nixlkv/nixlkv/internal/embedded"
	"github.com/nixlkv/nixlkv/internal/engine"
	"github.com/nixlkv/nixlkv/nixl"
)

// Open gives an engine of a kind that goes wrong as told. What is held back is let go when the
// test ends, and the engine is closed, which must hold no agent then. The test is skipped where
// there is no NIXL, unless the environment promises one.
func Open(t testing.TB, kind nixl.Kind) (*nixl.Engine, *Engine) {
	t.Helper()
	var raw engine.Engine = embedded.New()
	if kind == nixl.Native {
		lib, err := cgo.Open(cgo.Options{})
		if err != nil {
			if os.Getenv(cgo.EnvLibrary) == "" {
				t.Skip("skip: no NIXL library on this machine; make test fetches one")
			}
			t.Fatal(err)
		}
		raw = lib
	}
	faults := New(raw)
	e := nixl.OpenOver(faults, kind, zap.NewNop())
	t.Cleanup(func() {
		faults.Clear()
		if s := e.Stats(); s.Agents != 0 {
			t.Errorf("agents left: %+v", s)
		}
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	})
	return e, faults
}
