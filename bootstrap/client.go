package bootstrap

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"syscall"
	"time"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/internal/trust"
)

// Defaults and bounds of a client.
const (
	// DefaultRequestTimeout bounds one request, as in SGLang.
	DefaultRequestTimeout = 5 * time.Second
	// DefaultReadyTimeout bounds the wait for a prefill to be ready when the caller's context
	// has no deadline: SGLang asks 15 times, once a second.
	DefaultReadyTimeout = 15 * time.Second

	dialTimeout = 2 * time.Second
	// idleConns are kept for less time than SGLang's server (75 s) and ours keep them.
	idleConnTimeout = 60 * time.Second
	maxConns        = 16

	maxReply     = 1 << 20
	maxErrorText = 512
	// roomsPerQuery splits large queries, so that replies stay within maxReply.
	roomsPerQuery = 8192
)

const (
	pathRoute          = "/route"
	pathRegisterDPRank = "/register_dp_rank"
	pathQueryDPRanks   = "/query_dp_ranks"
	pathHealth         = "/health"
)

// Client asks one prefill's bootstrap server, SGLang's or this package's. All methods are safe
// for concurrent use and share at most 16 connections.
//
// Every request takes at most the request timeout, and what may pass (no connection, no
// answer, 503, other trouble of the server) is repeated until the context's deadline, or the
// ready timeout if it has none. The error then tells what was found last: it wraps
// nixlkv.ErrNotReady (503), nixlkv.ErrPeerLost (no connection), nixlkv.ErrTimeout (no answer in
// time) or just a *StatusError, and the context's error if that ended the wait.
// An answer that makes no sense wraps nixlkv.ErrMalformed, one that is too long
// nixlkv.ErrLimit; neither is asked for again.
type Client struct {
	addr    Endpoint
	base    url.URL
	http    http.Client
	request time.Duration
	ready   time.Duration
	token   string
}

type clientConfig struct {
	request, ready time.Duration
	token          string
	tls            *tls.Config
	transport      http.RoundTripper
	allowed        []netip.Prefix
}

// ClientOption changes a client's defaults. A nil one changes nothing.
type ClientOption func(*clientConfig)

// WithRequestTimeout bounds one request. Zero or less means DefaultRequestTimeout.
func WithRequestTimeout(d time.Duration) ClientOption {
	return func(c *clientConfig) {
		if d > 0 {
			c.request = d
		}
	}
}

// WithReadyTimeout bounds the repetition of requests whose context has no deadline. Zero or
// less means DefaultReadyTimeout.
func WithReadyTimeout(d time.Duration) ClientOption {
	return func(c *clientConfig) {
		if d > 0 {
			c.ready = d
		}
	}
}

// WithClientToken sends `Authorization: Bearer token` with every request.
func WithClientToken(token string) ClientOption {
	return func(c *clientConfig) { c.token = token }
}

// WithClientTLS speaks HTTPS; with nil, HTTP. Config is not modified and must not be afterwards.
func WithClientTLS(config *tls.Config) ClientOption {
	return func(c *clientConfig) { c.tls = config }
}

// WithTransport replaces the connections, which by default, or with nil, use no proxy: ranks are
// neighbours.
func WithTransport(rt http.RoundTripper) ClientOption {
	return func(c *clientConfig) { c.transport = rt }
}

// WithAllowedServers connects to addresses in these networks alone, also where a name stands
// for one; none means all. Elsewhere requests fail with nixlkv.ErrNotAllowed, and are not
// repeated. It has no effect beside WithTransport.
func WithAllowedServers(networks ...netip.Prefix) ClientOption {
	return func(c *clientConfig) { c.allowed = networks }
}

// NewClient gives a client of the bootstrap server at `host:port` (`[::1]:port`). It does not
// connect. A wildcard host stands for this machine. Errors wrap nixlkv.ErrMalformed.
func NewClient(addr string, opts ...ClientOption) (*Client, error) {
	e, err := ParseEndpoint(addr)
	if err != nil {
		return nil, fmt.Errorf("bootstrap address: %w", err)
	}
	c := clientConfig{request: DefaultRequestTimeout, ready: DefaultReadyTimeout}
	for _, o := range opts {
		if o != nil {
			o(&c)
		}
	}
	allowed, err := trust.NewList(c.allowed...)
	if err != nil {
		return nil, fmt.Errorf("allowed servers: %w", err)
	}
	scheme := "http"
	if c.tls != nil {
		scheme = "https"
	}
	if c.transport == nil {
		c.transport = &http.Transport{
			DialContext:            (&net.Dialer{Timeout: dialTimeout, Control: dialOnly(allowed)}).DialContext,
			TLSClientConfig:        c.tls,
			TLSHandshakeTimeout:    c.request,
			ResponseHeaderTimeout:  c.request,
			MaxResponseHeaderBytes: maxHeader,
			MaxConnsPerHost:        maxConns,
			MaxIdleConnsPerHost:    maxConns,
			IdleConnTimeout:        idleConnTimeout,
			DisableCompression:     true,
		}
	}
	return &Client{
		addr: e, base: e.Reachable().url(scheme), request: c.request, ready: c.ready, token: c.token,
		http: http.Client{
			Transport: c.transport,
			// The token is for this server alone.
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		},
	}, nil
}

