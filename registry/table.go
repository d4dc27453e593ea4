package registry

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/nixlkv/nixlkv"
)

// TableConfig configures a Table. Zero values take the defaults.
type TableConfig[P any] struct {
	// Peers is the most peers kept, refused ones included; default 4096. A peer that is
	// evicted and still lives fails its rooms until it registers again, which SGLang's decodes
	// do only after they lost the connection: there should be room for all that live.
	Peers int
	// MetadataBytes is how many bytes the agent metadata of all peers may take, which are kept to
	// be loaded again; default 1 GiB. A registration beyond it is an error that wraps
	// nixlkv.ErrLimit, unless refused or stale peers without rooms can go for it. Metadata that a
	// repeat has replaced while rooms hold the older ones' plan are not counted.
	MetadataBytes int
	// ReloadInterval is the least time between two reloads of a peer; default 1 s, as in SGLang
	// (_PEER_RELOAD_MIN_INTERVAL_S in nixl/conn.py). A peer that cannot be reached must not
	// cost more.
	ReloadInterval time.Duration
	// Drop is told of each plan once, when nothing uses it any more and why it was given up.
	// It runs in the goroutine whose call made it so, with no lock held; it may call the table.
	// The peer's next plan may be in the making, or in use.
	Drop func(peer *Peer, plan P, reason error)
	// Now is the clock; default time.Now.
	Now func() time.Time
}

// Table keeps the decode peers that a prefill has met, by agent name, and for each the plan P
// that the caller prepared for sending to it.
//
// [Table.Register] gives a new peer back as a [Preparation]: the caller makes the plan outside
// the table, as long as it takes, and ends it with Attach or Fail. There is one preparation of
// an agent at a time. Until it has ended [Table.Acquire] tells rooms to wait; afterwards it
// gives them leases, or the reason why not. When a peer goes stale or is replaced, the rooms
// that hold its old plan keep it until they release it; new rooms do not get it.
//
// All methods may be called from many goroutines. No lock is held while Drop runs.
type Table[P any] struct {
	limit         int
	metadataLimit int
	interval      time.Duration
	drop          func(*Peer, P, error)
	now           func() time.Time

	mu       sync.Mutex
	closed   bool
	gen      uint64 // the last one given
	entries  map[string]*entry[P]
	addrs    map[string]map[string]struct{} // agents by control address
	metadata int                            // bytes of agent metadata, of all entries
}

// entry is all that is known of one agent.
type entry[P any] struct {
	agent, addr string
	peer        *Peer // nil if it never registered rightly
	phase       Phase
	reason      error           // why Stale or Refused
	gen         uint64          // of the plan, or of the preparation that is wanted
	plan        *attached[P]    // if Live
	prep        *Preparation[P] // in progress, whatever the phase
	settled     chan struct{}   // closed when the phase is no longer Preparing
	rooms       int             // leases, on earlier plans too
	added, seen time.Time
	proven      bool      // a plan was made for this geometry
	reloaded    time.Time // when the last reload began; zero: never
}

// attached is a plan with the rooms that hold it. It is given up when it has a reason, and
// dropped when it is given up and no room holds it.
type attached[P any] struct {
	peer   *Peer
	plan   P
	gen    uint64
	rooms  int
	reason error
}

// NewTable makes an empty table.
func NewTable[P any](c TableConfig[P]) *Table[P] {
	t := &Table[P]{
		limit: c.Peers, metadataLimit: c.MetadataBytes, interval: c.ReloadInterval, drop: c.Drop, now: c.Now,
		entries: map[string]*entry[P]{}, addrs: map[string]map[string]struct{}{},
	}
	if t.limit <= 0 {
		t.limit = 4096
	}
	if t.metadataLimit <= 0 {
		t.metadataLimit = defaultMetadataBytes
	}
	if t.interval <= 0 {
		t.interval = time.Second
	}
	if t.drop == nil {
		t.drop = func(*Peer, P, error) {}
	}
	if t.now == nil {
		t.now = time.Now
	}
	return t
}

// Register takes a peer in. The peer belongs to the table from then on.
//
//   - An unknown agent is added, one known with other geometry replaced. If the table is full,
//     a peer without rooms goes: refused and stale ones first, then the one that was last seen
//     longest ago. If all have rooms, the error wraps nixlkv.ErrLimit.
//   - A known agent with the same geometry changes nothing, which is the normal repeat; but if
//     it was stale or refused, this sign of life has it prepared again, as often as
//     [Table.Reload] would. Newer agent metadata is kept for the next preparation.
//
// If a plan has to be made, the preparation is given, and the caller has to end it. There is
// none if nothing changed, or if an earlier one of this agent has not ended: then whoever ends
// that one is given the next.
//
// The error is what [Peer.Validate] says, or wraps nixlkv.ErrLimit or nixlkv.ErrClosed.
func (t *Table[P]) Register(p *Peer) (*Preparation[P], Outcome, error) {
	if p == nil {
		return nil, Unchanged, fmt.Errorf("%w: no peer", nixlkv.ErrMalformed)
	}
	if err := p.Validate(); err != nil {
		return nil, Unchanged, fmt.Errorf("peer %s: %w", p.Agent, err)
	}
	var d dropping[P]
	defer t.dropAll(&d)
	t.mu.Lock()
	defer t.mu.Unlock()
	now := t.now()
	if err := t.admit(p, &d); err != nil {
		return nil, Unchanged, err
	}
	e, known, err := t.enter(p.Agent, now, &d)
	if err != nil {
		return nil, Unchanged, err
	}
	outcome := Replaced
	switch {
	case !known:
		outcome = Added
	case e.peer != nil && e.peer.SameGeometry(p):
		if !e.peer.sameMetadata(p) {
			t.keep(e, p)
		}
		if e.phase != Stale && e.phase != Refused || t.tooSoon(e, now) > 0 {
			return nil, Unchanged, nil
		}
		e.reloaded = now
		return t.want(e), Again, nil
	default:
		t.giveUp(e, errReplaced, &d)
	}
	t.move(e, p.Addr)
	t.keep(e, p)
	e.added, e.reloaded, e.proven = now, time.Time{}, false
	return t.want(e), outcome, nil
}

