package kvsender

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/internal/wire"
	"github.com/nixlkv/nixlkv/nixl"
	"github.com/nixlkv/nixlkv/registry"
)

// wiredPeer is a decode rank that can be sent to: its plan, and what NIXL has prepared.
type wiredPeer struct {
	kv      *peerPlan
	aux     *auxPlan
	state   *statePlan
	remote  *nixl.Remote
	sources []*source        // one a segment, nil where nothing is prepared
	targets []*nixl.Prepared // likewise
}

// source is the prepared list of this rank's pages. Peers whose plans read the same share
// it.
type source struct {
	list *nixl.Prepared
	mem  nixl.Mem
	runs []nixl.Run
	uses int
}

// peerTable keeps the decode ranks that have registered, and takes new ones up: loading
// their metadata, preparing lists and making the first connection take too long for a
// room's time, and for the loop that receives.
type peerTable struct {
	*registry.Table[*wiredPeer]
	m    *Manager
	jobs chan func()

	// Used by the loader alone.
	sources []*source
	list    [2]*nixl.List // for preparing, by kind of memory
	probes  *prober
	retired []*nixl.Remote // to be invalidated

	mu      sync.Mutex
	parked  map[string][]*room // rooms that wait for a peer to be taken up
	looking map[string]int     // how often yet it is looked whether a peer lives
	closed  bool

	dials chan struct{} // holds one for each address that is tried
}

func newPeerTable(m *Manager) (*peerTable, error) {
	t := &peerTable{m: m, jobs: make(chan func(), m.cfg.limits.LoadQueue+2*m.cfg.limits.Peers), parked: map[string][]*room{}, dials: make(chan struct{}, maxDials), looking: map[string]int{}}
	t.Table = registry.NewTable(registry.TableConfig[*wiredPeer]{
		Peers: m.cfg.limits.Peers, MetadataBytes: m.cfg.limits.PeerMetadataBytes,
		Drop: func(p *registry.Peer, w *wiredPeer, reason error) {
			m.log.Info("dropping what was prepared for a decode", zap.String("decode", p.Agent), zap.NamedError("reason", reason))
			if !t.enqueue(func() { t.drop(w) }) {
				m.log.Error("could not drop what was prepared for a decode: the queue is full", zap.String("decode", p.Agent))
			}
		},
	})
	var err error
	t.probes, err = newProber(m.agent, m.cfg.probeTimeout)
	return t, err
}

// load is the loader's loop. It waits for no peer: what connects to one goes on by itself, and
// is looked at between jobs.
func (t *peerTable) load() {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	sweeps := time.NewTicker(t.m.cfg.peerExpiry / expiryLooks)
	defer sweeps.Stop()
	for {
		var tick <-chan time.Time
		if pause := t.probes.look(time.Now()); pause > 0 {
			timer.Reset(pause)
			tick = timer.C
		}
		t.retire()
		select {
		case job, open := <-t.jobs:
			if !open {
				t.probes.giveUp(nixlkv.ErrClosed)
				t.retire()
				return
			}
			job()
		case <-sweeps.C:
			t.sweep()
		case <-tick:
		}
	}
}

// enqueue hands work to the loader; false if there is too much, or it has ended.
func (t *peerTable) enqueue(job func()) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return false
	}
	select {
	case t.jobs <- job:
		return true
	default:
		return false
	}
}

// close drops all peers and lets the loader end. No room holds one any more.
func (t *peerTable) close() {
	t.Table.Close()
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.closed {
		t.closed = true
		close(t.jobs)
	}
}

func (t *peerTable) logIf(what string, err error) {
	if err != nil {
		t.m.log.Warn(what, zap.Error(err))
	}
}

// register takes a registration. A repeat changes nothing.
func (m *Manager) register(source netip.Addr, g *wire.Registration) {
	peer, err := registry.PeerFromRegistration(g, time.Now())
	if err == nil && peer.Pages() == 0 && len(peer.KV) > 0 {
		// A decode that does not tell how many pages it has is taken to have as many as this
		// rank (SGLang: _prepare_payload_xfer).
		peer, err = peer.WithPages(m.layout.Pages())
	}
	if err != nil {
		m.refusePeer(g.Agent, g.From, err)
		return
	}
	known, held, stale := m.peers.held(peer.Agent)
	if held && !known.SameGeometry(peer) {
		// An agent's name is its own for the life of its process, and so is its geometry: this
		// is somebody else.
		m.stats.dropped.Add(1)
		m.warn.Warn("ignored a registration under the name of a decode that is known with other geometry",
			zap.String("decode", peer.Agent), zap.String("address", peer.Addr), zap.String("known address", known.Addr))
		return
	}
	// A repeat is not counted: it is not taken up.
	welcome := held && !stale || m.intake.take(source, time.Now())
	prep, outcome, err := m.peers.Register(peer)
	if err != nil {
		m.refusePeer(g.Agent, g.From, err)
		return
	}
	if outcome == registry.Unchanged {
		return
	}
	m.warn.Warn("decode registered", zap.String("decode", peer.Agent), zap.String("address", peer.Addr),
		zap.Stringer("outcome", outcome), zap.Stringer("dialect", g.Dialect()), zap.Int("regions", len(peer.KV)))
	if !welcome {
		m.peers.putOff(peer.Agent, prep, fmt.Errorf("%d registrations from %v in a minute", m.cfg.limits.Registrations, source))
		return
	}
	m.peers.prepare(peer.Agent, prep)
	if outcome == registry.Added {
		m.suspect(peer.Addr, peer.Agent) // who was there before cannot be there any more
	}
}

