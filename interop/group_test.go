package interop

import (
	"cmp"
	"fmt"
	"net"
	"slices"
	"strconv"
	"testing"
)

// group is the ranks of a prefill in operation.
type group struct {
	env        environment
	of         *setup
	by, beside impl
	dir        string
	port       int // of the bootstrap server
	ranks      []*process
}

// startGroup starts the ranks of a prefill at a port. Those that the setup says are SGLang's are
// beside's, the others by's.
func startGroup(t *testing.T, env environment, s *setup, by, beside impl, port int) *group {
	t.Helper()
	g := launchGroup(t, env, s, by, beside, port)
	g.complete(t)
	return g
}

// launchGroup launches the prefill's first rank, which serves the others.
func launchGroup(t *testing.T, env environment, s *setup, by, beside impl, port int) *group {
	t.Helper()
	g := &group{env: env, of: s, by: by, beside: beside, dir: t.TempDir(), port: port}
	g.launch(t, 0)
	return g
}

// complete launches the other ranks when the first is ready, and waits until all are.
func (g *group) complete(t *testing.T) {
	t.Helper()
	g.ranks[0].waitReady(t)
	for i := 1; i < len(g.of.prefill); i++ {
		g.launch(t, i)
	}
	for _, x := range g.ranks[1:] {
		x.waitReady(t)
	}
}

func (g *group) launch(t *testing.T, i int) {
	t.Helper()
	c := g.of.prefill[i]
	c.Role, c.BootstrapPort, c.ServeBootstrap = "prefill", g.port, i == 0
	if c.FillSeed == "" {
		c.FillSeed = fmt.Sprintf("p%d", i)
	}
	by := g.by
	if slices.Contains(g.of.sglang, i) {
		by = g.beside
	}
	g.ranks = append(g.ranks, startRank(t, g.env, by, g.dir, fmt.Sprintf("prefill%d", i), c))
}

// addr is where decodes find the prefill.
func (g *group) addr() string {
	return net.JoinHostPort(cmp.Or(g.of.prefill[0].Host, "127.0.0.1"), strconv.Itoa(g.port))
}

// stop ends the ranks. This library's must not have kept anything of the rooms.
func (g *group) stop(t *testing.T) {
	t.Helper()
	checkKept(t, g.ranks)
	exitAll(t, g.ranks...)
}

// checkKept: no rank of this library's has kept anything of rooms.
func checkKept(t *testing.T, ranks []*process) {
	t.Helper()
	for _, x := range ranks {
		if !x.ours {
			continue
		}
		// The number of an aborted room is held a moment longer.
		x.askUntil(t, "rooms are let go", "rooms", map[string]any{"cmd": "rooms"}, func(e event) bool {
			return len(e.RequestStatus) == 0 && len(e.Failures) == 0 && e.Held == 0
		})
	}
}
