package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/nixlkv/nixlkv/bootstrap"
	"github.com/nixlkv/nixlkv/kvsender"
	"github.com/nixlkv/nixlkv/metadata"
	"github.com/nixlkv/nixlkv/nixl"
)

// prefill is the side that has computed the KV cache of some requests and sends it.
type prefill struct {
	*program
	worker
	plan    *plan
	boot    *bootstrap.Server
	manager *kvsender.Manager
	child   *child // the decode, where this process has started it
	bar     *progress
}

// run is the prefill from start to end. When it returns, everything is closed.
func (p *prefill) run(ctx context.Context) (err error) {
	defer func() { err = p.close(ctx, err) }()
	if !p.verbose { // the log says more
		p.bar = newProgress(p.stderr)
	}
	defer p.bar.end()
	if err := p.open(ctx); err != nil {
		return err
	}
	r := &results{info: p.engine.Info(), asked: p.kind, config: p.config, plan: p.plan}
	if err := p.send(ctx, r); err != nil {
		return err
	}
	if err := p.part(ctx, r); err != nil {
		return err
	}
	p.bar.say("measuring memcpy")
	if r.copied, err = measureCopy(ctx, p.pool, p.plan.round(0)); err != nil {
		return err
	}
	p.bar.end()
	return r.print(p.stdout)
}

// open opens the engine, serves the bootstrap server, has the decode started, and registers
// there once the cache is filled.
func (p *prefill) open(ctx context.Context) (err error) {
	p.plan = newPlan(&p.config)
	// The decode has a cache too, and when it is gone this process makes a second one to
	// measure memcpy with.
	if err := checkMemory(2 * p.plan.shape.bytes(p.plan.pool)); err != nil {
		return err
	}
	if err := p.openEngine(p.program); err != nil {
		return err
	}
	info := p.engine.Info()
	if p.kind == nixl.Auto && info.Kind == nixl.Embedded {
		why := info.Why
		if !p.verbose {
			why = brief(why)
		}
		fmt.Fprintf(p.stderr, "demo: running on the embedded engine, in pure Go. %s\n", why)
	}
	if p.boot, err = bootstrap.Listen(p.bootstrap, bootstrap.WithLogger(p.log)); err != nil {
		return err
	}
	if err := p.callDecode(p.boot.Endpoint().String(), info.Kind); err != nil {
		return err
	}
	p.bar.say("making the KV caches")
	layout, err := p.makeMemory(ctx, rolePrefill, p.plan)
	if err != nil {
		return err
	}
	if err := p.pool.fill(ctx, p.plan.seed); err != nil {
		return err
	}
	p.manager, err = kvsender.NewManager(ctx, layout,
		kvsender.WithEngine(p.engine), kvsender.WithBootstrap(p.boot.Endpoint().String()),
		kvsender.WithListen(p.host, 0), kvsender.WithLogger(p.log), kvsender.WithMemory(p.memory()...),
		kvsender.WithBootstrapTimeout(p.patience()), kvsender.WithCloseTimeout(closeTimeout))
	return err
}

// callDecode starts the decode, or says how it is started.
func (p *prefill) callDecode(addr string, kind nixl.Kind) (err error) {
	args := p.decodeArgs(addr, kind)
	if p.role == roleBoth {
		p.child, err = startDecode(args, p.stderr, p.fail)
		return err
	}
	fmt.Fprintf(p.stderr, "demo: waiting for a decode: demo %s\n", strings.Join(args, " "))
	return nil
}

// send sends all requests, batch by batch. The decode asks for a round when it has verified
// the one before.
func (p *prefill) send(ctx context.Context, r *results) error {
	p.bar.begin(len(p.plan.rooms))
	for round := range p.plan.rounds {
		for i, batch := range p.plan.batches(round) {
			m := &r.later
			switch {
			case round == 0 && i == 0:
				m = &r.first
			case round == 0:
				m = &r.others
			}
			samples, err := p.sendBatch(ctx, batch)
			if err != nil {
				return err
			}
			m.add(samples)
		}
		p.log.Info("round sent", zap.Int("round", round))
	}
	return nil
}

