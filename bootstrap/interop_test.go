package bootstrap

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/internal/testkit/releases"
	"github.com/nixlkv/nixlkv/internal/testkit/spawn"
)

// The tests in this file run SGLang's own bootstrap code (testdata/sglang/driver.py) against
// this package, for every release found under SGLANG_SRC. PEER_PYTHON is a Python with aiohttp,
// msgspec, numpy, psutil, pyzmq and requests.

func sglangReleases(t *testing.T) (python string, found []releases.Release) {
	t.Helper()
	python, root := os.Getenv("PEER_PYTHON"), os.Getenv("SGLANG_SRC")
	if python == "" || root == "" {
		t.Skip("skip: PEER_PYTHON and SGLANG_SRC are not set, so SGLang is not there to be tested against")
	}
	found, err := releases.In(root)
	if err != nil {
		t.Fatal(err)
	}
	return python, found
}

// driver is a process that plays SGLang's side.
type driver struct {
	t   *testing.T
	in  *json.Encoder
	out *bufio.Scanner
}

func startDriver(t *testing.T, python, src string) *driver {
	t.Helper()
	cmd := exec.Command(python, "testdata/sglang/driver.py", src)
	cmd.Env = append(os.Environ(), "PYTHONDONTWRITEBYTECODE=1", "no_proxy=*")
	p := spawn.Start(t, cmd)
	p.Limit(t, 2*time.Minute)
	t.Cleanup(func() { p.Finish(t, 10*time.Second) })
	d := &driver{t: t, in: json.NewEncoder(p.Stdin), out: bufio.NewScanner(p.Stdout)}
	d.read(nil)
	return d
}

func (d *driver) read(answer any) {
	d.t.Helper()
	if !d.out.Scan() {
		d.t.Fatalf("the driver ended: %v", d.out.Err())
	}
	var failed struct {
		Error string `json:"error"`
	}
	if err := json.Unmarshal(d.out.Bytes(), &failed); err != nil || failed.Error != "" {
		d.t.Fatalf("the driver says %s", d.out.Bytes())
	}
	if answer != nil {
		if err := json.Unmarshal(d.out.Bytes(), answer); err != nil {
			d.t.Fatal(err)
		}
	}
}

type command map[string]any

// do has the driver carry out a command.
func (d *driver) do(name string, args command, answer any) {
	d.t.Helper()
	c := command{"cmd": name}
	for k, v := range args {
		c[k] = v
	}
	if err := d.in.Encode(c); err != nil {
		d.t.Fatal(err)
	}
	d.read(answer)
}

func (d *driver) register(e Endpoint, args command) (codes []int) {
	d.t.Helper()
	var answer struct{ Codes []int }
	args["host"], args["port"] = e.Host, e.Port
	d.do("register", args, &answer)
	return answer.Codes
}

func (d *driver) topology(addr string, decode command) (ok bool, info map[string]any) {
	d.t.Helper()
	var answer struct {
		OK   bool
		Info map[string]any
	}
	d.do("topology", command{"addr": addr, "decode": decode}, &answer)
	return answer.OK, answer.Info
}

// TestSGLangAtOurServer: SGLang's prefill registers here, and SGLang's decode finds it.
func TestSGLangAtOurServer(t *testing.T) {
	python, found := sglangReleases(t)
	for _, r := range found {
		t.Run(r.String(), func(t *testing.T) {
			d := startDriver(t, python, r.Src)
			for _, addr := range []string{"127.0.0.1:0", "[::1]:0"} {
				t.Run(addr, func(t *testing.T) {
					if addr[0] == '[' {
						hasIPv6(t)
					}
					s := listen(t, addr)
					d.t = t
					sglangPrefillAndDecode(t, d, s)
				})
			}
			d.t = t
			sglangNewerKeys(t, d, r.Minor)
		})
	}
}

