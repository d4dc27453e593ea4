package nixl

import (
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/nixlkv/nixlkv/internal/embedded"
)

// TCP says how the embedded engine reaches peers on other hosts, and is reached by them.
type TCP struct {
	// Listen is the address, host:port, to listen on; port 0 is any free one. Empty means not
	// to listen: peers on other hosts cannot reach the agent, but it can reach them.
	Listen string
	// Advertise is what the agent's metadata tells peers, host or host:port, in the order in
	// which they try it; at most 8. Without it they are told Listen, which then has to name a
	// host.
	Advertise []string
	// Timeout is how long a peer may acknowledge nothing, or take nothing, before it is lost.
	// Zero is 10 s, the least is 1 s.
	Timeout time.Duration
	// Only takes TCP on one host as well, where memory would be mapped.
	Only bool
}

// WithTCP makes an agent of the embedded engine use TCP between hosts. Without it nothing is
// exposed to a network. What is sent is not encrypted, and whoever knows the agent's metadata
// can read and write what it registered, so keep to networks that you trust, as with NIXL.
// The native engine has transports of its own, and ignores it.
func WithTCP(c TCP) AgentOption {
	return func(o *agentOptions) {
		c.Advertise = slices.Clone(c.Advertise)
		o.tcp = &c
	}
}

// params adds the backend parameters of the embedded engine.
func (c *TCP) params(to map[string]string) map[string]string {
	p := map[string]string{embedded.ParamListen: c.Listen, embedded.ParamAdvertise: strings.Join(c.Advertise, ",")}
	if c.Timeout != 0 {
		p[embedded.ParamTimeout] = c.Timeout.String()
	}
	if c.Only {
		p[embedded.ParamTransport] = "tcp"
	}
	maps.Copy(p, to)
	return p
}
