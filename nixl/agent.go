package nixl

import (
	"errors"
	"fmt"
	"maps"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/nixlkv/nixlkv/internal/engine"
)

// Sync says how an agent guards itself against concurrent calls.
type Sync = engine.Sync

// The modes of NIXL (nixl_thread_sync_t).
const (
	// SyncNone: NIXL locks nothing. The agent then makes one native call at a time.
	SyncNone = engine.SyncNone
	// SyncStrict: one lock, held across every native call.
	SyncStrict = engine.SyncStrict
	// SyncRW: posting and polling go on side by side. The default.
	SyncRW = engine.SyncRW
)

// DefaultBackend is the backend that an agent creates unless it is told otherwise.
const DefaultBackend = "UCX"

// DefaultCloseTimeout bounds Agent.Close.
const DefaultCloseTimeout = 10 * time.Second

// maxAgentName bounds an agent's name; it goes into messages and C strings.
const maxAgentName = 512

// AgentOption configures NewAgent. A nil one changes nothing.
type AgentOption func(*agentOptions)

type backendSpec struct {
	name   string
	params map[string]string
}

type agentOptions struct {
	cfg          engine.AgentConfig
	backends     []backendSpec
	closeTimeout time.Duration
	tcp          *TCP
}

// WithBackend makes the agent create this backend instead of UCX with its defaults. The
// parameters replace the plugin's own defaults one by one (Agent.PluginParams shows them;
// UCX has num_workers, num_threads, ucx_devices and others). Several are created in order.
func WithBackend(plugin string, params map[string]string) AgentOption {
	return func(o *agentOptions) { o.backends = append(o.backends, backendSpec{plugin, maps.Clone(params)}) }
}

// WithProgressThread says whether NIXL moves transfers on by a thread of its own. It is on
// by default: without it some transports complete only while both sides poll.
func WithProgressThread(on bool) AgentOption {
	return func(o *agentOptions) { o.cfg.ProgressThread = on }
}

// WithProgressDelay sets the pause of the progress thread between two rounds.
func WithProgressDelay(d time.Duration) AgentOption {
	return func(o *agentOptions) { o.cfg.ProgressDelay = d }
}

// WithSync sets the locking mode; SyncRW is the default.
func WithSync(m Sync) AgentOption { return func(o *agentOptions) { o.cfg.Sync = m } }

// WithTelemetry makes the engine keep the times of each transfer for Transfer.Telemetry.
func WithTelemetry() AgentOption { return func(o *agentOptions) { o.cfg.Telemetry = true } }

// WithHostVRAM backs VRAM by host memory, for development on machines without a GPU. The
// kind keeps its name in this package and towards peers, but the engine sees DRAM with
// device 0; it works only with peers that do the same. It is logged.
func WithHostVRAM() AgentOption { return func(o *agentOptions) { o.cfg.HostVRAM = true } }

// WithCloseTimeout bounds Close; the default is DefaultCloseTimeout.
func WithCloseTimeout(d time.Duration) AgentOption {
	return func(o *agentOptions) { o.closeTimeout = d }
}

// Agent is one participant: it owns registrations, knows peers, and posts transfers.
type Agent struct {
	eng  *Engine
	raw  engine.Agent
	name string
	opts agentOptions
	log  *zap.Logger

	calls  gate
	serial sync.Mutex // held across each call under SyncNone

	// loading is held while peers are loaded and dropped, calls of the engine included: it
	// keeps a lost peer's end and its return apart. It comes before mu.
	loading sync.Mutex

	// mu guards what depends on what. It is never held across a native call.
	mu        sync.Mutex
	regs      map[*Registration]struct{}
	remotes   map[*Remote]struct{}
	current   map[string]*Remote // the remote that a name stands for now
	self      *Remote            // once asked for; in neither of these
	prepared  map[*Prepared]struct{}
	lists     map[*List]struct{}
	transfers transferList // those that hold a request
	leaving   []*Registration

	inFlight atomic.Int64 // posted and not settled
	polls    sync.Pool    // of *pollBatch

	closeOnce sync.Once
	closed    chan struct{} // torn down
	closeErr  error         // what went wrong then; read after closed
	closing   atomic.Int64  // when closing began, UnixNano
}

