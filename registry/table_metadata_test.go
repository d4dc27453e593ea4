package registry

import (
	"testing"
	"time"

	"github.com/nixlkv/nixlkv"
)

// The metadata of all peers stay within their bound; what lives is not forgotten for a newcomer.
func TestTableMetadataBytes(t *testing.T) {
	k := newTableKit(0)
	k.metadataLimit = 100
	of := func(agent string, n int) *Peer {
		p := peerOf(agent)
		p.AgentMetadata = make([]byte, n)
		return p
	}
	take := func(agent string, n, total int) {
		t.Helper()
		p, _, err := k.Register(of(agent, n))
		if err != nil {
			t.Fatal(err)
		}
		if p != nil {
			if _, err := p.Attach(agent); err != nil {
				t.Fatal(err)
			}
		}
		k.advance(2 * time.Second)
		if got := k.MetadataBytes(); got != total {
			t.Fatalf("%d bytes, want %d", got, total)
		}
	}
	refuse := func(agent string, n int) {
		t.Helper()
		before := k.MetadataBytes()
		p, outcome, err := k.Register(of(agent, n))
		wraps(t, err, nixlkv.ErrLimit)
		if p != nil || outcome != Unchanged || k.MetadataBytes() != before {
			t.Errorf("%v, %v, %d bytes", p, outcome, k.MetadataBytes())
		}
	}
	refuse("a", 101)
	if k.Len() != 0 {
		t.Error("what was refused is kept")
	}
	take("a", 40, 40)
	take("b", 60, 100)
	refuse("c", 1)
	if err := k.Refuse("c", "", errBroken); err != nil || k.MetadataBytes() != 100 {
		t.Error(err, k.MetadataBytes())
	}
	// A repeat counts once, with what it brings.
	take("a", 10, 70)
	refuse("a", 41)
	if p, i, _ := k.Lookup("a"); len(p.AgentMetadata) != 10 || i.Phase != Live {
		t.Errorf("%d bytes, %v", len(p.AgentMetadata), i.Phase)
	}
	take("c", 30, 100)
	// A stale peer that a room holds stays, and so do those that live; one without rooms goes.
	l := k.acquire(t, "b")
	k.MarkStale("b", errBroken)
	k.MarkStale("c", errBroken)
	refuse("d", 31)
	if _, _, ok := k.Lookup("c"); !ok {
		t.Error("c was forgotten, though its place is not enough")
	}
	take("d", 30, 100)
	l.Release()
	take("e", 50, 90)
	k.phase(t, "a", Live)
	k.Forget("e")
	k.Forget("d")
	if k.MetadataBytes() != 10 {
		t.Error(k.MetadataBytes())
	}
	if err := k.Refuse("a", "", errBroken); err != nil || k.MetadataBytes() != 0 {
		t.Error(err, k.MetadataBytes())
	}
	take("a", 100, 100)
	k.Close()
	if k.MetadataBytes() != 0 {
		t.Error(k.MetadataBytes())
	}
}
