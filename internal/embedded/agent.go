package embedded

import (
	"crypto/rand"
	"fmt"
	"maps"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/nixlkv/nixlkv/internal/engine"
)

// pluginName is the backend's name. NIXL's usual one is accepted in its place, so that
// the same caller runs on both engines.
const (
	pluginName  = "EMBEDDED"
	pluginAlias = "UCX"
)

// backendHandle is the only backend there is.
const backendHandle engine.Backend = 1

// Agent implements engine.Agent.
type Agent struct {
	name     string
	config   engine.AgentConfig
	settings config
	host     hostID
	id       agentID

	requests  table[request]
	prepareds table[prepared]
	lists     table[list]
	remotes   table[*peer]

	local atomic.Pointer[spanIndex[*localRegion]] // what is registered
	inbox inbox
	pool  *pool
	cost  costModel
	stats counters

	goroutines sync.WaitGroup
	active     atomic.Int64  // requests in progress
	quit       chan struct{} // closed by Destroy

	mu         sync.Mutex
	backend    string            // its name, empty before CreateBackend
	params     map[string]string // it was created with
	tcp        tcpConfig         // read from them
	listeners  []net.Listener
	address    string   // of the Unix socket
	advertised []string // TCP addresses
	destroyed  bool
	lastRegion uint64
	epoch      uint64
	byID       map[uint64]*localRegion
	bySpan     map[span][]*localRegion
	peers      map[string]*peer // loaded and not lost
	allPeers   map[*peer]struct{}
	inbounds   map[*inbound]struct{}
	strangers  int // those over TCP that have not said yet which agent they mean
}

var _ engine.Agent = (*Agent)(nil)

func newAgent(name string, cfg engine.AgentConfig, settings config, host hostID) *Agent {
	a := &Agent{
		name: name, config: cfg, settings: settings, host: host,
		inbox:    inbox{limit: settings.inboxBytes},
		byID:     make(map[uint64]*localRegion),
		bySpan:   make(map[span][]*localRegion),
		peers:    make(map[string]*peer),
		allPeers: make(map[*peer]struct{}),
		inbounds: make(map[*inbound]struct{}),
		quit:     make(chan struct{}),
		epoch:    1,
	}
	rand.Read(a.id[:])
	a.local.Store(&spanIndex[*localRegion]{})
	return a
}

// usable says whether the agent can do anything. a.mu is held. The statuses are NIXL's.
func (a *Agent) usable() error {
	switch {
	case a.destroyed:
		return errDestroyed
	case a.backend == "":
		return errNoBackend
	}
	return nil
}

var (
	errDestroyed = fmt.Errorf("agent is destroyed: %w", engine.ErrInvalidState)
	errNoBackend = fmt.Errorf("no backend was created: %w", engine.ErrNotFound)
)

func (a *Agent) ready() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.usable()
}

// Plugins implements engine.Agent.
func (*Agent) Plugins() ([]string, error) { return []string{pluginName}, nil }

// PluginParams implements engine.Agent.
func (a *Agent) PluginParams(plugin string) (map[string]string, []engine.Mem, error) {
	if plugin != pluginName && plugin != pluginAlias {
		return nil, nil, fmt.Errorf("embedded: no plugin %q, there is %s: %w", plugin, pluginName, engine.ErrNotFound)
	}
	return defaultParams(), a.mems(), nil
}

func (a *Agent) mems() []engine.Mem {
	if a.config.HostVRAM {
		return []engine.Mem{engine.DRAM, engine.VRAM}
	}
	return []engine.Mem{engine.DRAM}
}

// CreateBackend implements engine.Agent. It accepts EMBEDDED or, for callers written for
// NIXL, UCX; both mean this engine, and one may be created once. From then on the agent
// listens: on a Unix socket of its own host and, if ParamListen says so, on a TCP address.
// Parameters that it does not know are an error of EMBEDDED; those of UCX are meant for
// NIXL's, kept for BackendParams and change nothing.
func (a *Agent) CreateBackend(plugin string, params map[string]string) (engine.Backend, error) {
	if _, _, err := a.PluginParams(plugin); err != nil {
		return 0, err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case a.destroyed:
		return 0, fmt.Errorf("embedded: create backend: %w", errDestroyed)
	case a.backend != "":
		return 0, fmt.Errorf("embedded: backend %s exists, an agent has one: %w", a.backend, engine.ErrInvalidParam)
	}
	tcp, err := parseParams(plugin, params)
	if err != nil {
		return 0, fmt.Errorf("embedded: create backend: %w", err)
	}
	if err := a.listen(tcp); err != nil {
		return 0, fmt.Errorf("embedded: create backend: listen: %w: %w", err, engine.ErrBackend)
	}
	a.backend, a.params, a.tcp = plugin, maps.Clone(params), tcp
	a.pool = newPool(a.settings.workers)
	for _, l := range a.listeners {
		a.goroutines.Go(func() { a.acceptAll(l) })
	}
	return backendHandle, nil
}

