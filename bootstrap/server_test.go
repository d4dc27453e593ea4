package bootstrap

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nixlkv/nixlkv"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
)

// send makes one request at a handler and gives code and body.
func send(h http.Handler, method, target, body string) (int, string) {
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(method, target, strings.NewReader(body)))
	return w.Code, w.Body.String()
}

// rankBody is a registration with some keys replaced; nil removes a key.
func rankBody(t *testing.T, change map[string]any) string {
	t.Helper()
	var m map[string]any
	if err := json.Unmarshal([]byte(sglangRank), &m); err != nil {
		t.Fatal(err)
	}
	maps.Copy(m, change)
	maps.DeleteFunc(m, func(_ string, v any) bool { return v == nil })
	b, err := json.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

const topologyQuery = "/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"

func rankQuery(dp, cp, tp, pp int) string {
	return fmt.Sprintf("/route?prefill_dp_rank=%d&prefill_cp_rank=%d&target_tp_rank=%d&target_pp_rank=%d", dp, cp, tp, pp)
}

func expect(t *testing.T, h http.Handler, method, target, body string, code int, text string) {
	t.Helper()
	if c, b := send(h, method, target, body); c != code || !strings.Contains(b, text) {
		t.Errorf("%s %s: %d %s, want %d with %q", method, target, c, b, code, text)
	}
}

func TestServerRoute(t *testing.T) {
	s := NewServer()
	expect(t, s, "GET", topologyQuery, "", 503, "no rank has registered")
	expect(t, s, "GET", rankQuery(0, 0, 0, 0), "", 503, "no rank has registered")
	if _, err := s.Topology(); !errors.Is(err, nixlkv.ErrNotReady) {
		t.Errorf("Topology: %v", err)
	}
	// The same rank twice is still one of two.
	expect(t, s, "PUT", "/route", rankBody(t, map[string]any{"rank_ip": "10.0.0.6"}), 200, "OK")
	expect(t, s, "PUT", "/route", sglangRank, 200, "OK")
	expect(t, s, "GET", topologyQuery, "", 503, "1 of 2")
	expect(t, s, "GET", rankQuery(0, 0, 1, 0), "", 503, "1 of 2")
	expect(t, s, "PUT", "/route", rankBody(t, map[string]any{"attn_tp_rank": 0, "rank_ip": "fd00::7"}), 200, "OK")

	code, body := send(s, "GET", topologyQuery, "")
	topo, err := ParseTopology([]byte(body))
	if code != 200 || err != nil || topo.AttnTPSize != 2 || topo.PageSize != 64 || !topo.FollowBootstrapRoom ||
		topo.PrefillHTTPPort != 30000 || topo.KVCacheDtype != "auto" {
		t.Errorf("topology: %d %s, %v", code, body, err)
	}
	if got := keysOf(t, []byte(body)); len(got) != len(keys0518) {
		t.Errorf("keys %v", got)
	}
	expect(t, s, "GET", rankQuery(0, 0, 0, 0), "", 200, `{"rank_ip":"fd00::7","rank_port":41234}`)
	expect(t, s, "GET", rankQuery(0, 0, 1, 0), "", 200, `{"rank_ip":"10.0.0.7","rank_port":41234}`)
	for _, q := range []string{rankQuery(0, 0, 2, 0), rankQuery(1, 0, 0, 0), rankQuery(0, 0, 0, 1), rankQuery(-1, 0, 0, 0)} {
		expect(t, s, "GET", q, "", 404, "no such prefill rank")
	}

	// A restarted rank is found at its new address.
	expect(t, s, "PUT", "/route", rankBody(t, map[string]any{"rank_port": 5}), 200, "OK")
	expect(t, s, "GET", rankQuery(0, 0, 1, 0), "", 200, `"rank_port":5}`)

	s.Forget()
	expect(t, s, "GET", topologyQuery, "", 503, "no rank has registered")
}

func TestServerQueryParameters(t *testing.T) {
	s := NewServer()
	for target, param := range map[string]string{
		"/route":                    "prefill_dp_rank",
		"/route?prefill_dp_rank=-1": "prefill_cp_rank",
		"/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1":      "target_pp_rank",
		strings.Replace(topologyQuery, "-1", "", 1):                           "prefill_dp_rank",
		strings.Replace(topologyQuery, "-1", "x", 1):                          "prefill_dp_rank",
		strings.Replace(topologyQuery, "-1", "1.5", 1):                        "prefill_dp_rank",
		strings.Replace(topologyQuery, "-1", "99999999999999999999", 1):       "prefill_dp_rank",
		strings.Replace(topologyQuery, "-1", strings.Repeat("1", 1000), 1):    "prefill_dp_rank",
		strings.Replace(topologyQuery, "target_tp_rank", "target_TP_rank", 1): "target_tp_rank",
	} {
		expect(t, s, "GET", target, "", 400, "parameter "+param)
	}
}

func TestServerFirstRankCounts(t *testing.T) {
	s := NewServer()
	expect(t, s, "PUT", "/route", sglangRank, 200, "OK")
	for _, tc := range []struct {
		key  string
		v    any
		code int
		text string
	}{
		{"attn_tp_size", 4, 400, "TP size differs across prefill ranks: 2, then 4"},
		{"attn_cp_size", 2, 400, "CP size"},
		{"attn_dp_size", 2, 400, "DP size"},
		{"system_dp_size", 2, 400, "DP size"},
		{"pp_size", 2, 400, "PP size"},
		{"decode_allocation_policy", "prefill_complete", 400, "allocation policy"},
		{"dsv41_spec_layout", map[string]any{"a": 1}, 400, "layout differs across prefill ranks in [a]"},
		{"decode_allocation_policy", "early", 200, "OK"},
		{"page_size", 16, 200, "OK"},
		{"kv_cache_dtype", "fp8_e4m3", 200, "OK"},
		{"load_balance_method", "round_robin", 200, "OK"},
		{"enable_dsa_cache_layer_split", true, 200, "OK"},
		{"prefill_http_port", 1, 200, "OK"},
		{"kv_layout", "nhd", 200, "OK"}, // the first that tells one
		{"kv_layout", "hnd", 400, `KV layout differs across prefill ranks: "nhd", then "hnd"`},
	} {
		expect(t, s, "PUT", "/route", rankBody(t, map[string]any{"attn_tp_rank": 0, tc.key: tc.v}), tc.code, tc.text)
	}
	got, err := s.Topology()
	want := Topology{
		AttnTPSize: 2, AttnCPSize: 1, DPSize: 1, PPSize: 1, PageSize: 64, KVCacheDtype: "auto", FollowBootstrapRoom: true,
		PrefillHTTPPort: 30000, KVLayout: "nhd", DecodeAllocationPolicy: EarlyAllocation,
	}
	if err != nil || fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("topology %+v, %v, want %+v", got, err, want)
	}
}

