package kvsender

import (
	"go.uber.org/zap"

	"github.com/nixlkv/nixlkv/registry"
)

// A decode whose host or network is gone shows nothing of that to a prefill that has nothing to
// send to it. So those that are idle are looked at now and then, and those that cannot be sent to
// are forgotten when nothing has come from them for long.

// expiryLooks is how often within the expiry it is looked which decodes that concerns.
const expiryLooks = 4

// sweep looks over the table of decodes once. The loader calls it.
func (t *peerTable) sweep() {
	expiry := t.m.cfg.peerExpiry
	for _, x := range t.Snapshot() {
		switch {
		case x.Phase == registry.Live && x.Idle >= expiry/expiryLooks:
			t.answers(x.Agent, x.Addr, func(err error) {
				if err != nil {
					t.look(x.Agent, x.Addr)
				}
			})
		case (x.Phase == registry.Stale || x.Phase == registry.Refused) && x.Rooms == 0 && x.Idle >= expiry:
			t.m.warn.Warn("forgot a decode that cannot be sent to", zap.String("decode", x.Agent), zap.String("address", x.Addr),
				zap.Duration("unheard for", x.Idle), zap.String("reason", x.Reason))
			t.Forget(x.Agent)
			t.m.disconnect(x.Addr)
		}
	}
}
