package kvreceiver

import (
	"fmt"
	"net/netip"
	"time"

	"go.uber.org/zap"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/bootstrap"
	"github.com/nixlkv/nixlkv/hostmem"
	"github.com/nixlkv/nixlkv/internal/trust"
	"github.com/nixlkv/nixlkv/internal/wire"
	"github.com/nixlkv/nixlkv/metadata"
	"github.com/nixlkv/nixlkv/nixl"
)

// Option configures NewManager. A nil one changes nothing.
type Option func(*config)

// Limits bound what a manager holds. A field that is not positive takes its default.
type Limits struct {
	Rooms     int // rooms open, or failed and not released; default 65,536
	Prefills  int // prefills, by bootstrap address; default 1,024
	Ranks     int // prefill ranks connected to; default 4,096
	Chunks    int // chunks of a room from one source; default 65,536
	DoneRooms int // rooms that Poll has not fetched; default 65,536

	// Of one message: bytes of a frame and of all frames, default 16 and 32 MiB.
	FrameBytes, MessageBytes int
}

func (l Limits) complete() Limits {
	for _, f := range []struct {
		n    *int
		dflt int
	}{{&l.Rooms, 1 << 16}, {&l.Prefills, 1024}, {&l.Ranks, 4096}, {&l.Chunks, 1 << 16}, {&l.DoneRooms, 1 << 16},
		{&l.FrameBytes, 16 << 20}} {
		if *f.n <= 0 {
			*f.n = f.dflt
		}
	}
	if l.MessageBytes <= 0 {
		l.MessageBytes = max(32<<20, l.FrameBytes)
	}
	return l
}

// The times of SGLang (sglang/srt/environ.py, SGLANG_DISAGGREGATION_…), where it has them; its
// DefaultSendTimeout is 1 s, without connecting.
const (
	DefaultConnectTimeout    = 15 * time.Second
	DefaultSendTimeout       = 2 * time.Second
	DefaultWaitingTimeout    = 300 * time.Second
	DefaultHeartbeatInterval = 5 * time.Second
	DefaultHeartbeatFailures = 2
	DefaultReleaseTimeout    = 30 * time.Second
	DefaultCloseTimeout      = 10 * time.Second
	// DefaultLossGrace is how long what a lost rank told last may still be on its way.
	DefaultLossGrace = 250 * time.Millisecond

	minHeartbeatInterval = 2 * time.Second // SGLang's floor
)

type config struct {
	engine            *nixl.Engine
	memory            []*hostmem.Buffer
	agentOptions      []nixl.AgentOption
	backend           string
	backendParams     map[string]string
	host              string
	port              int
	advertise         string
	clientOptions     []bootstrap.ClientOption
	forceQuery        bool
	allCPRanks        bool
	policy            bootstrap.AllocationPolicy
	metadata          *metadata.Buffers
	log               *zap.Logger
	connectTimeout    time.Duration
	sendTimeout       time.Duration
	waitingTimeout    time.Duration
	heartbeatInterval time.Duration
	heartbeatFailures int
	releaseTimeout    time.Duration
	lossGrace         time.Duration
	closeTimeout      time.Duration
	staging           bool
	threadInit        func() error
	limits            Limits
	curve             *nixlkv.Curve
	trust             trust.Policy
	allowed           []netip.Prefix
	trustErr          error
	taking            func(wire.Message) // a test's own, called with each message
}

func defaultConfig() config {
	return config{
		backend:           nixl.DefaultBackend,
		host:              "127.0.0.1",
		policy:            bootstrap.EarlyAllocation,
		log:               zap.NewNop(),
		connectTimeout:    DefaultConnectTimeout,
		sendTimeout:       DefaultSendTimeout,
		waitingTimeout:    DefaultWaitingTimeout,
		heartbeatInterval: DefaultHeartbeatInterval,
		heartbeatFailures: DefaultHeartbeatFailures,
		releaseTimeout:    DefaultReleaseTimeout,
		lossGrace:         DefaultLossGrace,
		closeTimeout:      DefaultCloseTimeout,
	}
}

