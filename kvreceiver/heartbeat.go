package kvreceiver

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/nixlkv/nixlkv"
)

const (
	// heartbeatTimeout bounds one question: SGLang gives 2 s to connect and 3 s to answer.
	heartbeatTimeout = 5 * time.Second
	// heartbeatsAtOnce bounds the questions at a time, so that a prefill that does not answer
	// keeps few others waiting.
	heartbeatsAtOnce = 64
	// forgetPrefillAfter is when a prefill without rooms is not asked any more.
	forgetPrefillAfter = 15 * time.Minute
)

// heartbeat asks every prefill again and again whether it lives. One that does not answer
// several times in a row is lost: its rooms fail.
func (m *Manager) heartbeat() {
	defer m.loops.Done()
	tick := time.NewTicker(m.cfg.heartbeatInterval)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			m.beat()
		case <-m.ctx.Done():
			return
		}
	}
}

// beat asks every prefill once.
func (m *Manager) beat() {
	m.forgetIdle()
	var wg sync.WaitGroup
	turn := make(chan struct{}, heartbeatsAtOnce)
	for _, p := range m.snapshotPrefills() {
		if !p.wasReached() {
			p.misses = 0
			continue
		}
		turn <- struct{}{}
		wg.Add(1)
		go func() {
			defer wg.Done()
			p.beat()
			<-turn
		}()
	}
	wg.Wait()
}

func (p *prefill) wasReached() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.reached
}

// beat asks one prefill.
func (p *prefill) beat() {
	m := p.m
	ctx, cancel := context.WithTimeout(m.ctx, heartbeatTimeout)
	defer cancel()
	err := p.client.Health(ctx)
	if err == nil || m.ctx.Err() != nil {
		p.misses = 0
		return
	}
	p.misses++
	m.stats.missed.Add(1)
	m.warn.Warn("a prefill did not answer its heartbeat", zap.String("prefill", p.addr), zap.Int("misses", p.misses), zap.Error(err))
	if p.misses < m.cfg.heartbeatFailures {
		return
	}
	p.misses = 0
	p.giveUp()
	cause := fmt.Errorf("prefill: Lost connection with prefill instance (bootstrap_addr: %s): %d heartbeats failed: %w", p.addr, m.cfg.heartbeatFailures, err)
	if !errors.Is(err, nixlkv.ErrPeerLost) {
		cause = fmt.Errorf("%w: %w", nixlkv.ErrPeerLost, cause)
	}
	m.afterDrain(func() { m.failRooms(p, cause) })
}

// failRooms fails the unfinished rooms of a prefill.
func (m *Manager) failRooms(p *prefill, cause error) {
	for _, r := range m.allRooms() {
		if r.prefill == p {
			r.mu.Lock()
			r.fail(cause)
			r.mu.Unlock()
		}
	}
}

// allRooms gives the rooms in the table.
func (m *Manager) allRooms() []*room {
	m.roomsMu.Lock()
	defer m.roomsMu.Unlock()
	rooms := make([]*room, 0, len(m.rooms))
	for _, r := range m.rooms {
		rooms = append(rooms, r)
	}
	return rooms
}

// forgetIdle drops prefills that have had no room for long.
func (m *Manager) forgetIdle() {
	m.prefillsMu.Lock()
	defer m.prefillsMu.Unlock()
	for _, p := range m.prefills {
		if p.refs == 0 && time.Since(p.used) > forgetPrefillAfter {
			m.dropPrefill(p)
		}
	}
}
