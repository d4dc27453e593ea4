package wire

import (
	"net"
	"strconv"
)

// Endpoint is where a worker's PULL socket listens. It can be compared and is its own key
// in a map.
type Endpoint struct {
	IP   string // bare, without brackets: 10.0.0.1, ::1; a host name passes too
	Port int    // 1 to 65535
}

// String gives host:port, with brackets around an IPv6 address.
func (e Endpoint) String() string { return net.JoinHostPort(e.IP, strconv.Itoa(e.Port)) }

func (e Endpoint) check() error {
	if err := checkHost(e.IP); err != nil {
		return err
	}
	return checkPort(e.Port)
}

// IsZero says that there is no endpoint.
func (e Endpoint) IsZero() bool { return e == Endpoint{} }

const (
	maxHost = 255 // the longest host name that DNS allows
	maxPort = 65535
)

// checkHost refuses what cannot be an address or a host name. SGLang sends whatever
// SGLANG_HOST_IP says, so names have to pass; brackets belong to URLs only.
func checkHost[S ~string | ~[]byte](s S) error {
	if len(s) == 0 {
		return malformed("no address")
	}
	if len(s) > maxHost {
		return tooMany("bytes of address", len(s), maxHost)
	}
	for i := range len(s) {
		switch c := s[i]; {
		case c >= '0' && c <= '9', c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z':
		case c == '.', c == ':', c == '-', c == '_', c == '%':
		default:
			return malformed("%s is not an address", quoted([]byte(s)))
		}
	}
	return nil
}

func checkPort(p int) error {
	if p < 1 || p > maxPort {
		return malformed("port %d, expected 1 to %d", p, maxPort)
	}
	return nil
}

// checkAgent refuses names that are empty, longer than limit or not printable ASCII.
func checkAgent[S ~string | ~[]byte](s S, limit int) error {
	if len(s) == 0 {
		return malformed("no agent name")
	}
	if len(s) > limit {
		return tooMany("bytes of agent name", len(s), limit)
	}
	for i := range len(s) {
		if s[i] < ' ' || s[i] > '~' {
			return malformed("agent name %s is not printable ASCII", quoted([]byte(s)))
		}
	}
	return nil
}
