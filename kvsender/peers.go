package kvsender

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/hostmem"
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
	probe   *prober
	retired []*nixl.Remote // to be invalidated

	mu      sync.Mutex
	parked  map[string][]*room // rooms that wait for a peer to be taken up
	looking map[string]int     // how often yet it is looked whether a peer lives
	closed  bool
}

func newPeerTable(m *Manager) (*peerTable, error) {
	t := &peerTable{m: m, jobs: make(chan func(), m.cfg.limits.LoadQueue+2*m.cfg.limits.Peers), parked: map[string][]*room{}, looking: map[string]int{}}
	t.Table = registry.NewTable(registry.TableConfig[*wiredPeer]{
		Peers: m.cfg.limits.Peers,
		Drop: func(p *registry.Peer, w *wiredPeer, reason error) {
			m.log.Info("dropping what was prepared for a decode", zap.String("decode", p.Agent), zap.NamedError("reason", reason))
			if !t.enqueue(func() { t.drop(w) }) {
				m.log.Error("could not drop what was prepared for a decode: the queue is full", zap.String("decode", p.Agent))
			}
		},
	})
	var err error
	t.probe, err = newProber(m.agent)
	return t, err
}

// load is the loader's loop.
func (t *peerTable) load() {
	for job := range t.jobs {
		job()
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
	t.enqueue(t.end)
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.closed {
		t.closed = true
		close(t.jobs)
	}
}

// end gives back what the loader keeps for itself.
func (t *peerTable) end() {
	for _, l := range t.list {
		if l != nil {
			t.logIf("freeing a list", l.Free())
		}
	}
	t.logIf("ending the probe", t.probe.close())
	t.retire()
}

func (t *peerTable) logIf(what string, err error) {
	if err != nil {
		t.m.log.Warn(what, zap.Error(err))
	}
}

// register takes a registration. A repeat changes nothing.
func (m *Manager) register(g *wire.Registration) {
	peer, err := registry.PeerFromRegistration(g, time.Now())
	if err == nil && peer.Pages() == 0 && len(peer.KV) > 0 {
		// A decode that does not tell how many pages it has is taken to have as many as this
		// rank (SGLang: _prepare_payload_xfer).
		peer, err = peer.WithPages(m.layout.Pages())
	}
	if err != nil {
		m.refusePeer(g.Agent, err)
		return
	}
	if known, live := m.peers.live(peer.Agent); live && !known.SameGeometry(peer) {
		// An agent's name is its own for the life of its process, and so is its geometry: this
		// is somebody else.
		m.stats.dropped.Add(1)
		m.warn.Warn("ignored a registration under the name of a decode that is known with other geometry",
			zap.String("decode", peer.Agent), zap.String("address", peer.Addr), zap.String("known address", known.Addr))
		return
	}
	prep, outcome, err := m.peers.Register(peer)
	if err != nil {
		m.warn.Warn("refused a decode", zap.String("decode", g.Agent), zap.Error(err))
		return
	}
	if outcome == registry.Unchanged {
		return
	}
	m.warn.Warn("decode registered", zap.String("decode", peer.Agent), zap.String("address", peer.Addr),
		zap.Stringer("outcome", outcome), zap.Stringer("dialect", g.Dialect()), zap.Int("regions", len(peer.KV)))
	m.peers.prepare(peer.Agent, prep)
	if outcome == registry.Added {
		m.suspect(peer.Addr, peer.Agent) // who was there before cannot be there any more
	}
}

// refusePeer keeps an agent known as refused, so that its rooms fail with the reason.
func (m *Manager) refusePeer(agent string, reason error) {
	m.warn.Warn("refused a registration", zap.String("decode", agent), zap.Error(reason))
	if _, live := m.peers.live(agent); live {
		return // anybody can send something under its name
	}
	if err := m.peers.Refuse(agent, "", reason); err != nil {
		m.warn.Warn("could not note the refusal", zap.String("decode", agent), zap.Error(err))
	}
}

// live gives what is known of a peer, and whether it can be sent to.
func (t *peerTable) live(agent string) (*registry.Peer, bool) {
	p, info, ok := t.Lookup(agent)
	return p, ok && p != nil && info.Phase == registry.Live
}

// prepare has the loader make a peer's plan, and wake the rooms that wait for it.
func (t *peerTable) prepare(agent string, prep *registry.Preparation[*wiredPeer]) {
	if prep == nil {
		return
	}
	job := func() {
		start := time.Now()
		err := prep.Run(func(p *registry.Peer) (*wiredPeer, error) {
			if t.m.ctx.Err() != nil {
				return nil, nixlkv.ErrClosed
			}
			return t.wire(p)
		})
		if err != nil {
			t.m.warn.Warn("a decode cannot be sent to", zap.String("decode", agent), zap.Error(err))
		} else {
			t.m.log.Info("decode taken up", zap.String("decode", agent), zap.Duration("took", time.Since(start)))
		}
		t.wake(agent)
	}
	// What is left of the queue is for dropping peers, which cannot be refused.
	if len(t.jobs) >= t.m.cfg.limits.LoadQueue || !t.enqueue(job) {
		for prep != nil {
			prep = prep.Fail(fmt.Errorf("%w: %w: too many registrations at once", nixlkv.ErrPeerStale, nixlkv.ErrLimit))
		}
		go t.wake(agent) // the caller may hold a room that waits for it too
	}
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

// wire makes all that sending to a peer needs.
func (t *peerTable) wire(p *registry.Peer) (*wiredPeer, error) {
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
	if len(w.aux.buffers) > 0 {
		if err := t.probe.read(w.remote, w.aux.buffers[0].dst); err != nil {
			return mayPass(err)
		}
	}
	return nil
}

// mayPass lets a later try succeed where the peer was lost or is still settling, or the engine
// has failed, which may pass too: a decode registers once, and would be refused for good.
func mayPass(err error) error {
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
	t.retire()
}

// retire drops the metadata of peers that are done with. One that did not answer the probe
// is held by it until it does.
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

// prober makes the first connection to a peer when it registers, by reading a byte of a
// metadata buffer: the first transfer to a peer costs up to 200 ms, and a write would change
// the peer's memory before it asked for anything.
type prober struct {
	buf    *hostmem.Buffer
	reg    *nixl.Registration
	local  *nixl.List
	remote *nixl.List
	t      *nixl.Transfer
}

// probeTimeout bounds the first connection.
const probeTimeout = 3 * time.Second

func newProber(a *nixl.Agent) (*prober, error) {
	p := &prober{t: a.NewTransfer()}
	var err error
	if p.buf, err = hostmem.Alloc(1); err != nil {
		return nil, err
	}
	if p.reg, err = a.Register(nixl.Host(p.buf)); err != nil {
		return nil, errors.Join(err, p.buf.Free())
	}
	if p.local, err = a.NewList(nixl.DRAM); err == nil {
		p.remote, err = a.NewList(nixl.DRAM)
	}
	if err == nil {
		err = p.local.Append(nixl.Desc{Addr: uint64(p.buf.Addr()), Len: 1})
	}
	if err != nil {
		return nil, errors.Join(err, p.close())
	}
	return p, nil
}

func (p *prober) read(r *nixl.Remote, addr uint64) error {
	if p.t.Held() {
		// The last read has not settled: its peer does not answer.
		if err := p.t.Release(); err != nil {
			return nil
		}
	}
	if err := p.remote.Clear(); err != nil {
		return err
	}
	if err := p.remote.Append(nixl.Desc{Addr: addr, Len: 1}); err != nil {
		return err
	}
	err := p.t.Create(nixl.Read, p.local, r, p.remote, nixl.TransferOptions{Post: true})
	if err == nil {
		ctx, cancel := context.WithTimeout(context.Background(), probeTimeout)
		defer cancel()
		err = p.t.Wait(ctx)
	}
	if p.t.Held() {
		return errors.Join(err, p.t.Release())
	}
	return err
}

func (p *prober) close() error {
	var errs []error
	if p.t.Held() {
		errs = append(errs, p.t.Release())
	}
	for _, l := range []*nixl.List{p.local, p.remote} {
		if l != nil {
			errs = append(errs, l.Free())
		}
	}
	errs = append(errs, p.reg.Deregister(), p.buf.Free())
	return errors.Join(errs...)
}
