package kvreceiver

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/bootstrap"
	"github.com/nixlkv/nixlkv/hostmem"
	"github.com/nixlkv/nixlkv/internal/changes"
	"github.com/nixlkv/nixlkv/internal/control"
	"github.com/nixlkv/nixlkv/internal/ratelog"
	"github.com/nixlkv/nixlkv/internal/wire"
	"github.com/nixlkv/nixlkv/nixl"
	"github.com/nixlkv/nixlkv/registry"
)

// Manager stands for one decode rank. Its methods may be called from many goroutines.
type Manager struct {
	cfg    config
	log    *zap.Logger
	warn   *ratelog.Logger
	layout *registry.Layout
	decode bootstrap.DecodeConfig

	engine       *nixl.Engine
	ownEngine    bool
	agent        *nixl.Agent
	memory       *nixl.Registration
	ctl          *control.Control
	self         wire.Endpoint // where prefills answer to
	registration [][]byte      // frames, the same for every prefill rank

	stats       counters
	generations atomic.Uint64 // of aborts
	drain       *drainer

	linksMu sync.Mutex
	links   map[control.Endpoint]*link

	prefillsMu sync.Mutex
	prefills   map[string]*prefill

	roomsMu   sync.Mutex
	rooms     map[nixlkv.Room]*room
	lingering map[nixlkv.Room][]*room // those out of the table whose pages are not released
	live      int                     // rooms in either
	closing   bool
	abandoned int           // rooms that were not released in time
	idle      chan struct{} // closed once closing and no room is live

	changed *changes.List[*room] // for Poll

	listening chan struct{}   // closed once ctl is set, or will not be
	ctx       context.Context // ends when closing begins
	cancel    context.CancelFunc
	loops     sync.WaitGroup
	closeOnce sync.Once
	closed    chan struct{}
	closeErr  error
}

// NewManager registers the layout's memory with NIXL and opens the control socket. The layout
// is validated and must not be changed afterwards; its memory must stay mapped until Close has
// returned nil.
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
		return nil, fmt.Errorf("kvreceiver: %w", err)
	}
	if err := checkMetadata(layout, cfg.metadata); err != nil {
		return nil, fmt.Errorf("kvreceiver: %w", err)
	}
	m := &Manager{
		cfg: cfg, log: cfg.log, warn: ratelog.New(cfg.log), layout: layout, decode: decodeConfig(layout, &cfg),
		links:     map[control.Endpoint]*link{},
		prefills:  map[string]*prefill{},
		rooms:     map[nixlkv.Room]*room{},
		lingering: map[nixlkv.Room][]*room{},
		changed:   changes.New[*room](cfg.limits.DoneRooms),
		idle:      make(chan struct{}),
		listening: make(chan struct{}),
		closed:    make(chan struct{}),
	}
	m.ctx, m.cancel = context.WithCancel(context.Background())
	err := ctx.Err()
	if err == nil {
		err = m.start()
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("kvreceiver: %w", err), m.Close())
	}
	return m, nil
}

// start brings everything up. What it has begun when it fails is ended by Close.
func (m *Manager) start() error {
	m.engine = m.cfg.engine
	if m.engine == nil {
		e, err := nixl.Open(nixl.Auto, nixl.WithLogger(m.log))
		if err != nil {
			return err
		}
		m.engine, m.ownEngine = e, true
	}
	// The drainer moves NIXL on; a thread that does nothing else would keep half a core busy.
	agentOpts := append([]nixl.AgentOption{nixl.WithProgressThread(false)}, m.cfg.agentOptions...)
	agentOpts = append(agentOpts, nixl.WithBackend(m.cfg.backend, m.cfg.backendParams), nixl.WithCloseTimeout(m.cfg.closeTimeout))
	agent, err := m.engine.NewAgent("nixlkv-"+rand.Text(), agentOpts...)
	if err != nil {
		return err
	}
	m.agent = agent
	if m.memory, err = agent.Register(regionsOf(m.layout, m.cfg.memory)...); err != nil {
		return err
	}
	if m.drain, err = startDrainer(m); err != nil {
		return err
	}
	m.ctl, err = control.New(control.Config{
		Host: m.cfg.host, Port: m.cfg.port, HandlerFrom: m.receive, Panicked: m.panicked, Observer: m.observe, Logger: m.log,
		Curve: m.cfg.curve, Allowed: m.cfg.trust.Allowed,
		// A rank's loss must be seen for as long as a room may wait for it.
		IdleTimeout: max(15*time.Minute, 2*m.cfg.waitingTimeout),
		SendTimeout: m.cfg.sendTimeout,
		Limits: control.Limits{
			FrameBytes: m.cfg.limits.FrameBytes, MessageBytes: m.cfg.limits.MessageBytes,
			Endpoints: min(m.cfg.limits.Ranks, maxEndpoints),
			// A room may have its metadata and an abort on their way to each of some ranks.
			Pending: 4 * m.cfg.limits.Rooms, EndpointPending: 2 * m.cfg.limits.Rooms,
		},
	})
	if err != nil {
		close(m.listening)
		return err
	}
	if err = m.describe(); err == nil {
		m.loops.Add(1)
		go m.heartbeat()
	}
	close(m.listening)
	return err
}

