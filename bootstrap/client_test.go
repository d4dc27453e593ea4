package bootstrap

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"

	"github.com/nixlkv/nixlkv"
)

// answers is a transport that answers from a script; its last entry stays.
type answers struct {
	mu     sync.Mutex
	script []answer
	asked  []time.Time
}

// answer is a code and body, an error, or (hang) none at all.
type answer struct {
	code int
	body string
	err  error
	hang bool
}

func (a *answers) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Body != nil {
		_ = r.Body.Close()
	}
	a.mu.Lock()
	a.asked = append(a.asked, time.Now())
	next := a.script[0]
	if len(a.script) > 1 {
		a.script = a.script[1:]
	}
	a.mu.Unlock()
	switch {
	case next.hang:
		<-r.Context().Done()
		return nil, r.Context().Err()
	case next.err != nil:
		return nil, next.err
	}
	return &http.Response{
		StatusCode: next.code, Header: http.Header{}, Body: io.NopCloser(strings.NewReader(next.body)), Request: r,
	}, nil
}

func (a *answers) client(t *testing.T, opts ...ClientOption) *Client {
	t.Helper()
	c, err := NewClient("prefill:8998", append(opts, WithTransport(a))...)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// testRank is a registration that needs nothing else.
var testRank = RankInfo{RankIP: "10.0.0.7", RankPort: 1, PageSize: 1}

const goodTopology = `{"attn_tp_size":1,"attn_cp_size":1,"dp_size":1,"pp_size":1}`

func TestRegisterRetries(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := &answers{script: []answer{{err: errors.New("refused")}, {code: 500}, {code: 503}, {hang: true}, {code: 200, body: "OK"}}}
		if err := a.client(t).Register(t.Context(), testRank); err != nil {
			t.Fatal(err)
		}
		if len(a.asked) != 5 {
			t.Fatalf("%d tries", len(a.asked))
		}
		for i, base := range []time.Duration{1, 2, 4, 8} {
			pause := a.asked[i+1].Sub(a.asked[i])
			if i == 3 { // the fourth try hung for the request timeout
				pause -= DefaultRequestTimeout
			}
			if base *= time.Second; pause < base*3/4 || pause > base {
				t.Errorf("pause %d is %v, want 0.75 to 1 times %v", i+1, pause, base)
			}
		}
	})
}

func TestRegisterGivesUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := &answers{script: []answer{{err: errors.New("refused")}}}
		err := a.client(t).Register(t.Context(), testRank)
		if !errors.Is(err, nixlkv.ErrPeerLost) || len(a.asked) != 5 || !strings.Contains(err.Error(), "prefill:8998") {
			t.Errorf("%v after %d tries", err, len(a.asked))
		}

		// A rank that disagrees is refused for good.
		a = &answers{script: []answer{{code: 400, body: "Inconsistent prefill allocation policies"}}}
		err = a.client(t).Register(t.Context(), testRank)
		if !errors.Is(err, nixlkv.ErrMismatch) || len(a.asked) != 1 || !strings.Contains(err.Error(), "Inconsistent") {
			t.Errorf("%v after %d tries", err, len(a.asked))
		}

		// The caller's deadline ends the pause between tries.
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		start := time.Now()
		a = &answers{script: []answer{{code: 500}}}
		err = a.client(t).Register(ctx, testRank)
		if !errors.Is(err, context.DeadlineExceeded) || time.Since(start) != 100*time.Millisecond || len(a.asked) != 1 {
			t.Errorf("%v after %v", err, time.Since(start))
		}

		a = &answers{script: []answer{{code: 200}}}
		for _, bad := range []RankInfo{
			{}, {RankIP: "0.0.0.0", RankPort: 1, PageSize: 1}, {RankIP: "::1", RankPort: 1, PageSize: 1, AttnTPRank: 1},
		} {
			if err := a.client(t).Register(t.Context(), bad); !errors.Is(err, nixlkv.ErrMalformed) || len(a.asked) > 0 {
				t.Errorf("%+v: %v", bad, err)
			}
		}
	})
}

func TestTopologyWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		notReady := answer{code: 503, body: "Prefill server not fully registered yet (3 workers registered)."}
		a := &answers{script: []answer{{err: errors.New("refused")}, notReady, notReady, {code: 200, body: goodTopology}}}
		if topo, err := a.client(t).Topology(t.Context()); err != nil || topo.AttnTPSize != 1 {
			t.Fatalf("%+v, %v", topo, err)
		}

		// Until the caller's deadline, long after the ready timeout.
		a = &answers{script: []answer{notReady}}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		start := time.Now()
		_, err := a.client(t).Topology(ctx)
		if !errors.Is(err, nixlkv.ErrNotReady) || !errors.Is(err, context.DeadlineExceeded) ||
			!strings.Contains(err.Error(), "3 workers registered") || time.Since(start) != time.Minute {
			t.Errorf("%v after %v", err, time.Since(start))
		}
		if n := len(a.asked); n < 60 || n > 90 {
			t.Errorf("asked %d times in a minute", n)
		}

		// Without a deadline, for the ready timeout.
		start = time.Now()
		_, err = a.client(t, WithReadyTimeout(3*time.Second)).Topology(t.Context())
		if !errors.Is(err, nixlkv.ErrNotReady) || time.Since(start) != 3*time.Second {
			t.Errorf("%v after %v", err, time.Since(start))
		}

		// What was found is told even if the last request is cut short.
		a = &answers{script: []answer{notReady, {hang: true}}}
		ctx, cancel = context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		if _, err = a.client(t).Topology(ctx); !errors.Is(err, nixlkv.ErrNotReady) {
			t.Error(err)
		}

		// A server that never answers.
		a = &answers{script: []answer{{hang: true}}}
		start = time.Now()
		_, err = a.client(t, WithRequestTimeout(time.Second)).Topology(t.Context())
		if !errors.Is(err, nixlkv.ErrTimeout) || time.Since(start) != DefaultReadyTimeout || len(a.asked) < 5 {
			t.Errorf("%v after %v, %d tries", err, time.Since(start), len(a.asked))
		}

		cancelled, cancel := context.WithCancel(t.Context())
		cancel()
		a = &answers{script: []answer{{code: 200, body: goodTopology}}}
		if _, err = a.client(t).Topology(cancelled); !errors.Is(err, context.Canceled) || len(a.asked) > 0 {
			t.Error(err)
		}
	})
}

