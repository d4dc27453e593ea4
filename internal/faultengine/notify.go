package faultengine

import (
	"bytes"

	"github.com/nixlkv/nixlkv/internal/engine"
)

// note is a notification that is held back.
type note struct {
	fault *Fault
	from  string
	msg   []byte
}

// Notifications implements engine.Agent.
func (a *agent) Notifications(dst *engine.Notifications) error {
	var came engine.Notifications
	if err := a.Agent.Notifications(&came); err != nil {
		dst.Reset()
		return err
	}
	dst.Reset()
	a.mu.Lock()
	defer a.mu.Unlock()
	kept := a.late[:0]
	for _, n := range a.late {
		if n.fault.holds() {
			kept = append(kept, n)
			continue
		}
		n.fault.letGo()
		dst.Append(n.from, n.msg)
	}
	clear(a.late[len(kept):])
	a.late = kept
	for from, msg := range came.All() {
		f := a.e.fault(Notifications, string(from), msg)
		copies := 1
		if f != nil {
			switch f.rule.Do {
			case Lose, Delay:
				copies = 0
			case Double:
				copies = 2
			}
			if f.rule.Do == Delay || f.rule.Do == Again {
				a.late = append(a.late, note{f, string(from), bytes.Clone(msg)})
			}
		}
		for range copies {
			dst.Append(string(from), msg)
		}
	}
	return nil
}
