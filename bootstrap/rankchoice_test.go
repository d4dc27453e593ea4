package bootstrap

import (
	"errors"
	"strings"
	"testing"

	"github.com/nixlkv/nixlkv"
)

func TestDecodeDPRank(t *testing.T) {
	const room = nixlkv.MaxRoom // 2^63-1
	for _, tc := range []struct {
		name  string
		topo  Topology
		given int
		force bool
		rank  int
		ok    bool
		err   error
	}{
		{"given", Topology{DPSize: 4, FollowBootstrapRoom: true}, 2, true, 2, true, nil},
		{"given, not there", Topology{DPSize: 4}, 4, false, 0, false, nixlkv.ErrNoSuchRank},
		{"given, single", Topology{}, 1, false, 0, false, nixlkv.ErrNoSuchRank},
		{"single", Topology{}, NoDPRank, true, 0, true, nil},
		{"following", Topology{DPSize: 4, FollowBootstrapRoom: true}, NoDPRank, false, 3, true, nil},
		{"following, forced", Topology{DPSize: 4, FollowBootstrapRoom: true}, NoDPRank, true, 0, false, nil},
		{"not following", Topology{DPSize: 4}, -7, false, 0, false, nil},
	} {
		rank, ok, err := DecodeDPRank(tc.topo, room, tc.given, tc.force)
		if rank != tc.rank || ok != tc.ok || !errors.Is(err, tc.err) {
			t.Errorf("%s: %d, %v, %v", tc.name, rank, ok, err)
		}
	}
}

func TestPrefillDPRank(t *testing.T) {
	for _, tc := range []struct {
		name     string
		p        Placement
		register bool
		err      error
	}{
		{"single", Placement{Room: 7, ForceQuery: true, Method: "round_robin"}, false, nil},
		{"given", Placement{Room: 7, DPSize: 4, DPRank: 1, Given: true, ForceQuery: true}, false, nil},
		{"following, in place", Placement{Room: 7, DPSize: 4, DPRank: 3}, false, nil},
		{"following, named", Placement{Room: 7, DPSize: 4, DPRank: 3, Method: FollowBootstrapRoom}, false, nil},
		{"following, elsewhere", Placement{Room: 7, DPSize: 4, DPRank: 2}, false, nixlkv.ErrTopology},
		{"forced, in place", Placement{Room: 7, DPSize: 4, DPRank: 3, ForceQuery: true}, true, nil},
		{"forced, elsewhere", Placement{Room: 7, DPSize: 4, DPRank: 2, ForceQuery: true}, true, nil},
		{"not following", Placement{Room: 7, DPSize: 4, DPRank: 3, Method: "round_robin"}, true, nil},
		{"no such rank", Placement{Room: 7, DPSize: 4, DPRank: 4}, false, nixlkv.ErrTopology},
		{"negative", Placement{Room: 7, DPSize: -1}, false, nixlkv.ErrTopology},
	} {
		register, err := PrefillDPRank(tc.p)
		if register != tc.register || !errors.Is(err, tc.err) {
			t.Errorf("%s: %v, %v", tc.name, register, err)
		}
	}
	_, err := PrefillDPRank(Placement{Room: 7, DPSize: 4, DPRank: 2})
	if !strings.Contains(err.Error(), "follow_bootstrap_room conflict") {
		t.Errorf("%v lacks the operators' text", err)
	}
}

// TestDPRankSidesAgree: a decode that does not ask finds the rank where the prefill serves the
// room, and a decode that asks finds it registered.
func TestDPRankSidesAgree(t *testing.T) {
	for _, method := range []string{"", FollowBootstrapRoom, "round_robin"} {
		for _, force := range []bool{false, true} {
			for room := range nixlkv.Room(9) {
				for rank := range 4 {
					topo := RankInfo{AttnDPSize: 4, LoadBalanceMethod: method}.Topology()
					register, err := PrefillDPRank(Placement{Room: room, DPSize: 4, DPRank: rank, ForceQuery: force, Method: method})
					if err != nil {
						continue // the room fails at once
					}
					got, known, err := DecodeDPRank(topo, room, NoDPRank, force)
					if err != nil || known == register || (known && got != rank) {
						t.Errorf("method %q, force %v, room %d: registered %v on %d, decode takes %d, %v, %v",
							method, force, room, register, rank, got, known, err)
					}
				}
			}
		}
	}
}
