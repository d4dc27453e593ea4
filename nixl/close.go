package nixl

import (
	"context"
	"errors"
	"time"

	"go.uber.org/zap"

	"github.com/nixlkv/nixlkv/internal/engine"
)

// Pauses between two looks at what keeps a closing agent from being torn down.
const (
	minTeardownPause = 200 * time.Microsecond
	maxTeardownPause = 500 * time.Millisecond
)

// Close is Shutdown within the agent's close timeout.
func (a *Agent) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), a.opts.closeTimeout)
	defer cancel()
	return a.Shutdown(ctx)
}

// Shutdown ends the agent. From its start on every other call gives ErrClosed. It waits
// until the calls that are inside the engine have returned and every posted transfer has
// settled, then gives everything back in order: requests, prepared lists, lists, peers,
// registrations, the agent. The memory that was registered is free when it returns nil.
//
// When the context ends first it returns an error wrapping ErrStillInFlight. The agent then
// stays in quarantine, its memory registered and pinned, and is torn down in the background
// as soon as everything has settled. Shutdown and Close may be called again, to wait on.
func (a *Agent) Shutdown(ctx context.Context) error {
	a.closeOnce.Do(func() {
		a.closing.Store(time.Now().UnixNano())
		a.calls.close()
		go a.teardown()
	})
	select {
	case <-a.closed:
		return a.fail("close", "", a.closeErr)
	default:
	}
	select {
	case <-a.closed:
		return a.fail("close", "", a.closeErr)
	case <-ctx.Done():
		return a.fail("close", "", &InFlightError{
			Transfers: int(a.inFlight.Load()),
			Calls:     a.calls.inside(),
			Waited:    time.Since(time.Unix(0, a.closing.Load())),
		})
	}
}

// teardown runs once, alone with the agent: nobody else is inside or can enter.
func (a *Agent) teardown() {
	<-a.calls.drained
	a.settleAll()
	a.closeErr = a.giveBack()
	a.eng.forget(a)
	close(a.closed)
}

// settleAll waits until no transfer is in flight, however long that takes.
func (a *Agent) settleAll() {
	pause := minTeardownPause
	for warned := false; a.inFlight.Load() > 0; {
		for t := a.transfers.head; t != nil; t = t.next {
			t.mu.Lock()
			if t.state == transferPosted {
				t.pollOne()
			}
			t.mu.Unlock()
		}
		if a.inFlight.Load() == 0 {
			break
		}
		if !warned && pause == maxTeardownPause {
			a.log.Warn("closing waits for transfers in flight", zap.Int64("transfers", a.inFlight.Load()))
			warned = true
		}
		time.Sleep(pause)
		pause = min(pause*2, maxTeardownPause)
	}
}

// giveBack releases everything in order. What fails is reported and left behind, and so is
// all that must not be ended while it is there.
func (a *Agent) giveBack() error {
	var errs []error
	for t := a.transfers.head; t != nil; {
		next := t.next
		t.mu.Lock()
		if err := t.end(); err != nil {
			errs = append(errs, err)
		}
		t.mu.Unlock()
		t = next
	}
	for p := range a.prepared {
		if err := p.p.release(); err != nil {
			errs = append(errs, err)
		} else if err := p.end(); err != nil {
			errs = append(errs, err)
		}
	}
	for l := range a.lists {
		l.mu.Lock()
		l.end()
		l.mu.Unlock()
	}
	a.mu.Lock()
	clear(a.lists)
	a.mu.Unlock()
	if len(errs) > 0 {
		return errors.Join(errs...)
	}
	for r := range a.remotes {
		if err := r.p.release(); err != nil {
			errs = append(errs, err)
		} else if err := r.end(); err != nil {
			errs = append(errs, err)
		}
	}
	for r := range a.regs {
		if err := a.deregisterAtLast(r); err != nil {
			errs = append(errs, err)
		}
	}
	if len(errs) > 0 {
		return errors.Join(errs...)
	}
	return a.raw.Destroy()
}

// deregisterAtLast waits for peers that still hold the memory.
func (a *Agent) deregisterAtLast(r *Registration) error {
	if err := r.p.release(); err != nil {
		return err
	}
	for pause := minTeardownPause; ; pause = min(pause*2, maxTeardownPause) {
		err := r.deregisterRaw()
		if err == nil {
			a.mu.Lock()
			delete(a.regs, r)
			a.mu.Unlock()
			return nil
		}
		if !errors.Is(err, engine.ErrBusy) {
			return err
		}
		time.Sleep(pause)
	}
}

func closeAll(agents []*Agent) error {
	errs := make([]error, len(agents))
	done := make(chan struct{})
	for i, a := range agents {
		go func() {
			errs[i] = a.Close()
			done <- struct{}{}
		}()
	}
	for range agents {
		<-done
	}
	return errors.Join(errs...)
}