func TestAnswersHaveMeanings(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		topology := func(c *Client, ctx context.Context) error { _, err := c.Topology(ctx); return err }
		rank := func(c *Client, ctx context.Context) error { _, err := c.Rank(ctx, RankID{TP: 3}); return err }
		register := func(c *Client, ctx context.Context) error { return c.Register(ctx, testRank) }
		room := func(c *Client, ctx context.Context) error { return c.RegisterDPRank(ctx, 7, 1) }
		query := func(c *Client, ctx context.Context) error {
			_, err := c.QueryDPRanks(ctx, []nixlkv.Room{7})
			return err
		}
		health := func(c *Client, ctx context.Context) error { return c.Health(ctx) }
		refused := errors.New("refused")
		for _, tc := range []struct {
			name string
			do   func(*Client, context.Context) error
			got  answer
			want error
			says string
			once bool
		}{
			{"topology, not ready", topology, answer{code: 503}, nixlkv.ErrNotReady, "prefill parallel info", false},
			{"topology, gone", topology, answer{err: refused}, nixlkv.ErrPeerLost, "refused", false},
			{"topology, refused key", topology, answer{code: 400}, nixlkv.ErrMalformed, "400", true},
			{"topology, no text", topology, answer{code: 200}, nixlkv.ErrMalformed, "", true},
			{"topology, HTML", topology, answer{code: 200, body: "<html>"}, nixlkv.ErrMalformed, "", true},
			{"topology, too long", topology, answer{code: 200, body: strings.Repeat(" ", maxReply+1)}, nixlkv.ErrLimit, "", true},
			{"topology, moved", topology, answer{code: 301}, nil, "301", true},
			{"rank, none", rank, answer{code: 404}, nixlkv.ErrNoSuchRank, "Could not fetch bootstrap info for: " +
				"prefill_dp_rank: 0 prefill_cp_rank: 0 target_tp_rank: 3 and target_pp_rank 0", true},
			{"rank, not ready", rank, answer{code: 503}, nixlkv.ErrNotReady, "Could not fetch bootstrap info for:", false},
			{"rank, gone", rank, answer{err: refused}, nixlkv.ErrPeerLost, "Could not fetch bootstrap info for:", false},
			{"rank, no port", rank, answer{code: 200, body: `{"rank_ip":"::1"}`}, nixlkv.ErrMalformed, "rank_port", true},
			{"rank, bad host", rank, answer{code: 200, body: `{"rank_ip":"a b","rank_port":1}`}, nixlkv.ErrMalformed, "host", true},
			{"rank, bad port", rank, answer{code: 200, body: `{"rank_ip":"::1","rank_port":"1"}`}, nixlkv.ErrMalformed, "", true},
			{"register, path unknown", register, answer{code: 404}, nixlkv.ErrUnsupported, "PUT /route", true},
			{"register, not allowed", register, answer{code: 405}, nixlkv.ErrUnsupported, "", true},
			{"register, forbidden", register, answer{code: 403}, nil, "Forbidden", true},
			{"room, full", room, answer{code: 429}, nixlkv.ErrLimit, "room 7", false},
			{"room, too large", room, answer{code: 413}, nixlkv.ErrLimit, "", true},
			{"room, malformed", room, answer{code: 400}, nixlkv.ErrMalformed, "", true},
			{"query, broken", query, answer{code: 502}, nil, "502", false},
			{"query, bad rank", query, answer{code: 200, body: `{"7":-1}`}, nixlkv.ErrMalformed, "7:", true},
			{"query, path unknown", query, answer{code: 404}, nixlkv.ErrUnsupported, "", true},
			{"health, in trouble", health, answer{code: 503}, nixlkv.ErrNotReady, "heartbeat", true},
			{"health, gone", health, answer{err: refused}, nixlkv.ErrPeerLost, "heartbeat", true},
			{"health, silent", health, answer{hang: true}, nixlkv.ErrTimeout, "heartbeat", true},
		} {
			a := &answers{script: []answer{tc.got}}
			err := tc.do(a.client(t), t.Context())
			if err == nil || tc.want != nil && !errors.Is(err, tc.want) || !strings.Contains(err.Error(), tc.says) ||
				(len(a.asked) == 1) != tc.once {
				t.Errorf("%s: %v, asked %d times", tc.name, err, len(a.asked))
			}
			var status *StatusError
			if tc.got.code > 200 && (!errors.As(err, &status) || status.Code != tc.got.code) {
				t.Errorf("%s: no StatusError in %v", tc.name, err)
			}
			if tc.want == nil && errors.Is(err, nixlkv.ErrNotReady) {
				t.Errorf("%s: %v", tc.name, err)
			}
		}
	})
}

func TestRankRefusesNegative(t *testing.T) {
	a := &answers{script: []answer{{code: 200, body: goodTopology}}}
	if _, err := a.client(t).Rank(t.Context(), wholePrefill); !errors.Is(err, nixlkv.ErrNoSuchRank) || len(a.asked) > 0 {
		t.Error(err)
	}
}

