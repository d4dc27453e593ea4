package nixl

import (
	"sync"
	"sync/atomic"
)

// gate counts calls that are inside the engine, so that nothing is torn down under them.
// Once it is closed nobody enters, and drained is closed when the last one has left.
type gate struct {
	state   atomic.Int64 // calls inside, and the closed bit
	drained chan struct{}
	once    sync.Once
}

const gateClosed = 1 << 62

// enter says whether the call may go on; if so, leave must follow.
func (g *gate) enter() bool {
	if g.state.Add(1)&gateClosed == 0 {
		return true
	}
	g.leave()
	return false
}

func (g *gate) leave() {
	if g.state.Add(-1) == gateClosed {
		g.once.Do(func() { close(g.drained) })
	}
}

func (g *gate) close() {
	if g.state.Or(gateClosed) == 0 {
		g.once.Do(func() { close(g.drained) })
	}
}

func (g *gate) closing() bool { return g.state.Load()&gateClosed != 0 }

func (g *gate) inside() int { return int(g.state.Load() &^ gateClosed) }

// pins counts the uses of a handle and refuses to end it while there are any.
type pins struct{ n atomic.Int64 } // uses, or pinsReleased

const pinsReleased = -1 << 62

// pin says whether the handle is alive; if so, unpin must follow.
func (p *pins) pin() bool {
	for {
		n := p.n.Load()
		if n < 0 {
			return false
		}
		if p.n.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

func (p *pins) unpin() { p.n.Add(-1) }

// release ends the handle: nil for the one caller that shall do it, ErrInUse while there
// are uses, ErrReleased when it ended before.
func (p *pins) release() error {
	if p.n.CompareAndSwap(0, pinsReleased) {
		return nil
	}
	if p.n.Load() < 0 {
		return ErrReleased
	}
	return ErrInUse
}

// revive takes back a release whose native part failed.
func (p *pins) revive() { p.n.Store(0) }