func (c *config) validate() error {
	c.limits = c.limits.complete()
	if c.trustErr != nil {
		return fmt.Errorf("kvreceiver: allowed peers: %w", c.trustErr)
	}
	if c.log == nil {
		c.log = zap.NewNop()
	}
	for _, t := range []struct {
		name string
		d    time.Duration
	}{
		{"connect timeout", c.connectTimeout}, {"send timeout", c.sendTimeout}, {"waiting timeout", c.waitingTimeout},
		{"heartbeat interval", c.heartbeatInterval}, {"release timeout", c.releaseTimeout}, {"close timeout", c.closeTimeout},
	} {
		if t.d <= 0 {
			return fmt.Errorf("kvreceiver: %s is %v, want more than 0", t.name, t.d)
		}
	}
	switch {
	case c.lossGrace < 0:
		return fmt.Errorf("kvreceiver: loss grace is %v, want at least 0", c.lossGrace)
	case c.heartbeatFailures < 1:
		return fmt.Errorf("kvreceiver: %d heartbeat failures, want at least 1", c.heartbeatFailures)
	case c.port < 0 || c.port > 65535:
		return fmt.Errorf("kvreceiver: port %d", c.port)
	case c.policy != "" && c.policy != bootstrap.EarlyAllocation && c.policy != bootstrap.PrefillCompleteAllocation:
		return fmt.Errorf("kvreceiver: %w: allocation policy %q", nixlkv.ErrUnsupported, c.policy)
	case c.staging:
		return fmt.Errorf("kvreceiver: %w: staging buffers (%s)", nixlkv.ErrUnsupported, EnvStagingBuffer)
	}
	return nil
}

// WithEngine gives the NIXL engine; the manager makes its own agent on it and leaves the
// engine open. Without it, or with nil, the manager opens nixl.Auto and closes it.
func WithEngine(e *nixl.Engine) Option { return func(c *config) { c.engine = e } }

// WithMemory names the buffers that memory of the layout lies in. They cannot be freed before
// the manager has let go of them (hostmem.ErrInUse), and over the embedded engine a prefill
// maps them, which is several times as fast as sending through a socket. Other memory is known
// by its address alone, and stays mapped as NewManager asks. A nil buffer is none.
func WithMemory(buffers ...*hostmem.Buffer) Option {
	return func(c *config) { c.memory = append(c.memory, buffers...) }
}

// WithBackend chooses the NIXL backend and its parameters, as nixl.WithBackend. Without it
// the backend is UCX, with no threads of its own, as in SGLang's decode.
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

// WithListen sets the address that the control socket binds to, and its port, 0 for any. The
// default is 127.0.0.1: a decode that is served by other hosts names its own address.
func WithListen(host string, port int) Option {
	return func(c *config) { c.host, c.port = host, port }
}

// WithAdvertise sets the IP address that prefills are told to answer to, where it is not the
// one that the control socket binds to.
func WithAdvertise(ip string) Option { return func(c *config) { c.advertise = ip } }

// WithBootstrapClient sets options of the clients that ask bootstrap servers: TLS, a token.
func WithBootstrapClient(opts ...bootstrap.ClientOption) Option {
	return func(c *config) { c.clientOptions = append(c.clientOptions, opts...) }
}

// WithForceQuery asks the prefill for each room's DP rank even where room % size tells it; the
// prefill must be set the same way.
func WithForceQuery() Option { return func(c *config) { c.forceQuery = true } }

// WithAllCPRanks takes pages from every context-parallel rank of a prefill, instead of rank 0
// alone. The prefills must be set the same way.
func WithAllCPRanks() Option { return func(c *config) { c.allCPRanks = true } }

// WithAllocationPolicy says when this decode reserves pages (decode_allocation_policy, from
// SGLang 0.5.22). It must be the prefill's own. Under bootstrap.PrefillCompleteAllocation a
// room is ready for its pages only when its prefill has computed them: see Receiver.Ready.
func WithAllocationPolicy(p bootstrap.AllocationPolicy) Option {
	return func(c *config) { c.policy = p }
}

