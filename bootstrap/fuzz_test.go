package bootstrap

import (
	"bytes"
	"encoding/json"
	"errors"
	"net/http/httptest"
	"net/url"
	"reflect"
	"strings"
	"testing"

	"github.com/nixlkv/nixlkv"
)

// typed tells whether an error of a parser is one that callers can branch on.
func typed(err error) bool {
	return errors.Is(err, nixlkv.ErrMalformed) || errors.Is(err, nixlkv.ErrLimit)
}

func FuzzParseTopology(f *testing.F) {
	f.Add([]byte(goodTopology))
	f.Add([]byte(`{"attn_tp_size":8,"attn_cp_size":2,"dp_size":1,"pp_size":4,"page_size":null,"kv_cache_dtype":"auto",` +
		`"dsv41_spec_layout":{"a":[1,{"b":null}]},"kv_layout":"nhd","decode_allocation_policy":"early"}`))
	f.Add([]byte(`{"attn_tp_size":65536,"attn_cp_size":65536,"dp_size":65536,"pp_size":65536}`))
	f.Add([]byte(`{"attn_tp_size":1e2}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		topo, err := ParseTopology(b)
		if err != nil {
			if !typed(err) {
				t.Fatalf("untyped error %v", err)
			}
			return
		}
		if n := topo.Ranks(); n < 1 || n > MaxRanks {
			t.Fatalf("%d ranks", n)
		}
		// What was understood can be passed on, and means the same.
		out, err := json.Marshal(topo)
		if err != nil {
			t.Fatal(err)
		}
		again, err := ParseTopology(out)
		if err != nil {
			t.Fatalf("%s: %v", out, err)
		}
		if again.DecodeAllocationPolicy.orEarly() != topo.DecodeAllocationPolicy.orEarly() {
			t.Fatalf("policy %q, then %q", topo.DecodeAllocationPolicy, again.DecodeAllocationPolicy)
		}
		topo.DecodeAllocationPolicy, again.DecodeAllocationPolicy = "", ""
		if keys, err := differingKeys(topo.DSV41SpecLayout, again.DSV41SpecLayout); err != nil || len(keys) > 0 {
			t.Fatalf("layouts differ in %q, %v", keys, err)
		}
		topo.DSV41SpecLayout, again.DSV41SpecLayout = nil, nil
		if !reflect.DeepEqual(topo, again) {
			t.Fatalf("%+v, then %+v", topo, again)
		}
		if _, err := MapRanks(topo, Geometry{TP: topo.AttnTPSize, Attention: MLA}); err != nil && !errors.Is(err, nixlkv.ErrTopology) {
			t.Fatal(err)
		}
	})
}

func FuzzParseRankInfo(f *testing.F) {
	f.Add([]byte(sglangRank))
	f.Add([]byte(`{"rank_ip":"fe80::1%eth0","rank_port":1}`))
	f.Add([]byte(`{"attn_tp_size":null,"dsv41_spec_layout":{}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		info, err := ParseRankInfo(b)
		if err != nil {
			if !typed(err) {
				t.Fatalf("untyped error %v", err)
			}
			return
		}
		if e, err := ParseEndpoint(info.Endpoint().String()); err != nil || e != info.Endpoint() {
			t.Fatalf("address %q is read back as %+v, %v", info.Endpoint(), e, err)
		}
		out, err := json.Marshal(info)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := ParseRankInfo(out); err != nil {
			t.Fatalf("%s: %v", out, err)
		}
	})
}

// FuzzServer sends any request to a server that knows one rank.
func FuzzServer(f *testing.F) {
	f.Add("PUT", "/route", "", []byte(sglangRank))
	f.Add("GET", "/route", "prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1", []byte(nil))
	f.Add("GET", "/route", "prefill_dp_rank=0&prefill_cp_rank=0&target_tp_rank=%31&target_pp_rank=;", []byte(nil))
	f.Add("POST", "/register_dp_rank", "", []byte(`{"bootstrap_room":7,"dp_rank":1}`))
	f.Add("POST", "/query_dp_ranks", "", []byte(`{"bootstrap_rooms":[7,8]}`))
	f.Add("HEAD", "/health", "x", []byte{})
	f.Fuzz(func(t *testing.T, method, path, query string, body []byte) {
		s := NewServer(WithMaxRooms(4), WithMaxRanks(4))
		expect(t, s, "PUT", "/route", sglangRank, 200, "OK")
		r := httptest.NewRequest("GET", "/", bytes.NewReader(body))
		r.Method, r.URL = method, &url.URL{Path: "/" + strings.TrimPrefix(path, "/"), RawQuery: query}
		w := httptest.NewRecorder()
		s.ServeHTTP(w, r)
		switch w.Code {
		case 200:
			if w.Header().Get("Content-Type") == "application/json; charset=utf-8" && !json.Valid(w.Body.Bytes()) {
				t.Fatalf("invalid JSON %q", w.Body)
			}
		case 301, 307, 308, 400, 404, 405, 413, 429, 503:
		default:
			t.Fatalf("code %d: %s", w.Code, w.Body)
		}
		if len(s.rooms.byID) > 1 || len(s.ranks.ranks) > 2 {
			t.Fatalf("%d rooms, %d ranks after one request", len(s.rooms.byID), len(s.ranks.ranks))
		}
	})
}

// FuzzReplies reads any bytes as each of the replies that a client gets.
func FuzzReplies(f *testing.F) {
	f.Add([]byte(`{"rank_ip":"10.0.0.7","rank_port":41234}`))
	f.Add([]byte(`{"7":1,"8":null,"9":"x"}`))
	f.Add([]byte(`null`))
	f.Fuzz(func(t *testing.T, b []byte) {
		e, err := parseRankReply(b)
		if err == nil {
			_, err = ParseEndpoint(e.String())
		}
		if err != nil && !typed(err) {
			t.Fatalf("untyped error %v", err)
		}
		found := make(map[nixlkv.Room]int)
		if err := parseDPRanks(b, []nixlkv.Room{7, 8}, found); err != nil && !typed(err) {
			t.Fatalf("untyped error %v", err)
		}
		if len(found) > 2 {
			t.Fatalf("ranks of rooms that were not asked for: %v", found)
		}
		for room, rank := range found {
			if rank < 0 || rank >= MaxRanks {
				t.Fatalf("room %d on rank %d", room, rank)
			}
		}
	})
}

func FuzzParseEndpoint(f *testing.F) {
	for _, s := range []string{"10.0.0.7:8998", "[::1]:8998", "[fe80::1%eth0]:1", "a:0", ":", "[::1"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		e, err := ParseEndpoint(s)
		if err != nil {
			if !typed(err) {
				t.Fatalf("untyped error %v", err)
			}
			return
		}
		if again, err := ParseEndpoint(e.String()); err != nil || again != e {
			t.Fatalf("%q gives %+v, then %+v, %v", s, e, again, err)
		}
		u := e.url("http")
		parsed, err := url.Parse(u.String())
		if err != nil || parsed.Path != "" || parsed.Port() == "" || parsed.User != nil {
			t.Fatalf("%q gives the URL %v, %v", s, parsed, err)
		}
	})
}
