package kvsender

import (
	"fmt"
	"net/netip"
	"time"

	"go.uber.org/zap"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/bootstrap"
	"github.com/nixlkv/nixlkv/hostmem"
	"github.com/nixlkv/nixlkv/internal/control"
	"github.com/nixlkv/nixlkv/internal/trust"
	"github.com/nixlkv/nixlkv/internal/wire"
	"github.com/nixlkv/nixlkv/nixl"
)

// Option configures NewManager. A nil one changes nothing.
type Option func(*config)

// Limits bound what a manager holds. A field that is not positive takes its default.
type Limits struct {
	Rooms     int // rooms open or announced by decodes; default 65,536
	Peers     int // decode ranks; default 1,024
	Chunks    int // chunks of a room that wait to be posted; default 4,096
	InFlight  int // transfers of a room posted and not settled; default 64
	LoadQueue int // registrations waiting to be taken up; default 1,024
	DoneRooms int // ended rooms that Poll has not fetched; default 65,536
	AbortAcks int // acknowledgements that a room owes; default 64

	// Of what decodes announce before the rooms are opened here: how many such rooms, default
	// half of Rooms, and how many bytes their page and slot numbers take, default 512 MiB. A
	// room beyond fails with nixlkv.ErrLimit, and its decode is told.
	Announced, AnnouncedBytes int
	// Registrations are new decodes from one address (one /64 of IPv6) in a minute; default 256.
	// One beyond is taken up when a room needs it.
	Registrations int
	// PeerMetadataBytes are the bytes of NIXL's metadata of all decodes together, which are kept to
	// be loaded again; default 1 GiB. A registration beyond is refused, and its rooms fail with
	// nixlkv.ErrLimit, unless refused or lost decodes without rooms can be forgotten for it. A
	// decode that was refused may register again when others have gone.
	PeerMetadataBytes int
	// Strangers are answers on their way to addresses at which no decode is registered, and
	// connections for them; default 256. Further ones are left out.
	Strangers int

	// Of one message: bytes of a frame and of all frames, default 16 and 32 MiB; bytes of NIXL's
	// metadata of a decode, default 16 MiB; its KV regions, default 4,096; the pages of a room
	// at one decode, default 4 Mi.
	FrameBytes, MessageBytes, MetadataBytes, Regions, Pages int
}

func (l Limits) complete() Limits {
	for _, f := range []struct {
		n    *int
		dflt int
	}{{&l.Rooms, 1 << 16}, {&l.Peers, 1024}, {&l.Chunks, 4096}, {&l.InFlight, 64}, {&l.LoadQueue, 1024},
		{&l.DoneRooms, 1 << 16}, {&l.AbortAcks, 64}, {&l.AnnouncedBytes, 512 << 20}, {&l.Registrations, 256}, {&l.PeerMetadataBytes, 1 << 30}, {&l.Strangers, 256},
		{&l.FrameBytes, 16 << 20}, {&l.MetadataBytes, 16 << 20}, {&l.Regions, 4096}, {&l.Pages, 4 << 20}} {
		if *f.n <= 0 {
			*f.n = f.dflt
		}
	}
	if l.Announced <= 0 {
		l.Announced = max(1, l.Rooms/2)
	}
	if l.MessageBytes <= 0 {
		l.MessageBytes = max(32<<20, l.FrameBytes)
	}
	return l
}

// wire gives the bounds on what a message holds.
func (l Limits) wire() wire.Limits {
	return wire.Limits{FrameSize: l.FrameBytes, AgentMetadata: l.MetadataBytes, Regions: l.Regions, Indices: l.Pages}
}

// control gives the bounds of the control socket. Every decode that is registered has a place
// in its table, and strangers have theirs beside.
func (l Limits) control() control.Limits {
	const least, most = 4096, 16384
	endpoints := min(max(least, l.Peers+l.Peers/4+l.Strangers), most)
	return control.Limits{
		FrameBytes: l.FrameBytes, MessageBytes: l.MessageBytes, Endpoints: endpoints, Strangers: min(l.Strangers, endpoints/2),
	}
}

// The times of SGLang (sglang/srt/environ.py, SGLANG_DISAGGREGATION_…), where it has them. Its
// prefill waits for a transfer for ever; 300 s is how long its decode waits for a room.
const (
	DefaultBootstrapTimeout = 300 * time.Second
	DefaultTransferTimeout  = 300 * time.Second
	DefaultSettleTimeout    = 5 * time.Second
	DefaultWorkers          = 4
	DefaultCloseTimeout     = 10 * time.Second
	DefaultPeerExpiry       = 10 * time.Minute
)

