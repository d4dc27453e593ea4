package kvsender

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/hostmem"
	"github.com/nixlkv/nixlkv/nixl"
)

// prober makes the first connection to peers when they register, by reading a byte of a
// metadata buffer: the first transfer to a peer costs up to 200 ms, and a write would change the
// peer's memory before it asked for anything. Reads of many peers are under way at once, and one
// that does not answer holds up none of the others. It is the loader's alone.
type prober struct {
	agent   *nixl.Agent
	timeout time.Duration
	buf     *hostmem.Buffer
	local   *nixl.List // the byte that all read into
	remote  *nixl.List // filled anew for each
	flying  []*probe
	pause   time.Duration

	// Used again by each look.
	transfers []*nixl.Transfer
	statuses  []nixl.Status
}

// probe is a read that has not settled. Its peer's Remote is held by it.
type probe struct {
	t        *nixl.Transfer
	remote   *nixl.Remote
	deadline time.Time
	late     bool          // it was told that the peer does not answer
	done     []func(error) // who waits for it
}

// tell tells those who wait.
func (x *probe) tell(err error) {
	done := x.done
	x.done = nil
	for _, f := range done {
		f(err)
	}
}

const (
	// probeTimeout bounds the first connection, unless a test says otherwise.
	probeTimeout = 3 * time.Second
	// maxProbes bounds the reads under way, those given up but not settled included. Beyond it
	// peers are taken up without, and their first room makes the connection.
	maxProbes = 64
)

// The pause between two looks at the reads. It doubles, so that none takes more than twice as
// long as it has to, and a peer that never answers costs next to nothing.
const (
	minProbePause = 20 * time.Microsecond
	maxProbePause = 100 * time.Millisecond
)

// errNoPlace: too many reads are under way. It says nothing of the peer.
var errNoPlace = errors.New("kvsender: too many first connections at once")

// newProber gives a prober, with an error too, so that it can be freed.
func newProber(a *nixl.Agent, timeout time.Duration) (*prober, error) {
	p := &prober{agent: a, timeout: timeout}
	var err error
	if p.buf, err = hostmem.Alloc(1); err != nil {
		return p, err
	}
	if _, err = a.Register(nixl.Host(p.buf)); err != nil {
		return p, err
	}
	if p.local, err = a.NewList(nixl.DRAM); err != nil {
		return p, err
	}
	if p.remote, err = a.NewList(nixl.DRAM); err != nil {
		return p, err
	}
	return p, p.local.Append(nixl.Desc{Addr: uint64(p.buf.Addr()), Len: 1})
}

// free follows the end of the agent, which has given everything else back.
func (p *prober) free() error {
	if p.buf == nil {
		return nil
	}
	return p.buf.Free()
}

// read begins to read a byte of a peer. done is called when it is there, cannot be had, or has
// not come in time; perhaps at once.
func (p *prober) read(r *nixl.Remote, addr uint64, done func(error)) {
	for _, x := range p.flying {
		switch {
		case x.late && x.remote.Name() == r.Name():
			done(fmt.Errorf("%w: %s has not answered an earlier read: %w", nixlkv.ErrPeerStale, r.Name(), context.DeadlineExceeded))
			return
		case !x.late && x.remote == r:
			x.done = append(x.done, done)
			return
		}
	}
	if len(p.flying) >= maxProbes {
		done(errNoPlace)
		return
	}
	x := &probe{t: p.agent.NewTransfer(), remote: r, deadline: time.Now().Add(p.timeout), done: []func(error){done}}
	err := p.remote.Clear()
	if err == nil {
		err = p.remote.Append(nixl.Desc{Addr: addr, Len: 1})
	}
	if err == nil {
		err = x.t.Create(nixl.Read, p.local, r, p.remote, nixl.TransferOptions{Post: true})
	}
	if err != nil {
		if x.t.Held() {
			err = errors.Join(err, x.t.Release())
		}
		done(err)
		return
	}
	p.flying = append(p.flying, x)
	p.pause = minProbePause
}

// look ends the reads that have settled, tells of those that are late, and gives the time until
// the next look; 0 if nothing is under way.
func (p *prober) look(now time.Time) (pause time.Duration) {
	if len(p.flying) == 0 {
		return 0
	}
	p.transfers, p.statuses = p.transfers[:0], p.statuses[:0]
	for _, x := range p.flying {
		p.transfers, p.statuses = append(p.transfers, x.t), append(p.statuses, nixl.InProgress)
	}
	if err := p.agent.Poll(p.transfers, p.statuses); err != nil {
		// Somebody closed the engine under the manager; the agent ends what is under way.
		p.giveUp(err)
		p.flying = nil
		return 0
	}
	clear(p.transfers)
	// What is told may begin reads, so the list is in order before.
	var tell []func()
	kept := p.flying[:0]
	for i, x := range p.flying {
		if p.statuses[i] != nixl.InProgress {
			err := errors.Join(x.t.Err(), x.t.Release())
			tell = append(tell, func() { x.tell(err) })
			continue
		}
		if !x.late && now.After(x.deadline) {
			x.late = true
			tell = append(tell, func() {
				x.tell(fmt.Errorf("%w: no connection within %v: %w", nixl.ErrInProgress, p.timeout, context.DeadlineExceeded))
			})
		}
		kept = append(kept, x)
	}
	clear(p.flying[len(kept):])
	p.flying = kept
	p.pause = min(2*p.pause, maxProbePause)
	for _, f := range tell {
		f()
	}
	if len(p.flying) == 0 {
		return 0
	}
	return p.pause
}

// giveUp tells all that are still waited for. Their reads go on until they settle.
func (p *prober) giveUp(reason error) {
	for _, x := range p.flying {
		x.late = true
		x.tell(reason)
	}
}
