package interop

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/nixlkv/nixlkv/nixl"
)

// TestTwoPrefillsAtOnce: one decode of this library's takes rooms from a prefill of the oldest and
// one of the newest release, room beside room. Then each number is used again at the other.
func TestTwoPrefillsAtOnce(t *testing.T) {
	env := need(t)
	oldest, newest := env.releases[0], env.releases[len(env.releases)-1]
	if oldest == newest {
		t.Skip("skip: SGLANG_SRC holds one release")
	}
	const rooms = 30
	kv := regions(4, 1024)
	kv.NumSlots, kv.AuxSlots = 2*3*rooms, 2*rooms
	s := func(seed string) *setup {
		return &setup{name: "two_prefills", prefill: oneRank(rankConfig{KV: kv, FillSeed: seed}), decode: oneRank(rankConfig{KV: kv})}
	}
	p := startPair(t, env, s("old"), sglang(oldest), golang(nixl.Native))
	q := p.at(startGroup(t, env, s("new"), sglang(newest), impl{}, freePorts.take(t)))
	for wave := range 2 {
		t.Run(fmt.Sprintf("wave_%d", wave), func(t *testing.T) {
			at := [2]*pair{p, q}
			if wave == 1 {
				at = [2]*pair{q, p}
			}
			var of [2]testCase
			for i := range rooms {
				n := int32(3 * (rooms*wave + i))
				r := room{
					number: uint64(i), to: []int32{n + 2, n, n + 1}, toAux: rooms*wave + i,
					send: [][]int32{{n}, {n + 1, n + 2}}, aux: i, gap: time.Duration(i%7) * time.Millisecond,
				}
				of[i%2].rooms = append(of[i%2].rooms, r)
				at[i%2].open(t, &r, map[string]float64{"prefill": patience.Seconds(), "decode": patience.Seconds()})
			}
			for side := range at {
				checkRooms(t, at[side], &of[side])
			}
		})
		if p.broken() || q.broken() {
			t.Fatal("a rank has ended")
		}
	}
	q.prefill.stop(t)
	p.stop(t)
}

// checkRooms: what a prefill has sent is what lies at the decode.
func checkRooms(t *testing.T, p *pair, c *testCase) {
	t.Helper()
	got := p.finish(t, c)
	for i, r := range c.rooms {
		kv, aux := digests(t, p.prefill.ranks[0], slices.Concat(r.send...), r.aux)
		if d := got.Decode[0][i]; d.Status != "Success" || d.KV != kv || d.Aux != aux {
			t.Errorf("room %d from %s: %v %s; want KV %s, aux %s", r.number, p.prefill.by, d.key(), d.message, kv, aux)
		}
		if got.Prefill[0][i].Status != "Success" {
			t.Errorf("room %d at %s: %s %s", r.number, p.prefill.by, got.Prefill[0][i].Status, got.Prefill[0][i].message)
		}
	}
}