// refusePeer keeps an agent known as refused, so that its rooms fail with the reason.
func (m *Manager) refusePeer(agent string, from wire.Endpoint, reason error) {
	m.warn.Warn("refused a registration", zap.String("decode", agent), zap.Error(reason))
	if _, held, _ := m.peers.held(agent); held {
		return // anybody can send something under its name
	}
	addr := "" // not told
	if !from.IsZero() {
		addr = from.String()
	}
	if err := m.peers.Refuse(agent, addr, reason); err != nil {
		m.warn.Warn("could not note the refusal", zap.String("decode", agent), zap.Error(err))
	}
}

// held gives what is known of a peer, and whether nothing that comes under its name changes
// that: it can be sent to, was and may be again, or is being taken up. Without the last,
// registrations that differ in turn would keep the loader with one name for as long as they come.
// stale says that a registration has it taken up.
func (t *peerTable) held(agent string) (p *registry.Peer, held, stale bool) {
	p, info, ok := t.Lookup(agent)
	stale = info.Phase == registry.Stale
	return p, ok && p != nil && (stale || info.Phase == registry.Live || info.Phase == registry.Preparing), stale
}

// prepare has the loader make a peer's plan, and wake the rooms that wait for it.
func (t *peerTable) prepare(agent string, prep *registry.Preparation[*wiredPeer]) {
	if prep == nil {
		return
	}
	// What is left of the queue is for dropping peers, which cannot be refused.
	if len(t.jobs) >= t.m.cfg.limits.LoadQueue || !t.enqueue(func() { t.takeUp(agent, prep) }) {
		t.putOff(agent, prep, errors.New("too many registrations at once"))
	}
}

// putOff leaves a peer for later: a room that needs it has it taken up.
func (t *peerTable) putOff(agent string, prep *registry.Preparation[*wiredPeer], why error) {
	for prep != nil {
		prep = prep.Fail(fmt.Errorf("%w: %w: %w", nixlkv.ErrPeerStale, nixlkv.ErrLimit, why))
	}
	go t.wake(agent) // the caller may hold a room that waits for it too
}

// takeUp makes a peer's plan and wakes the rooms that wait for it.
func (t *peerTable) takeUp(agent string, prep *registry.Preparation[*wiredPeer]) {
	started := time.Now()
	t.begin(prep, func(err error) {
		if err != nil {
			t.m.warn.Warn("a decode cannot be sent to", zap.String("decode", agent), zap.Error(err))
		} else {
			t.m.log.Info("decode taken up", zap.String("decode", agent), zap.Duration("took", time.Since(started)))
		}
		t.wake(agent)
	})
}

// begin makes a peer's plan and has the first connection made. done is called when the peer is
// live, or cannot be; perhaps at once.
func (t *peerTable) begin(prep *registry.Preparation[*wiredPeer], done func(error)) {
	w, err := t.wire(prep.Peer())
	if err != nil || len(w.aux.buffers) == 0 {
		t.finish(prep, w, err, done)
		return
	}
	t.probes.read(w.remote, w.aux.buffers[0].dst, func(err error) {
		if errors.Is(err, errNoPlace) {
			err = nil // its first room makes the connection
		}
		t.finish(prep, w, mayPass(err), done)
	})
}

// finish ends a preparation, and begins the one that follows from it.
func (t *peerTable) finish(prep *registry.Preparation[*wiredPeer], w *wiredPeer, err error, done func(error)) {
	var next *registry.Preparation[*wiredPeer]
	if err == nil {
		next, err = prep.Attach(w)
	} else {
		if w != nil {
			t.drop(w)
		}
		next = prep.Fail(err)
	}
	if next != nil {
		t.begin(next, done)
		return
	}
	done(err)
}

// park makes a room wait for a peer that is being taken up. The caller holds r.mu; the room
// is not scheduled again before the peer is ready or refused.
func (t *peerTable) park(agent string, r *room) {
	r.parked = true
	t.mu.Lock()
	t.parked[agent] = append(t.parked[agent], r)
	t.mu.Unlock()
}

// wake schedules the rooms that wait for a peer.
func (t *peerTable) wake(agent string) {
	t.mu.Lock()
	rooms := t.parked[agent]
	delete(t.parked, agent)
	t.mu.Unlock()
	for _, r := range rooms {
		r.mu.Lock()
		r.parked = false
		r.schedule()
		r.advance()
		r.mu.Unlock()
	}
}