func TestServerAllRanks(t *testing.T) {
	s := NewServer()
	n := 0
	for dp := range 2 {
		for cp := range 2 {
			for tp := range 3 {
				for pp := range 2 {
					expect(t, s, "GET", topologyQuery, "", 503, "regist")
					expect(t, s, "PUT", "/route", rankBody(t, map[string]any{
						"attn_tp_size": 3, "attn_tp_rank": tp, "attn_cp_size": 2, "attn_cp_rank": cp, "pp_size": 2, "pp_rank": pp,
						"attn_dp_size": 2, "attn_dp_rank": dp, "system_dp_rank": dp, "rank_port": 100 + n,
					}), 200, "OK")
					n++
				}
			}
		}
	}
	expect(t, s, "GET", rankQuery(1, 0, 2, 1), "", 200, fmt.Sprintf(`"rank_port":%d}`, 100+12+0+4+1))
}

func TestServerLimits(t *testing.T) {
	s := NewServer(WithMaxRanks(4), WithMaxRooms(2))
	expect(t, s, "PUT", "/route", rankBody(t, map[string]any{"attn_tp_size": 5}), 413, "at most 4")
	expect(t, s, "PUT", "/route", rankBody(t, map[string]any{"attn_tp_size": 4}), 200, "OK")
	big := `{"x":"` + strings.Repeat("a", maxQueryBody) + `"}`
	expect(t, s, "PUT", "/route", big, 413, "request body")
	expect(t, s, "POST", "/register_dp_rank", big, 413, "request body")
	expect(t, s, "POST", "/query_dp_ranks", big, 413, "request body")
	many := `{"bootstrap_rooms":[1` + strings.Repeat(",1", maxQueryRooms) + `]}`
	expect(t, s, "POST", "/query_dp_ranks", many, 413, "rooms in one query")
	for room, code := range []int{200, 200, 429} {
		expect(t, s, "POST", "/register_dp_rank", fmt.Sprintf(`{"bootstrap_room":%d,"dp_rank":0}`, room), code, "")
	}
	expect(t, s, "POST", "/register_dp_rank", `{"bootstrap_room":1,"dp_rank":0}`, 200, "OK")
}

