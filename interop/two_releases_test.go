package interop

import (
	"testing"

	"github.com/nixlkv/nixlkv/nixl"
)

// TestTwoReleasesAtOnce: one prefill of this library's serves a decode of the oldest and one of
// the newest release, room beside room. One is told of success by notifications, the other
// by KV_STATUS.
func TestTwoReleasesAtOnce(t *testing.T) {
	env := need(t)
	oldest, newest := env.releases[0], env.releases[len(env.releases)-1]
	if oldest == newest {
		t.Skip("skip: SGLANG_SRC holds one release")
	}
	s := plain()
	p := startPair(t, env, s, golang(nixl.Native), sglang(oldest))
	q := p.prefill.startDecode(t, s, sglang(newest))
	for i := range s.cases {
		// The aborts of the one are put between good rooms of the other.
		of, beside := &s.cases[i], other(s.cases[(i+1)%len(s.cases)])
		t.Run(of.name, func(t *testing.T) {
			p.begin(t, of)
			q.begin(t, beside)
			got, gotBeside := p.finish(t, of), q.finish(t, beside)
			p.judge(t, of, got)
			q.judge(t, beside, gotBeside)
		})
		if p.broken() || q.broken() {
			t.Fatal("a rank has ended")
		}
	}
	q.stopDecode(t)
	p.stop(t)
}

// other is the same case with rooms of other numbers.
func other(c testCase) *testCase {
	rooms := make([]room, len(c.rooms))
	for i, r := range c.rooms {
		r.number ^= 1 << 20
		rooms[i] = r
	}
	c.rooms = rooms
	return &c
}

// TestOtherRooms: no room of a case is one of another's beside it.
func TestOtherRooms(t *testing.T) {
	s := plain()
	seen := map[uint64]string{}
	for i := range s.cases {
		for _, r := range s.cases[i].rooms {
			seen[r.number] = s.cases[i].name
		}
	}
	for _, c := range s.cases {
		for _, r := range other(c).rooms {
			if name, ok := seen[r.number]; ok {
				t.Errorf("room %d of %s is one of %s", r.number, c.name, name)
			}
		}
	}
}
