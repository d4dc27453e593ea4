// Package embedded is the engine for machines without NIXL: pure Go, Go to Go. It keeps
// NIXL's semantics, so that the same caller runs on both engines.
//
// # How bytes move
//
// An agent that writes or reads is the initiator, the one that registered the memory the
// target. An initiator opens one connection to each target it uses; a target never opens
// one. Memory that is backed by a sealed memfd is handed over that connection as a file
// descriptor; the initiator maps the registered range and copies at the speed of memcpy.
// All other (foreign) memory goes through the connection, and so does everything over
// TCP: writev from where the bytes are, readv to where they belong. The target checks bounds
// against its registrations, and holds a region only while the kernel copies, never while
// it waits for a peer. A notification follows the bytes on the same connection and is
// acknowledged when the target has queued it.
//
// # The Unix socket
//
// Agents listen on an abstract Unix stream socket with a random name. Abstract, because
// such a name leaves nothing on disk when a process is killed, needs no writable
// directory and works between the containers of a pod, which share a network namespace
// but no file system. Such names have no permissions, so both ends compare the other's
// user id (SO_PEERCRED). A stream, because a frame may be larger than what a socket takes
// in one packet.
//
// # TCP
//
// An agent that is told to (ParamListen) listens on a TCP address as well, and its metadata
// names it. A peer takes it if the agent is on another host or in another network namespace,
// or if nobody answers on the Unix socket. There are no users to compare: what admits a
// peer is that it names the agent's id, 128 random bits that only the metadata tells.
// Nothing is encrypted, so the network has to be trusted, as with RDMA.
//
// A peer's end shows at once (its kernel says so). A peer whose host or network is gone says
// nothing: then the kernel gives up when it has acknowledged nothing for the timeout
// (ParamTimeout, 10 s), and a second later at most if there is no traffic. A peer that is
// stopped is not lost as long as it has all that it was sent; one that leaves bytes
// in the sockets for longer than the timeout is.
//
// # What settles, and when
//
// A request settles only when no goroutine of this engine, and no peer that it asked,
// will touch its memory any more. A connection is closed by an initiator only after its
// mappings are gone; for the target the end of a connection therefore means that its
// memory was let go.
package embedded

import (
	"fmt"
	"runtime"
	"time"

	"github.com/nixlkv/nixlkv/internal/engine"
)

// Bounds that are part of what the engine promises.
const (
	// MaxNotification is the greatest length of a notification in bytes.
	MaxNotification = 1 << 20
	// MaxName is the greatest length of an agent's name in bytes.
	MaxName = 1024
	// MaxRegions is the greatest number of regions that an agent may have registered.
	MaxRegions = 1 << 16
	// MaxDescriptors is the greatest number of descriptors in a list.
	MaxDescriptors = 1 << 22
)

// maxHandles bounds each kind of handle of an agent.
const maxHandles = 1 << 20

// Option changes a setting of the engine.
type Option func(*config)

type config struct {
	workers        int
	releaseTimeout time.Duration
	connectTimeout time.Duration
	inboxBytes     int
	inlineBytes    uint64
	strangerWait   time.Duration
}

// WithWorkers sets how many goroutines of each agent copy memory; below 1 means the
// default, the smaller of 4 and GOMAXPROCS.
func WithWorkers(n int) Option {
	return func(c *config) {
		if n > 0 {
			c.workers = n
		}
	}
}

// WithReleaseTimeout sets how long Deregister and Destroy wait for peers to let memory go
// before they give engine.ErrBusy. The default is 5 seconds.
func WithReleaseTimeout(d time.Duration) Option {
	return func(c *config) {
		if d > 0 {
			c.releaseTimeout = d
		}
	}
}

// WithConnectTimeout sets how long Connect, and Notify to a peer that is not connected or
// takes no more notifications, wait. The default is 5 seconds. Transfers do not time out:
// one to a peer that is stopped stays in progress (over TCP see ParamTimeout).
func WithConnectTimeout(d time.Duration) Option {
	return func(c *config) {
		if d > 0 {
			c.connectTimeout = d
		}
	}
}

// WithInbox sets how many bytes of notifications an agent keeps before Notifications
// drains them; names and record headers count. What arrives beyond is held back at its
// sender, whose request stays in progress. The default is 64 MiB; the least is room for
// one notification of MaxNotification bytes.
func WithInbox(bytes int) Option {
	return func(c *config) {
		if bytes > 0 {
			c.inboxBytes = max(bytes, recordSize(MaxName, MaxNotification))
		}
	}
}

// inlineBytes: up to this size a copy costs less than waking a worker.
const inlineBytes = 64 << 10

// New makes the engine. It holds nothing but its settings.
func New(opts ...Option) engine.Engine {
	c := config{
		workers:        min(4, runtime.GOMAXPROCS(0)),
		releaseTimeout: 5 * time.Second,
		connectTimeout: 5 * time.Second,
		inboxBytes:     64 << 20,
		inlineBytes:    inlineBytes,
		strangerWait:   strangerWait,
	}
	for _, o := range opts {
		if o != nil {
			o(&c)
		}
	}
	return &eng{config: c}
}

type eng struct{ config config }

var _ engine.Engine = (*eng)(nil)

// Info implements engine.Engine.
func (*eng) Info() engine.Info { return engine.Info{Name: "embedded"} }

// NewAgent implements engine.Engine. The agent is an *Agent. ProgressThread,
// ProgressDelay and Sync need nothing here: transfers always move on by themselves, and
// an agent is always safe for concurrent use.
func (e *eng) NewAgent(name string, cfg engine.AgentConfig) (engine.Agent, error) {
	if name == "" || len(name) > MaxName {
		return nil, fmt.Errorf("embedded: agent name of %d bytes, want 1 to %d: %w", len(name), MaxName, engine.ErrInvalidParam)
	}
	host, err := readHost()
	if err != nil {
		return nil, fmt.Errorf("embedded: agent %q: %w: %w", name, err, engine.ErrBackend)
	}
	return newAgent(name, cfg, e.config, host), nil
}