// WithMetadata says what the layout's aux slots are. Publish then clears a room's slot, and
// when the room is complete the slot must hold its number: another one fails the room with
// nixlkv.ErrCorruptMetadata. Receiver.Metadata reads the rest. With nil they are not looked at.
func WithMetadata(b *metadata.Buffers) Option { return func(c *config) { c.metadata = b } }

// WithLogger gives the logger. Without it, or with nil, nothing is logged.
func WithLogger(l *zap.Logger) Option { return func(c *config) { c.log = l } }

// WithConnectTimeout bounds Receiver.Connect where its context has no deadline. SGLang asks
// for a prefill's topology 15 times, once a second.
func WithConnectTimeout(d time.Duration) Option { return func(c *config) { c.connectTimeout = d } }

// WithSendTimeout bounds how long a message to a prefill rank may wait to be sent, connecting
// included.
func WithSendTimeout(d time.Duration) Option { return func(c *config) { c.sendTimeout = d } }

// WithWaitingTimeout bounds the time from Publish until the pages are there.
func WithWaitingTimeout(d time.Duration) Option { return func(c *config) { c.waitingTimeout = d } }

// WithHeartbeat sets how often a prefill's bootstrap server is asked whether it lives, at
// least every two seconds apart, and after how many failures in a row it is given up.
func WithHeartbeat(interval time.Duration, failures int) Option {
	return func(c *config) {
		c.heartbeatInterval, c.heartbeatFailures = max(interval, minHeartbeatInterval), failures
	}
}

// WithReleaseTimeout bounds how long a failed room waits for its prefill ranks to say that
// they write nothing any more. A room number that is used again is held back as long.
func WithReleaseTimeout(d time.Duration) Option { return func(c *config) { c.releaseTimeout = d } }

// WithLossGrace sets how long after the loss of a connection its rooms may still be completed
// by what was on its way.
func WithLossGrace(d time.Duration) Option { return func(c *config) { c.lossGrace = d } }

// WithCloseTimeout bounds Manager.Close.
func WithCloseTimeout(d time.Duration) Option { return func(c *config) { c.closeTimeout = d } }

// WithThreadInit runs f once on the thread that fetches notifications, before it does: a server
// makes its CUDA context current there. NIXL's agent is made, and the layout's memory registered,
// by whoever calls NewManager. An error of f fails NewManager; nil is no f.
func WithThreadInit(f func() error) Option { return func(c *config) { c.threadInit = f } }

// WithCurve encrypts control messages and lets only those in who have a key. It is for managers
// whose peers are all this library's: SGLang's workers speak no CURVE, and get nowhere. The
// bytes that NIXL moves, and what the bootstrap server tells, are not its affair.
func WithCurve(keys nixlkv.Curve) Option { return func(c *config) { c.curve = &keys } }

// WithAllowedPeers names the networks that prefills are in. Connections from others are refused
// before anything that they send is read; a bootstrap server or prefill rank elsewhere is not
// connected to, and fails the room with nixlkv.ErrNotAllowed. Behind NAT both addresses of a
// prefill have to be allowed: the one that it registers, and the one that it comes from. Called
// again it adds.
func WithAllowedPeers(networks ...netip.Prefix) Option {
	return func(c *config) {
		c.allowed = append(c.allowed, networks...)
		c.trust.Allowed, c.trustErr = trust.Only(c.allowed...)
	}
}

// WithSourceMatching refuses what a prefill rank tells of a room over a connection from another
// IP address than the one it is known by, and counts it (Stats.Untrusted). It does not work
// through NAT, nor for a host that has several addresses and registers one of them but connects
// from another.
func WithSourceMatching() Option { return func(c *config) { c.trust.MatchSource = true } }

// WithLimits bounds what the manager holds.
func WithLimits(l Limits) Option { return func(c *config) { c.limits = l } }

// KVTransferError is how every failed room ends.
type KVTransferError = nixlkv.KVTransferError