// listen opens the sockets on which peers reach the agent. a.mu is held.
func (a *Agent) listen(c tcpConfig) error {
	u, address, err := listenUnix()
	if err != nil {
		return err
	}
	if c.listen == "" {
		a.listeners, a.address = []net.Listener{u}, address
		return nil
	}
	t, err := listenTCP(c.listen)
	if err != nil {
		u.Close()
		return err
	}
	advertised, err := c.addressesOf(t.Addr())
	if err != nil {
		u.Close()
		t.Close()
		return err
	}
	a.listeners, a.address, a.advertised = []net.Listener{u, t}, address, advertised
	return nil
}

// BackendParams implements engine.Agent. ParamAdvertise tells the addresses in use.
func (a *Agent) BackendParams(b engine.Backend) (map[string]string, []engine.Mem, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if b != backendHandle || a.usable() != nil {
		return nil, nil, fmt.Errorf("embedded: no backend %#x: %w", uintptr(b), engine.ErrInvalidParam)
	}
	params := defaultParams()
	maps.Copy(params, a.params)
	params[ParamAdvertise] = strings.Join(a.advertised, ",")
	return params, a.mems(), nil
}

// Notifications implements engine.Agent.
func (a *Agent) Notifications(dst *engine.Notifications) error {
	if err := a.ready(); err != nil {
		return fmt.Errorf("embedded: notifications: %w", err)
	}
	for _, p := range a.inbox.drain(dst) {
		p.in.reply(reply{typ: frameDone, number: p.number})
	}
	return nil
}

// Destroy implements engine.Agent. Regions that are still registered are deregistered
// first, with the same wait and the same engine.ErrBusy, after which the agent is as it
// was. A request in progress is an error too. A second call does nothing.
func (a *Agent) Destroy() error {
	a.mu.Lock()
	if a.destroyed {
		a.mu.Unlock()
		return nil
	}
	regions := slices.Collect(maps.Values(a.byID))
	a.mu.Unlock()
	if n := a.active.Load(); n > 0 {
		return fmt.Errorf("embedded: destroy agent %q: %d requests in progress: %w", a.name, n, engine.ErrInvalidState)
	}
	if err := a.withdraw(regions); err != nil {
		return fmt.Errorf("embedded: destroy agent %q: %w", a.name, err)
	}

	a.mu.Lock()
	a.destroyed = true
	a.peers = nil
	peers := slices.Collect(maps.Keys(a.allPeers))
	listeners := a.listeners
	a.mu.Unlock()
	for _, p := range peers {
		p.fail(errDestroyed)
	}
	close(a.quit)
	for _, l := range listeners {
		l.Close()
	}
	for _, in := range a.listInbound() {
		in.stop()
	}
	// Nothing of this waits for a peer: sockets are told to give up, and what copies
	// stops at the next piece.
	a.goroutines.Wait()
	if a.pool != nil {
		a.pool.stop()
	}
	return nil
}

// Stats counts what happened to an agent's connections.
type Stats struct {
	Inbound int    // connections of peers to this agent, now
	Loaded  int    // peers whose metadata is loaded, now
	Regions int    // regions registered, now
	Handles int    // requests, lists, prepared lists and remotes, now
	Refused uint64 // connections refused: another user, another agent or version meant, or too many
	Dropped uint64 // connections ended because the peer broke the protocol
	Lost    uint64 // peers lost: their process or their connection ended
}

type counters struct{ refused, dropped, lost atomic.Uint64 }

// Stats gives a snapshot.
func (a *Agent) Stats() Stats {
	a.mu.Lock()
	defer a.mu.Unlock()
	return Stats{
		Inbound: len(a.inbounds),
		Loaded:  len(a.peers),
		Regions: len(a.byID),
		Handles: a.requests.count() + a.lists.count() + a.prepareds.count() + a.remotes.count(),
		Refused: a.stats.refused.Load(),
		Dropped: a.stats.dropped.Load(),
		Lost:    a.stats.lost.Load(),
	}
}