// sendBatch sends requests, so many at a time.
func (p *prefill) sendBatch(ctx context.Context, batch []request) (samples []sample, err error) {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	queue := make(chan request, len(batch))
	for _, r := range batch {
		queue <- r
	}
	close(queue)
	var (
		mu      sync.Mutex // guards samples, err and the bar
		workers sync.WaitGroup
	)
	take := func(s sample, e error) {
		mu.Lock()
		defer mu.Unlock()
		switch {
		case e == nil:
			samples = append(samples, s)
			p.bar.step()
		case err == nil:
			err = e // what fails after it fails because of it
			stop()
		}
	}
	for range min(p.inFlight, len(batch)) {
		workers.Go(func() {
			for r := range queue {
				if ctx.Err() != nil {
					return
				}
				take(p.sendRequest(ctx, r))
			}
		})
	}
	workers.Wait()
	if err == nil && len(samples) < len(batch) {
		err = context.Cause(ctx)
	}
	return samples, err
}

// sendRequest sends the pages of a request, chunk by chunk, and its first token. What is
// measured is the time from the first chunk, when the decode has told where they go, until
// all have landed.
func (p *prefill) sendRequest(ctx context.Context, r request) (m sample, err error) {
	s, err := p.manager.Open(r.room)
	if err != nil {
		return m, err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	if _, err := s.WaitBootstrapped(ctx); err != nil {
		return m, err
	}
	m.begun = time.Now()
	plan := kvsender.Plan{Pages: len(r.sources), Tokens: len(r.sources) * p.plan.shape.pageTokens, Aux: kvsender.Aux(r.source)}
	if err := s.Begin(plan); err != nil {
		return m, err
	}
	pages := r.sources
	for ; len(pages) > p.chunk; pages = pages[p.chunk:] {
		if err := s.Send(pages[:p.chunk]); err != nil {
			return m, err
		}
	}
	if err := p.slots.Encode(r.source, &metadata.Record{Room: r.room, OutputID: r.token}); err != nil {
		return m, err
	}
	if err := s.Finish(pages, nil); err != nil {
		return m, err
	}
	if err := s.Wait(ctx); err != nil {
		return m, err
	}
	m.ended, m.bytes = time.Now(), p.plan.shape.bytes(len(r.sources))
	posted := s.Metrics()
	m.pieces, m.transfers = int(posted.Pages), posted.Transfers
	p.log.Debug("request sent", zap.Uint64("room", uint64(r.room)), zap.Int("chunks", posted.Chunks), zap.Int("transfers", posted.Transfers))
	return m, nil
}

// part lets go of the decode's memory, and gets its report where it is this process's child.
func (p *prefill) part(ctx context.Context, r *results) (err error) {
	if err := p.manager.Shutdown(ctx); err != nil {
		return err
	}
	p.bar.say("waiting for the decode to verify the last round")
	r.decode, err = p.child.wait(ctx)
	return err
}

// close gives everything back and gives the run's error, or what went wrong here.
func (p *prefill) close(ctx context.Context, err error) error {
	if err != nil && ctx.Err() == nil {
		p.child.notice()
	}
	err = explain(ctx, err)
	// The decode ends before the manager: transfers to one that hangs would not settle.
	p.child.stop()
	var manager func() error
	if p.manager != nil {
		manager = p.manager.Close
	}
	cleanup := p.worker.close(manager)
	if p.boot != nil {
		cleanup = errors.Join(cleanup, p.boot.Close())
	}
	if err != nil && cleanup != nil {
		p.log.Warn("cleaning up", zap.Error(cleanup))
		return err
	}
	return errors.Join(err, cleanup)
}