// Refuse keeps an agent as one that cannot be sent to, so that its rooms fail with the reason:
// for a registration that could not be read beyond name and address. An agent that is known is
// refused from now on too. The error wraps nixlkv.ErrMalformed (no name), ErrLimit or
// ErrClosed.
func (t *Table[P]) Refuse(agent, addr string, reason error) error {
	if agent == "" {
		return fmt.Errorf("%w: no agent name", nixlkv.ErrMalformed)
	}
	var d dropping[P]
	defer t.dropAll(&d)
	t.mu.Lock()
	defer t.mu.Unlock()
	now := t.now()
	e, _, err := t.enter(agent, now, &d)
	if err != nil {
		return err
	}
	t.giveUp(e, reason, &d)
	t.move(e, addr)
	t.keep(e, nil)
	e.added = now
	e.settle(Refused, reason)
	return nil
}

// MarkStale gives up a peer's plan, as of a lost connection, and says whether that changed
// anything: whether the peer was live or being prepared. From then on Acquire fails with
// nixlkv.ErrPeerStale and the reason, until Reload or the peer itself makes it live again.
//
// What was noticed with a certain plan is told by [Lease.MarkStale], which leaves a newer plan
// alone.
func (t *Table[P]) MarkStale(agent string, reason error) bool {
	var d dropping[P]
	defer t.dropAll(&d)
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.find(agent)
	if e == nil || e.phase == Stale || e.phase == Refused {
		return false
	}
	t.makeStale(e, reason, &d)
	return true
}

func (t *Table[P]) makeStale(e *entry[P], reason error, d *dropping[P]) {
	t.giveUp(e, reason, d)
	e.settle(Stale, reason)
}

// Reload has a stale peer prepared again from the registration that was kept: NIXL forgets a
// peer's metadata when it sees the connection break, and a decode that lives on does not
// register again for that.
//
// The error wraps nixlkv.ErrNotRegistered; [ErrNotStale] for a live peer; [ErrPreparing] if a
// preparation has not ended, in which case a stale peer is prepared again by whoever ends it;
// [ErrTooSoon] and nixlkv.ErrPeerStale within the interval; and for a refused peer the reason.
func (t *Table[P]) Reload(agent string) (*Preparation[P], error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.find(agent)
	if e == nil {
		return nil, t.unknown(agent)
	}
	switch e.phase {
	case Live:
		return nil, fmt.Errorf("%w: %s", ErrNotStale, agent)
	case Stale:
	default:
		return nil, e.err()
	}
	now := t.now()
	if left := t.tooSoon(e, now); left > 0 {
		return nil, fmt.Errorf("%w, again in %v: %w", ErrTooSoon, left, e.err())
	}
	e.reloaded = now
	if p := t.want(e); p != nil {
		return p, nil
	}
	return nil, e.err()
}

// tooSoon gives how long the peer must not be reloaded.
func (t *Table[P]) tooSoon(e *entry[P], now time.Time) time.Duration {
	if e.reloaded.IsZero() {
		return 0
	}
	return t.interval - now.Sub(e.reloaded)
}

// Forget takes a peer out of the table, and says whether it was there. Leases on it stay good
// until they are released.
func (t *Table[P]) Forget(agent string) bool {
	var d dropping[P]
	defer t.dropAll(&d)
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.find(agent)
	if e != nil {
		t.remove(e, errForgotten, &d)
	}
	return e != nil
}

// Close forgets every peer. From then on Register, Refuse, Acquire and Reload fail with
// nixlkv.ErrClosed; leases are still to be released and preparations to be ended.
func (t *Table[P]) Close() {
	var d dropping[P]
	defer t.dropAll(&d)
	t.mu.Lock()
	defer t.mu.Unlock()
	t.closed = true
	for _, e := range t.entries {
		t.remove(e, nixlkv.ErrClosed, &d)
	}
}

// Lookup gives a peer as it registered last, and how the table stands with it. The peer is nil
// if it was refused before it could be read.
func (t *Table[P]) Lookup(agent string) (*Peer, PeerInfo, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.find(agent)
	if e == nil {
		return nil, PeerInfo{}, false
	}
	return e.peer, e.info(t.now()), true
}

// Len counts the peers.
func (t *Table[P]) Len() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := 0
	for _, e := range t.entries {
		if e.phase != gone {
			n++
		}
	}
	return n
}

// Snapshot gives all peers, by agent name.
func (t *Table[P]) Snapshot() []PeerInfo {
	t.mu.Lock()
	now := t.now()
	infos := make([]PeerInfo, 0, len(t.entries))
	for _, e := range t.entries {
		if e.phase != gone {
			infos = append(infos, e.info(now))
		}
	}
	t.mu.Unlock()
	slices.SortFunc(infos, func(a, b PeerInfo) int { return cmp.Compare(a.Agent, b.Agent) })
	return infos
}

// ByAddr gives the agents whose control socket is at an address (host:port, as in Peer.Addr),
// sorted: those to mark stale when the connection to it is lost. A decode that restarts at the
// same address comes under a new name, beside the old one.
func (t *Table[P]) ByAddr(addr string) []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Sorted(maps.Keys(t.addrs[addr]))
}
