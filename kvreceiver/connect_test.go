package kvreceiver

import (
	"context"
	"errors"
	"net"
	"net/http"
	"testing"
	"time"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/bootstrap"
	"github.com/nixlkv/nixlkv/internal/wire"
	"github.com/nixlkv/nixlkv/nixl"
	"github.com/nixlkv/nixlkv/registry"
)

// A prefill is asked until all its ranks have registered.
func TestConnectWaitsForAllRanks(t *testing.T) {
	q := newPair(t, openEngine(t, nixl.Embedded), shape{tp: 2, later: 1})
	r := q.open(1)
	came := make(chan error, 1)
	go func() { came <- r.Connect(within(t)) }()
	q.p.untilAsked("GET /route", 2)
	select {
	case err := <-came:
		t.Fatalf("connected without the second rank: %v", err)
	default:
	}
	q.p.ranks[1].register()
	ok(t, <-came)
	ok(t, r.Close())
}

func TestConnectErrors(t *testing.T) {
	e := openEngine(t, nixl.Embedded)
	mem := newKitMemory(t)
	mem.fill()
	info := func(change func(*bootstrap.RankInfo)) shape { return shape{info: change} }
	tp3 := func(l *registry.Layout) {
		l.Ranks, l.KVHeads, l.TotalKVHeads = registry.Ranks{TP: 3}, 1, 3
	}
	for _, tc := range []struct {
		name   string
		shape  shape
		layout func(*registry.Layout)
		opts   []Option
		want   error
		text   string
	}{
		{"page size", info(func(i *bootstrap.RankInfo) { i.PageSize = 32 }), nil, nil, nixlkv.ErrMismatch, "page size"},
		{"dtype", info(func(i *bootstrap.RankInfo) { i.KVCacheDtype = "fp8_e4m3" }), func(l *registry.Layout) { l.KVDtype = "bf16" }, nil, nixlkv.ErrMismatch, "dtype"},
		{"layout", info(func(i *bootstrap.RankInfo) { i.KVLayout = "hnd" }), func(l *registry.Layout) { l.KVLayout = "nhd" }, nil, nixlkv.ErrMismatch, "layout"},
		{"prefill's policy", info(func(i *bootstrap.RankInfo) { i.DecodeAllocationPolicy = bootstrap.PrefillCompleteAllocation }), nil, nil, nixlkv.ErrMismatch, "policy"},
		{"decode's policy", shape{}, nil, []Option{WithAllocationPolicy(bootstrap.PrefillCompleteAllocation)}, nixlkv.ErrMismatch, "policy"},
		{"prefill_complete with TP", shape{tp: 2, info: func(i *bootstrap.RankInfo) { i.DecodeAllocationPolicy = bootstrap.PrefillCompleteAllocation }}, nil,
			[]Option{WithAllocationPolicy(bootstrap.PrefillCompleteAllocation)}, nixlkv.ErrTopology, "prefill_complete"},
		{"sizes", shape{tp: 2}, tp3, nil, nixlkv.ErrTopology, ""},
		{"never all ranks", shape{tp: 2, later: 1}, nil, []Option{WithConnectTimeout(100 * time.Millisecond)}, nixlkv.ErrNotReady, "Could not fetch prefill parallel info"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			l := mem.layout()
			if tc.layout != nil {
				tc.layout(l)
			}
			p := newSite(t, e, mem, tc.shape)
			m := newManager(t, l, append(quick(e), tc.opts...)...)
			r, err := m.Open(1, p.addr)
			ok(t, err)
			err = r.Connect(context.Background())
			te := checkError(t, r, err, tc.want, tc.text)
			if te.Peer != p.addr || len(te.Ranks) != 0 {
				t.Errorf("peer %q, ranks %v", te.Peer, te.Ranks)
			}
			ok(t, r.Released(within(t)))
			ok(t, r.Close())
			for _, k := range p.ranks {
				if n := has(k, func(wire.Message) bool { return true }); n != 0 {
					t.Errorf("rank %d was sent %d messages", k.number, n)
				}
			}
		})
	}
}

