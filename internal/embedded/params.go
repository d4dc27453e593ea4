package embedded

import (
	"fmt"
	"maps"
	"math"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"github.com/nixlkv/nixlkv/internal/engine"
)

// Parameters of the backend. Without any, an agent can be reached on its own host only, by
// its own user.
const (
	// ParamListen is a TCP address, host:port, on which peers on other hosts reach the agent;
	// port 0 is any free one. The default is none. Nothing is encrypted, and whoever has the
	// agent's metadata, or reads it off the network, may read and write what is registered.
	ParamListen = "tcp_listen"
	// ParamAdvertise lists the addresses that the metadata tells peers, host or host:port,
	// separated by commas, in the order in which they are tried; without a port, or with port
	// 0, the one listened on. The default is the address listened on, unless that is a
	// wildcard.
	ParamAdvertise = "tcp_advertise"
	// ParamTimeout is a Go duration: how long the other end of a TCP connection may
	// acknowledge nothing, or take nothing, before it is lost. The default is 10s, the least 1s.
	ParamTimeout = "tcp_timeout"
	// ParamTransport says how this agent reaches peers: "auto" (the default: the Unix socket
	// on its own host, else TCP), "unix" or "tcp".
	ParamTransport = "transport"
)

const (
	defaultTCPTimeout = 10 * time.Second
	minTCPTimeout     = time.Second
	maxTCPTimeout     = 24 * time.Hour
)

// transport restricts how peers are reached.
type transport uint8

const (
	transportAuto transport = iota
	transportUnix
	transportTCP
)

var transportNames = [...]string{"auto", "unix", "tcp"}

// tcpConfig is what the backend's parameters say.
type tcpConfig struct {
	listen    string   // empty: not over TCP
	advertise []string // host:port; the port may be 0
	timeout   time.Duration
	transport transport
}

// defaultParams are the parameters with their defaults.
func defaultParams() map[string]string {
	return map[string]string{
		ParamListen:    "",
		ParamAdvertise: "",
		ParamTimeout:   defaultTCPTimeout.String(),
		ParamTransport: transportNames[transportAuto],
	}
}

// parseParams reads the parameters. Others are an error, unless the backend was asked for
// by NIXL's name: then they are meant for NIXL's.
func parseParams(plugin string, params map[string]string) (tcpConfig, error) {
	all := defaultParams()
	if plugin == pluginName {
		for k := range params {
			if _, known := all[k]; !known {
				return tcpConfig{}, fmt.Errorf("parameter %q is not known: %w", k, engine.ErrInvalidParam)
			}
		}
	}
	maps.Copy(all, params)
	c := tcpConfig{listen: all[ParamListen]}
	fail := func(name string, err error) (tcpConfig, error) {
		return tcpConfig{}, fmt.Errorf("parameter %s=%q: %w: %w", name, all[name], err, engine.ErrInvalidParam)
	}
	var err error
	if c.timeout, err = time.ParseDuration(all[ParamTimeout]); err != nil {
		return fail(ParamTimeout, err)
	}
	if c.timeout < minTCPTimeout || c.timeout > maxTCPTimeout {
		return fail(ParamTimeout, fmt.Errorf("not between %v and %v", minTCPTimeout, maxTCPTimeout))
	}
	switch all[ParamTransport] {
	case transportNames[transportAuto]:
	case transportNames[transportUnix]:
		c.transport = transportUnix
	case transportNames[transportTCP]:
		c.transport = transportTCP
	default:
		return fail(ParamTransport, fmt.Errorf("want one of %q", transportNames))
	}
	if c.listen != "" {
		if _, _, err := net.SplitHostPort(c.listen); err != nil {
			return fail(ParamListen, err)
		}
	}
	if all[ParamAdvertise] == "" {
		return c, nil
	}
	if c.listen == "" {
		return fail(ParamAdvertise, fmt.Errorf("without %s", ParamListen))
	}
	for entry := range strings.SplitSeq(all[ParamAdvertise], ",") {
		if c.advertise = append(c.advertise, withPort(strings.TrimSpace(entry))); len(c.advertise) > maxTCPAddresses {
			return fail(ParamAdvertise, fmt.Errorf("more than %d addresses", maxTCPAddresses))
		}
	}
	return c, nil
}

// withPort gives a host that has no port the port 0.
func withPort(s string) string {
	if _, _, err := net.SplitHostPort(s); err == nil {
		return s
	}
	return net.JoinHostPort(strings.Trim(s, "[]"), "0")
}

// addressesOf gives what the metadata says of a listener.
func (c *tcpConfig) addressesOf(l net.Addr) ([]string, error) {
	bound, err := netip.ParseAddrPort(l.String())
	if err != nil {
		return nil, err
	}
	if len(c.advertise) == 0 {
		if bound.Addr().IsUnspecified() {
			return nil, fmt.Errorf("parameter %s=%q is every address of this host: say in %s which one peers use: %w",
				ParamListen, c.listen, ParamAdvertise, engine.ErrInvalidParam)
		}
		return []string{bound.String()}, nil
	}
	out := make([]string, 0, len(c.advertise))
	for _, s := range c.advertise {
		host, port, err := net.SplitHostPort(s)
		if err == nil && port == "0" {
			s = net.JoinHostPort(host, strconv.Itoa(int(bound.Port())))
		}
		if err := checkTCPAddress(s); err != nil {
			return nil, fmt.Errorf("parameter %s: %w: %w", ParamAdvertise, err, engine.ErrInvalidParam)
		}
		out = append(out, s)
	}
	return out, nil
}

// Bounds of the TCP addresses in metadata.
const (
	maxTCPAddresses = 8
	maxTCPAddress   = 255 + 1 + 5 // a name of the DNS, and a port
)

// checkTCPAddress says whether a peer can be told to dial an address.
func checkTCPAddress(s string) error {
	host, port, err := net.SplitHostPort(s)
	if err != nil {
		return err
	}
	n, err := strconv.ParseUint(port, 10, 16)
	ip, notIP := netip.ParseAddr(host)
	switch {
	case len(s) > maxTCPAddress || strings.ContainsFunc(s, func(r rune) bool { return r <= ' ' || r > '~' || r == '/' }):
		return fmt.Errorf("address %.80q is too long or has other than visible characters", s)
	case err != nil || n == 0 || n > math.MaxUint16:
		return fmt.Errorf("address %q has no port from 1 to 65535", s)
	case host == "" || notIP == nil && ip.IsUnspecified():
		return fmt.Errorf("address %q names no host", s)
	}
	return nil
}
