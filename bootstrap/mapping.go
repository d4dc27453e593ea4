package bootstrap

import (
	"fmt"

	"github.com/nixlkv/nixlkv"
)

// Attention says how a model's KV cache is split over tensor parallel ranks.
type Attention uint8

// The kinds of KV cache.
const (
	// MHA: every TP rank holds its own KV heads (GQA and MQA included).
	MHA Attention = iota
	// MLA: every TP rank holds the same, whole pages.
	MLA
	// HybridMLA: an MLA pool next to linear attention state that is split like heads.
	HybridMLA
)

var attentionNames = [...]string{"MHA", "MLA", "hybrid MLA"}

// String gives the kind's name.
func (a Attention) String() string {
	if int(a) < len(attentionNames) {
		return attentionNames[a]
	}
	return fmt.Sprintf("Attention(%d)", uint8(a))
}

// Geometry is where a decode worker stands in its engine. Sizes count ranks; a size of 0
// means 1.
type Geometry struct {
	TP         int // attention TP size
	EngineRank int // the worker's TP rank in its engine; may exceed TP with DP attention
	CP         int // must be 1
	PP         int // must be 1 or the prefill's
	PPRank     int
	DCP        int // decode context parallel size
	Attention  Attention
	// AllCPRanks: take pages from every CP rank of the prefill, whose ranks must send
	// accordingly (SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER on both sides).
	AllCPRanks bool
}

// RankID names one rank of a prefill.
type RankID struct{ DP, CP, TP, PP int }

// Target is one prefill rank that a decode worker has to talk to, within the DP group that
// serves the room.
type Target struct {
	TP, CP, PP int
	// Dummy: the rank sends nothing to this worker and gets dummy metadata, so that its own
	// side of the room does not wait for a decode.
	Dummy bool
}

// In names the target's rank in a DP group.
func (t Target) In(dp int) RankID { return RankID{DP: dp, CP: t.CP, TP: t.TP, PP: t.PP} }

// RankMap says which prefill ranks a decode worker talks to.
type RankMap struct {
	// Targets in the order to ask the bootstrap server and to connect in: higher PP stages
	// first, since a stage waits for those after it.
	Targets []Target
	// Destinations is the number of decode workers that send metadata for a room to each
	// target (required_dst_info_num).
	Destinations int
	// Responses is the number of targets that must tell Success: all but the dummies.
	Responses int
}

// MapRanks works out which prefill ranks a decode worker needs, as SGLang's decode does
// (CommonKVManager._resolve_rank_mapping; with sharding as of 0.5.23). It depends on nothing
// but its arguments, and both sides rely on its numbers.
//
// Errors wrap nixlkv.ErrTopology, or what Topology.Validate gives. Unlike SGLang it refuses
// TP sizes of which neither divides the other: there some prefill ranks would be asked by
// nobody, or ranks be asked that do not exist.
func MapRanks(t Topology, g Geometry) (RankMap, error) {
	if err := t.Validate(); err != nil {
		return RankMap{}, err
	}
	if err := checkGeometry(t, g); err != nil {
		return RankMap{}, err
	}
	tp, err := mapTP(t, g)
	if err != nil {
		return RankMap{}, err
	}
	cps := targetCPs(t, g)
	firstPP, lastPP := targetPPs(t, g)

	m := RankMap{Destinations: tp.destinations}
	m.Targets = make([]Target, 0, cps*(tp.last-tp.first+1)*(lastPP-firstPP+1))
	for cp := range cps {
		for r := tp.first; r <= tp.last; r++ {
			for pp := lastPP; pp >= firstPP; pp-- {
				dummy := tp.onlyFirst && r != tp.first
				m.Targets = append(m.Targets, Target{TP: r, CP: cp, PP: pp, Dummy: dummy})
				if !dummy {
					m.Responses++
				}
			}
		}
	}
	return m, nil
}

// checkGeometry refuses what does not depend on TP.
func checkGeometry(t Topology, g Geometry) error {
	switch {
	case g.TP < 0 || g.CP < 0 || g.PP < 0 || g.DCP < 0 || g.EngineRank < 0:
		return fmt.Errorf("%w: negative size or rank of the decode: %+v", nixlkv.ErrTopology, g)
	case g.PPRank < 0 || g.PPRank >= orOne(g.PP):
		return fmt.Errorf("%w: decode PP rank %d of %d", nixlkv.ErrTopology, g.PPRank, orOne(g.PP))
	case int(g.Attention) >= len(attentionNames):
		return fmt.Errorf("%w: %v", nixlkv.ErrTopology, g.Attention)
	case orOne(g.CP) != 1:
		return fmt.Errorf("%w: decode CP size %d, must be 1", nixlkv.ErrTopology, g.CP)
	case orOne(g.PP) != 1 && orOne(g.PP) != orOne(t.PPSize):
		return fmt.Errorf("%w: decode PP size %d, must be 1 or the prefill's %d", nixlkv.ErrTopology, g.PP, orOne(t.PPSize))
	}
	if orOne(g.DCP) == 1 {
		return nil
	}
	switch {
	case g.Attention == MHA:
		return fmt.Errorf("%w: decode DCP size %d needs an MLA or hybrid MLA pool", nixlkv.ErrTopology, g.DCP)
	case orOne(t.AttnCPSize) != 1:
		return fmt.Errorf("%w: decode DCP size %d needs prefill CP size 1, found %d",
			nixlkv.ErrTopology, g.DCP, t.AttnCPSize)
	case t.EnableKVCacheSharding:
		return fmt.Errorf("%w: decode DCP size %d with a prefill that shards its KV cache", nixlkv.ErrTopology, g.DCP)
	}
	return nil
}

// tpTargets are the prefill TP ranks first to last.
type tpTargets struct {
	first, last  int
	onlyFirst    bool // the others are dummies
	destinations int
}

func mapTP(t Topology, g Geometry) (tpTargets, error) {
	p, d := orOne(t.AttnTPSize), orOne(g.TP)
	r := g.EngineRank % d
	if g.Attention == MLA && t.EnableKVCacheSharding && orOne(t.AttnCPSize) == 1 {
		// The pages are spread over all TP ranks: everybody takes from everybody.
		if p != d {
			return tpTargets{}, fmt.Errorf("%w: MLA KV cache sharding needs equal TP sizes, prefill has %d, decode %d",
				nixlkv.ErrTopology, p, d)
		}
		return tpTargets{first: 0, last: p - 1, destinations: d}, nil
	}
	switch {
	case d >= p && d%p == 0:
		n := d / p
		return tpTargets{first: r / n, last: r / n, destinations: n}, nil
	case p > d && p%d == 0:
		n := p / d
		return tpTargets{first: r * n, last: (r+1)*n - 1, onlyFirst: g.Attention == MLA, destinations: 1}, nil
	default:
		return tpTargets{}, fmt.Errorf("%w: prefill TP size %d and decode TP size %d, one must divide the other",
			nixlkv.ErrTopology, p, d)
	}
}

// targetCPs gives how many of the prefill's CP ranks send: the first, or all.
func targetCPs(t Topology, g Geometry) int {
	if g.AllCPRanks || g.Attention == HybridMLA || t.EnableDSACacheLayerSplit || t.EnableKVCacheSharding {
		return orOne(t.AttnCPSize)
	}
	return 1
}

// targetPPs gives the first and last prefill PP stage that send: the worker's own, or all.
func targetPPs(t Topology, g Geometry) (first, last int) {
	if orOne(g.PP) == orOne(t.PPSize) {
		return g.PPRank, g.PPRank
	}
	return 0, orOne(t.PPSize) - 1
}
