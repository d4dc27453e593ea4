package kvreceiver

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/bootstrap"
	"github.com/nixlkv/nixlkv/internal/control"
	"github.com/nixlkv/nixlkv/internal/wire"
)

// Connect finds the prefill ranks that hold the room's KV cache, and registers with those that
// do not know this rank yet. A prefill that is not ready is asked until the context's deadline,
// or the connect timeout if it has none. What was found serves later rooms too, and then
// Connect returns at once.
//
// Any error fails the room and is its *KVTransferError: nixlkv.ErrNotReady, ErrPeerLost or
// ErrTimeout where the prefill did not answer or was not ready, ErrNoSuchRank, ErrMismatch and
// ErrTopology where the two sides do not fit, ErrSendBlocked where a rank could not be reached,
// ErrNotAllowed where it does not let this side in or is not allowed here, or the context's.
func (v *Receiver) Connect(ctx context.Context) error {
	r := v.r
	if _, ok := ctx.Deadline(); !ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, r.m.cfg.connectTimeout)
		defer cancel()
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	if err := r.beginConnect(cancel); err != nil {
		return err
	}
	err := r.connect(ctx)
	r.mu.Lock()
	defer r.mu.Unlock()
	if err != nil {
		r.fail(connectError(err))
	}
	if r.failure != nil {
		return r.failure
	}
	r.metrics.Connected = time.Now()
	if r.m.cfg.policy != bootstrap.PrefillCompleteAllocation {
		r.advance(nixlkv.WaitingForInput)
		return nil
	}
	r.startWaiting()
	r.goOn(r.askCompletion)
	if r.failure != nil {
		return r.failure
	}
	return nil
}

// beginConnect notes how to end the attempt if the room ends meanwhile.
func (r *room) beginConnect(cancel context.CancelCauseFunc) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.failure != nil:
		return r.failure
	case r.stopConnect != nil:
		return fmt.Errorf("kvreceiver: room %d: Connect called twice", r.id)
	}
	r.stopConnect = cancel
	return nil
}

func (r *room) connect(ctx context.Context) error {
	g, found, err := r.prefill.find(ctx, r.id, r.dpRank)
	if err != nil {
		return err
	}
	targets := make([]*roomTarget, len(found))
	for i, t := range found {
		targets[i] = &roomTarget{target: t}
		if targets[i].link, err = r.m.link(t.to, r); err != nil {
			break
		}
	}
	r.mu.Lock()
	if err != nil || r.status.Ended() {
		defer r.mu.Unlock()
		for _, t := range targets {
			if t != nil && t.link != nil {
				r.m.unlink(t.link, r)
			}
		}
		return err
	}
	r.connected(g, targets)
	links := make([]*link, len(targets)) // the room lets go of its own when it ends
	for i, t := range targets {
		links[i] = t.link
	}
	r.mu.Unlock()
	if err := register(ctx, links); err != nil {
		r.prefill.forget()
		return err
	}
	return nil
}

// register waits until every rank knows this one.
func register(ctx context.Context, links []*link) error {
	type outcome struct {
		to  control.Endpoint
		err error
	}
	failed := func(to control.Endpoint, err error) error {
		return fmt.Errorf("_register_kv_args to prefill %s failed: %w", to, err)
	}
	came := make(chan outcome, len(links))
	asked := 0
	for _, l := range links {
		if ctx.Err() != nil { // the room may have let go of its links
			return failed(l.to, context.Cause(ctx))
		}
		already, err := l.await(func(err error) { came <- outcome{l.to, err} })
		if err != nil {
			return failed(l.to, err)
		}
		if !already {
			asked++
		}
	}
	for range asked {
		select {
		case o := <-came:
			if o.err != nil {
				return failed(o.to, o.err)
			}
		case <-ctx.Done():
			return unregistered(links, context.Cause(ctx))
		}
	}
	return nil
}

// unregistered says that not every rank came to know this one in time: which cannot be connected to,
// and why, or how many they are.
func unregistered(links []*link, cause error) error {
	for _, l := range links {
		if trouble := l.m.ctl.Trouble(l.to); trouble != nil {
			return fmt.Errorf("_register_kv_args to prefill %s failed: %w: %w", l.to, cause, trouble)
		}
	}
	return fmt.Errorf("registering with %d prefill ranks: %w", len(links), cause)
}

// askCompletion asks the prefill to tell when it has computed the room. The caller holds mu.
func (r *room) askCompletion() {
	r.asked = true
	var enc wire.Encoder // let go with the frames, which stay queued
	frames, err := enc.Bootstrap(&wire.Bootstrap{Room: r.id, From: r.m.self})
	for _, t := range r.targets {
		if err == nil {
			t.out = &outgoing{frames: frames, done: func(generation uint64, err error) { r.askedOver(t, generation, err) }}
			err = t.link.send(t.out)
		}
		if err != nil {
			t.out = nil
			r.fail(unasked(t, err))
			return
		}
	}
}

// askedOver takes the outcome of asking. It takes mu.
func (r *room) askedOver(t *roomTarget, generation uint64, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !t.told {
		t.out = nil
	}
	switch {
	case err != nil:
		r.fail(unasked(t, err))
	case t.generation == 0:
		t.generation = generation
	}
}

func unasked(t *roomTarget, err error) error {
	return fmt.Errorf("BOOTSTRAP to prefill %s failed: %w", t.to, err)
}

// connectError says why the ranks of a room were not found, in the words of this package's
// sentinels.
func connectError(err error) error {
	if !errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	for _, sentinel := range []error{nixlkv.ErrNotReady, nixlkv.ErrPeerLost, nixlkv.ErrTimeout, nixlkv.ErrSendBlocked} {
		if errors.Is(err, sentinel) {
			return err
		}
	}
	return fmt.Errorf("%w: %w", nixlkv.ErrTimeout, err)
}
