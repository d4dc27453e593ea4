package registry

import (
	"fmt"

	"github.com/nixlkv/nixlkv"
)

// defaultMetadataBytes is what the agent metadata of all peers may take.
const defaultMetadataBytes = 1 << 30

// What follows is called with the table's lock held, except MetadataBytes.

// keep makes a peer the entry's, nil is none, and counts its agent metadata.
func (t *Table[P]) keep(e *entry[P], p *Peer) {
	t.metadata += p.metadataLen() - e.peer.metadataLen()
	e.peer = p
}

func (p *Peer) metadataLen() int {
	if p == nil {
		return 0
	}
	return len(p.AgentMetadata)
}

// admit makes place for the agent metadata of a peer that registers. Refused and stale peers
// without rooms go for it, those that were last seen longest ago first; what lives stays.
func (t *Table[P]) admit(p *Peer, d *dropping[P]) error {
	known := t.entries[p.Agent]
	more := p.metadataLen()
	if known != nil {
		more -= known.peer.metadataLen()
	}
	if t.metadata+more <= t.metadataLimit {
		return nil
	}
	dispensable := func(e *entry[P]) bool {
		return e != known && (e.phase == Stale || e.phase == Refused) && e.peer.metadataLen() > 0
	}
	free := 0
	for _, e := range t.entries {
		if e.evictable() && dispensable(e) {
			free += e.peer.metadataLen()
		}
	}
	if t.metadata+more-free > t.metadataLimit {
		return fmt.Errorf("%w: NIXL metadata of %d bytes, beside %d of other decodes, at most %d", nixlkv.ErrLimit,
			p.metadataLen(), t.metadata+more-p.metadataLen(), t.metadataLimit)
	}
	for t.metadata+more > t.metadataLimit {
		t.remove(t.easiestMissed(dispensable), errEvicted, d)
	}
	return nil
}

// MetadataBytes counts the bytes of agent metadata of all peers.
func (t *Table[P]) MetadataBytes() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.metadata
}
