package kvsender

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/nixl"
)

// Close is Shutdown within the close timeout.
func (m *Manager) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), m.cfg.closeTimeout)
	defer cancel()
	return m.Shutdown(ctx)
}

// Shutdown ends the manager. Rooms that have not ended fail with nixlkv.ErrClosed, on both
// sides. It waits until nothing is in flight any more, then gives everything back. When the
// context ends first it returns an error wrapping nixl.ErrStillInFlight: the memory of the
// layout may still be read, and stays registered until Shutdown or Close, called again,
// returns nil.
func (m *Manager) Shutdown(ctx context.Context) error {
	begun := time.Now()
	m.closeOnce.Do(func() {
		m.cancel()
		go m.teardown()
	})
	m.failAll(fmt.Errorf("%w: the prefill is shutting down", nixlkv.ErrClosed))
	select {
	case <-m.closed:
		return m.closeErr
	case <-ctx.Done():
	}
	if m.agent != nil {
		if s := m.agent.Stats(); s.InFlight > 0 || s.Calls > 0 {
			return fmt.Errorf("kvsender: closing: %w: %w", &nixl.InFlightError{Transfers: s.InFlight, Calls: s.Calls, Waited: time.Since(begun)}, ctx.Err())
		}
	}
	return fmt.Errorf("kvsender: closing: %w", ctx.Err())
}

// failAll fails every room and lets no new one in.
func (m *Manager) failAll(cause error) {
	m.roomsMu.Lock()
	m.closing = true
	rooms := make([]*room, 0, len(m.live))
	for r := range m.live {
		rooms = append(rooms, r)
	}
	if len(rooms) == 0 {
		closeOnce(m.idle)
	}
	m.roomsMu.Unlock()
	for _, r := range rooms {
		r.mu.Lock()
		if r.sender == nil {
			r.forget(cause)
		} else {
			r.fail(cause)
			r.sender.closed = true
			m.detach(r)
			r.quiesce()
		}
		r.mu.Unlock()
	}
}

// teardown gives everything back, in order, once no room is live. It waits however long
// that takes; Shutdown does not.
func (m *Manager) teardown() {
	<-m.idle
	var errs []error
	m.runQueue.close()
	if m.peers != nil {
		m.peers.close()
	}
	m.workers.Wait()
	if m.landing != nil {
		close(m.landing.stop)
	}
	m.lander.Wait()
	close(m.placements)
	m.registrar.Wait()
	if m.ctl != nil {
		ctx, cancel := context.WithTimeout(context.Background(), m.cfg.closeTimeout)
		errs = append(errs, m.ctl.Close(ctx))
		cancel()
	}
	if m.client != nil {
		m.client.Close()
	}
	if m.agent != nil {
		errs = append(errs, m.agent.Shutdown(context.Background()))
	}
	if m.peers != nil {
		errs = append(errs, m.peers.probes.free())
	}
	if m.ownEngine {
		errs = append(errs, m.engine.Close())
	}
	m.closeErr = errors.Join(errs...)
	close(m.closed)
}
