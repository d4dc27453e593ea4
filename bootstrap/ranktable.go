package bootstrap

import (
	"fmt"

	"github.com/nixlkv/nixlkv"
)

// rankTable is what the ranks of one prefill have registered. Not safe for concurrent use.
//
// It is bounded by the size that the first rank tells, which is bounded by limit.
type rankTable struct {
	limit int
	topo  Topology // of the first rank; meaningful once there is one
	ranks map[RankID]Endpoint
}

// add enters a validated rank, or replaces the address of one that is back after a restart.
// The first rank's values count. Ranks that disagree on sizes, layout or policy would make
// decodes write to the wrong places, so they are refused: nixlkv.ErrMismatch.
func (r *rankTable) add(info RankInfo) error {
	told := info.Topology()
	if len(r.ranks) == 0 {
		if n := told.Ranks(); n > r.limit {
			return fmt.Errorf("%w: prefill of %d ranks, at most %d", nixlkv.ErrLimit, n, r.limit)
		}
		r.topo = told
		r.ranks = map[RankID]Endpoint{info.ID(): info.Endpoint()}
		return nil
	}
	if err := r.agrees(told); err != nil {
		return err
	}
	// Values that some ranks do not tell are filled in by the first one that does.
	setIfZero(&r.topo.KVLayout, told.KVLayout)
	setIfZero(&r.topo.KVCacheDtype, told.KVCacheDtype)
	setIfZero(&r.topo.PrefillHTTPPort, told.PrefillHTTPPort)
	r.ranks[info.ID()] = info.Endpoint()
	return nil
}

func (r *rankTable) agrees(told Topology) error {
	first := r.topo
	for _, x := range []struct {
		what        string
		first, told int
	}{
		{"TP size", first.AttnTPSize, told.AttnTPSize}, {"CP size", first.AttnCPSize, told.AttnCPSize},
		{"DP size", first.DPSize, told.DPSize}, {"PP size", first.PPSize, told.PPSize},
	} {
		if x.first != x.told {
			return fmt.Errorf("%w: %s differs across prefill ranks: %d, then %d", nixlkv.ErrMismatch, x.what, x.first, x.told)
		}
	}
	keys, err := differingKeys(first.DSV41SpecLayout, told.DSV41SpecLayout)
	if err != nil {
		return err
	}
	switch {
	case len(keys) > 0:
		return fmt.Errorf("%w: DeepSeek-V4.1 DSpark layout differs across prefill ranks in %v", nixlkv.ErrMismatch, keys)
	case first.KVLayout != "" && told.KVLayout != "" && first.KVLayout != told.KVLayout:
		return fmt.Errorf("%w: KV layout differs across prefill ranks: %q, then %q",
			nixlkv.ErrMismatch, first.KVLayout, told.KVLayout)
	case first.DecodeAllocationPolicy != told.DecodeAllocationPolicy:
		return fmt.Errorf("%w: allocation policy differs across prefill ranks: %q, then %q",
			nixlkv.ErrMismatch, first.DecodeAllocationPolicy, told.DecodeAllocationPolicy)
	}
	return nil
}

// overruled names a value in which a rank differs from the first one without being refused,
// "" if there is none: SGLang's server lets the first rank speak for all.
func (r *rankTable) overruled(told Topology) string {
	first := r.topo
	switch {
	case first.PageSize != told.PageSize:
		return "page size"
	case told.KVCacheDtype != "" && first.KVCacheDtype != told.KVCacheDtype:
		return "KV cache dtype"
	case first.FollowBootstrapRoom != told.FollowBootstrapRoom:
		return "load balance method"
	case first.EnableDSACacheLayerSplit != told.EnableDSACacheLayerSplit:
		return "DSA cache layer split"
	case first.EnableKVCacheSharding != told.EnableKVCacheSharding:
		return "KV cache sharding"
	}
	return ""
}

// ready tells whether every rank has registered. Distinct ranks count, so one that registers
// twice does not stand for another.
func (r *rankTable) ready() error {
	if len(r.ranks) == 0 {
		return fmt.Errorf("%w: no rank has registered", nixlkv.ErrNotReady)
	}
	if n := r.topo.Ranks(); len(r.ranks) < n {
		return fmt.Errorf("%w: %d of %d ranks have registered", nixlkv.ErrNotReady, len(r.ranks), n)
	}
	return nil
}

func (r *rankTable) topology() (Topology, error) {
	return r.topo, r.ready()
}

// find gives a rank's address once all have registered.
func (r *rankTable) find(id RankID) (Endpoint, error) {
	if err := r.ready(); err != nil {
		return Endpoint{}, err
	}
	e, ok := r.ranks[id]
	if !ok {
		return Endpoint{}, fmt.Errorf("%w: dp %d cp %d tp %d pp %d of dp %d cp %d tp %d pp %d", nixlkv.ErrNoSuchRank,
			id.DP, id.CP, id.TP, id.PP, r.topo.DPSize, r.topo.AttnCPSize, r.topo.AttnTPSize, r.topo.PPSize)
	}
	return e, nil
}

func setIfZero[T comparable](v *T, to T) {
	var zero T
	if *v == zero {
		*v = to
	}
}
