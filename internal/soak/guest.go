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
	plan   *plan
	addr   string
	engine *nixl.Engine
	mem    *memory
	room   nixlkv.Room // the next guest's
	tally  tally

	end  context.CancelFunc
	busy sync.WaitGroup
}

func newGuests(p *plan, addr string, engine *nixl.Engine) (*guests, error) {
	mem, err := newMemory(p, 1)
	return &guests{plan: p, addr: addr, engine: engine, mem: mem, room: firstGuestRoom}, err
}

// visit has guests come and go until stop. Those who do not meet the prefill cost the machine
// nearly as much, and are there to compare with.
func (g *guests) visit(meet bool) {
	ctx, cancel := context.WithCancel(context.Background())
	g.end = cancel
	g.busy.Go(func() {
		for ctx.Err() == nil {
			begun := time.Now()
			g.tally.add(arrives, time.Since(begun), g.one(ctx, meet))
		}
	})
}

func (g *guests) one(ctx context.Context, meet bool) (err error) {
	m, err := newDecodeManager(context.WithoutCancel(ctx), g.mem, g.engine)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, m.Close()) }()
	if !meet {
		return nil
	}
	room := g.room
	g.room++
	return receive(m, g.mem, g.addr, room, arrives, 0)
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
