package kvsender

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/bootstrap"
	"github.com/nixlkv/nixlkv/hostmem"
	"github.com/nixlkv/nixlkv/internal/changes"
	"github.com/nixlkv/nixlkv/internal/control"
	"github.com/nixlkv/nixlkv/internal/ratelog"
	"github.com/nixlkv/nixlkv/nixl"
	"github.com/nixlkv/nixlkv/registry"
)

// Manager stands for one prefill rank. Its methods may be called from many goroutines.
type Manager struct {
	cfg    config
	log    *zap.Logger
	warn   *ratelog.Logger
	layout *registry.Layout
	rank   int // by which KV_STATUS and ABORT_ACK name this rank
	source int // by which notifications name it
	share  share

	engine    *nixl.Engine
	ownEngine bool
	agent     *nixl.Agent
	memory    *nixl.Registration
	ctl       *control.Control
	client    *bootstrap.Client
	advertise string

	peers        *peerTable
	intake       *intake
	unregistered recent[error]
	missed       recent[*missed]
	runQueue     *runQueue
	landing      *landing
	flights      sync.Pool // of *flight
	stats        counters

	roomsMu   sync.Mutex
	rooms     map[nixlkv.Room]*room
	live      map[*room]struct{}      // those in the table, and those out of it but not over
	lingering map[nixlkv.Room][]*room // those out of the table but not over
	backlog   backlog                 // of the rooms that were announced and not opened
	closing   bool
	idle      chan struct{} // closed once closing and no room is live

	changed *changes.List[*room] // for Poll

	listening  chan struct{}   // closed once ctl is set, or will not be
	ctx        context.Context // ends when closing begins
	cancel     context.CancelFunc
	placements chan nixlkv.Room // rooms whose DP rank is to be registered

	workers   sync.WaitGroup // the threads that post, and the loader of peers
	lander    sync.WaitGroup // the completion loop
	registrar sync.WaitGroup
	closeOnce sync.Once
	closed    chan struct{}
	closeErr  error
}

// NewManager registers the layout's memory with NIXL, opens the control socket and, with
// WithBootstrap, registers the rank at the bootstrap server, which it retries within ctx.
// The layout is validated and must not be changed afterwards; its memory must stay mapped
// until Close has returned nil.
func NewManager(ctx context.Context, layout *registry.Layout, opts ...Option) (*Manager, error) {
	cfg := defaultConfig()
	for _, o := range opts {
		if o != nil {
			o(&cfg)
		}
	}
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	if err := layout.Validate(); err != nil {
		return nil, fmt.Errorf("kvsender: %w", err)
	}
	if cfg.staging {
		return nil, checkStaging(layout, cfg.stagingChunk)
	}
	if err := checkPolicy(layout, cfg.policy); err != nil {
		return nil, err
	}
	m := &Manager{
		cfg: cfg, log: cfg.log, warn: ratelog.New(cfg.log), layout: layout,
		rank: layout.Ranks.PrefillRank(), source: layout.Ranks.SourceRank(),
		share:     shareOf(layout, cfg.allCPRanks),
		rooms:     map[nixlkv.Room]*room{},
		live:      map[*room]struct{}{},
		lingering: map[nixlkv.Room][]*room{},
		listening: make(chan struct{}),
		changed:   changes.New[*room](cfg.limits.DoneRooms),
		idle:      make(chan struct{}),
		closed:    make(chan struct{}),
		runQueue:  newRunQueue(),
		intake:    newIntake(cfg.limits.Registrations),

		placements: make(chan nixlkv.Room, cfg.limits.LoadQueue),
	}
	m.ctx, m.cancel = context.WithCancel(context.Background())
	if err := m.start(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("kvsender: %w", err), m.Close())
	}
	return m, nil
}

// start brings everything up, from the memory to the rendezvous. What it has begun when it
// fails is ended by Close.
func (m *Manager) start(ctx context.Context) error {
	m.engine = m.cfg.engine
	if m.engine == nil {
		e, err := nixl.Open(nixl.Auto, nixl.WithLogger(m.log))
		if err != nil {
			return err
		}
		m.engine, m.ownEngine = e, true
	}
	agentOpts := append([]nixl.AgentOption{nixl.WithProgressDelay(progressDelay)}, m.cfg.agentOptions...)
	agentOpts = append(agentOpts, nixl.WithBackend(m.cfg.backend, m.backendParams()), nixl.WithCloseTimeout(m.cfg.closeTimeout))
	agent, err := m.engine.NewAgent("nixlkv-"+rand.Text(), agentOpts...)
	if err != nil {
		return err
	}
	m.agent = agent
	if m.memory, err = agent.Register(regionsOf(m.layout, m.cfg.memory)...); err != nil {
		return err
	}
	if m.peers, err = newPeerTable(m); err != nil {
		return err
	}
	m.landing = newLanding(m)
	if err := m.startThreads(); err != nil {
		return err
	}
	m.ctl, err = control.New(control.Config{
		Host: m.cfg.host, Port: m.cfg.port, HandlerFrom: m.receive, Panicked: m.panicked, Observer: m.observe, Logger: m.log,
		Curve: m.cfg.curve, Allowed: m.cfg.trust.Allowed, Limits: m.cfg.limits.control(),
	})
	close(m.listening)
	if err != nil {
		return err
	}
	return m.rendezvous(ctx)
}