func sglangPrefillAndDecode(t *testing.T, d *driver, s *Server) {
	addr := s.Endpoint().String()
	const ranks = 8 // DP 2 × TP 2 × PP 2
	rank := func(dp, tp, pp int) command {
		return command{
			"parallel": command{"attn_tp_size": 2, "attn_tp_rank": tp, "attn_dp_size": 2, "attn_dp_rank": dp, "pp_size": 2,
				"load_balance_method": "round_robin"},
			// With DP attention SGLang sends the DP rank as both kinds, up to 0.5.21.
			"pp_rank": pp, "system_dp_rank": dp,
			"rank_ip": s.Endpoint().Host, "rank_port": 100 + 4*dp + 2*tp + pp, "page_size": 64, "dtype": "fp8_e4m3",
		}
	}
	decode := command{"tp": 1, "page_size": 64, "dtype": "fp8_e4m3", "kind": MLA}
	n := 0
	for dp := range 2 {
		for tp := range 2 {
			for pp := range 2 {
				for range 2 { // twice, and still one rank
					if codes := d.register(s.Endpoint(), rank(dp, tp, pp)); !slices.Equal(codes, []int{200}) {
						t.Fatalf("registration answered %v", codes)
					}
				}
				n++
				ok, info := d.topology(addr, decode)
				if ok != (n == ranks) {
					t.Fatalf("topology %v, %v after %d of %d ranks", ok, info, n, ranks)
				}
				if !ok {
					continue
				}
				for key, want := range map[string]any{
					"attn_tp_size": 2.0, "attn_cp_size": 1.0, "dp_size": 2.0, "pp_size": 2.0, "page_size": 64.0,
					"kv_cache_dtype": "fp8_e4m3", "follow_bootstrap_room": false, "enable_dsa_cache_layer_split": false,
					"prefill_http_port": 30000.0,
				} {
					if info[key] != want {
						t.Errorf("%s is %v, want %v", key, info[key], want)
					}
				}
			}
		}
	}

	// The ranks that SGLang's receiver finds are those that MapRanks names, dummies included.
	var receiver struct {
		Failure string
		Ranks   []struct {
			IP    string `json:"rank_ip"`
			Port  int    `json:"rank_port"`
			Dummy bool   `json:"is_dummy"`
		}
	}
	d.do("receive", command{"addr": addr, "decode": decode, "dp_rank": 1}, &receiver)
	topo, err := s.Topology()
	if err != nil {
		t.Fatal(err)
	}
	m, err := MapRanks(topo, Geometry{TP: 1, Attention: MLA})
	if err != nil {
		t.Fatal(err)
	}
	if len(receiver.Ranks) != len(m.Targets) {
		t.Fatalf("SGLang found %+v, want %+v", receiver, m)
	}
	for i, x := range m.Targets {
		got := receiver.Ranks[i]
		if got.IP != s.Endpoint().Host || got.Port != 100+4+2*x.TP+x.PP || got.Dummy != x.Dummy {
			t.Errorf("SGLang found %+v for %+v", got, x)
		}
	}
	d.do("receive", command{"addr": addr, "decode": decode, "dp_rank": 2}, &receiver)
	if !strings.Contains(receiver.Failure, "Could not fetch bootstrap info for: prefill_dp_rank: 2") {
		t.Errorf("DP rank 2 of 2: %q", receiver.Failure)
	}

	const room = int64(nixlkv.MaxRoom)
	var rooms struct{ Found map[string]int }
	d.do("register_dp_rank", command{"addr": addr, "room": room, "dp_rank": 1}, nil)
	d.do("query_dp_ranks", command{"addr": addr, "rooms": []int64{room, 7}}, &rooms)
	if want := map[string]int{nixlkv.MaxRoom.String(): 1}; !reflect.DeepEqual(rooms.Found, want) {
		t.Errorf("DP ranks %v, want %v", rooms.Found, want)
	}

	var heartbeat struct{ Alive bool }
	d.do("heartbeat", command{"addr": addr}, &heartbeat)
	if !heartbeat.Alive {
		t.Error("SGLang's heartbeat takes the server for dead")
	}

	// One that disagrees is refused at every try.
	other := rank(0, 0, 0)
	other["parallel"].(command)["pp_size"] = 4
	if codes := d.register(s.Endpoint(), other); !slices.Equal(codes, []int{400, 400, 400, 400, 400}) {
		t.Errorf("a rank of another prefill is answered %v", codes)
	}
}

// sglangNewerKeys: a reply carries a newer key only if its value matters; a release that does
// not know the key cannot serve that prefill anyway, and says so.
func sglangNewerKeys(t *testing.T, d *driver, number int) {
	layout := command{"num_draft_tokens": 4}
	for _, tc := range []struct {
		name    string
		since   int
		prefill RankInfo
		decode  command
	}{
		{"policy", 22, RankInfo{DecodeAllocationPolicy: PrefillCompleteAllocation}, command{"policy": "prefill_complete"}},
		{"sharding", 23, RankInfo{EnableKVCacheSharding: true}, command{}},
		{"layout", 23, RankInfo{KVLayout: "nhd"}, command{"kv_layout": "nhd"}},
		{"DSpark", 21, RankInfo{DSV41SpecLayout: json.RawMessage(`{"num_draft_tokens":4}`)}, command{"spec_layout": layout}},
		{"defaults", 18, RankInfo{DecodeAllocationPolicy: EarlyAllocation}, command{}},
	} {
		s := listen(t, "127.0.0.1:0")
		info := tc.prefill
		info.RankIP, info.RankPort, info.PageSize = "10.0.0.7", 1, 1
		if err := newClient(t, s.Endpoint().String()).Register(t.Context(), info); err != nil {
			t.Fatal(err)
		}
		if ok, _ := d.topology(s.Endpoint().String(), tc.decode); ok != (number >= tc.since) {
			t.Errorf("%s: 0.5.%d takes the topology: %v", tc.name, number, ok)
		}
	}
}

