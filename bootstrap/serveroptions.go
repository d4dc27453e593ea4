package bootstrap

import (
	"crypto/tls"
	"net/netip"
	"time"

	"go.uber.org/zap"
)

// Defaults of a server.
const (
	// DefaultRoomTTL is how long a room's DP rank is kept
	// (SGLANG_DISAGGREGATION_BOOTSTRAP_ENTRY_CLEANUP_INTERVAL).
	DefaultRoomTTL = 120 * time.Second
	// DefaultMaxRooms bounds the rooms whose DP rank is kept at a time.
	DefaultMaxRooms = 1 << 19
)

type serverConfig struct {
	log      *zap.Logger
	now      func() time.Time
	roomTTL  time.Duration
	maxRooms int
	maxRanks int
	token    string
	tls      *tls.Config
	allowed  []netip.Prefix
}

// ServerOption changes a server's defaults. A nil one changes nothing.
type ServerOption func(*serverConfig)

// WithLogger sends a server's log to l; without it, or with nil, nothing is logged.
func WithLogger(l *zap.Logger) ServerOption {
	return func(c *serverConfig) {
		if l != nil {
			c.log = l
		}
	}
}

// WithClock replaces time.Now for the expiry of rooms; nil does not.
func WithClock(now func() time.Time) ServerOption {
	return func(c *serverConfig) {
		if now != nil {
			c.now = now
		}
	}
}

// WithRoomTTL sets how long a room's DP rank is kept. Zero or less means DefaultRoomTTL.
func WithRoomTTL(d time.Duration) ServerOption {
	return func(c *serverConfig) {
		if d > 0 {
			c.roomTTL = d
		}
	}
}

// WithMaxRooms bounds the rooms whose DP rank is kept; more are refused. Zero or less means
// DefaultMaxRooms.
func WithMaxRooms(n int) ServerOption {
	return func(c *serverConfig) {
		if n > 0 {
			c.maxRooms = n
		}
	}
}

// WithMaxRanks bounds the ranks of the prefill, over all DP groups. Zero or less, or more than
// MaxRanks, means MaxRanks.
func WithMaxRanks(n int) ServerOption {
	return func(c *serverConfig) {
		if n > 0 && n <= MaxRanks {
			c.maxRanks = n
		}
	}
}

// WithToken makes a server ask for `Authorization: Bearer token` on everything but /health.
// SGLang's workers send none, so it is for fleets without them.
func WithToken(token string) ServerOption {
	return func(c *serverConfig) { c.token = token }
}

// WithAllowedClients answers requests from these networks alone, except to /health; others get
// 403. It is for fleets with SGLang's workers, which cannot send a token. The address is that of
// the connection (http.Request.RemoteAddr): behind a proxy it is the proxy's. No network means
// all of them; one that is not valid lets nobody in.
func WithAllowedClients(networks ...netip.Prefix) ServerOption {
	return func(c *serverConfig) { c.allowed = append(c.allowed, networks...) }
}

// WithTLS makes Listen and Serve speak HTTPS; with nil, HTTP. SGLang's workers speak HTTP alone.
func WithTLS(config *tls.Config) ServerOption {
	return func(c *serverConfig) { c.tls = config }
}
