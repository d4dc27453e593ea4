package kvreceiver

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/bootstrap"
	"github.com/nixlkv/nixlkv/internal/control"
	"github.com/nixlkv/nixlkv/internal/wire"
	"github.com/nixlkv/nixlkv/registry"
)

// prefill is what is known of one prefill, by the address of its bootstrap server. It is asked
// once for all rooms, and again after it was found gone or changed.
type prefill struct {
	m      *Manager
	addr   string
	client *bootstrap.Client
	asking chan struct{} // holds a token while somebody asks
	refs   int           // rooms; guarded by the manager's prefillsMu
	used   time.Time     // likewise: when the last room left
	misses int           // heartbeats; the heartbeat's own

	mu      sync.Mutex
	known   *group // nil: to be asked
	reached bool   // it has answered, and its heartbeat is watched
}

// group is what the bootstrap server told. It is not changed once it is known, except that
// the ranks of further DP groups are added under the prefill's lock.
type group struct {
	topology bootstrap.Topology
	mapping  bootstrap.RankMap
	targets  map[int][]target // by DP rank
}

// target is a prefill rank that gets a room's metadata.
type target struct {
	to     control.Endpoint
	number int  // by which KV_STATUS and ABORT_ACK name it
	dummy  bool // sends nothing, but must not wait for this decode
}

// find gives the ranks of a room, in the order to send to.
func (p *prefill) find(ctx context.Context, room nixlkv.Room, dpRank int) (*group, []target, error) {
	g, err := p.group(ctx)
	if err != nil {
		return nil, nil, err
	}
	dp, err := p.dpRank(ctx, g, room, dpRank)
	if err != nil {
		return nil, nil, err
	}
	targets, err := p.targets(ctx, g, dp)
	return g, targets, err
}

// ask runs f unless what it would find is there, one at a time: what many rooms need at once
// is asked for once.
func (p *prefill) ask(ctx context.Context, there func() bool, f func() error) error {
	check := func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		return there()
	}
	if check() {
		return nil
	}
	select {
	case p.asking <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { <-p.asking }()
	if check() {
		return nil
	}
	return f()
}

// group gives the prefill's topology and the ranks in it that matter here.
func (p *prefill) group(ctx context.Context) (g *group, err error) {
	there := func() bool { g = p.known; return g != nil }
	err = p.ask(ctx, there, func() error {
		g, err = p.askTopology(ctx)
		if err != nil {
			return err
		}
		p.mu.Lock()
		defer p.mu.Unlock()
		p.known, p.reached = g, true
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("connecting: %w", err)
	}
	return g, nil
}

func (p *prefill) askTopology(ctx context.Context) (*group, error) {
	t, err := p.client.Topology(ctx)
	if err != nil {
		return nil, err
	}
	mapping, err := p.fit(t)
	if err != nil {
		return nil, fmt.Errorf("the prefill of bootstrap_addr: %s: %w", p.addr, err)
	}
	return &group{topology: t, mapping: mapping, targets: map[int][]target{}}, nil
}

// fit says how this decode's ranks go with the prefill's.
func (p *prefill) fit(t bootstrap.Topology) (mapping bootstrap.RankMap, err error) {
	if err := bootstrap.CheckDecode(t, p.m.decode); err != nil {
		return mapping, err
	}
	if p.m.cfg.policy == bootstrap.PrefillCompleteAllocation && max(t.AttnTPSize, t.AttnCPSize, t.PPSize) > 1 {
		return mapping, fmt.Errorf("%w: %s requires peer attention TP1/CP1/PP1, found TP%d/CP%d/PP%d",
			nixlkv.ErrTopology, p.m.cfg.policy, t.AttnTPSize, t.AttnCPSize, t.PPSize)
	}
	return bootstrap.MapRanks(t, p.m.decode.Geometry)
}

// The pause between two questions for a room's DP rank, which the prefill registers when it
// gets to the request.
const (
	minQueryPause = 20 * time.Millisecond
	maxQueryPause = time.Second
)

// dpRank finds out which DP rank serves a room.
func (p *prefill) dpRank(ctx context.Context, g *group, room nixlkv.Room, given int) (int, error) {
	rank, ok, err := bootstrap.DecodeDPRank(g.topology, room, given, p.m.cfg.forceQuery)
	if err != nil || ok {
		return rank, err
	}
	for pause := minQueryPause; ; pause = min(2*pause, maxQueryPause) {
		found, err := p.client.QueryDPRanks(ctx, []nixlkv.Room{room})
		if err != nil {
			return 0, fmt.Errorf("asking for the DP rank of room %d: %w", room, err)
		}
		if rank, ok := found[room]; ok {
			if rank < 0 || rank >= max(g.topology.DPSize, 1) {
				return 0, fmt.Errorf("%w: room %d is at DP rank %d of %d", nixlkv.ErrNoSuchRank, room, rank, g.topology.DPSize)
			}
			return rank, nil
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return 0, fmt.Errorf("%w: the prefill has not told the DP rank of room %d: %w", nixlkv.ErrNotReady, room, ctx.Err())
		}
	}
}

// targets gives the addresses of the ranks of a DP group.
func (p *prefill) targets(ctx context.Context, g *group, dp int) (found []target, err error) {
	there := func() bool { found = g.targets[dp]; return found != nil }
	err = p.ask(ctx, there, func() error {
		asked := make([]target, 0, len(g.mapping.Targets))
		for _, t := range g.mapping.Targets {
			at, err := p.client.Rank(ctx, t.In(dp))
			if err != nil {
				return fmt.Errorf("connecting: %w", err)
			}
			to, err := p.m.resolve(ctx, at)
			if err != nil {
				return fmt.Errorf("connecting: Could not fetch bootstrap info for: prefill_dp_rank: %d prefill_cp_rank: %d target_tp_rank: %d and target_pp_rank %d (bootstrap_addr: %s): %w",
					dp, t.CP, t.TP, t.PP, p.addr, err)
			}
			asked = append(asked, target{to, g.number(t), t.Dummy})
		}
		p.mu.Lock()
		defer p.mu.Unlock()
		found = asked
		g.targets[dp] = asked
		return nil
	})
	return found, err
}

// number gives the number that a rank names itself by.
func (g *group) number(t bootstrap.Target) int {
	return wire.PrefillPosition{
		TPRank: t.TP, PPSize: max(g.topology.PPSize, 1), PPRank: t.PP, CPSize: max(g.topology.AttnCPSize, 1), CPRank: t.CP,
	}.Rank()
}

// forget drops what is known, so that the next room asks again.
func (p *prefill) forget() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.known = nil
}

