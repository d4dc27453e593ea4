package bootstrap

import (
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"strconv"
	"strings"

	"github.com/nixlkv/nixlkv"
)

// Endpoint is where something listens. Host is an IP address or a name and never bracketed,
// as on SGLang's wire (rank_ip `::1`); brackets come with the port.
type Endpoint struct {
	Host string
	Port int
}

// ParseEndpoint reads `host:port`; an IPv6 address must be bracketed, as a bootstrap address
// is. Errors wrap nixlkv.ErrMalformed.
func ParseEndpoint(addr string) (Endpoint, error) {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return Endpoint{}, fmt.Errorf("%w: address %q: %w", nixlkv.ErrMalformed, addr, err)
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil {
		return Endpoint{}, fmt.Errorf("%w: port of address %q", nixlkv.ErrMalformed, addr)
	}
	e := Endpoint{Host: host, Port: int(n)}
	return e, e.Validate()
}

// Validate tells whether a peer can connect there: a host that is an IP address or looks like
// a name, and a port above 0. Errors wrap nixlkv.ErrMalformed.
func (e Endpoint) Validate() error {
	if !validHost(e.Host) {
		return fmt.Errorf("%w: host %q", nixlkv.ErrMalformed, e.Host)
	}
	if e.Port < 1 || e.Port > maxPort {
		return fmt.Errorf("%w: port %d", nixlkv.ErrMalformed, e.Port)
	}
	return nil
}

// String gives `host:port`, `[::1]:port` for IPv6.
func (e Endpoint) String() string { return net.JoinHostPort(e.Host, strconv.Itoa(e.Port)) }

// TCP gives the ZMQ endpoint, `tcp://host:port` or `tcp://[::1]:port`.
func (e Endpoint) TCP() string { return "tcp://" + e.String() }

// Reachable gives the endpoint at which a listener bound to e is reached from its own
// machine: a wildcard address becomes the loopback address of the same family.
func (e Endpoint) Reachable() Endpoint {
	if ip, err := netip.ParseAddr(e.Host); err == nil && ip.Unmap().IsUnspecified() {
		if ip.Unmap().Is4() {
			e.Host = "127.0.0.1"
		} else {
			e.Host = "::1"
		}
	}
	return e
}

// url gives the base of requests to the endpoint; a zone (fe80::1%eth0) is escaped when the
// URL is written out.
func (e Endpoint) url(scheme string) url.URL {
	return url.URL{Scheme: scheme, Host: e.String()}
}

// network is what net.Listen needs so that a literal address listens on its own family
// alone: Go would open 0.0.0.0 to IPv6 too.
func (e Endpoint) network() string {
	ip, err := netip.ParseAddr(e.Host)
	switch {
	case err != nil:
		return "tcp"
	case ip.Unmap().Is4():
		return "tcp4"
	default:
		return "tcp6"
	}
}

const (
	maxPort = 65535
	maxHost = 253
)

// validHost keeps out what would change the meaning of an address that is pasted together
// from a host and a port.
func validHost(host string) bool {
	if host == "" || len(host) > maxHost {
		return false
	}
	if ip, err := netip.ParseAddr(host); err == nil {
		return validZone(ip.Zone())
	}
	return isName(host)
}

func validZone(zone string) bool { return zone == "" || isName(zone) }

func isName(s string) bool {
	return strings.IndexFunc(s, func(r rune) bool {
		switch {
		case r >= 'a' && r <= 'z', r >= 'A' && r <= 'Z', r >= '0' && r <= '9', r == '-', r == '.', r == '_':
			return false
		}
		return true
	}) < 0
}
