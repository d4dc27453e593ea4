package kvsender

import (
	"errors"
	"slices"
	"time"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/internal/wire"
)

// missed is a room that this side gave up, and closed, before its decodes had told where its pages
// go. Those that still do are told why nothing will come.
type missed struct {
	reason error
	until  time.Time
	told   []string // agents: one that announces the room again means another use of the number
}

// remember keeps a room that is closed for decodes that have not announced it. One that its decode
// aborted has nobody to be told.
func (r *room) remember() {
	if r.sender != nil && r.status == nixlkv.Failed && !r.bootstrapped() && !errors.Is(r.failure, errAbortedThere) {
		r.m.missed.note(r.id, &missed{reason: r.failure, until: time.Now().Add(r.m.cfg.bootstrapTimeout)})
	}
}

// late answers a decode that announces a room which was given up here; false if it was not, and
// the room is to come.
func (m *Manager) late(meta *wire.Metadata) bool {
	x := m.missed.take(meta.Room)
	if x == nil || time.Now().After(x.until) || slices.Contains(x.told, meta.Agent) || m.lookup(meta.Room) != nil {
		return false
	}
	x.told = append(x.told, meta.Agent)
	m.missed.note(meta.Room, x) // for the other decodes of the room
	m.tellFailure(meta.From, meta.Room, x.reason)
	return true
}
