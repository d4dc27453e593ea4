package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/nixlkv/nixlkv/internal/testkit/spawn"
	"github.com/nixlkv/nixlkv/nixl"
)

// asKvpeer makes the test binary kvpeer itself.
const asKvpeer = "KVPEER_TEST_AS_MAIN"

func TestMain(m *testing.M) {
	if os.Getenv(asKvpeer) != "" {
		main()
		return
	}
	goleak.VerifyTestMain(m)
}

// process is kvpeer as a process of its own.
type process struct {
	*spawn.Process
	t   *testing.T
	out *bufio.Scanner // of its standard output
}

func start(t *testing.T, config string, args ...string) *process {
	t.Helper()
	path := filepath.Join(t.TempDir(), "config.json")
	if err := os.WriteFile(path, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(os.Args[0], append(args, path)...)
	// The race detector would sleep for a second before the program exits.
	cmd.Env = append(os.Environ(), asKvpeer+"=1", "GORACE="+strings.TrimSpace(os.Getenv("GORACE")+" atexit_sleep_ms=0"))
	p := &process{Process: spawn.Start(t, cmd), t: t}
	p.out = bufio.NewScanner(p.Stdout)
	p.Limit(t, time.Minute)
	return p
}

func (p *process) tell(command map[string]any) {
	p.t.Helper()
	line, err := json.Marshal(command)
	if err != nil {
		p.t.Fatal(err)
	}
	p.line(string(line))
}

func (p *process) line(s string) {
	p.t.Helper()
	if _, err := io.WriteString(p.Stdin, s+"\n"); err != nil {
		p.t.Fatal(err)
	}
}

// next gives the next event, which must be of that name.
func (p *process) next(name string) map[string]any {
	p.t.Helper()
	e := p.any(name)
	if e["event"] != name {
		p.t.Fatalf("%v; want %s", e, name)
	}
	return e
}

// any gives the next event; want is for the failure.
func (p *process) any(want string) map[string]any {
	p.t.Helper()
	if !p.out.Scan() {
		p.t.Fatalf("kvpeer ended (%v) instead of telling %s", p.out.Err(), want)
	}
	var e map[string]any
	d := json.NewDecoder(strings.NewReader(p.out.Text()))
	d.UseNumber()
	if err := d.Decode(&e); err != nil {
		p.t.Fatalf("%s: %v", p.out.Text(), err)
	}
	return e
}

// exit has the program exit.
func (p *process) exit() {
	p.t.Helper()
	p.tell(map[string]any{"cmd": "exit"})
	p.next("bye")
	if code := p.wait(); code != 0 {
		p.t.Errorf("exit code %d", code)
	}
}

// wait gives the exit code.
func (p *process) wait() int {
	p.t.Helper()
	if p.out.Scan() {
		p.t.Errorf("one event more: %s", p.out.Text())
	}
	return p.State().ExitCode()
}

// engines are those that this machine has.
func engines(t *testing.T) []string {
	names := []string{nixl.Embedded.String()}
	if e, err := nixl.Open(nixl.Native); err == nil {
		if err := e.Close(); err != nil {
			t.Error(err)
		}
		names = append(names, nixl.Native.String())
	}
	return names
}

const (
	smallKV    = `"kv":{"page_size":4,"item_lens":[256,256,256,256],"num_slots":64,"kv_head_num":1,"total_kv_head_num":1` + smallState + `}`
	smallState = `,"state":[{"type":"swa","item_lens":[32],"num_slots":4}]`
)

// prefillConfig describes a small prefill whose bootstrap server takes any port.
func prefillConfig(more string) string {
	return `{"role":"prefill","bootstrap_port":0,"fill_seed":"p0",` + more + smallKV + `}`
}

// decodeConfig describes a decode of the same size.
func decodeConfig(more string) string { return `{"role":"decode",` + more + smallKV + `}` }

// TestWithoutPeer drives the program from its start to its end. The digests are Python's.
func TestWithoutPeer(t *testing.T) {
	for _, engine := range engines(t) {
		t.Run(engine, func(t *testing.T) {
			p := start(t, prefillConfig(""), "-engine", engine)
			ready := p.next("ready")
			if ready["role"] != "prefill" || ready["local_ip"] != "127.0.0.1" || ready["engine"] != engine || ready["agent"] == "" {
				t.Errorf("%v", ready)
			}
			health, err := http.Get(fmt.Sprintf("http://127.0.0.1:%v/health", ready["bootstrap_port"]))
			if err != nil {
				t.Fatal(err)
			}
			if err := health.Body.Close(); err != nil || health.StatusCode != http.StatusOK {
				t.Errorf("the bootstrap server says %s, %v", health.Status, err)
			}
			http.DefaultClient.CloseIdleConnections()
			control, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%v", ready["rank_port"]))
			if err != nil {
				t.Fatal(err)
			}
			if err := control.Close(); err != nil {
				t.Fatal(err)
			}

			p.tell(map[string]any{"cmd": "expect", "kv_indices": []int{1, 2, 3, 8, 9}, "aux_index": 5, "state_indices": [][]int{{}}})
			e := p.next("expect")
			if e["kv_sha256"] != "54116e17b50fbd1c4f60ac6f0fb206f6f6a6cab8dcb45cce2b6f76206bd288a6" ||
				e["aux_sha256"] != "0730bee294114f368313e87b99c48da8d6dd7be0d9f15c54268505e59ea44c91" {
				t.Errorf("%v", e)
			}
			p.tell(map[string]any{"cmd": "expect"})
			if e := p.next("expect"); e["aux_sha256"] != nil {
				t.Errorf("%v", e)
			}
			all := make([]int, 64)
			for i := range all {
				all[i] = i
			}
			p.tell(map[string]any{"cmd": "stray", "kv_indices": all, "aux_indices": all[:16], "state_indices": [][]int{all[:4]}})
			if e := p.next("stray"); fmt.Sprint(e["bytes"]) != "0" {
				t.Errorf("nothing is outside of everything: %v", e)
			}
			p.tell(map[string]any{"cmd": "stray", "kv_indices": all, "aux_indices": all[:16]})
			if e := p.next("stray"); fmt.Sprint(e["bytes"]) == "0" {
				t.Errorf("the state is filled: %v", e)
			}

			// Patience ends a report, not the room.
			p.tell(map[string]any{"cmd": "send", "room": 7, "chunks": [][]int{{1}}, "aux_index": 1, "timeout": 0.01})
			if e := p.next("done"); e["status"] != "Bootstrapping" || e["error"] != nil {
				t.Errorf("%v", e)
			}
			p.tell(map[string]any{"cmd": "rooms"})
			if e := p.next("rooms"); fmt.Sprint(e["request_status"]) != "map[7:Bootstrapping]" || fmt.Sprint(e["held"]) != "1" {
				t.Errorf("%v", e)
			}
			p.tell(map[string]any{"cmd": "send", "room": 7, "chunks": [][]int{{1}}})
			if e := p.next("exception"); fmt.Sprint(e["room"]) != "7" || !strings.Contains(fmt.Sprint(e["message"]), "in use") {
				t.Errorf("the room is open: %v", e)
			}
			p.tell(map[string]any{"cmd": "abort", "room": 7})
			p.next("aborted")
			p.tell(map[string]any{"cmd": "rooms"})
			if e := p.next("rooms"); fmt.Sprint(e["failures"]) == "map[]" {
				t.Errorf("an aborted room has no failure: %v", e)
			}
			// One that waits is told.
			const far = 1<<63 - 1
			p.tell(map[string]any{"cmd": "send", "room": uint64(far), "chunks": [][]int{{}}, "timeout": 60})
			p.tell(map[string]any{"cmd": "abort", "room": uint64(far)})
			aborted, done := p.any("aborted"), p.any("done")
			if aborted["event"] == "done" { // nobody says which of them is first
				aborted, done = done, aborted
			}
			room := json.Number(strconv.FormatUint(far, 10))
			if aborted["room"] != room || done["room"] != room || done["status"] != "Failed" || done["error"] != "KVTransferError" ||
				!strings.Contains(fmt.Sprint(done["message"]), "Aborted by AbortReq.") || done["is_from_another_rank"] != false {
				t.Errorf("%v, %v", aborted, done)
			}
			// A room that is waiting when the driver ends does not hold it up.
			p.tell(map[string]any{"cmd": "send", "room": 8, "chunks": [][]int{{1}}, "aux_index": 1, "timeout": 60})
			p.exit()
		})
	}
}

func TestEndOfInput(t *testing.T) {
	p := start(t, prefillConfig(""), "-engine", "embedded")
	p.next("ready")
	if err := p.Stdin.Close(); err != nil {
		t.Fatal(err)
	}
	p.next("bye")
	if code := p.wait(); code != 0 {
		t.Errorf("exit code %d", code)
	}
}

// TestBadCommands: each is answered, and the program goes on.
func TestBadCommands(t *testing.T) {
	for role, tc := range map[string]struct {
		config string
		lines  []string
	}{
		"prefill": {prefillConfig(""), []string{
			`{"cmd":"receive","room":1}`,
			`{"cmd":"send"}`,
			`{"cmd":"send","room":-1,"chunks":[[1]]}`,
			`{"cmd":"send","room":9223372036854775808,"chunks":[[1]]}`,
			`{"cmd":"send","room":1}`,
			`{"cmd":"send","room":1,"chunks":[[4294967296]]}`,
			`{"cmd":"send","room":1,"chunks":[[1]],"gap_s":-1}`,
			`{"cmd":"send","room":1,"chunks":[[1]],"timeout":1e9}`,
			`{"cmd":"send","room":1,"chunks":[[1]],"num_kv_tokens":-1}`,
		}},
		"decode": {decodeConfig(""), []string{
			`{"cmd":"send","room":1,"chunks":[[1]]}`,
			`{"cmd":"receive"}`,
			`{"cmd":"receive","room":1}`,
			`{"cmd":"receive","room":-1,"bootstrap_addr":"127.0.0.1:1"}`,
			`{"cmd":"receive","room":9223372036854775808,"bootstrap_addr":"127.0.0.1:1"}`,
			`{"cmd":"receive","room":1,"bootstrap_addr":"127.0.0.1"}`,
			`{"cmd":"receive","room":1,"bootstrap_addr":"127.0.0.1:1","kv_indices":[4294967296]}`,
			`{"cmd":"receive","room":1,"bootstrap_addr":"127.0.0.1:1","timeout":-1}`,
			`{"cmd":"bench","count":1,"pages":1,"concurrency":1}`,
		}},
	} {
		t.Run(role, func(t *testing.T) {
			p := start(t, tc.config, "-engine", "embedded")
			p.next("ready")
			for _, line := range append(tc.lines,
				`not JSON`,
				`null`,
				`{}`,
				`{"cmd":"dance"}`,
				`{"cmd":"abort"}`,
				`{"cmd":"expect","kv_indices":[64]}`,
				`{"cmd":"expect","aux_index":16}`,
				`{"cmd":"expect","state_indices":[[4]]}`,
				`{"cmd":"expect","state_indices":[[],[]]}`,
				`{"cmd":"stray","state_indices":[[],[]]}`,
				`{"cmd":"bench"}`,
			) {
				p.line(line)
				if e := p.next("exception"); e["message"] == "" || e["error"] == "" {
					t.Errorf("%s: %v", line, e)
				}
			}
			p.tell(map[string]any{"cmd": "rooms"})
			if e := p.next("rooms"); fmt.Sprint(e["request_status"]) != "map[]" || fmt.Sprint(e["held"]) != "0" {
				t.Errorf("a refused command left a room: %v", e)
			}
			p.exit()
		})
	}
}

func TestCannotStart(t *testing.T) {
	for name, tc := range map[string]struct {
		config string
		args   []string
		want   string
	}{
		"decode staging": {decodeConfig(`"env":{"SGLANG_DISAGG_STAGING_BUFFER":1},`), nil, "staging"},
		"decode layout":  {decodeConfig(`"parallel":{"attn_tp_rank":3},`), nil, "TPRank"},
		"policy":         {prefillConfig(`"allocation_policy":"prefill_complete","parallel":{"attn_tp_size":2},`), nil, "prefill_complete"},
		"no config":      {"", nil, "invalid configuration"},
		"engine":         {prefillConfig(""), []string{"-engine", "steam"}, "steam"},
		"staging":        {prefillConfig(`"env":{"SGLANG_DISAGG_STAGING_BUFFER":1},`), nil, "staging"},
		"memory kinds":   {strings.Replace(prefillConfig(""), `"page_size"`, `"mem_kinds":["VRAM","VRAM","VRAM","HBM"],"page_size"`, 1), nil, "HBM"},
		"layout":         {prefillConfig(`"parallel":{"attn_tp_rank":3},`), nil, "TPRank"},
		"address":        {prefillConfig(`"host_ip":"localhost",`), nil, "host_ip"},
		"log level":      {prefillConfig(`"env":{"LOGLEVEL":"loud"},`), nil, "LOGLEVEL"},
	} {
		t.Run(name, func(t *testing.T) {
			if !slices.Contains(tc.args, "-engine") {
				tc.args = append(tc.args, "-engine", "embedded")
			}
			p := start(t, tc.config, tc.args...)
			if e := p.next("exception"); !strings.Contains(fmt.Sprint(e["message"]), tc.want) {
				t.Errorf("%v, want %s", e, tc.want)
			}
			if code := p.wait(); code != exitFailed {
				t.Errorf("exit code %d", code)
			}
		})
	}
	t.Run("usage", func(t *testing.T) {
		if code := run(nil, strings.NewReader(""), new(strings.Builder), new(strings.Builder)); code != exitUsage {
			t.Errorf("exit code %d", code)
		}
	})
}