// progressDelay is the pause of NIXL's progress thread, which by default keeps half a core busy
// even when there is nothing to do. The completion loop moves on what is in flight.
const progressDelay = 500 * time.Microsecond

// ucxThreads is how many threads UCX gets to move the bytes, as in SGLang's prefill
// (NixlKVManager). More than there are cores still pays: a transfer is cut into pieces that
// are posted and polled apart.
const ucxThreads = "8"

// ucxSplit is from how many descriptors on UCX's threads get a transfer. NIXL's own 1,024 leaves
// chunks of some ten pages to one thread: 16 pages of 64 regions then go at a fifth of the rate.
const ucxSplit = "128"

// backendParams gives the parameters of the backend: the caller's, or else UCX's threads.
func (m *Manager) backendParams() map[string]string {
	if m.cfg.backendParams != nil || m.cfg.backend != nixl.DefaultBackend || m.engine.Info().Kind != nixl.Native {
		return m.cfg.backendParams
	}
	return map[string]string{"num_threads": ucxThreads, "split_batch_size": ucxSplit}
}

// regionsOf lists a layout's memory for registration.
func regionsOf(l *registry.Layout, memory []*hostmem.Buffer) []nixl.Region {
	var regions []nixl.Region
	for _, s := range l.Spans() {
		regions = append(regions, nixl.Foreign(memOf(s.Kind), uintptr(s.Base), s.Len, s.Device).In(memory...))
	}
	return regions
}

// memOf gives NIXL's kind of a memory kind. Devices are the plan's (deviceOf) and the
// layout's (registry.Span).
func memOf(k registry.Kind) nixl.Mem {
	if k == registry.VRAM {
		return nixl.VRAM
	}
	return nixl.DRAM
}

// startThreads starts the threads that make native calls: the workers, the loader of peers,
// and the completion loop. Each is locked to its thread and runs the caller's initialiser.
func (m *Manager) startThreads() error {
	started := make(chan error)
	thread := func(wg *sync.WaitGroup, run func()) {
		wg.Add(1)
		go func() {
			defer wg.Done()
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			var err error
			if m.cfg.threadInit != nil {
				err = m.cfg.threadInit()
			}
			started <- err
			run() // even then: Close has it give back what it keeps
		}()
	}
	for range m.cfg.workers {
		thread(&m.workers, m.work)
	}
	thread(&m.workers, m.peers.load)
	thread(&m.lander, m.landing.run)
	var errs []error
	for range m.cfg.workers + 2 {
		if err := <-started; err != nil {
			errs = append(errs, fmt.Errorf("initialising a thread: %w", err))
		}
	}
	return errors.Join(errs...)
}

// rendezvous registers the rank where decodes look for it.
func (m *Manager) rendezvous(ctx context.Context) error {
	m.advertise = m.cfg.advertise
	if m.advertise == "" {
		addr := m.ctl.Addr().Addr()
		if addr.IsUnspecified() {
			return fmt.Errorf("the control socket listens on all addresses (%s): WithAdvertise has to name one that decodes can reach", addr)
		}
		m.advertise = addr.String()
	} else if _, err := netip.ParseAddr(m.advertise); err != nil {
		return fmt.Errorf("address to advertise: %w", err)
	}
	if m.cfg.bootstrapAddr == "" {
		return nil
	}
	client, err := bootstrap.NewClient(m.cfg.bootstrapAddr, m.cfg.clientOptions...)
	if err != nil {
		return err
	}
	m.client = client
	m.registrar.Add(1)
	go m.registerRooms()
	l, k := m.layout, m.layout.Ranks
	return client.Register(ctx, bootstrap.RankInfo{
		AttnTPSize: k.TP, AttnTPRank: k.TPRank, AttnCPSize: k.CP, AttnCPRank: k.CPRank,
		AttnDPSize: k.DP, AttnDPRank: k.DPRank, SystemDPSize: k.SystemDP, SystemDPRank: k.SystemDPRank,
		PPSize: k.PP, PPRank: k.PPRank,
		RankIP: m.advertise, RankPort: m.ctl.Port(),
		PageSize: l.PageSize, KVCacheDtype: l.KVDtype, KVLayout: l.KVLayout,
		LoadBalanceMethod: m.cfg.loadBalance, PrefillHTTPPort: m.cfg.httpPort,
		EnableDSACacheLayerSplit: l.SplitLayers, EnableKVCacheSharding: l.ShardKV, DecodeAllocationPolicy: m.cfg.policy,
	})
}

