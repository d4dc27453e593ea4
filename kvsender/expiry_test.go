package kvsender

import (
	"testing"
	"time"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/nixl"
)

// A decode whose engine is gone while its address still answers, as that of a host behind a proxy
// does, is found without a room that needs it, and forgotten. One that is idle and answers stays, and
// one that was refused does not.
func TestIdleDecodes(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *nixl.Engine) {
		p := newPair(t, e, 25, WithPeerExpiry(400*time.Millisecond))
		p.connect(t, 1)
		gone := p.another(t, e, 0)
		waits := p.bootstrapped(t, 2, gone)
		bad := p.d.registration()
		bad.Agent = "refused"
		p.d.register(bad)
		p.d.until("the refusal", func() bool { return len(p.agents()) == 3 })
		ok(t, gone.agent.Close())
		wantFailure(t, waits, nil, nixlkv.ErrPeerLost, "Lost connection with decode")
		p.knowsOnly(t, p.d)
		p.transfer(t, 3)
		p.d.status(3)
	})
}
