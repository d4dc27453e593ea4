package kvsender

import (
	"fmt"
	"math"
	"slices"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/registry"
)

// A Mamba slot is a tensor [outer, dim, …] of which TP shards the dimension dim. Between
// different TP sizes a prefill rank has part of a decode's shard, or all of several.

// dimBlock is n of the sharded dimension, from src here and dst there.
type dimBlock struct{ src, dst, n uint64 }

// sliced says whether both sides tell the dimension that is sharded.
func (s *stateSides) sliced() bool {
	return s.dims && slices.ContainsFunc(s.src, func(t registry.StateTensor) bool { return t.Dim != 0 })
}

// addMambaSlices plans the share of a slot that this rank has of the decode's, a pair for
// every block of the dimension, a row for each of the outer ones
// (compute_mamba_state_slice_byte_blocks in SGLang's disaggregation/utils.py).
func (c *stateComponent) addMambaSlices(s *stateSides, at [][2]int) error {
	for i := range s.src {
		if s.src[i].Dim == 0 {
			return fmt.Errorf("%w: Replicated Mamba PD state transfer currently requires matching prefill/decode attention TP sizes", nixlkv.ErrTopology)
		}
	}
	if err := s.checkServes(); err != nil {
		return err
	}
	for _, ij := range at {
		src, dst := &s.src[ij[0]], &s.dst[ij[1]]
		if src.Absent() || dst.absent() {
			continue
		}
		q, err := s.mambaRow(src, dst)
		if err != nil {
			return fmt.Errorf("prefill tensor %d to decode tensor %d: %w", ij[0], ij[1], err)
		}
		blocks, err := s.mambaBlocks(src, dst)
		if err != nil {
			return fmt.Errorf("prefill tensor %d to decode tensor %d: %w", ij[0], ij[1], err)
		}
		unit := q.srcRow / uint64(src.Dim)
		for _, b := range blocks {
			part := q
			part.src, part.dst, part.len = q.src+b.src*unit, q.dst+b.dst*unit, b.n*unit
			if err := c.add(s, ij, part); err != nil {
				return err
			}
		}
	}
	return nil
}

// mambaRow gives the pair of two tensors without its blocks: where slots and rows are.
func (s *stateSides) mambaRow(src *registry.StateTensor, dst *stateTarget) (pair, error) {
	outer := max(src.OuterCount, 1)
	for _, n := range []int{src.Dim, dst.dim, outer} {
		if n < 1 || n > math.MaxInt32 {
			return pair{}, fmt.Errorf("%w: a slot of %d rows of dimension %d at the prefill, %d at the decode", nixlkv.ErrRegions, outer, src.Dim, dst.dim)
		}
	}
	rows := uint64(outer)
	srcDim, dstDim := rows*uint64(src.Dim), rows*uint64(dst.dim)
	if src.ItemLen%srcDim != 0 || dst.itemLen%dstDim != 0 || src.ItemLen/srcDim != dst.itemLen/dstDim {
		return pair{}, fmt.Errorf("%w: %d rows of dimension %d in %d bytes at the prefill, of %d in %d bytes at the decode",
			nixlkv.ErrStride, outer, src.Dim, src.ItemLen, dst.dim, dst.itemLen)
	}
	return pair{
		src: src.Base, srcStride: src.ItemLen, srcRow: src.ItemLen / rows,
		dst: dst.base, dstStride: dst.itemLen, dstRow: dst.itemLen / rows, rows: rows,
	}, nil
}

// mambaBlocks gives what is copied of a row: a shard of this rank's, of which the decode's
// has several or a part. A convolution over query, key and value has three groups, each
// sharded by itself; they tell their whole lengths.
func (s *stateSides) mambaBlocks(src *registry.StateTensor, dst *stateTarget) ([]dimBlock, error) {
	p, d := uint64(ranks(s.l.Ranks.TP)), uint64(ranks(s.p.Ranks.TP))
	from, to := uint64(s.l.Ranks.EngineRank)%p, uint64(s.p.Ranks.EngineRank)%d
	whole := uint64(src.Dim) * p
	if whole != uint64(dst.dim)*d {
		return nil, fmt.Errorf("%w: dimension %d of TP %d at the prefill, %d of TP %d at the decode", nixlkv.ErrRegions, src.Dim, p, dst.dim, d)
	}
	groups := []int{src.Dim * int(p)}
	sum := uint64(0)
	for _, n := range src.ConvGroups {
		if n < 1 || n > math.MaxInt32 {
			return nil, fmt.Errorf("%w: a convolution group of %d", nixlkv.ErrRegions, n)
		}
		sum += uint64(n)
	}
	if len(src.ConvGroups) > 0 && sum == whole {
		groups = src.ConvGroups
	}
	blocks := make([]dimBlock, 0, len(groups))
	var srcAt, dstAt uint64
	for _, g := range groups {
		n := uint64(g)
		if n%max(p, d) != 0 {
			return nil, fmt.Errorf("%w: a convolution group of %d does not divide by TP %d", nixlkv.ErrRegions, g, max(p, d))
		}
		a, b := n/p, n/d
		block := dimBlock{src: srcAt, dst: dstAt, n: min(a, b)}
		if p > d {
			block.dst += from % (p / d) * a
		} else {
			block.src += to % (d / p) * b
		}
		blocks = append(blocks, block)
		srcAt, dstAt = srcAt+a, dstAt+b
	}
	return blocks, nil
}
