package kvreceiver

import (
	"context"
	"errors"
	"fmt"

	"github.com/nixlkv/nixlkv"
)

// Close is Shutdown within the close timeout.
func (m *Manager) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), m.cfg.closeTimeout)
	defer cancel()
	return m.Shutdown(ctx)
}

// Shutdown ends the manager. Rooms that have not ended fail with nixlkv.ErrClosed, and their
// prefills are told. It waits until no prefill writes any more, then gives everything back. When
// the context ends first it returns an error wrapping nixlkv.ErrReleaseUnconfirmed: the memory
// of the layout may still be written to, and stays registered until Shutdown or Close, called
// again, returns. What has not been released by the release timeout never will be: then
// everything is given back, and Shutdown returns nixlkv.ErrReleaseUnconfirmed for good, as it
// does when that has happened to any earlier room. The layout's memory must then be kept until
// the prefills are known to be gone.
func (m *Manager) Shutdown(ctx context.Context) error {
	m.closeOnce.Do(func() {
		m.cancel()
		go m.teardown()
	})
	m.failAll(fmt.Errorf("%w: the decode is shutting down", nixlkv.ErrClosed))
	select {
	case <-m.closed:
		return m.closeErr
	case <-ctx.Done():
	}
	m.roomsMu.Lock()
	live := m.live
	m.roomsMu.Unlock()
	if live > 0 {
		return fmt.Errorf("kvreceiver: closing: %w: %d rooms: %w", nixlkv.ErrReleaseUnconfirmed, live, ctx.Err())
	}
	return fmt.Errorf("kvreceiver: closing: %w", ctx.Err())
}

// failAll fails every room and lets no new one in.
func (m *Manager) failAll(cause error) {
	m.roomsMu.Lock()
	first := !m.closing
	m.closing = true
	if first && m.live == 0 {
		close(m.idle)
	}
	m.roomsMu.Unlock()
	for _, r := range m.allRooms() {
		r.mu.Lock()
		r.fail(cause)
		r.closed = true
		m.detach(r)
		r.mu.Unlock()
	}
}

// teardown gives everything back, in order, once no room is live. It waits as long as that
// takes, at most the release timeout; Shutdown does not.
func (m *Manager) teardown() {
	<-m.idle
	var errs []error
	if m.drain != nil {
		close(m.drain.stop)
	}
	m.loops.Wait()
	if m.ctl != nil {
		ctx, cancel := context.WithTimeout(context.Background(), m.cfg.closeTimeout)
		errs = append(errs, m.ctl.Close(ctx))
		cancel()
	}
	m.forgetAll()
	if m.agent != nil {
		errs = append(errs, m.agent.Shutdown(context.Background()))
	}
	if m.ownEngine {
		errs = append(errs, m.engine.Close())
	}
	if m.abandoned > 0 {
		errs = append(errs, fmt.Errorf("kvreceiver: %w: %d rooms", nixlkv.ErrReleaseUnconfirmed, m.abandoned))
	}
	m.closeErr = errors.Join(errs...)
	close(m.closed)
}

// forgetAll drops what is known of prefills once nothing is sent to them any more.
func (m *Manager) forgetAll() {
	m.prefillsMu.Lock()
	for _, p := range m.prefills {
		m.dropPrefill(p)
	}
	m.prefillsMu.Unlock()
	m.linksMu.Lock()
	clear(m.links)
	m.linksMu.Unlock()
}