// NewAgent makes an agent and its backend. The name must differ from those of all agents
// that it will meet, over time too: a restarted process takes a new one.
func (e *Engine) NewAgent(name string, opts ...AgentOption) (*Agent, error) {
	o := agentOptions{
		cfg:          engine.AgentConfig{ProgressThread: true, Sync: engine.SyncRW},
		closeTimeout: DefaultCloseTimeout,
	}
	for _, opt := range opts {
		if opt != nil {
			opt(&o)
		}
	}
	if o.backends == nil {
		o.backends = []backendSpec{{name: DefaultBackend}}
	}
	fail := func(err error) (*Agent, error) {
		return nil, &Error{Call: "new agent", Agent: name, Err: err}
	}
	if o.cfg.Sync > SyncRW || o.cfg.ProgressDelay < 0 {
		return fail(fmt.Errorf("%w: sync mode %d, progress delay %v", StatusInvalidParam, o.cfg.Sync, o.cfg.ProgressDelay))
	}
	if name == "" || len(name) > maxAgentName || strings.ContainsRune(name, 0) {
		return fail(fmt.Errorf("%w: an agent's name has 1 to %d bytes, none of them zero", StatusInvalidParam, maxAgentName))
	}
	e.mu.Lock()
	closed := e.closed
	e.mu.Unlock()
	if closed {
		return fail(ErrClosed)
	}
	raw, err := e.raw.NewAgent(name, o.cfg)
	if err != nil {
		return fail(err)
	}
	a := &Agent{
		eng: e, raw: raw, name: name, opts: o, log: e.log.With(zap.String("agent", name)),
		calls:    gate{drained: make(chan struct{})},
		regs:     map[*Registration]struct{}{},
		remotes:  map[*Remote]struct{}{},
		current:  map[string]*Remote{},
		prepared: map[*Prepared]struct{}{},
		lists:    map[*List]struct{}{},
		closed:   make(chan struct{}),
	}
	e.mu.Lock()
	closed = e.closed
	if !closed {
		e.agents[a] = struct{}{}
	}
	e.mu.Unlock()
	if closed {
		return fail(errors.Join(ErrClosed, a.raw.Destroy()))
	}
	for _, b := range o.backends {
		if o.tcp != nil && e.info.Kind == Embedded {
			b.params = o.tcp.params(b.params)
		}
		if _, err := a.CreateBackend(b.name, b.params); err != nil {
			return nil, errors.Join(err, a.Close())
		}
	}
	if o.cfg.HostVRAM {
		a.log.Warn("VRAM is backed by host memory: it works only with peers that do the same")
	}
	return a, nil
}

// Name gives the agent's name.
func (a *Agent) Name() string { return a.name }

// Engine gives the engine that made the agent.
func (a *Agent) Engine() *Engine { return a.eng }

// HostVRAM says whether VRAM is backed by host memory (WithHostVRAM).
func (a *Agent) HostVRAM() bool { return a.opts.cfg.HostVRAM }

// enter begins a call into the engine; unless it fails, leave must follow.
func (a *Agent) enter() error {
	if !a.calls.enter() {
		return ErrClosed
	}
	if a.opts.cfg.Sync == SyncNone {
		a.serial.Lock()
	}
	return nil
}

func (a *Agent) leave() {
	if a.opts.cfg.Sync == SyncNone {
		a.serial.Unlock()
	}
	a.calls.leave()
}

// fail gives an error its place. A nil error stays nil.
func (a *Agent) fail(call, peer string, err error) error {
	if err == nil {
		return nil
	}
	return &Error{Call: call, Agent: a.name, Peer: peer, Err: err}
}

// LocalMetadata gives what a peer needs to reach the memory that is registered now. It is
// opaque; NIXL's carries the agent's name, its connection data and its registrations.
func (a *Agent) LocalMetadata() ([]byte, error) {
	if err := a.enter(); err != nil {
		return nil, a.fail("local metadata", "", err)
	}
	defer a.leave()
	md, err := a.raw.LocalMetadata()
	return md, a.fail("local metadata", "", err)
}

// Notifications drains what has arrived since the last drain into buf, in one native call
// where the build has cgo. What buf held is replaced. NIXL takes its agent's lock alone for
// it, so an agent that is busy sending should have another one receive.
func (a *Agent) Notifications(buf *Notifications) error {
	if buf == nil {
		return a.fail("notifications", "", fmt.Errorf("%w: nil buffer", StatusInvalidParam))
	}
	if err := a.enter(); err != nil {
		buf.raw.Reset()
		return a.fail("notifications", "", err)
	}
	defer a.leave()
	err := a.raw.Notifications(&buf.raw)
	return a.fail("notifications", "", err)
}

// Notifications is a reusable buffer of drained notifications, for one goroutine at a time.
type Notifications struct{ raw engine.Notifications }

// Len counts the notifications in the buffer.
func (n *Notifications) Len() int { return n.raw.Count }

// All yields the sending agent's name and the message of each notification. Those of one
// sender come in the order in which they arrived. Both slices are overwritten by the next
// drain.
func (n *Notifications) All() func(yield func(from, msg []byte) bool) {
	return n.raw.All()
}

// AgentStats counts what an agent holds.
type AgentStats struct {
	Registrations   int
	RegisteredBytes uint64
	Remotes         int
	Lists           int
	Prepared        int
	Transfers       int // holding a request
	InFlight        int // posted and not settled
	Calls           int // inside the engine at this moment
}

// Stats counts what the agent holds. It works on a closed agent as well, and then tells
// what is in quarantine.
func (a *Agent) Stats() AgentStats {
	a.mu.Lock()
	defer a.mu.Unlock()
	s := AgentStats{
		Registrations: len(a.regs),
		Remotes:       len(a.remotes),
		Lists:         len(a.lists),
		Prepared:      len(a.prepared),
		Transfers:     a.transfers.n,
		InFlight:      int(a.inFlight.Load()),
		Calls:         a.calls.inside(),
	}
	for r := range a.regs {
		for _, reg := range r.regions {
			s.RegisteredBytes += reg.len
		}
	}
	return s
}
