package nixl

import (
	"go.uber.org/zap"

	"github.com/nixlkv/nixlkv/internal/engine"
)

// OpenOver gives an engine over an implementation of this module's engine contract. It is
// how the module's own tests put a recording or a failing engine under what they test; the
// contract is internal, so nobody else can call it. kind says which engine it stands for.
func OpenOver(raw engine.Engine, kind Kind, log *zap.Logger) *Engine {
	i := raw.Info()
	return newEngine(raw, Info{Kind: kind, Version: i.Version, Path: i.Path, Calls: i.Calls, Why: "given"}, log)
}
