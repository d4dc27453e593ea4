package registry

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nixlkv/nixlkv"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// usedPlan notices when it is used after it was dropped.
type usedPlan struct {
	agent   string
	gpu     uint64
	users   atomic.Int64
	dropped atomic.Int64
}

// busyTable is used from many goroutines at once.
type busyTable struct {
	*Table[*usedPlan]
	made      sync.Map
	count     atomic.Int64
	preparing [4]atomic.Int64
}

// prepare ends a preparation, and those that follow from it.
func (b *busyTable) prepare(t *testing.T, p *Preparation[*usedPlan]) {
	for p != nil {
		u := b.plan(t, p.Peer())
		if u == nil {
			p = p.Fail(nixlkv.ErrStride)
			continue
		}
		p, _ = p.Attach(u) // what the peer is by now, use finds out
	}
}

// plan makes a peer's plan, but for some.
func (b *busyTable) plan(t *testing.T, peer *Peer) *usedPlan {
	busy := &b.preparing[peer.Agent[len(peer.Agent)-1]-'0']
	if busy.Add(1) != 1 {
		t.Errorf("%s is prepared twice at once", peer.Agent)
	}
	defer busy.Add(-1)
	if rand.IntN(8) == 0 {
		return nil
	}
	u := &usedPlan{agent: peer.Agent, gpu: peer.GPU}
	b.made.Store(u, nil)
	b.count.Add(1)
	return u
}

func (b *busyTable) use(t *testing.T, agent string) {
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	l, err := b.AcquireWait(ctx, agent)
	if err != nil {
		if errors.Is(err, context.DeadlineExceeded) {
			t.Error(err)
		}
		return
	}
	u := l.Plan()
	if u.users.Add(1); u.dropped.Load() != 0 || u.agent != agent || u.gpu != l.Peer().GPU || l.Peer().Agent != agent {
		t.Errorf("%s got the plan of %s, dropped %d times", agent, u.agent, u.dropped.Load())
	}
	if rand.IntN(16) == 0 {
		l.MarkStale(errBroken)
	}
	if u.users.Add(-1); u.dropped.Load() != 0 {
		t.Errorf("the plan of %s was dropped in use", agent)
	}
	l.Release()
}

func TestTableConcurrent(t *testing.T) {
	b := &busyTable{}
	b.Table = NewTable(TableConfig[*usedPlan]{Peers: 3, ReloadInterval: time.Nanosecond, Drop: func(p *Peer, u *usedPlan, reason error) {
		if u.dropped.Add(1) != 1 || u.users.Load() != 0 || p.Agent != u.agent || reason == nil {
			t.Errorf("plan of %s dropped %d times with %d users: %v", u.agent, u.dropped.Load(), u.users.Load(), reason)
		}
	}})
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 300 {
				agent := fmt.Sprintf("agent-%d", rand.IntN(len(b.preparing)))
				switch rand.IntN(12) {
				case 0, 1:
					p := peerOf(agent)
					p.GPU = rand.Uint64N(2)
					prep, _, err := b.Register(p)
					if err != nil && !errors.Is(err, nixlkv.ErrLimit) {
						t.Error(err)
					}
					b.prepare(t, prep)
				case 2:
					prep, _ := b.Reload(agent)
					b.prepare(t, prep)
				case 3:
					for _, a := range b.ByAddr("10.0.0.1:5000") {
						b.MarkStale(a, errBroken)
					}
				case 4:
					b.Forget(agent)
				case 5:
					b.Snapshot()
					b.Lookup(agent)
				default:
					b.use(t, agent)
				}
				if n := b.Len(); n > 3 {
					t.Errorf("%d peers", n)
				}
			}
		})
	}
	wg.Wait()
	b.Close()
	if b.count.Load() == 0 {
		t.Error("no plan was made")
	}
	b.made.Range(func(u, _ any) bool {
		if n := u.(*usedPlan).dropped.Load(); n != 1 {
			t.Errorf("a plan of %s was dropped %d times", u.(*usedPlan).agent, n)
		}
		return true
	})
}

func BenchmarkAcquireRelease(b *testing.B) {
	table := NewTable(TableConfig[int]{})
	p, _, err := table.Register(peerOf("a"))
	if err != nil {
		b.Fatal(err)
	}
	if _, err := p.Attach(1); err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			l, err := table.Acquire("a")
			if err != nil {
				b.Error(err)
				return
			}
			l.Release()
		}
	})
}