// Long texts of a server are cut and quoted before they reach a log.
func TestStatusErrorText(t *testing.T) {
	a := &answers{script: []answer{{code: 400, body: "line\n\x1b[31m\xff" + strings.Repeat("x", 10_000)}}}
	_, err := a.client(t).Topology(t.Context())
	if err == nil || len(err.Error()) > maxErrorText+300 || strings.ContainsAny(err.Error(), "\n\x1b") ||
		!utf8.ValidString(err.Error()) {
		t.Errorf("%v", err)
	}
}

func TestQueryDPRanksInParts(t *testing.T) {
	s := NewServer()
	want := map[nixlkv.Room]int{0: 5, roomsPerQuery - 1: 6, roomsPerQuery: 7, 2 * roomsPerQuery: 8}
	for room, rank := range want {
		expect(t, s, "POST", "/register_dp_rank", fmt.Sprintf(`{"bootstrap_room":%d,"dp_rank":%d}`, room, rank), 200, "OK")
	}
	asked := 0
	c, err := NewClient("prefill:8998", WithTransport(roundTripper(func(r *http.Request) (*http.Response, error) {
		asked++
		return serve(s, r), nil
	})))
	if err != nil {
		t.Fatal(err)
	}
	rooms := make([]nixlkv.Room, 2*roomsPerQuery+1)
	for i := range rooms {
		rooms[i] = nixlkv.Room(i)
	}
	found, err := c.QueryDPRanks(t.Context(), rooms)
	if err != nil || fmt.Sprint(found) != fmt.Sprint(want) || asked != 3 {
		t.Errorf("%v, %v in %d requests", found, err, asked)
	}
	if found, err := c.QueryDPRanks(t.Context(), nil); err != nil || len(found) != 0 || asked != 3 {
		t.Errorf("no rooms: %v, %v", found, err)
	}
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func TestNewClientRefuses(t *testing.T) {
	for _, addr := range []string{"", "prefill", "::1:8998", "http://prefill:8998", "prefill:0"} {
		if _, err := NewClient(addr); !errors.Is(err, nixlkv.ErrMalformed) {
			t.Errorf("%q: %v", addr, err)
		}
	}
}

// Many at a time, under the race detector: ranks register, decodes wait for them.
func TestClientsAtOnce(t *testing.T) {
	s := listen(t, "127.0.0.1:0")
	c := newClient(t, s.Endpoint().String())
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	const ranks = 16
	var wg sync.WaitGroup
	for i := range ranks {
		wg.Go(func() {
			if e, err := c.Rank(ctx, RankID{TP: i}); err != nil || e.Port != 100+i {
				t.Errorf("rank %d: %v, %v", i, e, err)
			}
		})
		wg.Go(func() {
			info := testRank
			info.AttnTPSize, info.AttnTPRank, info.RankPort = ranks, i, 100+i
			if err := c.Register(ctx, info); err != nil {
				t.Error(err)
			}
			if err := c.RegisterDPRank(ctx, nixlkv.Room(i), 0); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if topo, err := s.Topology(); err != nil || topo.AttnTPSize != ranks {
		t.Errorf("%+v, %v", topo, err)
	}
}

// serve answers a client's request without a connection.
func serve(h http.Handler, r *http.Request) *http.Response {
	w := httptest.NewRecorder()
	if r.Body == nil {
		r.Body = http.NoBody
	}
	h.ServeHTTP(w, r)
	return w.Result()
}

// A redirect is an answer like any other: the token must not follow it elsewhere.
func TestRedirectIsNotFollowed(t *testing.T) {
	elsewhere := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		t.Errorf("%s followed, with %q", r.URL, r.Header.Get("Authorization"))
	}))
	defer elsewhere.Close()
	server := httptest.NewServer(http.RedirectHandler(elsewhere.URL, http.StatusTemporaryRedirect))
	defer server.Close()
	c := newClient(t, server.Listener.Addr().String(), WithClientToken("secret"))
	var status *StatusError
	if err := c.Health(t.Context()); !errors.As(err, &status) || status.Code != http.StatusTemporaryRedirect {
		t.Errorf("%v", err)
	}
}
