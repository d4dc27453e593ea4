package kvsender

import (
	"testing"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/internal/wire"
	"github.com/nixlkv/nixlkv/registry"
)

// A decode whose metadata find no place is refused with the reason, and welcome when another has
// gone.
func TestPeerMetadataBytes(t *testing.T) {
	e := embeddedEngine(t)
	const greatest = 4096
	p := newPair(t, e, 25, WithLimits(Limits{MetadataBytes: greatest, PeerMetadataBytes: greatest}))
	first := p.d.registration()
	p.d.register(first)
	p.transfer(t, 1)
	if s := p.m.Stats(); s.PeerMetadataBytes != len(first.AgentMetadata) || len(first.AgentMetadata) == 0 {
		t.Fatalf("%d bytes of metadata, want %d", s.PeerMetadataBytes, len(first.AgentMetadata))
	}
	g := p.d.registration()
	g.Agent, g.AgentMetadata = "greedy", make([]byte, greatest)
	p.d.register(g)
	eventually(t, "the refusal", func() bool { _, info, _ := p.m.peers.Lookup("greedy"); return info.Phase == registry.Refused })
	s := open(t, p.m, 2)
	p.d.tell(2, []int32{1}, 0, func(m *wire.Metadata) { m.Agent = "greedy" })
	_, err := s.WaitBootstrapped(within(t))
	ok(t, err)
	ok(t, s.Begin(Plan{Pages: 1, Aux: Aux(0)}))
	_ = s.Finish([]int32{1}, nil)
	wantFailure(t, s, nil, nixlkv.ErrLimit, "NIXL metadata of 4096 bytes")
	p.d.toldOf(2, nixlkv.ErrLimit.Error())
	ok(t, s.Close())
	p.transfer(t, 3) // the first one lives

	p.m.peers.Forget(p.d.agent.Name())
	p.d.register(g)
	eventually(t, "the metadata to be taken", func() bool { return p.m.Stats().PeerMetadataBytes == greatest })
	// They are nobody's, and so make place for a decode that lives.
	eventually(t, "the end of the try", func() bool { _, info, _ := p.m.peers.Lookup("greedy"); return info.Phase == registry.Refused })
	p.d.register(first)
	p.transfer(t, 4)
}
