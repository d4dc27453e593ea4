package interop

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/nixlkv/nixlkv/nixl"
)

// TestDecodeKilled: a decode that is killed between two chunks of a room fails that room. The
// prefill goes on with the decode beside it, and with the one that is started anew.
func TestDecodeKilled(t *testing.T) {
	env := need(t)
	r := env.releases[len(env.releases)-1]
	s := plain()
	p := startPair(t, env, s, golang(nixl.Native), sglang(r))
	q := p.prefill.startDecode(t, s, sglang(r))
	for _, x := range []*pair{p, q} {
		x.judge(t, caseOf(t, s, "equal_tp"), x.run(t, caseOf(t, s, "equal_tp")))
	}

	lost := &testCase{rooms: []room{{number: 500, send: [][]int32{{43}, {44}}, aux: 1, to: []int32{1, 2}, toAux: 1, gap: 2 * time.Second}}}
	p.begin(t, lost)
	ctx, cancel := context.WithTimeout(t.Context(), patience+reportPatience)
	defer cancel()
	if _, err := p.prefill.ranks[0].takeOf(ctx, "bootstrapped", &lost.rooms[0].number); err != nil {
		t.Fatal(err)
	}
	p.decode[0].kill()
	q.judge(t, caseOf(t, s, "three_rooms"), q.run(t, caseOf(t, s, "three_rooms")))
	e, err := p.prefill.ranks[0].takeOf(ctx, "done", &lost.rooms[0].number)
	if err != nil {
		t.Fatal(err)
	}
	if e.Status != "Failed" || e.Error != "KVTransferError" {
		t.Errorf("the room of a killed decode: %s %s", e.Status, e.Message)
	}

	again := p.prefill.startDecode(t, s, sglang(r))
	for _, x := range []*pair{q, again} {
		x.judge(t, caseOf(t, s, "contiguous_chunks"), x.run(t, caseOf(t, s, "contiguous_chunks")))
	}
	q.stopDecode(t)
	again.stop(t)
}

func caseOf(t *testing.T, s *setup, name string) *testCase {
	t.Helper()
	i := slices.IndexFunc(s.cases, func(c testCase) bool { return c.name == name })
	if i < 0 {
		t.Fatalf("%s has no case %s", s.name, name)
	}
	return &s.cases[i]
}
