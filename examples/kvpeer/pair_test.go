package main

import (
	"fmt"
	"strings"
	"testing"
)

// pair is a prefill and a decode.
type pair struct {
	prefill, decode *process
	addr            string // of the bootstrap server
}

// startPair starts both under an allocation policy; prefill_complete is not for models with state.
func startPair(t *testing.T, engine, policy string) *pair {
	t.Helper()
	more := fmt.Sprintf(`"allocation_policy":%q,`, policy)
	config := func(c string) string {
		if policy != "early" {
			c = strings.Replace(c, smallState, "", 1)
		}
		return c
	}
	p := &pair{prefill: start(t, config(prefillConfig(more)), "-engine", engine), decode: start(t, config(decodeConfig(more)), "-engine", engine)}
	ready := p.prefill.next("ready")
	p.addr = fmt.Sprintf("127.0.0.1:%v", ready["bootstrap_port"])
	ready = p.decode.next("ready")
	if ready["role"] != "decode" || ready["local_ip"] != "127.0.0.1" || ready["engine"] != engine || ready["agent"] == "" || ready["bootstrap_port"] != nil {
		t.Errorf("%v", ready)
	}
	return p
}

// receive and send open a room on either side, and wait for nothing.
func (p *pair) receive(room int, more map[string]any) {
	p.decode.t.Helper()
	command := map[string]any{"cmd": "receive", "room": room, "bootstrap_addr": p.addr, "timeout": 60}
	for k, v := range more {
		command[k] = v
	}
	p.decode.tell(command)
}

func (p *pair) send(room int, more map[string]any) {
	p.prefill.t.Helper()
	command := map[string]any{"cmd": "send", "room": room, "timeout": 60}
	for k, v := range more {
		command[k] = v
	}
	p.prefill.tell(command)
}

// done gives the end of a room at the decode.
func (p *pair) done(room int, status string) map[string]any {
	p.decode.t.Helper()
	e := p.decode.next("done")
	if fmt.Sprint(e["room"]) != fmt.Sprint(room) || e["status"] != status {
		p.decode.t.Errorf("%v; want room %d, %s", e, room, status)
	}
	return e
}

// rooms asks the decode again and again until its rooms are as they should be.
func (p *pair) rooms(is func(map[string]any) bool) map[string]any {
	p.decode.t.Helper()
	for {
		p.decode.tell(map[string]any{"cmd": "rooms"})
		if e := p.decode.next("rooms"); is(e) {
			return e
		}
	}
}

// sent takes what the prefill tells of a room that succeeds.
func (p *pair) sent(prefix int) {
	p.prefill.t.Helper()
	if e := p.prefill.next("bootstrapped"); fmt.Sprint(e["decode_prefix_len"]) != fmt.Sprint(prefix) {
		p.prefill.t.Errorf("%v, want a prefix of %d tokens", e, prefix)
	}
	if e := p.prefill.next("done"); e["status"] != "Success" {
		p.prefill.t.Errorf("%v", e)
	}
}

// TestPair moves rooms between two processes.
func TestPair(t *testing.T) {
	for _, engine := range engines(t) {
		for _, policy := range []string{"early", "prefill_complete"} {
			t.Run(engine+"/"+policy, func(t *testing.T) { testPair(t, engine, policy) })
		}
	}
}

func testPair(t *testing.T, engine, policy string) {
	p := startPair(t, engine, policy)
	p.receive(7, map[string]any{"kv_indices": []int{3, 4, 9}, "aux_index": 2})
	p.send(7, map[string]any{"chunks": [][]int{{1, 2}, {8}}, "aux_index": 5})
	got := p.done(7, "Success")
	p.sent(0)
	p.prefill.tell(map[string]any{"cmd": "expect", "kv_indices": []int{1, 2, 8}, "aux_index": 5})
	want := p.prefill.next("expect")
	if got["kv_sha256"] != want["kv_sha256"] || got["aux_sha256"] != want["aux_sha256"] || got["state_sha256"] != nil {
		t.Errorf("%v, want %v", got, want)
	}
	p.decode.tell(map[string]any{"cmd": "expect", "kv_indices": []int{3, 4, 9}, "aux_index": 2})
	if e := p.decode.next("expect"); e["kv_sha256"] != want["kv_sha256"] || e["aux_sha256"] != want["aux_sha256"] {
		t.Errorf("%v, want %v", e, want)
	}
	p.decode.tell(map[string]any{"cmd": "stray", "kv_indices": []int{3, 4, 9}, "aux_indices": []int{2}})
	if e := p.decode.next("stray"); fmt.Sprint(e["bytes"]) != "0" {
		t.Errorf("%v", e)
	}

	// The number may be used again at once; there is nothing to send but the aux slot.
	p.receive(7, map[string]any{"aux_index": 3, "decode_prefix_len": 16})
	p.send(7, map[string]any{"chunks": [][]int{{}}, "aux_index": 6})
	p.done(7, "Success")
	p.sent(16)

	p.abortBoth(t)
	p.patience(t, policy)
	// A room that waits when the driver ends does not hold it up.
	p.receive(12, map[string]any{"kv_indices": []int{20}, "aux_index": 10})
	p.rooms(func(e map[string]any) bool { // past looking for the prefill, of which its end would be told
		return strings.Contains(fmt.Sprint(e["request_status"]), "12:WaitingForInput") || policy != "early"
	})
	p.decode.exit()
	p.prefill.exit()
}

