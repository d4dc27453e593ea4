package kvsender

import (
	"fmt"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/registry"
)

// planPages plans whole pages: the bytes are the source's item length, each side has its own
// stride. All regions are of one kind on either side, and the decode has no fewer than this
// rank.
func planPages(l *registry.Layout, p *registry.Peer, src, dst registry.Kind) ([]segment, error) {
	at, err := pairRegions(l, p)
	if err != nil {
		return nil, err
	}
	s := segment{
		pairs:   make([]pair, 0, len(at)),
		srcKind: src, srcDev: deviceOf(src, l.GPU),
		dstKind: dst, dstDev: deviceOf(dst, p.GPU),
	}
	for i, j := range at {
		if err := s.addPages(l.KV[i], p.KV[j]); err != nil {
			return nil, fmt.Errorf("prefill region %d to decode region %d: %w", i, j, err)
		}
	}
	return []segment{s}, nil
}

// addPages adds the pair that copies whole pages between two regions.
func (s *segment) addPages(src, dst registry.Region) error {
	switch {
	case dst.ItemLen < src.ItemLen:
		return fmt.Errorf("%w: a page has %d bytes at the prefill, %d at the decode", nixlkv.ErrStride, src.ItemLen, dst.ItemLen)
	case src.Pages() == 0 || dst.Pages() == 0:
		return fmt.Errorf("%w: no pages: prefill %d of %d bytes, decode %d of %d bytes",
			nixlkv.ErrRegions, src.Pages(), src.ItemLen, dst.Pages(), dst.ItemLen)
	}
	s.limitPages(src.Pages(), dst.Pages())
	s.pairs = append(s.pairs, pair{
		src: src.Base, srcStride: src.ItemLen,
		dst: dst.Base, dstStride: dst.ItemLen,
		len: src.ItemLen, rows: 1,
	})
	return nil
}

// limitPages narrows the pages that can be named to what a further pair has. It is called
// before the pair is appended.
func (s *segment) limitPages(src, dst uint64) {
	if len(s.pairs) == 0 {
		s.srcPages, s.dstPages = src, dst
		return
	}
	s.srcPages, s.dstPages = min(s.srcPages, src), min(s.dstPages, dst)
}