// giveUp is forget for a prefill that is gone.
func (p *prefill) giveUp() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.known, p.reached = nil, false
}

// has says whether a rank belongs to the prefill, as far as it is known.
func (p *prefill) has(rank control.Endpoint) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.known == nil {
		return false
	}
	for _, targets := range p.known.targets {
		for _, t := range targets {
			if t.to == rank {
				return true
			}
		}
	}
	return false
}

// prefillAt gives the prefill at an address for a room, which gives it back with leave.
func (m *Manager) prefillAt(addr string) (*prefill, error) {
	m.prefillsMu.Lock()
	defer m.prefillsMu.Unlock()
	if m.ctx.Err() != nil {
		return nil, nixlkv.ErrClosed
	}
	if p := m.prefills[addr]; p != nil {
		p.refs++
		return p, nil
	}
	if len(m.prefills) >= m.cfg.limits.Prefills && !m.evictPrefill() {
		return nil, fmt.Errorf("%w: %d prefills", nixlkv.ErrLimit, len(m.prefills))
	}
	client, err := bootstrap.NewClient(addr, slices.Concat([]bootstrap.ClientOption{bootstrap.WithAllowedServers(m.cfg.allowed...)}, m.cfg.clientOptions)...)
	if err != nil {
		return nil, err
	}
	p := &prefill{m: m, addr: addr, client: client, asking: make(chan struct{}, 1), refs: 1}
	m.prefills[addr] = p
	return p, nil
}

// evictPrefill drops the prefill that has had no room for the longest time, and says whether
// there was one. The caller holds prefillsMu.
func (m *Manager) evictPrefill() bool {
	var oldest *prefill
	for _, p := range m.prefills {
		if p.refs == 0 && (oldest == nil || p.used.Before(oldest.used)) {
			oldest = p
		}
	}
	if oldest == nil {
		return false
	}
	m.dropPrefill(oldest)
	return true
}

// dropPrefill forgets a prefill without rooms. The caller holds prefillsMu.
func (m *Manager) dropPrefill(p *prefill) {
	delete(m.prefills, p.addr)
	p.client.Close()
}

// leave gives a prefill back.
func (m *Manager) leave(p *prefill) {
	m.prefillsMu.Lock()
	defer m.prefillsMu.Unlock()
	p.refs--
	p.used = time.Now()
}

// forgetRank makes the prefills that a lost rank belongs to be asked again: a prefill that is
// restarted listens at other ports.
func (m *Manager) forgetRank(rank control.Endpoint) {
	for _, p := range m.snapshotPrefills() {
		if p.has(rank) {
			p.forget()
		}
	}
}

func (m *Manager) snapshotPrefills() []*prefill {
	m.prefillsMu.Lock()
	defer m.prefillsMu.Unlock()
	all := make([]*prefill, 0, len(m.prefills))
	for _, p := range m.prefills {
		all = append(all, p)
	}
	return all
}

// decodeConfig is what a prefill's topology is checked against.
func decodeConfig(l *registry.Layout, cfg *config) bootstrap.DecodeConfig {
	k := l.Ranks.Normalized()
	d := bootstrap.DecodeConfig{
		Geometry: bootstrap.Geometry{
			TP: k.TP, EngineRank: k.EngineRank, CP: k.CP, PP: k.PP, PPRank: k.PPRank, DCP: k.DCP,
			AllCPRanks: cfg.allCPRanks,
		},
		PageSize: l.PageSize, KVCacheDtype: l.KVDtype, KVLayout: l.KVLayout,
		DecodeAllocationPolicy: cfg.policy,
	}
	switch {
	case l.HybridMLA:
		d.Attention = bootstrap.HybridMLA
	case l.MLA:
		d.Attention = bootstrap.MLA
	}
	for _, s := range l.State {
		d.StateTypes = append(d.StateTypes, string(s.Type))
	}
	return d
}
