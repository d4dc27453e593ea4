package registry

import (
	"errors"
	"testing"
	"time"
)

var errBroken = errors.New("broken pipe")

// clock is time as the test sets it.
type clock struct{ time time.Time }

func (c *clock) Now() time.Time           { return c.time }
func (c *clock) advance(by time.Duration) { c.time = c.time.Add(by) }

// tableKit is a table of string plans that remembers what was dropped.
type tableKit struct {
	*Table[string]
	clock
	dropped []string
	reasons []error
}

func newTableKit(peers int) *tableKit {
	k := &tableKit{clock: clock{noon}}
	k.Table = NewTable(TableConfig[string]{Peers: peers, Now: k.Now, Drop: func(p *Peer, plan string, reason error) {
		k.dropped, k.reasons = append(k.dropped, p.Agent+" "+plan), append(k.reasons, reason)
	}})
	return k
}

// live registers an agent and attaches a plan.
func (k *tableKit) live(t *testing.T, agent, plan string) {
	t.Helper()
	p, _, err := k.Register(peerOf(agent))
	if p == nil || err != nil {
		t.Fatal(p, err)
	}
	if next, err := p.Attach(plan); next != nil || err != nil {
		t.Fatal(next, err)
	}
}

func (k *tableKit) phase(t *testing.T, agent string, want Phase) {
	t.Helper()
	if _, i, ok := k.Lookup(agent); !ok || i.Phase != want {
		t.Errorf("%s is %v (known: %v), want %v", agent, i.Phase, ok, want)
	}
}

func (k *tableKit) acquire(t *testing.T, agent string) *Lease[string] {
	t.Helper()
	l, err := k.Acquire(agent)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func wraps(t *testing.T, err error, targets ...error) {
	t.Helper()
	for _, target := range targets {
		if !errors.Is(err, target) {
			t.Errorf("%v does not wrap %v", err, target)
		}
	}
}

func isErr(t *testing.T, k *tableKit, agent string, targets ...error) {
	t.Helper()
	l, err := k.Acquire(agent)
	if l != nil {
		t.Errorf("a lease on %s", agent)
	}
	wraps(t, err, targets...)
}