func TestServerRooms(t *testing.T) {
	now := time.Unix(0, 0)
	s := NewServer(WithClock(func() time.Time { return now }))
	query := `{"bootstrap_rooms":[7,8,9223372036854775807]}`
	expect(t, s, "POST", "/query_dp_ranks", query, 200, `{}`)
	expect(t, s, "POST", "/register_dp_rank", `{"bootstrap_room":9223372036854775807,"dp_rank":3}`, 200, "OK")
	expect(t, s, "POST", "/register_dp_rank", `{"bootstrap_room":7,"dp_rank":0}`, 200, "OK")
	expect(t, s, "POST", "/query_dp_ranks", query, 200, `{"7":0,"9223372036854775807":3}`)
	now = now.Add(DefaultRoomTTL - 1)
	expect(t, s, "POST", "/register_dp_rank", `{"bootstrap_room":7,"dp_rank":1}`, 200, "OK")
	expect(t, s, "POST", "/query_dp_ranks", query, 200, `{"7":1,"9223372036854775807":3}`)
	now = now.Add(1)
	expect(t, s, "POST", "/query_dp_ranks", query, 200, `{"7":1}`)

	for _, body := range []string{
		``, `[]`, `{}`, `{"bootstrap_room":7}`, `{"dp_rank":0}`, `{"bootstrap_room":-1,"dp_rank":0}`,
		`{"bootstrap_room":1.5,"dp_rank":0}`, `{"bootstrap_room":9223372036854775808,"dp_rank":0}`,
		`{"bootstrap_room":7,"dp_rank":-1}`, `{"bootstrap_room":7,"dp_rank":"0"}`, `{"bootstrap_room":null,"dp_rank":0}`,
	} {
		expect(t, s, "POST", "/register_dp_rank", body, 400, "malformed")
	}
	for _, body := range []string{``, `{}`, `{"bootstrap_rooms":null}`, `{"bootstrap_rooms":7}`, `{"bootstrap_rooms":["7"]}`,
		`{"bootstrap_rooms":[null]}`, `{"bootstrap_rooms":[[]]}`} {
		expect(t, s, "POST", "/query_dp_ranks", body, 400, "malformed")
	}
	// Once ranks are known, a rank that cannot be is refused.
	expect(t, s, "PUT", "/route", rankBody(t, map[string]any{"attn_dp_size": 2}), 200, "OK")
	expect(t, s, "POST", "/register_dp_rank", `{"bootstrap_room":7,"dp_rank":2}`, 400, "dp_rank 2 of 2")
	expect(t, s, "POST", "/register_dp_rank", `{"bootstrap_room":7,"dp_rank":1}`, 200, "OK")
}

func TestServerRoomTTL(t *testing.T) {
	now := time.Unix(0, 0)
	s := NewServer(WithClock(func() time.Time { return now }), WithRoomTTL(time.Second), WithMaxRooms(0), WithMaxRanks(-1))
	expect(t, s, "POST", "/register_dp_rank", `{"bootstrap_room":7,"dp_rank":1}`, 200, "OK")
	now = now.Add(time.Second)
	expect(t, s, "POST", "/query_dp_ranks", `{"bootstrap_rooms":[7]}`, 200, `{}`)
}

// What the first rank overrules and what is refused can be found in the log.
func TestServerLog(t *testing.T) {
	core, logs := observer.New(zap.InfoLevel)
	s := NewServer(WithLogger(zap.New(core)), WithLogger(nil))
	expect(t, s, "GET", topologyQuery, "", 503, "")
	expect(t, s, "PUT", "/route", sglangRank, 200, "OK")
	expect(t, s, "PUT", "/route", rankBody(t, map[string]any{"page_size": 16}), 200, "OK")
	expect(t, s, "PUT", "/route", `{}`, 400, "")
	var got []string
	for _, e := range logs.All() {
		got = append(got, e.Level.String()+" "+e.Message)
	}
	want := []string{
		"info prefill rank registered",
		"warn prefill rank differs from the first one, whose value counts",
		"info prefill rank registered",
		"warn bootstrap request refused",
	}
	if !slices.Equal(got, want) {
		t.Errorf("log %q, want %q", got, want)
	}
}

func TestServerMethods(t *testing.T) {
	s := NewServer()
	expect(t, s, "GET", "/health", "", 200, "OK")
	for _, method := range []string{"POST", "DELETE", "PATCH", "HEAD", "OPTIONS"} {
		expect(t, s, method, topologyQuery, "", 405, "")
	}
	for target, method := range map[string]string{"/register_dp_rank": "PUT", "/query_dp_ranks": "GET", "/health": "POST"} {
		expect(t, s, method, target, "", 405, "")
	}
	expect(t, s, "GET", "/other", "", 404, "")
}

func TestServerToken(t *testing.T) {
	s := NewServer(WithToken("secret"))
	for header, code := range map[string]int{
		"": 401, "Bearer": 401, "Bearer secre": 401, "Bearer secrets": 401, "Basic secret": 401, "Bearer secret": 503,
	} {
		r := httptest.NewRequest("GET", topologyQuery, nil)
		if header != "" {
			r.Header.Set("Authorization", header)
		}
		w := httptest.NewRecorder()
		s.ServeHTTP(w, r)
		if w.Code != code {
			t.Errorf("%q: %d, want %d", header, w.Code, code)
		}
	}
	expect(t, s, "GET", "/health", "", 200, "OK")
	expect(t, s, "POST", "/register_dp_rank", `{"bootstrap_room":7,"dp_rank":0}`, 401, "")
}

// A body that breaks off is the client's fault, not an empty registration.
func TestServerBrokenBody(t *testing.T) {
	s := NewServer()
	broken := io.MultiReader(strings.NewReader(sglangRank[:40]), brokenReader{})
	w := httptest.NewRecorder()
	s.ServeHTTP(w, httptest.NewRequest("PUT", "/route", broken))
	if w.Code != 400 || !bytes.Contains(w.Body.Bytes(), []byte("request body")) {
		t.Errorf("%d %s", w.Code, w.Body)
	}
}

type brokenReader struct{}

func (brokenReader) Read([]byte) (int, error) { return 0, io.ErrUnexpectedEOF }
