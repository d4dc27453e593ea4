package main

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/nixl"
)

// guests are decode managers that come and go, one at a time. Each is a peer that the prefill
// has not met before.
type guests struct {
	plan        *plan
	here, there host
	engine      *nixl.Engine
	mem         *memory
	tally       tally

	end  context.CancelFunc
	busy sync.WaitGroup
}

// host is a prefill that guests come to.
type host struct {
	addr string
	room nixlkv.Room // the next guest's
}

func newGuests(p *plan, here, there string, engine *nixl.Engine) (*guests, error) {
	mem, err := newMemory(p, 1)
	return &guests{plan: p, here: host{here, firstGuestRoom}, there: host{there, firstGuestRoom}, engine: engine, mem: mem}, err
}

// visit has guests come and go until stop. Those who come to nobody (nil), or to the other prefill,
// cost the machine nearly as much, and are there to compare with.
func (g *guests) visit(at *host) {
	ctx, cancel := context.WithCancel(context.Background())
	g.end = cancel
	g.busy.Go(func() {
		for ctx.Err() == nil {
			begun := time.Now()
			g.tally.add(arrives, time.Since(begun), g.one(ctx, at))
		}
	})
}

func (g *guests) one(ctx context.Context, at *host) (err error) {
	m, err := newDecodeManager(context.WithoutCancel(ctx), g.mem, g.engine)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, m.Close()) }()
	if at == nil {
		return nil
	}
	room := at.room
	at.room++
	return receive(m, g.mem, at.addr, room, arrives, 0)
}

func (g *guests) start() {}

func (g *guests) stop() {
	if g.end != nil {
		g.end()
	}
	g.busy.Wait()
}

func (g *guests) counts() *tally { return &g.tally }

func (g *guests) report(*report) {}

func (g *guests) close(context.Context) error { return g.mem.buf.Free() }
