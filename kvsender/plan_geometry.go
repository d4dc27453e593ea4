package kvsender

import (
	"fmt"
	"strings"

	"github.com/nixlkv/nixlkv/registry"
)

// GeometryError says why KV pages cannot go from this rank to a decode rank: the geometries of
// the two do not fit, or not in a way that can be served. The decode is refused when it
// registers; its rooms fail with this error, those of other decodes go on.
type GeometryError struct {
	Agent           string // NIXL agent of the decode
	Prefill, Decode string // what each side is, in a line
	Err             error  // wraps ErrRegions, ErrStride, ErrTopology, … of package nixlkv
}

// Error names both geometries.
func (e *GeometryError) Error() string {
	return fmt.Sprintf("decode %q: %v (prefill: %s; decode: %s)", e.Agent, e.Err, e.Prefill, e.Decode)
}

// Unwrap gives Err.
func (e *GeometryError) Unwrap() error { return e.Err }

// prefillGeometry and decodeGeometry say in one line what an operator compares when two
// sides do not fit.
func prefillGeometry(l *registry.Layout) string {
	k := l.Ranks
	attention := fmt.Sprintf("MHA of %d KV heads", totalHeads(l))
	switch {
	case l.HybridMLA:
		attention = "hybrid MLA"
	case l.MLA:
		attention = "MLA"
	}
	return fmt.Sprintf("%s, %d tokens a page, %s, TP rank %d of %d, PP rank %d of %d from layer %d, DCP rank %d of %d",
		describeRegions(l.KV), l.PageSize, attention, k.TPRank, ranks(k.TP), k.PPRank, ranks(k.PP), l.StartLayer, k.DCPRank, ranks(k.DCP))
}

func decodeGeometry(p *registry.Peer) string {
	k := p.Ranks
	return fmt.Sprintf("%s, engine rank %d, TP %d, DCP rank %d of %d",
		describeRegions(p.KV), k.EngineRank, ranks(k.TP), k.DCPRank, ranks(k.DCP))
}

// describeRegions tells number, kinds, page sizes and pages of regions.
func describeRegions(regions []registry.Region) string {
	if len(regions) == 0 {
		return "no KV regions"
	}
	first := regions[0]
	minLen, maxLen := first.ItemLen, first.ItemLen
	minPages, maxPages := first.Pages(), first.Pages()
	var kinds [4]int // the last one for what has no name
	ids := 0
	for _, r := range regions {
		minLen, maxLen = min(minLen, r.ItemLen), max(maxLen, r.ItemLen)
		minPages, maxPages = min(minPages, r.Pages()), max(maxPages, r.Pages())
		kinds[min(int(r.Kind), 3)]++
		if r.LayerID >= 0 {
			ids++
		}
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%d regions", len(regions))
	for k, name := range []string{registry.Unset: "of no kind", registry.VRAM: "VRAM", registry.DRAM: "DRAM", 3: "of unknown kind"} {
		if kinds[k] > 0 {
			fmt.Fprintf(&b, ", %d %s", kinds[k], name)
		}
	}
	fmt.Fprintf(&b, ", %s pages of %s bytes, %d layer ids", between(minPages, maxPages), between(minLen, maxLen), ids)
	return b.String()
}

func between(lo, hi uint64) string {
	if lo == hi {
		return fmt.Sprint(lo)
	}
	return fmt.Sprintf("%d to %d", lo, hi)
}