// dialOnly refuses to connect outside of a list; it is asked with the address itself, of
// every one that a name stands for.
func dialOnly(allowed trust.List) func(network, address string, _ syscall.RawConn) error {
	if allowed.Everywhere() {
		return nil
	}
	return func(_, address string, _ syscall.RawConn) error {
		a, err := netip.ParseAddrPort(address)
		if err != nil || !allowed.Allows(a.Addr()) {
			return fmt.Errorf("%w: bootstrap server at %s", nixlkv.ErrNotAllowed, address)
		}
		return nil
	}
}

// Addr gives the bootstrap address as it was given.
func (c *Client) Addr() string { return c.addr.String() }

// Close drops idle connections. Requests in progress end by their contexts.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// Register registers a prefill rank. It tries 5 times, like SGLang's prefill, 1, 2, 4 and 8 s
// apart. A rank that disagrees with those registered before wraps nixlkv.ErrMismatch.
func (c *Client) Register(ctx context.Context, rank RankInfo) error {
	if err := rank.Validate(); err != nil {
		return fmt.Errorf("register prefill rank: %w", err)
	}
	body, err := json.Marshal(rank)
	if err != nil {
		return fmt.Errorf("register prefill rank: %w: %w", nixlkv.ErrMalformed, err)
	}
	err = registering.do(ctx, func(ctx context.Context) error {
		_, err := c.roundTrip(ctx, http.MethodPut, pathRoute, nil, body)
		return err
	})
	if err != nil {
		return fmt.Errorf("register prefill rank at bootstrap server %s: %w", c.addr, err)
	}
	return nil
}

// Topology asks for the prefill's topology and waits until all of its ranks have registered.
func (c *Client) Topology(ctx context.Context) (Topology, error) {
	var t Topology
	err := c.ask(ctx, func(ctx context.Context) error {
		reply, err := c.roundTrip(ctx, http.MethodGet, pathRoute, wholePrefill.params(), nil)
		if err == nil {
			t, err = ParseTopology(reply)
		}
		return err
	})
	if err != nil {
		return Topology{}, fmt.Errorf("bootstrap: Could not fetch prefill parallel info from bootstrap_addr: %s: %w", c.addr, err)
	}
	return t, nil
}

// Rank asks for the address of one prefill rank's control socket and waits until all ranks
// have registered. A rank that does not exist wraps nixlkv.ErrNoSuchRank.
func (c *Client) Rank(ctx context.Context, id RankID) (Endpoint, error) {
	var e Endpoint
	err := func() error {
		if min(id.DP, id.CP, id.TP, id.PP) < 0 {
			return nixlkv.ErrNoSuchRank
		}
		return c.ask(ctx, func(ctx context.Context) error {
			reply, err := c.roundTrip(ctx, http.MethodGet, pathRoute, id.params(), nil)
			if err == nil {
				e, err = parseRankReply(reply)
			}
			return err
		})
	}()
	if err != nil {
		// SGLang's text, which operators search for.
		return Endpoint{}, fmt.Errorf("bootstrap: Could not fetch bootstrap info for: "+
			"prefill_dp_rank: %d prefill_cp_rank: %d target_tp_rank: %d and target_pp_rank %d (bootstrap_addr: %s): %w",
			id.DP, id.CP, id.TP, id.PP, c.addr, err)
	}
	return e, nil
}

// RegisterDPRank tells which DP rank serves a room, where PrefillDPRank asks for it. It is
// tried like Register. The server keeps it for two minutes.
func (c *Client) RegisterDPRank(ctx context.Context, room nixlkv.Room, dpRank int) error {
	body, err := json.Marshal(struct {
		Room nixlkv.Room `json:"bootstrap_room"`
		Rank int         `json:"dp_rank"`
	}{room, dpRank})
	if err != nil {
		return fmt.Errorf("register DP rank: %w: %w", nixlkv.ErrMalformed, err)
	}
	err = registering.do(ctx, func(ctx context.Context) error {
		_, err := c.roundTrip(ctx, http.MethodPost, pathRegisterDPRank, nil, body)
		return err
	})
	if err != nil {
		return fmt.Errorf("register DP rank %d of room %d at bootstrap server %s: %w", dpRank, room, c.addr, err)
	}
	return nil
}