// maxEndpoints is what package control takes.
const maxEndpoints = 16384

// describe makes the registration that every prefill rank gets.
func (m *Manager) describe() error {
	ip := m.cfg.advertise
	if ip == "" {
		addr := m.ctl.Addr().Addr()
		if addr.IsUnspecified() {
			return fmt.Errorf("the control socket listens on all addresses (%s): WithAdvertise has to name one that prefills can reach", addr)
		}
		ip = addr.String()
	} else if _, err := netip.ParseAddr(ip); err != nil {
		return fmt.Errorf("address to advertise: %w", err)
	}
	m.self = wire.Endpoint{IP: ip, Port: m.ctl.Port()}
	md, err := m.agent.LocalMetadata()
	if err != nil {
		return err
	}
	g, err := m.layout.Registration(m.agent.Name(), md, m.self)
	if err != nil {
		return err
	}
	var enc wire.Encoder // let go with the frames, which stay
	m.registration, err = enc.Registration(g)
	return err
}

// regionsOf lists a layout's memory for registration.
func regionsOf(l *registry.Layout, memory []*hostmem.Buffer) []nixl.Region {
	var regions []nixl.Region
	for _, s := range l.Spans() {
		mem := nixl.DRAM
		if s.Kind == registry.VRAM {
			mem = nixl.VRAM
		}
		regions = append(regions, nixl.Foreign(mem, uintptr(s.Base), s.Len, s.Device).In(memory...))
	}
	return regions
}

// resolve gives the control socket of a rank. A name is resolved here, for libzmq would do it
// in the thread that serves all connections. An address that is not allowed is no rank's.
func (m *Manager) resolve(ctx context.Context, at bootstrap.Endpoint) (control.Endpoint, error) {
	at = at.Reachable()
	ip, err := netip.ParseAddr(at.Host)
	if err != nil {
		ips, err := net.DefaultResolver.LookupNetIP(ctx, "ip", at.Host)
		if err != nil {
			return control.Endpoint{}, err
		}
		i := max(slices.IndexFunc(ips, func(ip netip.Addr) bool { return ip.Unmap().Is4() }), 0)
		ip = ips[i].Unmap()
	}
	if !m.cfg.trust.Allowed.Allows(ip) {
		return control.Endpoint{}, fmt.Errorf("%w: prefill rank at %v", nixlkv.ErrNotAllowed, ip)
	}
	return control.NewEndpoint(ip.String(), at.Port)
}

// Agent gives the name of the manager's NIXL agent.
func (m *Manager) Agent() string { return m.agent.Name() }

// Engine gives the NIXL engine in use.
func (m *Manager) Engine() *nixl.Engine { return m.engine }

// Addr gives the address that prefills answer to: that of the control socket.
func (m *Manager) Addr() string { return m.self.String() }

// ControlPort gives the port of the control socket.
func (m *Manager) ControlPort() int { return m.ctl.Port() }

