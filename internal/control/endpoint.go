package control

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"github.com/nixlkv/nixlkv"
)

// Endpoint is the address of a peer's PULL socket. It is comparable, and equal for equal
// addresses however they were written. The zero Endpoint is not valid.
type Endpoint struct {
	addr netip.AddrPort
}

// NewEndpoint makes an endpoint of the IP address and port that a peer gave of itself. IPv6
// addresses are bare there; brackets are accepted. Host names are refused, since libzmq would
// resolve them in the thread that serves all connections, and so are port 0 and addresses that
// no single peer can have (unspecified, multicast). The error wraps ErrMalformed.
func NewEndpoint(ip string, port int) (Endpoint, error) {
	if port < 1 || port > 65535 {
		return Endpoint{}, fmt.Errorf("%w: endpoint port %d", nixlkv.ErrMalformed, port)
	}
	bare := ip
	if inner, ok := strings.CutPrefix(ip, "["); ok {
		if bare, ok = strings.CutSuffix(inner, "]"); !ok || !strings.Contains(bare, ":") {
			return Endpoint{}, fmt.Errorf("%w: endpoint address %q", nixlkv.ErrMalformed, ip)
		}
	}
	a, err := netip.ParseAddr(bare)
	if err != nil {
		return Endpoint{}, fmt.Errorf("%w: endpoint address %q", nixlkv.ErrMalformed, ip)
	}
	a = a.Unmap()
	if a.IsUnspecified() || a.IsMulticast() || !printable(a.Zone()) {
		return Endpoint{}, fmt.Errorf("%w: endpoint address %q names no peer", nixlkv.ErrMalformed, ip)
	}
	return Endpoint{netip.AddrPortFrom(a, uint16(port))}, nil
}

// ParseEndpoint reads the form that String gives, tcp://10.0.0.1:5000 or tcp://[::1]:5000,
// under the rules of NewEndpoint.
func ParseEndpoint(s string) (Endpoint, error) {
	rest, ok := strings.CutPrefix(s, "tcp://")
	i := strings.LastIndexByte(rest, ':')
	if !ok || i < 0 {
		return Endpoint{}, fmt.Errorf("%w: endpoint %q", nixlkv.ErrMalformed, s)
	}
	host, port := rest[:i], rest[i+1:]
	if strings.Contains(host, ":") && !strings.HasPrefix(host, "[") {
		return Endpoint{}, fmt.Errorf("%w: endpoint %q: IPv6 addresses need brackets", nixlkv.ErrMalformed, s)
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil {
		return Endpoint{}, fmt.Errorf("%w: endpoint %q", nixlkv.ErrMalformed, s)
	}
	return NewEndpoint(host, int(n))
}

// String gives the form that libzmq takes.
func (e Endpoint) String() string { return "tcp://" + e.addr.String() }

// AddrPort gives address and port.
func (e Endpoint) AddrPort() netip.AddrPort { return e.addr }

// IsValid says whether e came from NewEndpoint or ParseEndpoint.
func (e Endpoint) IsValid() bool { return e.addr.IsValid() }

// printable guards what goes to libzmq as a C string: a zone can hold any bytes.
func printable(zone string) bool {
	for i := range len(zone) {
		if c := zone[i]; c <= ' ' || c >= 0x7f || strings.IndexByte("]%:/;,", c) >= 0 {
			return false
		}
	}
	return true
}
