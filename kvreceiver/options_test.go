package kvreceiver

import (
	"context"
	"errors"
	"math"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/bootstrap"
	"github.com/nixlkv/nixlkv/internal/wire"
	"github.com/nixlkv/nixlkv/nixl"
	"github.com/nixlkv/nixlkv/registry"
)

// What NewManager refuses leaves nothing behind; the engine's agents are checked at the end.
func TestNewManagerRefuses(t *testing.T) {
	e := openEngine(t, nixl.Embedded)
	mem := newKitMemory(t)
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	ok(t, err)
	defer func() { _ = taken.Close() }()
	noContext := errors.New("no context")
	for _, tc := range []struct {
		name   string
		layout func(*registry.Layout)
		opts   []Option
		want   error
		text   string
	}{
		{"no connect timeout", nil, []Option{WithConnectTimeout(0)}, nil, "connect timeout"},
		{"negative send timeout", nil, []Option{WithSendTimeout(-1)}, nil, "send timeout"},
		{"no waiting timeout", nil, []Option{WithWaitingTimeout(0)}, nil, "waiting timeout"},
		{"no release timeout", nil, []Option{WithReleaseTimeout(0)}, nil, "release timeout"},
		{"no heartbeat", nil, []Option{heartbeats(0, 1)}, nil, "heartbeat interval"},
		{"no heartbeat failures", nil, []Option{WithHeartbeat(time.Second, 0)}, nil, "heartbeat failures"},
		{"negative grace", nil, []Option{WithLossGrace(-1)}, nil, "loss grace"},
		{"port", nil, []Option{WithListen("127.0.0.1", 70000)}, nil, "port 70000"},
		{"port in use", nil, []Option{WithListen("127.0.0.1", taken.Addr().(*net.TCPAddr).Port)}, nil, "in use"},
		{"host", nil, []Option{WithListen("192.0.2.1", 0)}, nil, ""},
		{"all addresses", nil, []Option{WithListen("0.0.0.0", 0)}, nil, "WithAdvertise"},
		{"address to advertise", nil, []Option{WithAdvertise("decode.example")}, nil, "address to advertise"},
		{"policy", nil, []Option{WithAllocationPolicy("late")}, nixlkv.ErrUnsupported, "late"},
		{"staging", nil, []Option{func(c *config) { c.staging = true }}, nixlkv.ErrUnsupported, EnvStagingBuffer},
		{"thread", nil, []Option{WithThreadInit(func() error { return noContext })}, noContext, "initialising a thread"},
		{"layout", func(l *registry.Layout) { l.KV[1].Kind = registry.Unset }, nil, nixlkv.ErrMissingMemoryKind, ""},
		{"memory", func(l *registry.Layout) { l.KV[0].Base = math.MaxUint64 - 100 }, nil, nil, ""},
		{"backend", nil, []Option{WithBackend("NO_SUCH", nil)}, nil, "NO_SUCH"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			l := mem.layout()
			if tc.layout != nil {
				tc.layout(l)
			}
			opts := append([]Option{WithEngine(e), WithCloseTimeout(time.Second)}, tc.opts...)
			m, err := NewManager(t.Context(), l, opts...)
			if m != nil || err == nil || tc.want != nil && !errors.Is(err, tc.want) || !strings.Contains(err.Error(), tc.text) {
				t.Errorf("got %v, %v", m, err)
			}
			if n := e.Stats().Agents; n != 0 {
				t.Errorf("%d agents left", n)
			}
		})
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := NewManager(ctx, mem.layout(), WithEngine(e)); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

// The defaults are SGLang's and pass their own check.
func TestDefaults(t *testing.T) {
	c := defaultConfig()
	ok(t, c.validate())
	if c.waitingTimeout != 300*time.Second || c.heartbeatInterval != 5*time.Second || c.heartbeatFailures != 2 || c.releaseTimeout != 30*time.Second || c.backend != "UCX" {
		t.Errorf("config %+v", c)
	}
	WithHeartbeat(time.Millisecond, 4)(&c)
	if c.heartbeatInterval != 2*time.Second || c.heartbeatFailures != 4 {
		t.Errorf("heartbeat every %v, %d failures", c.heartbeatInterval, c.heartbeatFailures)
	}
	if l := (Limits{Rooms: 3, Chunks: -1}).complete(); l.Rooms != 3 || l.Chunks != 1<<16 || l.Prefills != 1024 || l.Ranks != 4096 || l.DoneRooms != 1<<16 {
		t.Errorf("limits %+v", l)
	}
}

// A manager without an engine opens one of its own, which is closed with it; the thread that
// makes native calls is prepared first.
func TestOwnEngine(t *testing.T) {
	calls := 0
	m, err := NewManager(t.Context(), newKitMemory(t).layout(), WithThreadInit(func() error { calls++; return nil }))
	ok(t, err)
	e := m.Engine()
	if calls != 1 || e == nil || m.ControlPort() == 0 || m.Addr() == "" || !strings.HasPrefix(m.Agent(), "nixlkv-") {
		t.Errorf("%d calls, engine %v, %s, agent %s", calls, e, m.Addr(), m.Agent())
	}
	closeManager(t, m)
	if _, err := e.NewAgent("late"); !errors.Is(err, nixl.ErrClosed) {
		t.Errorf("the engine is not closed: %v", err)
	}
}

// What prefills are told to answer to.
func TestAddresses(t *testing.T) {
	for _, tc := range []struct {
		host, advertise string
		want            string
	}{{"127.0.0.1", "", "127.0.0.1"}, {"0.0.0.0", "127.0.0.1", "127.0.0.1"}, {"::1", "", "::1"}, {"::", "::1", "::1"}} {
		t.Run(tc.host, func(t *testing.T) {
			l, err := net.Listen("tcp", net.JoinHostPort(tc.want, "0"))
			if err != nil {
				t.Skip("skip: no IPv6 on this machine")
			}
			ok(t, l.Close())
			q := newPair(t, openEngine(t, nixl.Embedded), shape{}, WithListen(tc.host, 0), WithAdvertise(tc.advertise))
			if want := net.JoinHostPort(tc.want, "0"); !strings.HasPrefix(q.m.Addr(), strings.TrimSuffix(want, "0")) {
				t.Errorf("listens at %s", q.m.Addr())
			}
			q.oneRoom(1, byStatus, 1, 2)
		})
	}
}

// A bootstrap server that asks for a token gets it.
func TestBootstrapClientOptions(t *testing.T) {
	e := openEngine(t, nixl.Embedded)
	s, err := bootstrap.Listen("127.0.0.1:0", bootstrap.WithToken("secret"))
	ok(t, err)
	t.Cleanup(func() { ok(t, s.Close()) })
	for token, want := range map[string]error{"secret": nixlkv.ErrNotReady, "wrong": nil} {
		m := newManager(t, newKitMemory(t).layout(), append(quick(e), WithBootstrapClient(bootstrap.WithClientToken(token)), WithConnectTimeout(100*time.Millisecond))...)
		r, err := m.Open(1, s.Endpoint().String())
		ok(t, err)
		err = r.Connect(context.Background())
		checkError(t, r, err, want, "")
		if want == nil && errors.Is(err, nixlkv.ErrNotReady) {
			t.Errorf("let in with the token %q", token)
		}
	}
}

func TestFromEnv(t *testing.T) {
	for _, tc := range []struct {
		env  map[string]string
		want error
		n    int
	}{
		{nil, nil, 0},
		{map[string]string{EnvWaitingTimeout: "12", EnvReleaseTimeout: "2.5", EnvSendTimeout: "1", EnvAllCPRanks: "yes", EnvForceQuery: "1", EnvStagingBuffer: "0"}, nil, 5},
		{map[string]string{EnvHeartbeatInterval: "9"}, nil, 1},
		{map[string]string{EnvHeartbeatFailures: "9"}, nil, 1},
		{map[string]string{EnvHeartbeatInterval: "9", EnvHeartbeatFailures: "9"}, nil, 1},
		{map[string]string{EnvNIXLBackend: "UCX", EnvNIXLParams: `{"num_workers":"3"}`}, nil, 1},
		{map[string]string{EnvNIXLParams: `{"num_workers":3}`}, nixlkv.ErrMalformed, 0},
		{map[string]string{EnvNIXLParams: `[]`}, nixlkv.ErrMalformed, 0},
		{map[string]string{EnvWaitingTimeout: "soon"}, nixlkv.ErrMalformed, 0},
		{map[string]string{EnvHeartbeatFailures: "x"}, nixlkv.ErrMalformed, 0},
		{map[string]string{EnvAllCPRanks: "maybe"}, nixlkv.ErrMalformed, 0},
		{map[string]string{EnvStagingBuffer: "true"}, nil, 1},
		{map[string]string{EnvStagingBuffer: "perhaps"}, nixlkv.ErrMalformed, 0},
		{map[string]string{EnvDeferredRelease: "1"}, nil, 0},
	} {
		opts, err := fromEnv(func(k string) (string, bool) { v, ok := tc.env[k]; return v, ok })
		if !errors.Is(err, tc.want) || len(opts) != tc.n {
			t.Errorf("%v: %d options, %v", tc.env, len(opts), err)
		}
	}
	all := map[string]string{
		EnvWaitingTimeout: "7", EnvReleaseTimeout: "8", EnvSendTimeout: "9", EnvHeartbeatInterval: "1", EnvHeartbeatFailures: "4",
		EnvNIXLParams: `{"a":"b"}`, EnvAllCPRanks: "1", EnvForceQuery: "true", EnvStagingBuffer: "1",
	}
	opts, err := fromEnv(func(k string) (string, bool) { v, ok := all[k]; return v, ok })
	ok(t, err)
	c := defaultConfig()
	for _, o := range opts {
		o(&c)
	}
	if c.waitingTimeout != 7*time.Second || c.releaseTimeout != 8*time.Second || c.sendTimeout != 9*time.Second || c.heartbeatInterval != 2*time.Second ||
		c.heartbeatFailures != 4 || c.backend != "UCX" || c.backendParams["a"] != "b" || !c.allCPRanks || !c.forceQuery || !c.staging {
		t.Errorf("config %+v", c)
	}
	t.Setenv(EnvWaitingTimeout, "never")
	if _, err := FromEnv(); !errors.Is(err, nixlkv.ErrMalformed) {
		t.Errorf("got %v", err)
	}
}

// A prefill's tags may be those of a room with as many writes a chunk as there are regions,
// and no more.
func TestChunkLimits(t *testing.T) {
	q := newPair(t, openEngine(t, nixl.Embedded), shape{}, WithLimits(Limits{Chunks: 2}))
	p := q.p.ranks[0]
	for id, tc := range []struct {
		chunks []int
		parts  int
		good   bool
	}{{[]int{1, 1}, kitRegions + 1, true}, {[]int{1, 1}, kitRegions + 2, false}, {[]int{2}, 0, true}} {
		r, told := q.published(nixlkv.Room(id))
		src := []int32{1, 2}
		for i := range tc.parts {
			notif := wire.AppendKVPart(nil, told[0].Room, 0, false, p.source, i, tc.parts)
			p.write(p.peer(told[0].Agent), []nixl.Desc{{Addr: uint64(q.prefills.kv.Addr()), Len: 1}}, []nixl.Desc{{Addr: p.peer(told[0].Agent).geometry.KVPtrs[0], Len: 1}}, notif)
		}
		if tc.good {
			p.serve(told[0], byNotifications, work{src: src, chunks: tc.chunks})
			ok(t, r.Wait(within(t)))
		} else {
			checkFailed(t, r, nixlkv.ErrMalformed, "part count mismatch")
			p.ack(p.aborted(r.Room()))
			ok(t, r.Released(within(t)))
		}
		ok(t, r.Close())
	}
	r, told := q.published(9)
	p.chunk(told[0], byNotifications, 2, false, []int32{1}, []int32{1}, 0)
	checkFailed(t, r, nixlkv.ErrLimit, "chunk 2")
	p.ack(p.aborted(9))
	ok(t, r.Released(within(t)))
	ok(t, r.Close())
}
