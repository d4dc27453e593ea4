package registry

import (
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/nixlkv/nixlkv"
)

// Phase is how a table stands with a peer.
type Phase uint8

// A peer is prepared, then live until it goes stale, or refused.
const (
	// Preparing: registered, and its plan is being made.
	Preparing Phase = iota
	// Live: rooms can send to it.
	Live
	// Stale: its plan is of no use any more, [Table.Reload] can make it live again.
	Stale
	// Refused: it cannot be sent to as it registered.
	Refused

	// gone: taken out while its plan is being made. It stays in the table, unseen, until that
	// has ended, so that no second preparation of the agent begins beside it.
	gone
)

var phaseNames = [...]string{"preparing", "live", "stale", "refused"}

// String gives the phase in a word.
func (p Phase) String() string {
	if int(p) < len(phaseNames) {
		return phaseNames[p]
	}
	return "Phase(" + strconv.Itoa(int(p)) + ")"
}

// Outcome is what a registration changed.
type Outcome uint8

// What Register did.
const (
	// Unchanged: the peer is known with this geometry.
	Unchanged Outcome = iota
	// Added: the peer was not known.
	Added
	// Replaced: the peer was known with other geometry.
	Replaced
	// Again: the peer was known with this geometry, and stale or refused.
	Again
)

var outcomeNames = [...]string{"unchanged", "added", "replaced", "again"}

// String gives the outcome in a word.
func (o Outcome) String() string {
	if int(o) < len(outcomeNames) {
		return outcomeNames[o]
	}
	return "Outcome(" + strconv.Itoa(int(o)) + ")"
}

// Errors of a Table, besides those of package nixlkv.
var (
	// ErrPreparing: the peer's plan is being made.
	ErrPreparing = errors.New("registry: peer is being prepared")
	// ErrNotStale: a live peer was to be reloaded.
	ErrNotStale = errors.New("registry: peer is not stale")
	// ErrTooSoon: the last reload of the peer was less than the interval ago.
	ErrTooSoon = errors.New("registry: peer was reloaded just now")
	// ErrEnded: the preparation has ended before.
	ErrEnded = errors.New("registry: preparation has ended")
)

// Why plans are dropped, where the caller did not say.
var (
	errUnnamed   = errors.New("no reason given")
	errReplaced  = errors.New("replaced by a registration with other geometry")
	errForgotten = errors.New("forgotten")
	errEvicted   = fmt.Errorf("%w: evicted, as others were seen since", nixlkv.ErrLimit)
)

// PeerInfo is how a table stands with a peer, for people to look at.
type PeerInfo struct {
	Agent, Addr string
	Dialect     Dialect
	Regions     int    // KV regions
	Kinds       string // their memory kinds: "VRAM", or how many of each
	Pages       uint64 // 0: unknown
	Phase       Phase
	Reason      string        // why it is stale or refused
	Rooms       int           // leases, on earlier plans too
	Generation  uint64        // of its plan, or of the preparation in progress
	Age         time.Duration // since it registered
	Idle        time.Duration // since it was last heard of or used
}

func (e *entry[P]) info(now time.Time) PeerInfo {
	i := PeerInfo{
		Agent: e.agent, Addr: e.addr, Phase: e.phase, Rooms: e.rooms, Generation: e.gen,
		Age: now.Sub(e.added), Idle: now.Sub(e.seen),
	}
	if e.reason != nil {
		i.Reason = e.reason.Error()
	}
	if e.peer != nil {
		i.Dialect, i.Regions, i.Pages, i.Kinds = e.peer.Dialect, len(e.peer.KV), e.peer.Pages(), kindCounts(e.peer.KV)
	}
	return i
}

// kindCounts gives the one kind that regions have, or how many there are of each.
func kindCounts(regions []Region) string {
	var n [len(kindNames)]int
	for i := range regions {
		if k := regions[i].Kind; int(k) < len(n) {
			n[k]++
		}
	}
	var s string
	for _, k := range [...]Kind{VRAM, DRAM, Unset} {
		switch {
		case n[k] == 0:
		case n[k] == len(regions):
			return k.String()
		case s == "":
			s = fmt.Sprintf("%d %v", n[k], k)
		default:
			s += fmt.Sprintf(", %d %v", n[k], k)
		}
	}
	return s
}
