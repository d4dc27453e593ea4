package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.uber.org/zap"

	"github.com/nixlkv/nixlkv/nixl"
)

// job is a request to send: its KV cache goes from pages of the prefill to pages of the
// decode.
type job struct {
	room             uint64
	sources, targets []int32
}

// jobs pairs what both sides have said of a round.
func jobs(p *plan, r *ready, round int) []job {
	rooms, sources := p.rooms(round), p.sources(round)
	js := make([]job, len(rooms))
	for i, room := range rooms {
		js[i] = job{room, sources[i], r.Targets[i]}
	}
	return js
}

// sender writes requests to one peer, several at a time. It keeps its transfers and
// buffers, so that a request costs no allocation.
type sender struct {
	agent         *nixl.Agent
	log           *zap.Logger
	shape         shape
	pool          int            // pages of either side
	local, remote *nixl.Prepared // every page of either side, as listPages lists them

	idle     []*nixl.Transfer
	active   []*nixl.Transfer
	flights  []flight // of the active ones
	statuses []nixl.Status
	sources  []int32 // descriptors of the request that is being posted
	targets  []int32
}

// flight is a request on its way.
type flight struct {
	job    job
	posted time.Time
}

// newSender prepares both sides' lists, once for all requests.
func newSender(a *nixl.Agent, remote *nixl.Remote, own *pool, theirs []uint64, inFlight int, log *zap.Logger) (*sender, error) {
	s := &sender{agent: a, log: log, shape: own.shape, pool: own.pages, statuses: make([]nixl.Status, inFlight)}
	var err error
	if s.local, err = prepare(a, own.shape, own.addresses(), own.pages, a.Prepare); err != nil {
		return nil, err
	}
	if s.remote, err = prepare(a, own.shape, theirs, own.pages, remote.Prepare); err != nil {
		return nil, err
	}
	for range inFlight {
		s.idle = append(s.idle, a.NewTransfer())
	}
	return s, nil
}

// prepare binds the list of all pages of one side.
func prepare(a *nixl.Agent, s shape, addresses []uint64, pages int, bind func(*nixl.List) (*nixl.Prepared, error)) (*nixl.Prepared, error) {
	l, err := listPages(a, s, addresses, pages)
	if err != nil {
		return nil, err
	}
	p, err := bind(l)
	return p, errors.Join(err, l.Free())
}

// send writes requests, as many at a time as there are transfers, and returns when all have
// settled. settled is called after each. When it fails, some may still be in flight:
// closing the agent waits for them.
func (s *sender) send(ctx context.Context, jobs []job, settled func()) (measurement, error) {
	var m measurement
	begin := time.Now()
	var pace backoff
	for len(jobs) > 0 || len(s.active) > 0 {
		for len(jobs) > 0 && len(s.idle) > 0 {
			if err := s.post(jobs[0]); err != nil {
				return m, fmt.Errorf("room %d: %w", jobs[0].room, err)
			}
			jobs = jobs[1:]
		}
		n, err := s.poll(&m)
		if err != nil {
			return m, err
		}
		if n > 0 {
			pace.moved()
			for range n {
				settled()
			}
			if ctx.Err() == nil {
				continue // others may have settled meanwhile, and there may be more to post
			}
		}
		if err := pace.wait(ctx); err != nil {
			return m, fmt.Errorf("sending, with %d requests in flight: %w", len(s.active), err)
		}
	}
	m.wall = time.Since(begin)
	return m, nil
}

// post makes a request's transfer and posts it in the same call.
func (s *sender) post(j job) error {
	t := s.idle[len(s.idle)-1]
	posted := time.Now()
	s.sources = appendIndices(s.sources[:0], s.shape, s.pool, j.sources)
	s.targets = appendIndices(s.targets[:0], s.shape, s.pool, j.targets)
	err := t.CreateIndexed(nixl.Write, s.local, s.sources, s.remote, s.targets,
		nixl.TransferOptions{Notif: tag(j.room), Post: true})
	if err != nil {
		return err
	}
	s.idle = s.idle[:len(s.idle)-1]
	s.active = append(s.active, t)
	s.flights = append(s.flights, flight{j, posted})
	s.log.Debug("posted", zap.Uint64("room", j.room), zap.Duration("took", time.Since(posted)))
	return nil
}

// poll asks for all active transfers at once, takes account of those that have settled and
// counts them.
func (s *sender) poll(m *measurement) (settled int, err error) {
	if err := s.agent.Poll(s.active, s.statuses); err != nil {
		return 0, err
	}
	now := time.Now()
	for i := len(s.active) - 1; i >= 0; i-- {
		t, f := s.active[i], s.flights[i]
		switch s.statuses[i] {
		case nixl.InProgress:
			continue
		case nixl.Success:
		default:
			return settled, fmt.Errorf("room %d: %w", f.job.room, t.Err())
		}
		measured, err := t.Telemetry()
		if err != nil {
			return settled, err
		}
		if err := t.Release(); err != nil {
			return settled, err
		}
		pages := len(f.job.sources)
		m.add(s.shape.bytes(pages), now.Sub(f.posted))
		m.descriptors += pages * s.shape.regions()
		m.merged += int(measured.Descriptors)
		s.log.Debug("sent", zap.Uint64("room", f.job.room), zap.Duration("latency", now.Sub(f.posted)),
			zap.Uint64("descriptors", measured.Descriptors))

		// The last one takes the place of this one.
		last := len(s.active) - 1
		s.active[i], s.flights[i], s.statuses[i] = s.active[last], s.flights[last], s.statuses[last]
		s.active, s.flights = s.active[:last], s.flights[:last]
		s.idle = append(s.idle, t)
		settled++
	}
	return settled, nil
}
