package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"iter"

	"go.uber.org/zap"

	"github.com/nixlkv/nixlkv/nixl"
)

// decode is the side that the KV cache is sent to.
type decode struct {
	*program

	engine *nixl.Engine
	agent  *nixl.Agent
	pool   *pool
	link   *link
	plan   *plan

	targets [][]int32 // this side's pages of each request
	want    []origin  // of each page of the pool
	round   int
}

// run is the decode from start to end. When it returns, everything is closed.
func (d *decode) run(ctx context.Context) (err error) {
	defer func() { err = d.close(ctx, err) }()
	for step := range d.steps() {
		if err := step.do(ctx); err != nil {
			return err
		}
	}
	return nil
}

// step is a part of the run.
type step struct {
	name string
	do   func(context.Context) error
}

// steps gives the parts in order. Each needs the ones before it.
func (d *decode) steps() iter.Seq[step] {
	return func(yield func(step) bool) {
		if !yield(step{"meet", d.meet}) || !yield(step{"prepare", d.prepare}) || !yield(step{"answer", d.answer}) {
			return
		}
		for d.round = range d.plan.Rounds {
			if !yield(step{"await", d.await}) || !yield(step{"verify", d.verify}) {
				return
			}
		}
		yield(step{"part", d.part})
	}
}

// meet connects to the prefill and gets the plan.
func (d *decode) meet(ctx context.Context) error {
	conn, err := dial(ctx, d.connectTo, d.log)
	if err != nil {
		return err
	}
	d.link = newLink(conn, rolePrefill, d.fail, nil)
	m, err := d.link.receive(ctx, "plan")
	if err != nil {
		return err
	}
	if m.Plan == nil {
		return errors.New("the prefill did not begin with a plan")
	}
	d.plan = m.Plan
	return d.plan.check()
}

// prepare opens the engine that the prefill has and registers an empty cache.
func (d *decode) prepare(ctx context.Context) error {
	kind, err := nixl.ParseKind(d.plan.Engine)
	if err != nil {
		return err
	}
	if asked := d.kind; asked != nixl.Auto && asked != kind {
		return fmt.Errorf("the prefill runs on the %v engine, this decode was started with -engine %v", kind, asked)
	}
	s := d.plan.shape()
	if err := checkMemory(s.bytes(d.plan.Pool)); err != nil {
		return err
	}
	if d.engine, err = d.openEngine(kind); err != nil {
		return err
	}
	if d.agent, err = d.engine.NewAgent("decode-"+rand.Text(), nixl.WithCloseTimeout(closeTimeout)); err != nil {
		return err
	}
	if d.pool, err = newPool(ctx, roleDecode, s, d.plan.Pool); err != nil {
		return err
	}
	_, err = d.agent.Register(d.pool.regions()...)
	return err
}

// answer tells the prefill where the requests shall go.
func (d *decode) answer(context.Context) error {
	p := d.plan
	// What is registered after this the metadata does not tell.
	metadata, err := d.agent.LocalMetadata()
	if err != nil {
		return err
	}
	d.targets = pickPages(random(p.Seed, streamDecode), p.Pool, p.requests(), p.Pages)
	d.want = make([]origin, p.Pool)
	return d.link.send(message{Ready: &ready{Metadata: metadata, Regions: d.pool.addresses(), Targets: d.targets}})
}

// await drains notifications until every request of the round has its own. NIXL delivers
// one only after the bytes of its transfer.
func (d *decode) await(ctx context.Context) error {
	rooms := d.plan.rooms(d.round)
	missing := make(map[uint64]bool, len(rooms))
	for _, room := range rooms {
		missing[room] = true
	}
	var arrived nixl.Notifications
	var pace backoff
	for len(missing) > 0 {
		if err := d.agent.Notifications(&arrived); err != nil {
			return err
		}
		for from, msg := range arrived.All() {
			room, err := parseTag(msg)
			switch {
			case err != nil:
				return err
			case string(from) != d.plan.Agent:
				return fmt.Errorf("room %d: notification from agent %.64q, want %q", room, from, d.plan.Agent)
			case !missing[room]:
				return fmt.Errorf("room %d: notified twice, or not in this round", room)
			}
			delete(missing, room)
			d.log.Debug("arrived", zap.Uint64("room", room))
		}
		if arrived.Len() > 0 {
			pace.moved()
		}
		if err := pace.wait(ctx); err != nil {
			return fmt.Errorf("waiting for notifications, %d of %d missing: %w", len(missing), len(rooms), err)
		}
	}
	arrive(d.want, rooms, d.plan.sources(d.round), d.targets)
	return nil
}

// verify looks at every byte of the cache and reports.
func (d *decode) verify(ctx context.Context) error {
	d.log.Info("round arrived, verifying it", zap.Int("round", d.round))
	if err := verify(ctx, d.pool, d.plan.shape(), d.plan.Seed, d.want); err != nil {
		return err
	}
	return d.link.send(message{Report: &report{Written: d.plan.bytes(), Zero: d.zero()}})
}

// zero is how much of the cache belongs to no request.
func (d *decode) zero() int64 { return d.plan.shape().bytes(d.plan.Pool) - d.plan.bytes() }

// part waits until the prefill holds nothing of this process any more.
func (d *decode) part(ctx context.Context) error {
	m, err := d.link.receive(ctx, "end")
	if err != nil {
		return err
	}
	if !m.Bye {
		return errors.New("the prefill did not end with its bye")
	}
	return nil
}

// close gives everything back and gives the run's error, or what went wrong here. The
// prefill is told of a failure at once, and of success by the end of the link, when the
// memory is free.
func (d *decode) close(ctx context.Context, err error) error {
	if err != nil && d.link != nil {
		err = explain(ctx, err)
		d.link.close(err)
	}
	var cleanup error
	if d.engine != nil {
		cleanup = d.engine.Close()
	}
	if d.pool != nil {
		cleanup = errors.Join(cleanup, d.pool.free())
	}
	if err != nil {
		if cleanup != nil {
			d.log.Warn("cleaning up", zap.Error(cleanup))
		}
		return err
	}
	d.link.close(cleanup)
	return cleanup
}