// Open opens a room at the prefill whose bootstrap server is at addr, host:port. It does no
// I/O. It gives nixlkv.ErrRoomInUse while the room is open, nixlkv.ErrLimit at the bound on
// rooms or prefills, and nixlkv.ErrMalformed for a room or address that cannot be: under
// WithMetadata not room 0, by which a metadata slot says that it was not written.
func (m *Manager) Open(id nixlkv.Room, addr string, opts ...RoomOption) (*Receiver, error) {
	if id > nixlkv.MaxRoom {
		return nil, fmt.Errorf("kvreceiver: %w: room %d", nixlkv.ErrMalformed, id)
	}
	if id == 0 && m.cfg.metadata != nil {
		return nil, fmt.Errorf("kvreceiver: %w: room 0: in a metadata slot it stands for no room, and could not be told from a slot that nobody has written", nixlkv.ErrMalformed)
	}
	p, err := m.prefillAt(addr)
	if err != nil {
		return nil, fmt.Errorf("kvreceiver: room %d: %w", id, err)
	}
	r := &room{
		m: m, id: id, dpRank: bootstrap.NoDPRank, prefill: p, metrics: Metrics{Opened: time.Now()},
		ready: make(chan struct{}), done: make(chan struct{}), released: make(chan struct{}),
	}
	r.receiver = &Receiver{r}
	for _, o := range opts {
		if o != nil {
			o(r)
		}
	}
	if err := m.attach(r); err != nil {
		m.leave(p)
		return nil, fmt.Errorf("kvreceiver: room %d: %w", id, err)
	}
	return r.receiver, nil
}

// attach puts a room into the table.
func (m *Manager) attach(r *room) error {
	m.roomsMu.Lock()
	defer m.roomsMu.Unlock()
	switch {
	case m.closing:
		return nixlkv.ErrClosed
	case m.rooms[r.id] != nil:
		return nixlkv.ErrRoomInUse
	case m.live >= m.cfg.limits.Rooms:
		return fmt.Errorf("%w: %d rooms", nixlkv.ErrLimit, m.live)
	}
	m.rooms[r.id] = r
	m.live++
	return nil
}

// detach takes a room out of the table, so that its number can be used again.
func (m *Manager) detach(r *room) {
	m.roomsMu.Lock()
	defer m.roomsMu.Unlock()
	if r.gone {
		return
	}
	r.gone = true
	delete(m.rooms, r.id)
	if r.over {
		m.left()
	} else {
		m.lingering[r.id] = append(m.lingering[r.id], r)
	}
}

// settled notes that the wait for a room's release is over. A room that is out of the table is
// forgotten, and a later use of its number may go on: the caller holds no room's lock unless
// this one is in the table.
func (m *Manager) settled(r *room, confirmed bool) {
	if next := m.forget(r, confirmed); next != nil {
		next.resume()
	}
}

// forget is settled; it gives the later use of the number, if there is one that may go on.
func (m *Manager) forget(r *room, confirmed bool) (next *room) {
	m.roomsMu.Lock()
	defer m.roomsMu.Unlock()
	r.over = true
	if !confirmed {
		m.abandoned++
	}
	if !r.gone {
		return nil
	}
	rest := slices.DeleteFunc(m.lingering[r.id], func(x *room) bool { return x == r })
	if len(rest) > 0 {
		m.lingering[r.id] = rest
	} else {
		delete(m.lingering, r.id)
		next = m.rooms[r.id]
	}
	m.left()
	return next
}

// left counts a room out. The caller holds roomsMu.
func (m *Manager) left() {
	m.live--
	if m.closing && m.live == 0 {
		close(m.idle)
	}
}

// lingers says whether an earlier use of a room's number is not released. The caller holds
// r.mu.
func (m *Manager) lingers(r *room) bool {
	m.roomsMu.Lock()
	defer m.roomsMu.Unlock()
	return len(m.lingering[r.id]) > 0
}

// roomsOf gives all rooms of a number, earlier uses first.
func (m *Manager) roomsOf(id nixlkv.Room) []*room {
	m.roomsMu.Lock()
	defer m.roomsMu.Unlock()
	rooms := m.lingering[id]
	if r := m.rooms[id]; r != nil {
		rooms = append(slices.Clip(rooms), r)
	} else {
		rooms = slices.Clone(rooms)
	}
	return rooms
}
