package kvsender

import (
	"sync/atomic"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/internal/control"
	"github.com/nixlkv/nixlkv/nixl"
	"github.com/nixlkv/nixlkv/registry"
)

type counters struct {
	registrations, metadata, aborts, acks atomic.Uint64
	refused, dropped, untold, untrusted   atomic.Uint64
	succeeded, failed, unsettled          atomic.Uint64
	quarantined                           atomic.Int64
	bytes, descriptors, transfers         atomic.Uint64
	stateBytes                            atomic.Uint64
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
	Registrations uint64 // messages of decodes, by kind
	Metadata      uint64
	Aborts        uint64
	AbortAcks     uint64 // sent
	Refused       uint64 // messages that could not be read
	Dropped       uint64 // messages that mean nothing here: of strangers, for other rooms or roles
	Untrusted     uint64 // messages that name an address that is not allowed, or not their own
	Untold        uint64 // messages to decodes that could not be sent
	SilencedLogs  uint64 // log lines left out because there were too many

	Succeeded, Failed uint64 // rooms
	Unsettled         uint64 // rooms whose writes had not settled when their senders were told
	Bytes             uint64 // posted
	StateBytes        uint64 // of these, state
	Descriptors       uint64 // posted, neighbours merged
	Transfers         uint64 // posted

	Rooms       int // open, announced, or ended with something in flight
	Quarantined int // of these, ended with something in flight: their decodes' pages are not free
	// Announced and not opened, and the bytes that their page and slot numbers take.
	Announced, AnnouncedBytes int

	Peers             []registry.PeerInfo
	PeerMetadataBytes int // of NIXL's metadata of decodes
	Agent             nixl.AgentStats
	Control           control.Stats
	RunQueue          int // rooms that wait for a worker
}

// Stats gives a snapshot for people to look at.
func (m *Manager) Stats() Stats {
	c := &m.stats
	s := Stats{
		Registrations: c.registrations.Load(), Metadata: c.metadata.Load(), Aborts: c.aborts.Load(),
		AbortAcks: c.acks.Load(), Refused: c.refused.Load(), Dropped: c.dropped.Load(), Untold: c.untold.Load(),
		Untrusted:    c.untrusted.Load(),
		SilencedLogs: m.warn.Suppressed(), Succeeded: c.succeeded.Load(), Failed: c.failed.Load(),
		Unsettled: c.unsettled.Load(), Quarantined: int(c.quarantined.Load()),
		Bytes: c.bytes.Load(), StateBytes: c.stateBytes.Load(), Descriptors: c.descriptors.Load(), Transfers: c.transfers.Load(),
		Peers: m.peers.Snapshot(), PeerMetadataBytes: m.peers.MetadataBytes(), Agent: m.agent.Stats(), Control: m.ctl.Stats(),
	}
	m.roomsMu.Lock()
	s.Rooms, s.Announced, s.AnnouncedBytes = len(m.live), m.backlog.rooms, m.backlog.bytes
	m.roomsMu.Unlock()
	m.runQueue.mu.Lock()
	s.RunQueue = len(m.runQueue.rooms)
	m.runQueue.mu.Unlock()
	return s
}