type config struct {
	engine           *nixl.Engine
	memory           []*hostmem.Buffer
	agentOptions     []nixl.AgentOption
	backend          string
	backendParams    map[string]string
	host             string
	port             int
	advertise        string
	bootstrapAddr    string
	clientOptions    []bootstrap.ClientOption
	httpPort         int
	loadBalance      string
	forceQuery       bool
	allCPRanks       bool
	log              *zap.Logger
	bootstrapTimeout time.Duration
	transferTimeout  time.Duration
	settleTimeout    time.Duration
	peerExpiry       time.Duration
	probeTimeout     time.Duration // of the first connection to a peer
	closeTimeout     time.Duration
	workers          int
	policy           bootstrap.AllocationPolicy
	staging          bool
	stagingChunk     int
	threadInit       func() error
	limits           Limits
	curve            *nixlkv.Curve
	trust            trust.Policy
	allowed          []netip.Prefix
	trustErr         error
	taking           func(wire.Message) // a test's own, called with each message
}

func defaultConfig() config {
	return config{
		backend:          nixl.DefaultBackend,
		policy:           bootstrap.EarlyAllocation,
		host:             "127.0.0.1",
		log:              zap.NewNop(),
		bootstrapTimeout: DefaultBootstrapTimeout,
		transferTimeout:  DefaultTransferTimeout,
		settleTimeout:    DefaultSettleTimeout,
		peerExpiry:       DefaultPeerExpiry,
		probeTimeout:     probeTimeout,
		closeTimeout:     DefaultCloseTimeout,
		workers:          DefaultWorkers,
	}
}

func (c *config) validate() error {
	c.limits = c.limits.complete()
	switch {
	case c.trustErr != nil:
		return fmt.Errorf("kvsender: allowed peers: %w", c.trustErr)
	case c.workers < 1 || c.workers > 256:
		return fmt.Errorf("kvsender: %d workers, want 1 to 256", c.workers)
	case min(c.bootstrapTimeout, c.transferTimeout, c.settleTimeout, c.closeTimeout) <= 0:
		return fmt.Errorf("kvsender: timeouts must be positive: bootstrap %v, transfer %v, settle %v, close %v",
			c.bootstrapTimeout, c.transferTimeout, c.settleTimeout, c.closeTimeout)
	case c.peerExpiry < time.Millisecond:
		return fmt.Errorf("kvsender: peers expire after %v, want 1 ms at least", c.peerExpiry)
	case c.port < 0 || c.port > 65535:
		return fmt.Errorf("kvsender: port %d", c.port)
	case c.policy != bootstrap.EarlyAllocation && c.policy != bootstrap.PrefillCompleteAllocation:
		return fmt.Errorf("kvsender: %w: allocation policy %q", nixlkv.ErrUnsupported, c.policy)
	}
	return nil
}

// WithEngine gives the NIXL engine; the manager makes its own agent on it and leaves the
// engine open. Without it, or with nil, the manager opens nixl.Auto and closes it.
func WithEngine(e *nixl.Engine) Option { return func(c *config) { c.engine = e } }

// WithMemory names the buffers that memory of the layout lies in. They cannot be freed before
// the manager has let go of them (hostmem.ErrInUse). Other memory is known by its address
// alone, and stays mapped as NewManager asks. A nil buffer is none.
func WithMemory(buffers ...*hostmem.Buffer) Option {
	return func(c *config) { c.memory = append(c.memory, buffers...) }
}

// WithBackend chooses the NIXL backend and its parameters, as nixl.WithBackend. Without it
// the backend is UCX, with the number of threads that SGLang gives a prefill.
func WithBackend(name string, params map[string]string) Option {
	return func(c *config) { c.backend, c.backendParams = name, params }
}

// WithHostVRAM backs VRAM by host memory, as nixl.WithHostVRAM.
func WithHostVRAM() Option {
	return func(c *config) { c.agentOptions = append(c.agentOptions, nixl.WithHostVRAM()) }
}

// WithAgentOptions refines the manager's NIXL agent.
func WithAgentOptions(opts ...nixl.AgentOption) Option {
	return func(c *config) { c.agentOptions = append(c.agentOptions, opts...) }
}

// WithListen sets the address that the control socket binds to, and its port, 0 for any.
// The default is 127.0.0.1: a prefill that serves other hosts names its own address.
func WithListen(host string, port int) Option {
	return func(c *config) { c.host, c.port = host, port }
}

// WithAdvertise sets the address that decodes are told to connect to, where it is not the
// one that the control socket binds to.
func WithAdvertise(ip string) Option { return func(c *config) { c.advertise = ip } }

// WithBootstrap names the bootstrap server, host:port, that the rank registers at. Without
// it the rank registers nowhere, and decodes must be told its address in another way.
func WithBootstrap(addr string, opts ...bootstrap.ClientOption) Option {
	return func(c *config) { c.bootstrapAddr, c.clientOptions = addr, opts }
}

// WithHTTPPort tells decodes the prefill server's HTTP port (prefill_http_port).
func WithHTTPPort(port int) Option { return func(c *config) { c.httpPort = port } }

