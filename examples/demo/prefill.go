package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"time"

	"go.uber.org/zap"

	"github.com/nixlkv/nixlkv/nixl"
)

// prefill is the side that has computed the KV cache of some requests and sends it.
type prefill struct {
	*program
	connect func(context.Context) (net.Conn, error) // gives the decode
	child   *child                                  // the decode, if connect has started it

	engine *nixl.Engine
	agent  *nixl.Agent
	pool   *pool
	link   *link
	plan   plan
	bar    *progress
}

// run is the prefill from start to end. When it returns, everything is closed.
func (p *prefill) run(ctx context.Context) (_ *results, err error) {
	defer func() { err = p.close(ctx, err) }()
	if err := p.open(); err != nil {
		return nil, err
	}
	if !p.verbose { // the log says more
		p.bar = newProgress(p.stderr)
	}
	defer p.bar.end()
	ready, err := p.meet(ctx)
	if err != nil {
		return nil, err
	}
	r := &results{info: p.engine.Info(), asked: p.kind, plan: &p.plan, inFlight: p.inFlight, verbose: p.verbose}
	if err := p.send(ctx, ready, r); err != nil {
		return nil, err
	}
	if err := p.part(ctx); err != nil {
		return nil, err
	}
	p.bar.say("measuring memcpy")
	r.copied, err = measureCopy(ctx, p.pool, jobs(&p.plan, ready, 0))
	return r, err
}

// open opens the engine, makes the agent and plans.
func (p *prefill) open() (err error) {
	// The decode has a cache too, and when it is gone this process makes a second one to
	// measure memcpy with.
	if err := checkMemory(2 * llama3(p.layers).bytes(p.poolPages)); err != nil {
		return err
	}
	if p.engine, err = p.openEngine(p.kind); err != nil {
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
	// A prefill never drains notifications, so one agent can do for all decodes. The name
	// has to be new: agents of earlier runs may be remembered.
	opts := []nixl.AgentOption{nixl.WithTelemetry(), nixl.WithCloseTimeout(closeTimeout)}
	if info.Kind == nixl.Native {
		// As SGLang's prefill: UCX cuts a transfer into pieces that its threads move.
		opts = append(opts, nixl.WithBackend(nixl.DefaultBackend, map[string]string{"num_threads": "8"}))
	}
	p.agent, err = p.engine.NewAgent("prefill-"+rand.Text(), opts...)
	if err != nil {
		return err
	}
	p.plan = makePlan(p.config, info.Kind, p.agent.Name())
	return nil
}

// meet connects to the decode, tells it the plan, makes the cache meanwhile and gets the
// decode's answer.
func (p *prefill) meet(ctx context.Context) (*ready, error) {
	conn, err := p.connect(ctx)
	if err != nil {
		return nil, err
	}
	p.link = newLink(conn, roleDecode, p.fail, p.child.exit)
	if err := p.link.send(message{Plan: &p.plan}); err != nil {
		return nil, err
	}
	p.bar.say("making the KV caches")
	if p.pool, err = newPool(ctx, rolePrefill, p.plan.shape(), p.plan.Pool); err != nil {
		return nil, err
	}
	if err := p.pool.fill(ctx, p.plan.Seed); err != nil {
		return nil, err
	}
	if _, err := p.agent.Register(p.pool.regions()...); err != nil {
		return nil, err
	}
	p.log.Info("waiting for the decode to be ready")
	m, err := p.link.receive(ctx, "pages")
	if err != nil {
		return nil, err
	}
	if m.Ready == nil {
		return nil, errors.New("the decode did not answer with its pages")
	}
	return m.Ready, m.Ready.check(&p.plan)
}

// send sends all requests, round by round: the very first alone, because it connects the
// two.
func (p *prefill) send(ctx context.Context, ready *ready, r *results) error {
	begin := time.Now()
	remote, err := p.agent.Load(ready.Metadata)
	if err != nil {
		return err
	}
	s, err := newSender(p.agent, remote, p.pool, ready.Regions, p.inFlight, p.log)
	if err != nil {
		return err
	}
	r.load = time.Since(begin)
	p.log.Info("decode loaded", zap.String("agent", remote.Name()), zap.Duration("took", r.load))

	p.bar.begin(len(p.plan.Rooms))
	for round := range p.plan.Rounds {
		js, m := jobs(&p.plan, ready, round), &r.later
		if round == 0 {
			if r.first, err = s.send(ctx, js[:1], p.bar.step); err != nil {
				return err
			}
			js, m = js[1:], &r.others
		}
		sent, err := s.send(ctx, js, p.bar.step)
		if err != nil {
			return err
		}
		m.join(sent)
		p.log.Info("round sent, waiting for the decode to verify it", zap.Int("round", round))
		if err := p.verified(ctx, r); err != nil {
			return err
		}
	}
	return nil
}

// verified gets the decode's report on a round.
func (p *prefill) verified(ctx context.Context, r *results) error {
	m, err := p.link.receive(ctx, "report")
	switch {
	case err != nil:
		return err
	case m.Report == nil:
		return errors.New("the decode did not answer with its report")
	case m.Report.Written != p.plan.bytes():
		return fmt.Errorf("the decode verified %d bytes, %d were sent", m.Report.Written, p.plan.bytes())
	}
	r.verified += m.Report.Written
	r.zero = m.Report.Zero
	return nil
}

// part lets go of the decode's memory, tells it so and waits for its end.
func (p *prefill) part(ctx context.Context) error {
	if err := p.agent.Close(); err != nil {
		return err
	}
	return p.link.bye(ctx)
}

// close gives everything back and gives the run's error, or what went wrong here.
func (p *prefill) close(ctx context.Context, err error) error {
	if p.link != nil {
		err = explain(ctx, err)
		p.link.close(err)
	}
	// The decode ends before the engine: transfers to one that hangs would not settle.
	cleanup := p.child.end()
	if p.engine != nil {
		cleanup = errors.Join(cleanup, p.engine.Close())
	}
	if p.pool != nil {
		cleanup = errors.Join(cleanup, p.pool.free())
	}
	if err != nil && cleanup != nil {
		p.log.Warn("cleaning up", zap.Error(cleanup))
		return err
	}
	return errors.Join(err, cleanup)
}
