package interop

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nixlkv/nixlkv/nixl"
)

// eachGoEngine runs a test of this library's ranks on both engines.
func eachGoEngine(t *testing.T, f func(t *testing.T, env environment, by impl)) {
	for _, engine := range []nixl.Kind{nixl.Native, nixl.Embedded} {
		t.Run(engine.String(), func(t *testing.T) { f(t, needEngine(t, engine), golang(engine)) })
	}
}

// knows waits until the prefill knows these decodes, and no others.
func (g *group) knows(t *testing.T, decodes ...*pair) {
	t.Helper()
	var want []string
	for _, p := range decodes {
		want = append(want, p.decode[0].ready.Agent)
	}
	slices.Sort(want)
	g.ranks[0].askUntil(t, "the table of decodes is as it should be", "rooms", map[string]any{"cmd": "rooms"}, func(e event) bool {
		return slices.Equal(e.Peers, want)
	})
}

// bootstrapped waits until the prefill has been told where a room's pages go.
func (p *pair) bootstrapped(t *testing.T, ctx context.Context, r *room) {
	t.Helper()
	if _, err := p.prefill.ranks[0].takeOf(ctx, "bootstrapped", &r.number); err != nil {
		t.Fatal(err)
	}
}

// succeeds runs a case and compares what arrived with what the prefill has.
func (p *pair) succeeds(t *testing.T, c *testCase) {
	t.Helper()
	p.begin(t, c)
	checkRooms(t, p, c)
}

// aRoom is a case of one room, in two chunks with a pause in between.
func aRoom(number uint64, page int32, gap time.Duration) *testCase {
	return &testCase{rooms: []room{{number: number, send: [][]int32{{page}, {page + 1}}, aux: 1, to: []int32{page, page + 1}, toAux: int(page), gap: gap}}}
}

// TestGoDecodeKilled: a decode is killed before a transfer, during one and after it. Its rooms
// fail at the prefill, the decode beside it goes on, and the prefill forgets it. A decode that is
// started anew at the same address takes its place.
func TestGoDecodeKilled(t *testing.T) {
	eachGoEngine(t, func(t *testing.T, env environment, by impl) {
		s := plain()
		s.decode = oneRank(s.decode[0])
		s.decode[0].ControlPort = freePorts.take(t)
		beside := plain()
		p := startPair(t, env, s, by, by)
		q := p.prefill.startDecode(t, beside, by)
		ctx := deadline(t)
		all := t // the decodes that are started anew live on
		for i, stage := range []string{"before", "during", "after"} {
			t.Run(stage, func(t *testing.T) {
				number := uint64(1000 * (i + 1))
				p.succeeds(t, aRoom(number, 0, 0))
				q.succeeds(t, aRoom(number+1, int32(10*i), 0))
				p.prefill.knows(t, p, q)

				c := aRoom(number+2, 20, time.Minute)
				if stage == "before" {
					c.rooms[0].send = [][]int32{nil, {20, 21}} // nothing is sent before the pause
				}
				if stage != "after" {
					p.begin(t, c)
					p.bootstrapped(t, ctx, &c.rooms[0])
				}
				goesOn := aRoom(number+3, int32(40+10*i), 200*time.Millisecond)
				q.begin(t, goesOn)
				killed := time.Now()
				p.decode[0].kill()
				if stage != "after" {
					got := done(t, ctx, p.prefill.ranks[0], c.rooms[0].number)
					if got.Status != "Failed" || !strings.Contains(got.message, "peer gone") {
						t.Errorf("the room of a killed decode: %s %s", got.Status, got.message)
					}
					t.Logf("the room failed %v after the decode was killed", time.Since(killed).Round(time.Millisecond))
				}
				checkRooms(t, q, goesOn)
				p.prefill.knows(t, q)
				p = p.prefill.startDecode(all, s, by)
			})
			if t.Failed() {
				return
			}
		}
		p.succeeds(t, aRoom(9000, 0, 0))
		p.prefill.knows(t, p, q)
		q.stopDecode(t)
		p.stop(t)
	})
}

// TestGoDecodeRestartedUnseen: the prefill has told the decode nothing when that is killed, so no
// socket and no transfer shows it. The decode that is started anew at its address does.
func TestGoDecodeRestartedUnseen(t *testing.T) {
	eachGoEngine(t, func(t *testing.T, env environment, by impl) {
		s := plain()
		s.decode = oneRank(s.decode[0])
		s.decode[0].ControlPort = freePorts.take(t)
		p := startPair(t, env, s, by, by)
		ctx := deadline(t)
		lost := aRoom(1, 20, time.Minute)
		lost.rooms[0].send = [][]int32{nil, {20, 21}}
		p.begin(t, lost)
		p.bootstrapped(t, ctx, &lost.rooms[0])
		p.decode[0].kill()
		again := p.prefill.startDecode(t, s, by)
		again.succeeds(t, aRoom(2, 0, 0))
		if got := done(t, ctx, p.prefill.ranks[0], 1); got.Status != "Failed" || !strings.Contains(got.message, "peer gone") {
			t.Errorf("the room of a killed decode: %s %s", got.Status, got.message)
		}
		p.prefill.knows(t, again)
		again.stop(t)
	})
}

// TestGoDecodeStopped: a decode that does not run for a while holds up nobody else, and its room
// goes on when it does.
func TestGoDecodeStopped(t *testing.T) {
	eachGoEngine(t, func(t *testing.T, env environment, by impl) {
		p := startPair(t, env, plain(), by, by)
		q := p.prefill.startDecode(t, plain(), by)
		p.succeeds(t, aRoom(1, 0, 0))
		q.succeeds(t, aRoom(2, 0, 0))
		held := aRoom(3, 10, 500*time.Millisecond)
		p.begin(t, held)
		p.bootstrapped(t, deadline(t), &held.rooms[0])
		resume := p.decode[0].pause(t)
		for i := range 20 {
			q.succeeds(t, aRoom(uint64(100+i), int32(10+2*i), 0))
		}
		resume()
		checkRooms(t, p, held)
		p.succeeds(t, aRoom(4, 20, 0))
		p.prefill.knows(t, p, q)
		q.stopDecode(t)
		p.stop(t)
	})
}

// TestGoOtherGeometry: a decode of another geometry registers while rooms are in flight. Its own
// rooms fail with the reason, the others go on.
func TestGoOtherGeometry(t *testing.T) {
	eachGoEngine(t, func(t *testing.T, env environment, by impl) {
		p := startPair(t, env, plain(), by, by)
		held := aRoom(1, 10, 5*time.Second)
		p.begin(t, held)
		ctx := deadline(t)
		p.bootstrapped(t, ctx, &held.rooms[0])
		other := plain()
		other.decode = oneRank(rankConfig{KV: regions(2, 256)})
		q := p.prefill.startDecode(t, other, by)
		for number := uint64(2); number < 4; number++ {
			c := aRoom(number, 0, 0)
			q.begin(t, c)
			for _, x := range []*process{q.decode[0], p.prefill.ranks[0]} {
				if got := done(t, ctx, x, number); got.Status != "Failed" || !strings.Contains(got.message, "decode registered fewer KV regions (2) than prefill (4)") {
					t.Errorf("%s: room %d: %s %s", x.name, number, got.Status, got.message)
				}
			}
		}
		checkRooms(t, p, held)
		q.stopDecode(t)
		p.stop(t)
	})
}
