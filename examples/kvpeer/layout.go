package main

import (
	"cmp"
	"fmt"

	"github.com/nixlkv/nixlkv/registry"
)

// newLayout describes a rank's memory, model and place to the library.
func newLayout(c *config, m *memory) (*registry.Layout, error) {
	l := &registry.Layout{
		PageSize: c.KV.PageSize, KVDtype: c.KV.Dtype,
		KVHeads: c.KV.heads(), TotalKVHeads: c.KV.TotalKVHeads,
		GPU: uint64(c.KVArgs.GPU), KVLayout: c.KVArgs.KVLayout, SWALayout: c.KVArgs.SWALayout,
		Ranks: c.ranks(),
		MLA:   c.IsMLA && !c.KVArgs.HybridMLA, HybridMLA: c.KVArgs.HybridMLA,
		StartLayer: c.KVArgs.StartLayer, CompressionRatios: c.KVArgs.CompressionRatios,
		DraftRegions: c.KVArgs.DraftEntries, ShardKV: c.Parallel.ShardKV, SplitLayers: c.Parallel.DSALayerSplit,
	}
	if c.KVArgs.EndLayer != nil {
		l.EndLayer = *c.KVArgs.EndLayer
	}
	for i, s := range m.kv {
		r := registry.Region{Base: s.addr(), Len: uint64(len(s.bytes())), ItemLen: uint64(s.itemLen),
			LayerID: entry(c.KV.LayerIDs, i, registry.NoLayer), Kind: registry.VRAM}
		if c.KV.MemKinds != nil {
			kind, err := registry.ParseKind(c.KV.MemKinds[i])
			if err != nil {
				return nil, fmt.Errorf("%w: mem_kinds: %w", errConfig, err)
			}
			r.Kind = kind
		}
		l.KV = append(l.KV, r)
	}
	for _, s := range m.aux {
		l.Aux = append(l.Aux, registry.AuxBuffer{Base: s.addr(), Len: uint64(len(s.bytes())), ItemLen: uint64(s.itemLen)})
	}
	for i, component := range m.state {
		l.State = append(l.State, newComponent(c.KV.State[i], component))
	}
	return l, l.Validate()
}

func newComponent(c stateConfig, tensors []slotted) registry.StateComponent {
	s := registry.StateComponent{Type: registry.StateType(c.Type)}
	for j, t := range tensors {
		s.Tensors = append(s.Tensors, registry.StateTensor{
			Base: t.addr(), Len: uint64(len(t.bytes())), ItemLen: uint64(t.itemLen),
			LayerID: entry(c.LayerIDs, j, registry.NoLayer),
			Dim:     entry(c.DimPerTensor, j, 0), OuterCount: entry(c.SliceOuterCounts, j, 0),
			ConvGroups: entry(c.ConvShardGroups, j, nil),
		})
	}
	return s
}

// entry gives an entry of a list that may be absent.
func entry[T any](list []T, i int, absent T) T {
	if len(list) == 0 {
		return absent
	}
	return list[i]
}

// heads gives the KV heads of the rank; where the model's are told, these need not be.
func (k *kvConfig) heads() int {
	switch {
	case k.KVHeads != nil:
		return *k.KVHeads
	case k.TotalKVHeads > 0:
		return 0
	}
	return 1
}

func (c *config) ranks() registry.Ranks {
	p := c.Parallel
	pp := p.PPRank
	if c.KVArgs.PPRank != nil {
		pp = *c.KVArgs.PPRank
	}
	systemDP := cmp.Or(p.SystemDPSize, p.DPSize)
	if p.EnableDPAttention {
		systemDP = 1 // dp_size is then another name of attn_dp_size
	}
	return registry.Ranks{
		EngineRank: c.KVArgs.EngineRank, ServerTP: c.TPSize,
		TP: p.AttnTPSize, TPRank: p.AttnTPRank,
		CP: p.AttnCPSize, CPRank: p.AttnCPRank,
		PP: p.PPSize, PPRank: pp,
		DP: p.AttnDPSize, DPRank: p.AttnDPRank,
		SystemDP: systemDP, SystemDPRank: c.KVArgs.SystemDPRank,
		DCP: p.AttnDCPSize, DCPRank: p.AttnDCPRank,
	}
}
