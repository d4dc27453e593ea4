package registry

import (
	"errors"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/nixlkv/nixlkv"
	"pgregory.net/rapid"
)

// tableModel says in plain terms what a Table has to do, and drives one beside it.
type tableModel struct {
	*Table[int]
	clock
	limit  int
	agents map[string]*modelAgent
	drops  map[int]int // plan: how often
	plans  []*modelPlan
	leases []*modelLease
	ending []*Preparation[int] // not ended
}

type modelAgent struct {
	visible       bool
	phase         Phase
	peer          *Peer
	plan          *modelPlan
	wanted        int  // counts what asked for a preparation
	prepares      *int // what the one in progress is for; nil: none
	proven        bool
	seen          time.Time
	reloaded      time.Time
	rooms, number int // number: when it last became wanted, over all agents
}

type modelPlan struct {
	id, leases int
	givenUp    bool
}

type modelLease struct {
	*Lease[int]
	agent *modelAgent
	plan  *modelPlan
}

var modelAgents = []string{"a", "b", "c", "d", "e"}

func (m *tableModel) draw(t *rapid.T) string { return rapid.SampledFrom(modelAgents).Draw(t, "agent") }

func (m *tableModel) get(agent string) *modelAgent {
	if a := m.agents[agent]; a != nil && a.visible {
		return a
	}
	return nil
}

func (a *modelAgent) giveUp() {
	if a.plan != nil {
		a.plan.givenUp = true
		a.plan = nil
	}
}

func (a *modelAgent) want(number int) {
	a.wanted++
	a.number = number
	a.phase, a.visible = Preparing, true
}

// room makes room for one more, as a full table does, and says whether there is.
func (m *tableModel) room() bool {
	if len(m.agents) < m.limit {
		return true
	}
	var victim string
	for name, a := range m.agents {
		if a.rooms > 0 || a.prepares != nil {
			continue
		}
		if victim == "" {
			victim = name
			continue
		}
		v := m.agents[victim]
		aLive, vLive := a.phase == Live, v.phase == Live
		if vLive && !aLive || aLive == vLive && a.seen.Before(v.seen) {
			victim = name
		}
	}
	if victim == "" {
		return false
	}
	m.agents[victim].giveUp()
	delete(m.agents, victim)
	return true
}

// started compares whether a preparation began with whether one should have.
func (m *tableModel) started(t *rapid.T, p *Preparation[int], a *modelAgent) {
	if (p != nil) != (a.prepares == nil) {
		t.Fatalf("preparation %v, one in progress: %v", p, a.prepares != nil)
	}
	if p == nil {
		return
	}
	if p.Peer() != a.peer {
		t.Fatalf("preparing for %+v, want %+v", p.Peer(), a.peer)
	}
	w := a.wanted
	a.prepares = &w
	m.ending = append(m.ending, p)
}

func (m *tableModel) register(t *rapid.T) {
	name := m.draw(t)
	peer := peerOf(name)
	peer.GPU = rapid.Uint64Range(0, 1).Draw(t, "geometry")
	peer.AgentMetadata = []byte{rapid.ByteRange(0, 1).Draw(t, "metadata")}
	p, outcome, err := m.Register(peer)

	a := m.agents[name]
	if a == nil {
		if !m.room() {
			if !errors.Is(err, nixlkv.ErrLimit) {
				t.Fatalf("a full table: %v", err)
			}
			return
		}
		a = &modelAgent{}
		m.agents[name] = a
	}
	if err != nil {
		t.Fatal(err)
	}
	a.seen = m.time
	want := Added
	switch {
	case !a.visible:
	case a.peer != nil && a.peer.GPU == peer.GPU:
		if a.peer.AgentMetadata[0] != peer.AgentMetadata[0] {
			a.peer = peer
		}
		want = Unchanged
		if a.phase == Stale || a.phase == Refused {
			if a.reloaded.IsZero() || m.time.Sub(a.reloaded) >= time.Second {
				want = Again
				a.reloaded = m.time
				a.want(m.count())
			}
		}
	default:
		want = Replaced
	}
	if outcome != want {
		t.Fatalf("%v, want %v", outcome, want)
	}
	if want == Unchanged {
		if p != nil {
			t.Fatal("a preparation of what did not change")
		}
		return
	}
	if want != Again {
		a.giveUp()
		a.peer, a.proven, a.reloaded = peer, false, time.Time{}
		a.want(m.count())
	}
	m.started(t, p, a)
}

func (m *tableModel) count() int {
	n := 0
	for _, a := range m.agents {
		n = max(n, a.number)
	}
	return n + 1
}

