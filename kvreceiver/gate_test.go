package kvreceiver

import (
	"sync"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/nixlkv/nixlkv/internal/embedded"
	"github.com/nixlkv/nixlkv/internal/engine"
	"github.com/nixlkv/nixlkv/nixl"
)

// gate is an engine whose notifications can be held back, as those of a slow network are.
type gate struct {
	engine.Engine
	mu     sync.Mutex
	waits  chan struct{} // a drain is at the gate
	closed bool          // the test's own
}

type gatedAgent struct {
	engine.Agent
	g *gate
}

// openGate gives an engine behind a gate, which is open.
func openGate(t *testing.T) (*nixl.Engine, *gate) {
	g := &gate{Engine: embedded.New(), waits: make(chan struct{}, 1)}
	e := nixl.OpenOver(g, nixl.Embedded, zap.NewNop())
	closeEngine(t, e)
	t.Cleanup(g.open)
	return e, g
}

func (g *gate) NewAgent(name string, cfg engine.AgentConfig) (engine.Agent, error) {
	a, err := g.Engine.NewAgent(name, cfg)
	if err != nil {
		return nil, err
	}
	return &gatedAgent{a, g}, nil
}

func (a *gatedAgent) Notifications(dst *engine.Notifications) error {
	select {
	case a.g.waits <- struct{}{}:
	default:
	}
	a.g.mu.Lock()
	defer a.g.mu.Unlock()
	return a.Agent.Notifications(dst)
}

// close holds back what comes from now on, and returns when a drain waits at the gate.
func (g *gate) close(t *testing.T, m *Manager) {
	t.Helper()
	g.mu.Lock()
	g.closed = true
	select {
	case <-g.waits:
	default:
	}
	m.drain.nudge()
	select {
	case <-g.waits:
	case <-time.After(patience):
		t.Fatal("no drain comes to the gate")
	}
}

func (g *gate) open() {
	if g.closed {
		g.closed = false
		g.mu.Unlock()
	}
}