// What a bootstrap server answers that makes no sense, or no server at all.
func TestConnectToNoPrefill(t *testing.T) {
	q := newPair(t, openEngine(t, nixl.Embedded), shape{}, WithConnectTimeout(200*time.Millisecond))
	try := func(id nixlkv.Room, addr string, want error, text string) {
		t.Helper()
		r, err := q.m.Open(id, addr)
		ok(t, err)
		checkError(t, r, r.Connect(context.Background()), want, text)
		ok(t, r.Close())
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	ok(t, err)
	silent := l.Addr().String() // it takes connections and never answers
	try(1, silent, nixlkv.ErrTimeout, "Could not fetch prefill parallel info from bootstrap_addr: "+silent)
	ok(t, l.Close())
	try(2, silent, nixlkv.ErrPeerLost, "Could not fetch prefill parallel info")
	q.p.refusing("/route", http.StatusOK, `{"attn_tp_size": 1}`)
	try(3, q.p.addr, nixlkv.ErrMalformed, "Could not fetch prefill parallel info")
	q.p.refusing("/route", http.StatusNotFound, "no")
	try(4, q.p.addr, nixlkv.ErrNoSuchRank, "404")
	// The topology is fine, and no rank is.
	for i, tc := range []struct {
		status int
		body   string
		want   error
	}{
		{http.StatusNotFound, "gone", nixlkv.ErrNoSuchRank},
		{http.StatusServiceUnavailable, "wait", nixlkv.ErrNotReady},
		{http.StatusOK, `{"rank_ip": "127.0.0.1", "rank_port": 0}`, nixlkv.ErrMalformed},
		{http.StatusOK, `{"rank_ip": "224.0.0.1", "rank_port": 9}`, nixlkv.ErrMalformed},
		{http.StatusOK, `{"rank_ip": "no.such.host.invalid", "rank_port": 9}`, nil},
	} {
		q.p.mu.Lock()
		q.p.refuse = func(w http.ResponseWriter, r *http.Request) bool {
			if r.URL.Path != "/route" || r.URL.Query().Get("target_tp_rank") == "-1" {
				return false
			}
			w.WriteHeader(tc.status)
			_, _ = w.Write([]byte(tc.body))
			return true
		}
		q.p.mu.Unlock()
		try(nixlkv.Room(10+i), q.p.addr, tc.want, "Could not fetch bootstrap info for: prefill_dp_rank: 0 prefill_cp_rank: 0 target_tp_rank: 0 and target_pp_rank 0")
	}
	// None of it is kept.
	q.p.refusing("", 0, "")
	q.oneRoom(20, byStatus, 1, 2)
}

// The context given to Connect ends it, and the room.
func TestConnectIsCancelled(t *testing.T) {
	q := newPair(t, openEngine(t, nixl.Embedded), shape{tp: 2, later: 1})
	for id, tc := range map[nixlkv.Room]struct {
		end  func(r *Receiver, cancel func())
		want error
	}{
		1: {func(_ *Receiver, cancel func()) { cancel() }, context.Canceled},
		2: {func(r *Receiver, _ func()) { r.Abort("not wanted") }, nixlkv.ErrAborted},
		3: {func(r *Receiver, _ func()) { ok(t, r.Close()) }, nixlkv.ErrAborted},
		4: {func(r *Receiver, _ func()) { r.FailedElsewhere(nil) }, nixlkv.ErrAnotherRank},
	} {
		r := q.open(id)
		ctx, cancel := context.WithCancel(within(t))
		asked := q.p.count("GET /route")
		came := make(chan error, 1)
		go func() { came <- r.Connect(ctx) }()
		q.p.untilAsked("GET /route", asked+1)
		if err := r.Connect(ctx); err == nil || errors.As(err, new(*KVTransferError)) {
			t.Errorf("connected twice: %v", err)
		}
		tc.end(r, cancel)
		checkError(t, r, <-came, tc.want, "")
		cancel()
		ok(t, r.Close())
	}
	ctx, cancel := contextOf(50)
	defer cancel()
	r := q.open(5)
	checkError(t, r, r.Connect(ctx), nixlkv.ErrNotReady, "")
	ok(t, r.Close())
}

// Many rooms that connect at once ask once, and register once.
func TestConnectAtOnce(t *testing.T) {
	q := newPair(t, openEngine(t, nixl.Embedded), shape{tp: 2})
	const n = 64
	came := make(chan error, n)
	rooms := make([]*Receiver, n)
	for i := range rooms {
		rooms[i] = q.open(nixlkv.Room(i))
		go func() { came <- rooms[i].Connect(within(t)) }()
	}
	for range n {
		ok(t, <-came)
	}
	if asked := q.p.count("GET /route"); asked != 3 {
		t.Errorf("asked %d times", asked)
	}
	ok(t, rooms[7].Publish(Destination{Pages: []int32{1}, Aux: Aux(0)}))
	for _, p := range q.p.ranks {
		p.serve(p.metadata(7), byStatus, work{src: []int32{1}}) // takes the registration
		if got := has(p, func(*wire.Registration) bool { return true }); got != 0 {
			t.Errorf("rank %d was registered with %d times more", p.number, got)
		}
	}
	ok(t, rooms[7].Wait(within(t)))
	for _, r := range rooms {
		ok(t, r.Close())
	}
}

func TestLimits(t *testing.T) {
	q := newPair(t, openEngine(t, nixl.Embedded), shape{tp: 2}, WithLimits(Limits{Rooms: 2, Prefills: 2, Ranks: 1}))
	r := q.open(1)
	checkError(t, r, r.Connect(within(t)), nixlkv.ErrLimit, "connections to 1 prefill ranks")
	ok(t, r.Close())
	a := q.open(2)
	other := q.another(shape{})
	b := other.open(3)
	if _, err := q.m.Open(4, q.p.addr); !errors.Is(err, nixlkv.ErrLimit) {
		t.Errorf("a third room: %v", err)
	}
	ok(t, a.Close())
	if _, err := q.m.Open(3, q.p.addr); !errors.Is(err, nixlkv.ErrRoomInUse) {
		t.Errorf("the same room: %v", err)
	}
	// A prefill without rooms makes place for another, one with rooms does not.
	third := q.another(shape{})
	c := third.open(5)
	if s := q.m.Stats(); s.Prefills != 2 {
		t.Errorf("%d prefills", s.Prefills)
	}
	ok(t, b.Close())
	d := third.open(6)
	ok(t, c.Close())
	e := other.open(7)
	if _, err := q.m.Open(8, q.p.addr); !errors.Is(err, nixlkv.ErrLimit) {
		t.Errorf("a third prefill: %v", err)
	}
	ok(t, d.Close())
	ok(t, e.Close())
	for _, addr := range []string{"", "nowhere", "127.0.0.1:0", "127.0.0.1:70000", "::1:80", "a b:80"} {
		if _, err := q.m.Open(9, addr); !errors.Is(err, nixlkv.ErrMalformed) {
			t.Errorf("%q: %v", addr, err)
		}
	}
	if _, err := q.m.Open(nixlkv.MaxRoom+1, q.p.addr); !errors.Is(err, nixlkv.ErrMalformed) {
		t.Errorf("too great a room: %v", err)
	}
}