// end ends one of the preparations in progress.
func (m *tableModel) end(t *rapid.T) {
	if len(m.ending) == 0 {
		t.Skip("nothing is being prepared")
	}
	i := rapid.IntRange(0, len(m.ending)-1).Draw(t, "preparation")
	p := m.ending[i]
	m.ending = slices.Delete(m.ending, i, i+1)
	a := m.agents[p.Peer().Agent]
	current := a.phase == Preparing && a.visible && *a.prepares == a.wanted
	a.prepares = nil

	var next *Preparation[int]
	if rapid.Bool().Draw(t, "attach") {
		plan := &modelPlan{id: len(m.plans), givenUp: !current}
		m.plans = append(m.plans, plan)
		var err error
		next, err = p.Attach(plan.id)
		if wanted := a.visible && a.phase == Preparing; (err != nil) == wanted {
			t.Fatalf("%v, with the peer %v, there: %v", err, a.phase, a.visible)
		}
		if current {
			a.phase, a.plan, a.proven, a.seen = Live, plan, true, m.time
		}
	} else {
		reason := rapid.SampledFrom([]error{nixlkv.ErrStride, nixlkv.ErrPeerStale}).Draw(t, "reason")
		next = p.Fail(reason)
		if current {
			a.phase = Refused
			if a.proven || reason == nixlkv.ErrPeerStale {
				a.phase = Stale
			}
		}
	}
	switch {
	case !current && a.visible && a.phase == Preparing:
		m.started(t, next, a)
	case next != nil:
		t.Fatal("a preparation that nobody wants")
	case !a.visible:
		delete(m.agents, p.Peer().Agent)
	}
}

func (m *tableModel) acquire(t *rapid.T) {
	name := m.draw(t)
	l, err := m.Acquire(name)
	a := m.get(name)
	want := error(nil)
	switch {
	case a == nil:
		want = nixlkv.ErrNotRegistered
	case a.phase == Preparing:
		want = ErrPreparing
	case a.phase == Stale:
		want = nixlkv.ErrPeerStale
	case a.phase == Refused && a.peer == nil:
		want = errBroken
	case a.phase == Refused:
		want = nixlkv.ErrStride
	}
	if !errors.Is(err, want) || (l == nil) != (want != nil) {
		t.Fatalf("%v, want %v", err, want)
	}
	if a == nil {
		return
	}
	a.seen = m.time
	if l == nil {
		return
	}
	if l.Plan() != a.plan.id || l.Peer().Agent != name || l.Err() != nil {
		t.Fatalf("plan %d of %s, want %d", l.Plan(), l.Peer().Agent, a.plan.id)
	}
	a.plan.leases++
	a.rooms++
	m.leases = append(m.leases, &modelLease{l, a, a.plan})
}

func (m *tableModel) lease(t *rapid.T) (int, *modelLease) {
	if len(m.leases) == 0 {
		t.Skip("no leases")
	}
	i := rapid.IntRange(0, len(m.leases)-1).Draw(t, "lease")
	return i, m.leases[i]
}

func (m *tableModel) release(t *rapid.T) {
	i, l := m.lease(t)
	l.Release()
	if rapid.Bool().Draw(t, "twice") {
		l.Release()
	}
	l.plan.leases--
	l.agent.rooms--
	l.agent.seen = m.time
	m.leases = slices.Delete(m.leases, i, i+1)
}

func (m *tableModel) leaseStale(t *rapid.T) {
	_, l := m.lease(t)
	want := !l.plan.givenUp
	if got := l.MarkStale(errBroken); got != want {
		t.Fatalf("changed: %v, want %v", got, want)
	}
	if want {
		l.agent.giveUp()
		l.agent.phase = Stale
	}
}

func (m *tableModel) markStale(t *rapid.T) {
	name := m.draw(t)
	a := m.get(name)
	want := a != nil && (a.phase == Live || a.phase == Preparing)
	if got := m.MarkStale(name, errBroken); got != want {
		t.Fatalf("changed: %v, want %v", got, want)
	}
	if want {
		a.giveUp()
		a.phase = Stale
	}
}

func (m *tableModel) reload(t *rapid.T) {
	name := m.draw(t)
	p, err := m.Reload(name)
	a := m.get(name)
	var want error
	switch {
	case a == nil:
		want = nixlkv.ErrNotRegistered
	case a.phase == Live:
		want = ErrNotStale
	case a.phase == Preparing:
		want = ErrPreparing
	case a.phase == Refused && a.peer == nil:
		want = errBroken
	case a.phase == Refused:
		want = nixlkv.ErrStride
	case !a.reloaded.IsZero() && m.time.Sub(a.reloaded) < time.Second:
		want = ErrTooSoon
	default:
		a.reloaded = m.time
		if a.prepares != nil {
			want = ErrPreparing
		}
		a.want(m.count())
		m.started(t, p, a)
	}
	if !errors.Is(err, want) {
		t.Fatalf("%v, want %v", err, want)
	}
}