// WithLoadBalance sets how rooms are spread over DP ranks (load_balance_method); the
// default is bootstrap.FollowBootstrapRoom. With any other, each room's rank is registered
// at the bootstrap server.
func WithLoadBalance(method string) Option { return func(c *config) { c.loadBalance = method } }

// WithForceQuery registers each room's DP rank even where decodes could work it out.
func WithForceQuery() Option { return func(c *config) { c.forceQuery = true } }

// WithAllCPRanks makes every context-parallel rank send its share of the pages, instead of
// rank 0 all of them. The decodes must be set the same way. Ranks of hybrid MLA, and those
// that share one KV cache (registry.Layout.ShardKV), do so without it, and decodes know.
func WithAllCPRanks() Option { return func(c *config) { c.allCPRanks = true } }

// WithAllocationPolicy says when decodes reserve pages (decode_allocation_policy, from SGLang
// 0.5.22); they must be set the same way. Under bootstrap.PrefillCompleteAllocation a decode
// tells where pages go only after Sender.Computed, and TP, CP and PP sizes must be 1.
func WithAllocationPolicy(p bootstrap.AllocationPolicy) Option {
	return func(c *config) { c.policy = p }
}

// WithLogger gives the logger. Without it, or with nil, nothing is logged.
func WithLogger(l *zap.Logger) Option {
	return func(c *config) {
		if c.log = l; l == nil {
			c.log = zap.NewNop()
		}
	}
}

// WithBootstrapTimeout bounds the time from opening a room until its decodes have told
// where its pages go.
func WithBootstrapTimeout(d time.Duration) Option {
	return func(c *config) { c.bootstrapTimeout = d }
}

// WithTransferTimeout bounds the time from posting a write until it has settled: over a network
// that has gone silent NIXL may never settle it. Its room then fails with nixlkv.ErrTimeout, and
// after the settle timeout with nixlkv.ErrReleaseUnconfirmed around that. How long the caller
// takes between Begin and Finish is not bounded.
func WithTransferTimeout(d time.Duration) Option { return func(c *config) { c.transferTimeout = d } }

// WithSettleTimeout bounds the time that a failed room waits for its writes to settle
// before its sender is told, with nixlkv.ErrReleaseUnconfirmed. The decode is told only
// when they have settled.
func WithSettleTimeout(d time.Duration) Option { return func(c *config) { c.settleTimeout = d } }

// WithPeerExpiry sets when a decode that cannot be sent to is forgotten: after that long without a
// message or room of it. One that is idle is looked at meanwhile, whether it still answers. A decode
// whose network was away for longer has to register again, which SGLang's decodes do when their
// heartbeat has failed, and this library's when they connect again.
func WithPeerExpiry(d time.Duration) Option { return func(c *config) { c.peerExpiry = d } }

// WithCloseTimeout bounds Manager.Close.
func WithCloseTimeout(d time.Duration) Option { return func(c *config) { c.closeTimeout = d } }

// WithWorkers sets the number of threads that post transfers.
func WithWorkers(n int) Option { return func(c *config) { c.workers = n } }

// WithThreadInit runs f once on each thread that makes native calls, before the first: a
// server makes its CUDA context current there. An error of it fails NewManager; nil is no f.
func WithThreadInit(f func() error) Option { return func(c *config) { c.threadInit = f } }

// WithCurve encrypts control messages and lets only those in who have a key. It is for managers
// whose peers are all this library's: SGLang's workers speak no CURVE, and get nowhere. The
// bytes that NIXL moves, and what the bootstrap server tells, are not its affair.
func WithCurve(keys nixlkv.Curve) Option { return func(c *config) { c.curve = &keys } }

// WithAllowedPeers names the networks that decodes are in. Connections from others are refused
// before anything that they send is read; messages that name an address elsewhere, to be
// answered at, are refused and counted (Stats.Untrusted). Behind NAT both addresses of a decode
// have to be allowed: the one that it names, and the one that it comes from. Called again it
// adds.
func WithAllowedPeers(networks ...netip.Prefix) Option {
	return func(c *config) {
		c.allowed = append(c.allowed, networks...)
		c.trust.Allowed, c.trustErr = trust.Only(c.allowed...)
	}
}

// WithSourceMatching refuses messages that name another IP address than the one that their
// connection comes from, and counts them (Stats.Untrusted): a decode can then speak only for
// its own host. Aborts that name none (SGLang 0.5.18) count only for rooms of a decode at the
// address that they come from. It does not work through NAT, nor for a host that has several
// addresses and names one of them but connects from another.
func WithSourceMatching() Option { return func(c *config) { c.trust.MatchSource = true } }

// WithLimits bounds what the manager holds.
func WithLimits(l Limits) Option { return func(c *config) { c.limits = l } }

// KVTransferError is how every failed room ends.
type KVTransferError = nixlkv.KVTransferError