// TestOurClientAtSGLangServer: ranks register at SGLang's server, and decodes ask it.
func TestOurClientAtSGLangServer(t *testing.T) {
	python, found := sglangReleases(t)
	for _, r := range found {
		t.Run(r.String(), func(t *testing.T) {
			d := startDriver(t, python, r.Src)
			for _, host := range []string{"127.0.0.1", "::1"} {
				t.Run(host, func(t *testing.T) {
					if host == "::1" {
						hasIPv6(t)
					}
					d.t = t
					var at struct{ Port int }
					d.do("serve", command{"host": host}, &at)
					e := Endpoint{Host: host, Port: at.Port}
					c := newClient(t, e.String())
					soon, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
					defer cancel()
					if _, err := c.Topology(soon); !errors.Is(err, nixlkv.ErrNotReady) {
						t.Errorf("before any rank: %v", err)
					}
					useServer(t, c)
				})
			}
			d.t = t
			var at struct{ Port int }
			d.do("serve", command{"host": "127.0.0.1"}, &at)
			ourClientConflicts(t, newClient(t, Endpoint{Host: "127.0.0.1", Port: at.Port}.String()), r.Minor)
		})
	}
}

// ourClientConflicts: what SGLang's server refuses, and from which release on.
func ourClientConflicts(t *testing.T, c *Client, number int) {
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	info := RankInfo{AttnTPSize: 2, RankIP: "10.0.0.7", RankPort: 1, PageSize: 64, KVCacheDtype: "auto", PrefillHTTPPort: 30000,
		EnableDSACacheLayerSplit: true}
	if err := c.Register(ctx, info); err != nil {
		t.Fatal(err)
	}
	info.AttnTPRank = 1
	for _, tc := range []struct {
		name   string
		since  int
		change func(*RankInfo)
	}{
		{"policy", 22, func(r *RankInfo) { r.DecodeAllocationPolicy = PrefillCompleteAllocation }},
		{"DSpark", 21, func(r *RankInfo) { r.DSV41SpecLayout = json.RawMessage(`{"a":1}`) }},
	} {
		if number < tc.since {
			continue
		}
		other := info
		tc.change(&other)
		if err := c.Register(ctx, other); !errors.Is(err, nixlkv.ErrMismatch) {
			t.Errorf("another %s: %v", tc.name, err)
		}
	}
	if err := c.Register(ctx, info); err != nil {
		t.Fatal(err)
	}
	topo, err := c.Topology(ctx)
	want := Topology{AttnTPSize: 2, AttnCPSize: 1, DPSize: 1, PPSize: 1, PageSize: 64, KVCacheDtype: "auto",
		FollowBootstrapRoom: true, EnableDSACacheLayerSplit: true, PrefillHTTPPort: 30000, DecodeAllocationPolicy: EarlyAllocation}
	// From 0.5.22 the default is told.
	topo.DecodeAllocationPolicy = topo.DecodeAllocationPolicy.orEarly()
	if err != nil || !reflect.DeepEqual(topo, want) {
		t.Errorf("topology %+v, %v, want %+v", topo, err, want)
	}
}

// TestGoldenVectorsAreSGLangs generates the golden vectors anew.
func TestGoldenVectorsAreSGLangs(t *testing.T) {
	python, found := sglangReleases(t)
	if len(found) != 6 || found[0].Minor != 18 || found[5].Minor != 23 {
		t.Skip("skip: the vectors are of releases 0.5.18 to 0.5.23, which SGLANG_SRC does not hold, or not alone")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	dir := t.TempDir()
	cmd := exec.CommandContext(ctx, python, "testdata/sglang/generate.py", filepath.Dir(found[0].Src), dir)
	cmd.Env = append(os.Environ(), "PYTHONDONTWRITEBYTECODE=1")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, name := range []string{"mapping.json", "compat.json"} {
		want, err := os.ReadFile(filepath.Join("testdata", name))
		if err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want) {
			t.Errorf("%s is not what testdata/sglang/generate.py writes", name)
		}
	}
}