// QueryDPRanks asks which DP ranks serve the rooms. Rooms that the prefill has not registered
// yet are not in the answer: ask again. An answer of rooms that were not asked for is ignored.
func (c *Client) QueryDPRanks(ctx context.Context, rooms []nixlkv.Room) (map[nixlkv.Room]int, error) {
	found := make(map[nixlkv.Room]int, len(rooms))
	for len(rooms) > 0 {
		n := min(len(rooms), roomsPerQuery)
		if err := c.queryDPRanks(ctx, rooms[:n], found); err != nil {
			return nil, fmt.Errorf("query DP ranks at bootstrap server %s: %w", c.addr, err)
		}
		rooms = rooms[n:]
	}
	return found, nil
}

func (c *Client) queryDPRanks(ctx context.Context, rooms []nixlkv.Room, found map[nixlkv.Room]int) error {
	body, err := json.Marshal(struct {
		Rooms []nixlkv.Room `json:"bootstrap_rooms"`
	}{rooms})
	if err != nil {
		return fmt.Errorf("%w: %w", nixlkv.ErrMalformed, err)
	}
	return c.ask(ctx, func(ctx context.Context) error {
		reply, err := c.roundTrip(ctx, http.MethodPost, pathQueryDPRanks, nil, body)
		if err != nil {
			return err
		}
		return parseDPRanks(reply, rooms, found)
	})
}

// Health asks once whether the server answers: one heartbeat. How many may fail is the
// caller's to count.
func (c *Client) Health(ctx context.Context) error {
	if _, err := c.roundTrip(ctx, http.MethodGet, pathHealth, nil, nil); err != nil {
		return fmt.Errorf("heartbeat of bootstrap server %s: %w", c.addr, err)
	}
	return nil
}

// ask repeats a request until the context's deadline, or the ready timeout.
func (c *Client) ask(ctx context.Context, one func(context.Context) error) error {
	if _, ok := ctx.Deadline(); !ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, c.ready)
		defer cancel()
	}
	return asking.do(ctx, one)
}

// roundTrip makes one request and gives the body of a 200.
func (c *Client) roundTrip(ctx context.Context, method, path string, query url.Values, body []byte) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, c.request)
	defer cancel()
	u := c.base
	u.Path, u.RawQuery = path, query.Encode()
	var content io.Reader
	if body != nil {
		content = bytes.NewReader(body)
	}
	req, err := http.NewRequestWithContext(ctx, method, u.String(), content)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", nixlkv.ErrMalformed, err)
	}
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	if c.token != "" {
		req.Header.Set("Authorization", "Bearer "+c.token)
	}
	res, err := c.http.Do(req)
	if err != nil {
		return nil, lost(err)
	}
	defer res.Body.Close()
	reply, err := io.ReadAll(io.LimitReader(res.Body, maxReply+1))
	switch {
	case err != nil:
		return nil, lost(err)
	case res.StatusCode != http.StatusOK:
		text := strings.ToValidUTF8(string(reply[:min(len(reply), maxErrorText)]), "\uFFFD")
		return nil, newStatusError(method, path, res.StatusCode, text)
	case len(reply) > maxReply:
		return nil, fmt.Errorf("%w: %s %s answered more than %d bytes", nixlkv.ErrLimit, method, path, maxReply)
	}
	return reply, nil
}

// lost says whether there was no connection or no answer.
func lost(err error) error {
	if errors.Is(err, nixlkv.ErrNotAllowed) {
		return err
	}
	var timeout net.Error
	if errors.Is(err, context.DeadlineExceeded) || errors.As(err, &timeout) && timeout.Timeout() {
		return fmt.Errorf("%w: %w", nixlkv.ErrTimeout, err)
	}
	return fmt.Errorf("%w: %w", nixlkv.ErrPeerLost, err)
}

func parseRankReply(b []byte) (Endpoint, error) {
	f, err := parseFields(b)
	if err != nil {
		return Endpoint{}, err
	}
	e := Endpoint{Host: f.text("rank_ip"), Port: f.number("rank_port", 1, maxPort)}
	if err := f.err(); err != nil {
		return Endpoint{}, err
	}
	return e, e.Validate()
}

// parseDPRanks adds the ranks of the rooms that were asked for to found.
func parseDPRanks(b []byte, rooms []nixlkv.Room, found map[nixlkv.Room]int) error {
	f, err := parseFields(b)
	if err != nil {
		return err
	}
	for _, room := range rooms {
		if key := room.String(); f.get(key) != nil {
			found[room] = f.number(key, 0, MaxRanks-1)
		}
	}
	return f.err()
}