func (m *tableModel) refuse(t *rapid.T) {
	name := m.draw(t)
	err := m.Refuse(name, "10.0.0.1:5000", errBroken)
	a := m.agents[name]
	if a == nil {
		if !m.room() {
			if !errors.Is(err, nixlkv.ErrLimit) {
				t.Fatalf("a full table: %v", err)
			}
			return
		}
		a = &modelAgent{}
		m.agents[name] = a
	}
	if err != nil {
		t.Fatal(err)
	}
	a.giveUp()
	a.visible, a.phase, a.peer, a.seen = true, Refused, nil, m.time
}

func (m *tableModel) forget(t *rapid.T) {
	name := m.draw(t)
	a := m.get(name)
	if got := m.Forget(name); got != (a != nil) {
		t.Fatalf("forgotten: %v", got)
	}
	if a == nil {
		return
	}
	a.giveUp()
	a.visible, a.peer = false, nil
	if a.prepares == nil {
		delete(m.agents, name)
	}
}

func (m *tableModel) pass(t *rapid.T) {
	m.advance(time.Duration(rapid.IntRange(1, 700).Draw(t, "ms")) * time.Millisecond)
}

// check compares all that can be seen from outside.
func (m *tableModel) check(t *rapid.T) {
	held := 0
	m.mu.Lock()
	for _, e := range m.entries {
		held += e.peer.metadataLen()
	}
	m.mu.Unlock()
	if counted := m.MetadataBytes(); held != counted {
		t.Fatalf("%d bytes of metadata are counted, there are %d", counted, held)
	}
	m.advance(time.Microsecond) // nothing is seen at the same time as something else
	for _, p := range m.plans {
		want := 0
		if p.givenUp && p.leases == 0 {
			want = 1
		}
		if m.drops[p.id] != want {
			t.Fatalf("plan %d with %d leases, given up: %v, was dropped %d times", p.id, p.leases, p.givenUp, m.drops[p.id])
		}
	}
	for _, l := range m.leases {
		if (l.Err() != nil) != l.plan.givenUp || l.Plan() != l.plan.id {
			t.Fatalf("plan %d of a lease on %d: %v", l.Plan(), l.plan.id, l.Err())
		}
	}
	visible := 0
	var here []string
	for name, a := range m.agents {
		peer, info, ok := m.Lookup(name)
		if ok != a.visible {
			t.Fatalf("%s is there: %v", name, ok)
		}
		if !ok {
			continue
		}
		visible++
		here = append(here, name)
		if info.Phase != a.phase || info.Rooms != a.rooms || peer != a.peer || (info.Reason != "") != (a.phase == Stale || a.phase == Refused) {
			t.Fatalf("%+v, want %+v", info, a)
		}
	}
	slices.Sort(here)
	if m.Len() != visible || len(m.Snapshot()) != visible || len(m.entries) > m.limit || !slices.Equal(m.ByAddr("10.0.0.1:5000"), here) {
		t.Fatalf("%d peers, %v here, want %v", m.Len(), m.ByAddr("10.0.0.1:5000"), here)
	}
}

// finish closes the table and gives everything back: nothing may be left, and every plan has
// been dropped once.
func (m *tableModel) finish(t *rapid.T) {
	m.Close()
	for _, l := range m.leases {
		l.Release()
	}
	for _, p := range m.ending {
		if next := p.Fail(errBroken); next != nil {
			t.Fatal("a preparation after the end")
		}
	}
	if len(m.entries)+len(m.addrs) != 0 {
		t.Fatalf("left over: %v, %v", slices.Collect(maps.Keys(m.entries)), m.addrs)
	}
	for _, p := range m.plans {
		if m.drops[p.id] != 1 {
			t.Fatalf("plan %d was dropped %d times", p.id, m.drops[p.id])
		}
	}
}

func TestTableModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := &tableModel{clock: clock{noon}, limit: 3, agents: map[string]*modelAgent{}, drops: map[int]int{}}
		m.Table = NewTable(TableConfig[int]{Peers: m.limit, Now: m.Now, Drop: func(p *Peer, plan int, reason error) {
			m.drops[plan]++
			if p == nil || reason == nil {
				t.Fatalf("plan %d of %+v dropped: %v", plan, p, reason)
			}
		}})
		t.Repeat(map[string]func(*rapid.T){
			"register": m.register, "register again": m.register, "end": m.end, "end another": m.end,
			"acquire": m.acquire, "acquire more": m.acquire, "release": m.release,
			"mark stale": m.markStale, "lease sees it stale": m.leaseStale, "reload": m.reload,
			"refuse": m.refuse, "forget": m.forget, "time passes": m.pass, "": m.check,
		})
		m.finish(t)
	})
}
