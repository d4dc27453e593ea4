package kvsender

import (
	"fmt"
	"math"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/registry"
)

// deal says how the tokens of pages are dealt out to the ranks of a decode: token t of the
// sequence goes to rank t mod ranks, where the tokens of a rank lie side by side. The zero
// deal is whole pages.
type deal struct {
	srcTokens, dstTokens uint64 // of a page on either side
	ranks, rank          uint64
}

// whole says whether pages go whole.
func (d deal) whole() bool { return d.ranks == 0 }

// owned gives the first of n tokens that the rank keeps, and how many they are; start is
// where the tokens stand in the sequence.
func (d deal) owned(start, n uint64) (first, count uint64) {
	first = (d.rank + d.ranks - start%d.ranks) % d.ranks
	if first >= n {
		return 0, 0
	}
	return first, (n - first + d.ranks - 1) / d.ranks
}

// pages gives how many pages of the decode's list the rank's tokens reach into, up to the
// token end; both count from the prefix on, which is a multiple of ranks.
func (d deal) pages(prefix, end uint64) uint64 {
	_, n := d.owned(prefix, end)
	return (n + d.dstTokens - 1) / d.dstTokens
}

// planDeal plans tokens that lie together here and are dealt out among the decode's ranks:
// decode context parallelism (send_kvcache_dcp in SGLang's nixl/conn.py). A page of the decode
// holds as many tokens as one of the prefill, every ranks-th of the sequence.
//
// A draft's regions go whole to every rank: from SGLang 0.5.20 a page of them is as long as
// the pages of all ranks together. Decodes of 0.5.18 and 0.5.19 deal them out like the others,
// and tell so by pages that are no longer.
func planDeal(l *registry.Layout, p *registry.Peer) ([]segment, error) {
	if l.ShardKV {
		return nil, fmt.Errorf("%w: decode DCP %d with a prefill that shards its KV cache", nixlkv.ErrTopology, p.Ranks.DCP)
	}
	if err := checkPageSize(l); err != nil {
		return nil, err
	}
	if p.Ranks.DCPRank < 0 || p.Ranks.DCPRank >= p.Ranks.DCP || p.Ranks.DCP > math.MaxInt32 {
		return nil, fmt.Errorf("%w: DCP rank %d of %d", nixlkv.ErrTopology, p.Ranks.DCPRank, p.Ranks.DCP)
	}
	pairing, err := pairRegions(l, p)
	if err != nil {
		return nil, err
	}
	tokens, n := uint64(l.PageSize), uint64(p.Ranks.DCP)
	dealt := deal{srcTokens: tokens, dstTokens: tokens, ranks: n, rank: uint64(p.Ranks.DCPRank)}
	all := deal{srcTokens: tokens, dstTokens: tokens * n, ranks: 1}
	b := planner{l: l, p: p}
	err = b.each(pairing.at, func(i int, src, dst registry.Region) error {
		token, d := src.ItemLen/tokens, dealt
		if i >= len(l.KV)-l.DraftRegions && dst.ItemLen != src.ItemLen {
			d = all
		}
		if token == 0 || token*tokens != src.ItemLen || dst.ItemLen%d.dstTokens != 0 || dst.ItemLen/d.dstTokens != token {
			return fmt.Errorf("%w: PD DCP source/destination KV geometry differs: a page has %d bytes and %d tokens at the prefill, %d bytes and %d tokens at the decode",
				nixlkv.ErrStride, src.ItemLen, tokens, dst.ItemLen, d.dstTokens)
		}
		return b.add(src, dst, d, pair{src: src.Base, srcStride: token, dst: dst.Base, dstStride: token, len: token, rows: 1})
	})
	return b.segments, err
}

// needsRelayout says whether the decode deals out tokens that lie together here, as
// requires_dcp_relayout in common/conn.py does.
func needsRelayout(l *registry.Layout, p *registry.Peer) (bool, error) {
	src, dst := ranks(l.Ranks.DCP), ranks(p.Ranks.DCP)
	switch {
	case src == dst && l.Ranks.DCPRank == p.Ranks.DCPRank:
		return false, nil
	case src == dst:
		return false, fmt.Errorf("%w: PD peers must connect matching DCP ranks: prefill %d, decode %d of %d", nixlkv.ErrTopology, l.Ranks.DCPRank, p.Ranks.DCPRank, src)
	case src == 1 && hasFlatPages(l):
		return true, nil
	}
	return false, fmt.Errorf("%w: unsupported DCP topology: prefill %d, decode %d, MLA %t", nixlkv.ErrTopology, src, dst, hasFlatPages(l))
}

// checkPageSize refuses layouts whose pages cannot be addressed token by token.
func checkPageSize(l *registry.Layout) error {
	if l.PageSize < 1 || l.PageSize > math.MaxInt32 {
		return fmt.Errorf("%w: pages of %d tokens", nixlkv.ErrRegions, l.PageSize)
	}
	return nil
}
