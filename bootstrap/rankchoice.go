package bootstrap

import (
	"fmt"

	"github.com/nixlkv/nixlkv"
)

// NoDPRank stands for a request that does not say which DP rank serves it.
const NoDPRank = -1

// DecodeDPRank says, on the decode side, which DP rank of the prefill serves a room: the one
// that the request gives, else 0 if there is only one, else room % DPSize if the prefill
// follows rooms and forceQuery is off (SGLang: DecodePreallocQueue._resolve_prefill_dp_rank,
// SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK).
//
// ok false means that only the prefill knows: ask Client.QueryDPRanks, again and again, since
// the prefill registers the rank when it gets to the request. A given rank (NoDPRank or any
// negative number for none) that the prefill does not have wraps nixlkv.ErrNoSuchRank.
func DecodeDPRank(t Topology, room nixlkv.Room, given int, forceQuery bool) (rank int, ok bool, err error) {
	size := orOne(t.DPSize)
	switch {
	case given >= size:
		return 0, false, fmt.Errorf("%w: the request gives DP rank %d, prefill has %d", nixlkv.ErrNoSuchRank, given, size)
	case given >= 0:
		return given, true, nil
	case size == 1:
		return 0, true, nil
	case t.FollowBootstrapRoom && !forceQuery:
		return int(uint64(room) % uint64(size)), true, nil
	default:
		return 0, false, nil
	}
}

// Placement is where a prefill serves a room.
type Placement struct {
	Room       nixlkv.Room
	DPRank     int // this worker's
	DPSize     int // 0 means 1
	Given      bool
	ForceQuery bool   // as in DecodeDPRank
	Method     string // load balance method; "": FollowBootstrapRoom
}

// PrefillDPRank says, on the prefill side, whether the room's DP rank has to be registered
// with Client.RegisterDPRank, because decodes cannot know it (SGLang: CommonKVSender, as of
// 0.5.22; before, a following prefill with forced queries registered only the rooms that sat
// elsewhere, and a decode with forced queries asked for the others in vain).
//
// A prefill that follows rooms but serves this one on another rank would never meet its
// decode: the error wraps nixlkv.ErrTopology and fails the room.
func PrefillDPRank(p Placement) (register bool, err error) {
	size := orOne(p.DPSize)
	if size < 0 || p.DPRank < 0 || p.DPRank >= size {
		return false, fmt.Errorf("%w: prefill DP rank %d of %d", nixlkv.ErrTopology, p.DPRank, size)
	}
	if size == 1 || p.Given {
		return false, nil
	}
	if p.ForceQuery || (p.Method != "" && p.Method != FollowBootstrapRoom) {
		return true, nil
	}
	if implied := int(uint64(p.Room) % uint64(size)); implied != p.DPRank {
		return false, fmt.Errorf("%w: follow_bootstrap_room conflict: room %d implies DP rank %d, but is served by %d",
			nixlkv.ErrTopology, p.Room, implied, p.DPRank)
	}
	return false, nil
}