// Agent gives the name of the manager's NIXL agent.
func (m *Manager) Agent() string { return m.agent.Name() }

// Engine gives the NIXL engine in use.
func (m *Manager) Engine() *nixl.Engine { return m.engine }

// Addr gives the address that decodes are told: that of the control socket.
func (m *Manager) Addr() string {
	return bootstrap.Endpoint{Host: m.advertise, Port: m.ctl.Port()}.String()
}

// ControlPort gives the port of the control socket.
func (m *Manager) ControlPort() int { return m.ctl.Port() }

// Open opens a room. Its decodes may have told where its pages go already. It gives
// nixlkv.ErrRoomInUse while the room is open, and nixlkv.ErrLimit at the bound on rooms.
func (m *Manager) Open(id nixlkv.Room) (*Sender, error) {
	if id > nixlkv.MaxRoom {
		return nil, fmt.Errorf("kvsender: %w: room %d", nixlkv.ErrMalformed, id)
	}
	for {
		r, err := m.roomFor(id, false)
		if err != nil {
			return nil, fmt.Errorf("kvsender: room %d: %w", id, err)
		}
		s, again, err := m.open(r)
		if !again {
			return s, err
		}
	}
}

// open opens a room that is in the table; again says that it has left the table meanwhile.
func (m *Manager) open(r *room) (s *Sender, again bool, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.detached {
		return nil, true, nil
	}
	if r.sender != nil {
		return nil, false, fmt.Errorf("kvsender: room %d: %w", r.id, nixlkv.ErrRoomInUse)
	}
	m.missed.take(r.id)
	r.sender = &Sender{r: r, booted: make(chan struct{}), done: make(chan struct{})}
	r.metrics.Opened = time.Now()
	m.leaveBacklog(r)
	r.stopTimer(&r.announce)
	if r.status.Ended() {
		r.sender.notify(r.status) // aborted by its decode before it was opened
		m.noteChanged(r)
		return r.sender, false, nil
	}
	m.place(r)
	switch {
	case r.failure != nil:
	case m.sendsNothing():
		r.status = nixlkv.WaitingForInput
		r.sender.notify(r.status)
	case !r.bootstrapped():
		r.timer = time.AfterFunc(m.cfg.bootstrapTimeout, r.timedOut)
		if reason := m.unregistered.take(r.id); reason != nil {
			r.noteUnregistered(reason)
		}
	}
	r.advance()
	return r.sender, false, nil
}

// sendsNothing says whether no decode talks to this rank: another CP rank sends its pages.
func (m *Manager) sendsNothing() bool { return m.share.by == noPages }

// place registers the room's DP rank where decodes cannot work it out by themselves.
func (m *Manager) place(r *room) {
	rank, size := m.dpRank()
	register, err := bootstrap.PrefillDPRank(bootstrap.Placement{Room: r.id, DPRank: rank, DPSize: size, ForceQuery: m.cfg.forceQuery, Method: m.cfg.loadBalance})
	switch {
	case err != nil:
		r.fail(err)
	case register && m.client != nil:
		select {
		case m.placements <- r.id:
		default:
			r.fail(fmt.Errorf("%w: rooms whose DP rank is to be registered", nixlkv.ErrLimit))
		}
	}
}

// dpRank gives the rank and size of the data parallelism that decodes choose by.
func (m *Manager) dpRank() (rank, size int) {
	k := m.layout.Ranks
	if k.SystemDP > 1 {
		return k.SystemDPRank, k.SystemDP
	}
	return k.DPRank, k.DP
}

// registerRooms registers rooms' DP ranks, one after the other. A failure is the decode's
// to find out, as in SGLang: it asks until it times out.
func (m *Manager) registerRooms() {
	defer m.registrar.Done()
	rank, _ := m.dpRank()
	for id := range m.placements {
		if m.ctx.Err() != nil {
			continue // closing: the rooms have failed
		}
		ctx, cancel := context.WithTimeout(m.ctx, 5*time.Second)
		if err := m.client.RegisterDPRank(ctx, id, rank); err != nil {
			m.warn.Warn("registering a room's DP rank", zap.Uint64("room", uint64(id)), zap.Error(err))
		}
		cancel()
	}
}