// wire makes all that sending to a peer needs, but for the connection.
func (t *peerTable) wire(p *registry.Peer) (*wiredPeer, error) {
	if t.m.ctx.Err() != nil {
		return nil, nixlkv.ErrClosed
	}
	w := &wiredPeer{}
	if err := t.wireInto(w, p); err != nil {
		t.drop(w)
		return nil, err
	}
	return w, nil
}

func (t *peerTable) wireInto(w *wiredPeer, p *registry.Peer) (err error) {
	if w.kv, err = planPeer(t.m.layout, p); err != nil {
		return err
	}
	if w.aux, err = planAux(t.m.layout, p); err != nil {
		return err
	}
	if w.aux.unequal {
		t.m.log.Warn("the decode has another number of metadata buffers; the leading ones are copied",
			zap.String("decode", p.Agent), zap.Int("here", len(t.m.layout.Aux)), zap.Int("there", len(p.Aux)))
	}
	w.state = planState(t.m.layout, p)
	for _, err := range w.state.faults() {
		t.m.warn.Warn("state of this decode's rooms cannot be sent", zap.String("decode", p.Agent), zap.Error(err))
	}
	// Before Load, which would replace what is known of the agent whose metadata it is.
	if name, err := t.m.agent.MetadataName(p.AgentMetadata); err != nil {
		return err
	} else if name != p.Agent {
		return fmt.Errorf("%w: metadata of agent %q in the registration of %q", nixlkv.ErrMalformed, name, p.Agent)
	}
	if w.remote, err = t.m.agent.Load(p.AgentMetadata); err != nil {
		return mayPass(err)
	}
	for i := range w.kv.segments {
		if err := t.wireSegment(w, &w.kv.segments[i]); err != nil {
			return err
		}
	}
	return nil
}

// mayPass lets a later try succeed where the peer was lost or is still settling, or the engine
// has failed, which may pass too: a decode registers once, and would be refused for good.
func mayPass(err error) error {
	if errors.Is(err, nixlkv.ErrPeerStale) {
		return err
	}
	for _, passes := range []error{nixl.ErrBusy, nixl.ErrPeerLost, context.DeadlineExceeded, nixl.StatusBackend} {
		if errors.Is(err, passes) && !errors.Is(err, nixl.ErrNotRegistered) {
			return fmt.Errorf("%w: %w", nixlkv.ErrPeerStale, err)
		}
	}
	return err
}

// wireSegment prepares the two lists of a segment, if it can go by index.
func (t *peerTable) wireSegment(w *wiredPeer, s *segment) error {
	if !s.preparable() {
		w.sources, w.targets = append(w.sources, nil), append(w.targets, nil)
		return nil
	}
	src, err := t.source(s)
	if err != nil {
		return err
	}
	w.sources = append(w.sources, src)
	l, err := t.fill(memOf(s.dstKind), s.appendDestinationRuns(nil))
	if err != nil {
		return err
	}
	target, err := w.remote.Prepare(l)
	if err != nil {
		return err
	}
	w.targets = append(w.targets, target)
	return nil
}

// source gives the prepared list of a segment's source pages, sharing it where it can.
func (t *peerTable) source(s *segment) (*source, error) {
	mem := memOf(s.srcKind)
	runs := s.appendSourceRuns(nil)
	for _, src := range t.sources {
		if src.mem == mem && slices.Equal(src.runs, runs) {
			src.uses++
			return src, nil
		}
	}
	l, err := t.fill(mem, runs)
	if err != nil {
		return nil, err
	}
	list, err := t.m.agent.Prepare(l)
	if err != nil {
		return nil, err
	}
	src := &source{list: list, mem: mem, runs: runs, uses: 1}
	t.sources = append(t.sources, src)
	return src, nil
}

// fill puts runs into the loader's list of a kind of memory.
func (t *peerTable) fill(mem nixl.Mem, runs []nixl.Run) (*nixl.List, error) {
	l := &t.list[mem]
	if *l == nil {
		var err error
		if *l, err = t.m.agent.NewList(mem); err != nil {
			return nil, err
		}
	}
	if err := (*l).Clear(); err != nil {
		return nil, err
	}
	return *l, (*l).AppendRuns(runs...)
}

// drop gives back what was prepared for a peer.
func (t *peerTable) drop(w *wiredPeer) {
	for _, p := range w.targets {
		if p != nil {
			t.logIf("freeing a decode's prepared list", p.Free())
		}
	}
	for _, s := range w.sources {
		if s == nil {
			continue
		}
		if s.uses--; s.uses == 0 {
			t.sources = slices.DeleteFunc(t.sources, func(x *source) bool { return x == s })
			t.logIf("freeing a source's prepared list", s.list.Free())
		}
	}
	if w.remote != nil {
		t.retired = append(t.retired, w.remote)
	}
	*w = wiredPeer{}
}

// retire drops the metadata of peers that are done with. One that does not answer its probe is
// held by that until it does.
func (t *peerTable) retire() {
	t.retired = slices.DeleteFunc(t.retired, func(r *nixl.Remote) bool {
		err := r.Invalidate()
		if errors.Is(err, nixl.ErrInUse) {
			return false
		}
		t.logIf("dropping a decode's metadata", err)
		return true
	})
}
