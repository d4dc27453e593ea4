package interop

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nixlkv/nixlkv/nixl"
)

// TestPrefillKilled: a SGLang prefill that is killed fails its rooms at this library's decode at
// once, in every dialect, while those of another prefill go on. Started again at the same
// address it serves the same decode, and a room that was opened meanwhile.
func TestPrefillKilled(t *testing.T) {
	env := need(t)
	for _, r := range env.only(18, 21, 23) {
		inTurn(t, r.String(), func(t *testing.T) { testPrefillKilled(t, env, sglang(r), nixl.Native) })
	}
}

// TestGoPrefillKilled is the same with a prefill of this library's, on both engines.
func TestGoPrefillKilled(t *testing.T) {
	for _, engine := range []nixl.Kind{nixl.Native, nixl.Embedded} {
		t.Run(engine.String(), func(t *testing.T) { testPrefillKilled(t, needEngine(t, engine), golang(engine), engine) })
	}
}

func testPrefillKilled(t *testing.T, env environment, by impl, engine nixl.Kind) {
	s := plain()
	// No heartbeat may be what tells: there is none in the time of the test.
	s.decode = oneRank(s.decode[0].env(envHeartbeat, "600").env(envReleaseTimeout, "1"))
	p := startPair(t, env, s, by, golang(engine))
	q := p.at(startGroup(t, env, s, golang(engine), impl{}, freePorts.take(t)))
	p.judge(t, caseOf(t, s, "equal_tp"), p.run(t, caseOf(t, s, "equal_tp")))
	q.judge(t, caseOf(t, s, "three_rooms"), q.run(t, caseOf(t, s, "three_rooms")))

	lost := &testCase{rooms: []room{
		{number: 500, send: [][]int32{{43}, {44}}, aux: 1, to: []int32{1, 2}, toAux: 1, gap: time.Minute},
		{number: 501, to: []int32{5, 6}, toAux: 20}, // the prefill never opens it
	}}
	p.begin(t, lost)
	beside := caseOf(t, s, "chunks_of_a_page")
	ctx, cancel := context.WithTimeout(t.Context(), patience+reportPatience)
	defer cancel()
	if _, err := p.prefill.ranks[0].takeOf(ctx, "bootstrapped", &lost.rooms[0].number); err != nil {
		t.Fatal(err)
	}
	p.prefill.ranks[0].askUntil(t, "the metadata of the second room", "rooms", map[string]any{"cmd": "rooms"}, func(e event) bool {
		_, known := e.RequestStatus["501"]
		return known || e.Held == len(lost.rooms)
	})
	q.begin(t, beside)
	p.prefill.ranks[0].kill()
	soon, cancelSoon := context.WithTimeout(t.Context(), patience)
	defer cancelSoon()
	for i := range lost.rooms {
		got := done(t, soon, p.decode[0], lost.rooms[i].number)
		if want := fmt.Sprintf("Lost connection with prefill instance (bootstrap_addr: %s)", p.prefill.addr()); got.Status != "Failed" || !strings.Contains(got.message, want) {
			t.Errorf("room %d of a killed prefill: %s %s; want %s", lost.rooms[i].number, got.Status, got.message, want)
		}
	}
	q.judge(t, beside, q.finish(t, beside))

	// This one has to wait for the prefill.
	early := &testCase{rooms: []room{{number: 502, send: [][]int32{{50}, {51, 52}}, aux: 2, to: []int32{85, 86, 87}, toAux: 21}}}
	p.receive(t, &early.rooms[0], startPatience.Seconds())
	p = p.at(startGroup(t, env, s, by, impl{}, p.prefill.port))
	p.judge(t, caseOf(t, s, "contiguous_chunks"), p.run(t, caseOf(t, s, "contiguous_chunks")))
	p.send(t, &early.rooms[0], patience.Seconds())
	if got := p.finish(t, early); got.Decode[0][0].Status != "Success" {
		t.Errorf("the room that waited for the prefill: %v", got)
	}
	q.prefill.stop(t)
	for i := range lost.rooms { // they are kept until then
		if _, err := p.decode[0].takeOf(ctx, "released", &lost.rooms[i].number); err != nil {
			t.Fatal(err)
		}
	}
	p.stop(t)
}
