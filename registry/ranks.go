package registry

import (
	"cmp"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/internal/wire"
)

// maxRanks bounds every size, and the ranks that one server numbers. It is the bootstrap
// server's bound too.
const maxRanks = 1 << 16

// Normalized gives the ranks with every size told: 1 for those that are 0, TP for ServerTP.
func (r Ranks) Normalized() Ranks {
	for _, size := range []*int{&r.TP, &r.CP, &r.PP, &r.DP, &r.SystemDP, &r.DCP} {
		*size = cmp.Or(*size, 1)
	}
	r.ServerTP = cmp.Or(r.ServerTP, r.TP)
	return r
}

// PrefillRank gives the number by which this rank names itself in KV_STATUS and ABORT_ACK
// (CommonKVManager._prefill_unique_rank). It is unique within a DP group.
func (r Ranks) PrefillRank() int {
	r = r.Normalized()
	return wire.PrefillPosition{
		TPRank: r.TPRank, PPSize: r.PP, PPRank: r.PPRank, CPSize: r.CP, CPRank: r.CPRank,
	}.Rank()
}

// SourceRank gives the number by which this rank names itself in notifications
// (NixlKVManager.transfer_source_rank up to 0.5.22).
func (r Ranks) SourceRank() int {
	r = r.Normalized()
	return wire.SourceRank(r.PPRank, r.ServerTP, r.EngineRank)
}

// validate checks sizes, then ranks, then how they go together; what depends on something
// that is wrong already is not checked.
// The engine rank is only a name: SGLang starts, and sends, with one that does not fit the
// attention TP rank, and so does this library.
func (r Ranks) validate(p *problems) {
	before := p.count()
	for _, s := range []struct {
		name string
		size int
	}{
		{"TP", r.TP}, {"ServerTP", r.ServerTP}, {"CP", r.CP}, {"PP", r.PP},
		{"DP", r.DP}, {"SystemDP", r.SystemDP}, {"DCP", r.DCP},
	} {
		if s.size < 0 || s.size > maxRanks {
			p.add("Ranks."+s.name, nixlkv.ErrTopology, "expected 0 to %d, got %d", maxRanks, s.size)
		}
	}
	if p.count() > before {
		return
	}
	n := r.Normalized()
	for _, s := range []struct {
		name       string
		rank, size int
	}{
		{"TPRank", n.TPRank, n.TP}, {"CPRank", n.CPRank, n.CP}, {"PPRank", n.PPRank, n.PP},
		{"DPRank", n.DPRank, n.DP}, {"SystemDPRank", n.SystemDPRank, n.SystemDP},
		{"DCPRank", n.DCPRank, n.DCP}, {"EngineRank", n.EngineRank, maxRanks},
	} {
		if s.rank < 0 || s.rank >= s.size {
			p.add("Ranks."+s.name, nixlkv.ErrTopology, "expected 0 to %d, got %d", s.size-1, s.rank)
		}
	}
	// Each size fits 17 bits, so the product fits 51.
	if all := int64(n.TP) * int64(n.CP) * int64(n.PP); all > maxRanks {
		p.add("Ranks", nixlkv.ErrTopology, "expected at most %d ranks in a DP group, got TP %d × CP %d × PP %d", maxRanks, n.TP, n.CP, n.PP)
	}
	if n.ServerTP%n.TP != 0 {
		p.add("Ranks.ServerTP", nixlkv.ErrTopology, "expected a multiple of TP %d, got %d", n.TP, n.ServerTP)
	}
}