// abortBoth gives a room up on either side, and one that is not there.
func (p *pair) abortBoth(t *testing.T) {
	t.Helper()
	// Nobody opens it at the prefill.
	p.receive(8, map[string]any{"kv_indices": []int{10, 11}, "aux_index": 4})
	p.decode.tell(map[string]any{"cmd": "abort", "room": 8})
	aborted, done := p.decode.any("aborted"), p.decode.any("done")
	if aborted["event"] == "done" { // nobody says which of them is first
		aborted, done = done, aborted
	}
	if aborted["event"] != "aborted" || done["status"] != "Failed" || done["error"] != "KVTransferError" || done["is_from_another_rank"] != false ||
		!strings.Contains(fmt.Sprint(done["message"]), "Aborted by AbortReq.") {
		t.Errorf("%v, %v", aborted, done)
	}
	if done["aux_sha256"] != nil { // the pages were published
		if e := p.decode.next("released"); e["confirmed"] != true {
			t.Errorf("%v", e)
		}
	}
	p.decode.tell(map[string]any{"cmd": "abort", "room": 8})
	p.decode.next("aborted") // it is cleared

	p.receive(9, map[string]any{"kv_indices": []int{12, 13}, "aux_index": 5})
	p.send(9, map[string]any{"chunks": [][]int{{3}, {4}}, "aux_index": 7, "gap_s": 60})
	p.prefill.next("bootstrapped")
	p.prefill.tell(map[string]any{"cmd": "abort", "room": 9})
	for _, e := range []map[string]any{p.prefill.any("aborted"), p.prefill.any("done")} {
		if e["event"] == "done" && e["status"] != "Failed" {
			t.Errorf("%v", e)
		}
	}
	if e := p.done(9, "Failed"); !strings.Contains(fmt.Sprint(e["message"]), "Aborted by AbortReq.") {
		t.Errorf("%v", e)
	}
	if e := p.decode.next("released"); e["confirmed"] != true {
		t.Errorf("%v", e)
	}
}

// patience: its end ends a report, not the room.
func (p *pair) patience(t *testing.T, policy string) {
	t.Helper()
	p.receive(10, map[string]any{"kv_indices": []int{14}, "aux_index": 6, "timeout": 0.2})
	e := p.decode.next("done")
	if s := e["status"]; s != "WaitingForInput" && s != "Bootstrapping" || e["error"] != nil {
		t.Errorf("%v", e)
	}
	r := p.rooms(func(r map[string]any) bool { return fmt.Sprint(r["held"]) == "1" }) // a released one is gone a moment later
	if fmt.Sprint(r["request_status"]) != fmt.Sprintf("map[10:%v]", e["status"]) || fmt.Sprint(r["failures"]) != "map[]" {
		t.Errorf("%v", r)
	}
	p.receive(10, map[string]any{"kv_indices": []int{15}, "aux_index": 7})
	if e := p.decode.next("exception"); fmt.Sprint(e["room"]) != "10" || !strings.Contains(fmt.Sprint(e["message"]), "in use") {
		t.Errorf("the room is open: %v", e)
	}
	p.decode.tell(map[string]any{"cmd": "abort", "room": 10})
	p.decode.next("aborted")

	// Nothing listens at port 1.
	p.decode.tell(map[string]any{"cmd": "receive", "room": 11, "bootstrap_addr": "127.0.0.1:1", "kv_indices": []int{16}, "aux_index": 8, "timeout": 0.2})
	if e := p.done(11, "NoPrefill"); e["kv_sha256"] != nil {
		t.Errorf("%v", e)
	}
	if policy != "early" {
		return // pages are named only once the prefill has computed the room
	}
	// A page that this rank does not have is refused here.
	p.receive(13, map[string]any{"kv_indices": []int{64}, "aux_index": 9})
	if e := p.done(13, "Failed"); !strings.Contains(fmt.Sprint(e["message"]), "page index out of range") {
		t.Errorf("%v", e)
	}
}

// TestBench runs a bench of both sides, in every pattern and with the slots used again and again.
func TestBench(t *testing.T) {
	for _, engine := range engines(t) {
		t.Run(engine, func(t *testing.T) {
			p := startPair(t, engine, "early")
			for i, tc := range []struct {
				count, pages, concurrency, chunks int
				pattern                           string
			}{
				{1, 1, 1, 1, ""}, {40, 5, 4, 3, "scattered"}, {40, 8, 8, 1, "contiguous"}, {3, 64, 2, 7, "contiguous"},
			} {
				command := map[string]any{"cmd": "bench", "count": tc.count, "pages": tc.pages, "concurrency": tc.concurrency, "chunks": tc.chunks,
					"pattern": tc.pattern, "first_room": 1000 * i, "timeout": 60, "bootstrap_addr": p.addr}
				p.decode.tell(command)
				p.prefill.tell(command)
				for side, x := range map[string]*process{"prefill": p.prefill, "decode": p.decode} {
					e := x.next("bench")
					if e["role"] != side || fmt.Sprint(e["ok"]) != fmt.Sprint(tc.count) || fmt.Sprint(e["failed"]) != "0" || e["first_error"] != nil ||
						e["p50_s"] == nil || e["p99_s"] == nil || fmt.Sprint(e["gb_per_s"]) == "0" {
						t.Errorf("%+v: %v", tc, e)
					}
				}
			}
			p.decode.exit()
			p.prefill.exit()
		})
	}
}

// TestBenchWithoutPrefill: rooms that fail are counted, with the first reason.
func TestBenchWithoutPrefill(t *testing.T) {
	p := start(t, decodeConfig(""), "-engine", "embedded")
	p.next("ready")
	p.tell(map[string]any{"cmd": "bench", "count": 3, "pages": 1, "concurrency": 2, "timeout": 0.2, "bootstrap_addr": "127.0.0.1:1"})
	if e := p.next("bench"); fmt.Sprint(e["ok"]) != "0" || fmt.Sprint(e["failed"]) != "3" || e["first_error"] == nil || e["p50_s"] != nil {
		t.Errorf("%v", e)
	}
	p.exit()
}
