package kvreceiver

import (
	"sync/atomic"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/internal/control"
	"github.com/nixlkv/nixlkv/nixl"
)

type counters struct {
	notifications, statuses, acks               atomic.Uint64
	refused, dropped, unknown, ignored          atomic.Uint64
	registrations, aborts, abortsUntold, losses atomic.Uint64
	missed, unconfirmed, succeeded, failed      atomic.Uint64
	untrusted                                   atomic.Uint64
}

func (c *counters) ended(s nixlkv.Status) {
	if s == nixlkv.Success {
		c.succeeded.Add(1)
	} else {
		c.failed.Add(1)
	}
}

// Stats count what a manager has done and what it holds.
type Stats struct {
	Notifications uint64 // of NIXL, by any agent
	Statuses      uint64 // KV_STATUS messages
	AbortAcks     uint64 // answers to aborts
	Refused       uint64 // messages and notifications that could not be read
	Dropped       uint64 // of staging buffers, which this library does not have
	Untrusted     uint64 // messages that did not come from the rank that they name
	Unknown       uint64 // for no room that waits for them
	Ignored       uint64 // that told a room nothing new

	Registrations uint64 // sent
	Aborts        uint64 // sent, one a prefill rank
	Untold        uint64 // aborts that could not be sent
	Losses        uint64 // connections to prefill ranks that ended
	Missed        uint64 // heartbeats
	Unconfirmed   uint64 // rooms whose pages were not released in time
	SilencedLogs  uint64 // log lines left out because there were too many

	Succeeded, Failed uint64 // rooms

	Rooms    int // open
	Waiting  int // closed, but their pages are not released yet
	Prefills int // known by their bootstrap address
	Ranks    int // prefill ranks connected to
	Agent    nixl.AgentStats
	Control  control.Stats
}

// Stats gives a snapshot for people to look at.
func (m *Manager) Stats() Stats {
	c := &m.stats
	s := Stats{
		Notifications: c.notifications.Load(), Statuses: c.statuses.Load(), AbortAcks: c.acks.Load(),
		Refused: c.refused.Load(), Dropped: c.dropped.Load(), Untrusted: c.untrusted.Load(), Unknown: c.unknown.Load(), Ignored: c.ignored.Load(),
		Registrations: c.registrations.Load(), Aborts: c.aborts.Load(), Untold: c.abortsUntold.Load(), Losses: c.losses.Load(),
		Missed: c.missed.Load(), Unconfirmed: c.unconfirmed.Load(), SilencedLogs: m.warn.Suppressed(),
		Succeeded: c.succeeded.Load(), Failed: c.failed.Load(),
		Agent: m.agent.Stats(), Control: m.ctl.Stats(),
	}
	m.roomsMu.Lock()
	s.Rooms, s.Waiting = len(m.rooms), m.live-len(m.rooms)
	m.roomsMu.Unlock()
	m.prefillsMu.Lock()
	s.Prefills = len(m.prefills)
	m.prefillsMu.Unlock()
	m.linksMu.Lock()
	s.Ranks = len(m.links)
	m.linksMu.Unlock()
	return s
}
