package nixl

import (
	"fmt"
	"sync"

	"go.uber.org/zap"

	"github.com/nixlkv/nixlkv/internal/cgo"
	"github.com/nixlkv/nixlkv/internal/embedded"
	"github.com/nixlkv/nixlkv/internal/engine"
)

// Kind chooses an engine.
type Kind int

// The engines.
const (
	// Auto is Native where NIXL can be loaded, else Embedded; Info.Why says why.
	Auto Kind = iota
	// Native is NVIDIA's NIXL library.
	Native
	// Embedded is this module's own engine, for Go peers only: on one host, and with WithTCP
	// between hosts.
	Embedded
)

var kindNames = [...]string{"auto", "native", "embedded"}

// String gives "auto", "native" or "embedded".
func (k Kind) String() string {
	if k < 0 || int(k) >= len(kindNames) {
		return fmt.Sprintf("Kind(%d)", int(k))
	}
	return kindNames[k]
}

// ParseKind reads what String gives.
func ParseKind(s string) (Kind, error) {
	for k, n := range kindNames {
		if s == n {
			return Kind(k), nil
		}
	}
	return 0, fmt.Errorf("nixl: no engine %q: auto, native or embedded", s)
}

// Option configures Open. A nil one changes nothing.
type Option func(*options)

type options struct {
	lib cgo.Options
	log *zap.Logger
}

// WithLibrary names the NIXL library, a file or a folder with libnixl_capi.so in it. No
// other place is looked at then.
func WithLibrary(path string) Option { return func(o *options) { o.lib.Library = path } }

// WithNIXLLogLevel sets the level of NIXL's own log on standard error: TRACE, DEBUG, INFO,
// WARN, ERROR or FATAL. It takes effect when the library is first loaded.
func WithNIXLLogLevel(level string) Option { return func(o *options) { o.lib.LogLevel = level } }

// WithCalls chooses how the native engine crosses into C on a transfer's path: "cgo" (a
// batching shim, the default where the build has cgo) or "purego".
func WithCalls(how string) Option { return func(o *options) { o.lib.Calls = how } }

// WithLogger gives the logger of the engine and its agents. Without it, or with nil, nothing is
// logged.
func WithLogger(l *zap.Logger) Option {
	return func(o *options) {
		if l != nil {
			o.log = l
		}
	}
}

// Info says what Open chose.
type Info struct {
	Kind    Kind   // Native or Embedded
	Version string // of NIXL, from its wheel; empty if it cannot be told
	Path    string // of the library
	Calls   string // "cgo" or "purego", for the native engine
	Why     string // why this engine, in a sentence
}

// Engine makes agents. Close it when no agent is needed any more.
type Engine struct {
	raw  engine.Engine
	info Info
	adds bool // engine.Info.LoadAdds
	log  *zap.Logger
	gpus gpus

	mu     sync.Mutex
	closed bool
	agents map[*Agent]struct{} // including those in quarantine
}

// Open gives an engine. A native library stays loaded until the process ends.
func Open(kind Kind, opts ...Option) (*Engine, error) {
	o := options{log: zap.NewNop()}
	for _, opt := range opts {
		if opt != nil {
			opt(&o)
		}
	}
	var raw engine.Engine
	var why string
	switch kind {
	case Native, Auto:
		lib, err := cgo.Open(o.lib)
		switch {
		case err == nil:
			raw, why = lib, "NIXL was loaded from "+lib.Info().Path
		case kind == Native:
			return nil, &Error{Call: "open", Err: err}
		default:
			raw, why = embedded.New(), "NIXL could not be loaded: "+err.Error()
		}
	case Embedded:
		raw, why = embedded.New(), "asked for"
	default:
		return nil, &Error{Call: "open", Err: fmt.Errorf("%w: no such engine: %v", ErrUnsupported, kind)}
	}
	in := raw.Info()
	e := newEngine(raw, Info{Kind: Native, Version: in.Version, Path: in.Path, Calls: in.Calls, Why: why}, o.log)
	if in.Name != Native.String() {
		e.info.Kind = Embedded
	}
	for _, v := range in.Overrode {
		e.log.Warn("overrode an environment variable: UCX would have taken Go's signal handlers", zap.String("was", v))
	}
	e.log.Info("engine opened", zap.Stringer("engine", e.info.Kind), zap.String("version", in.Version),
		zap.String("path", in.Path), zap.String("calls", in.Calls), zap.String("why", why))
	return e, nil
}

func newEngine(raw engine.Engine, info Info, log *zap.Logger) *Engine {
	return &Engine{raw: raw, info: info, adds: raw.Info().LoadAdds, log: log, agents: map[*Agent]struct{}{}}
}

// Info says which engine this is, and why.
func (e *Engine) Info() Info { return e.info }

// EngineStats counts what an engine holds.
type EngineStats struct {
	Agents      int // open or in quarantine
	Quarantined int // closed, but with transfers or calls still in flight
}

// Stats counts agents.
func (e *Engine) Stats() EngineStats {
	e.mu.Lock()
	defer e.mu.Unlock()
	s := EngineStats{Agents: len(e.agents)}
	for a := range e.agents {
		if a.calls.closing() {
			s.Quarantined++
		}
	}
	return s
}

// Close closes all agents, each within its close timeout, and the engine. It may be called
// again while agents are in quarantine (ErrStillInFlight).
func (e *Engine) Close() error {
	e.mu.Lock()
	e.closed = true
	agents := make([]*Agent, 0, len(e.agents))
	for a := range e.agents {
		agents = append(agents, a)
	}
	e.mu.Unlock()
	return closeAll(agents)
}

func (e *Engine) forget(a *Agent) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.agents, a)
}
