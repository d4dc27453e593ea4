package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"sync"

	"go.uber.org/zap"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/bootstrap"
	"github.com/nixlkv/nixlkv/kvsender"
	"github.com/nixlkv/nixlkv/nixl"
)

// prefill is a prefill rank.
type prefill struct {
	server  *bootstrap.Server // nil if another rank serves
	manager *kvsender.Manager
	mem     *memory
	events  *events

	mu   sync.Mutex
	open map[nixlkv.Room]*kvsender.Sender // not cleared
}

// openPrefill serves the rendezvous, if the configuration says so, and registers the rank
// there.
func openPrefill(ctx context.Context, cfg *config, mem *memory, engine *nixl.Engine, log *zap.Logger, ev *events) (_ *prefill, err error) {
	p := &prefill{mem: mem, events: ev, open: map[nixlkv.Room]*kvsender.Sender{}}
	defer func() {
		if err != nil {
			ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
			defer cancel()
			err = errors.Join(err, p.close(ctx))
		}
	}()
	layout, err := newLayout(cfg, mem)
	if err != nil {
		return nil, err
	}
	ip, err := cfg.localIP()
	if err != nil {
		return nil, err
	}
	opts, err := kvsender.FromEnv()
	if err != nil {
		return nil, err
	}
	at := bootstrap.Endpoint{Host: cfg.Host, Port: cfg.BootstrapPort}.Reachable()
	if cfg.ServeBootstrap {
		p.server, err = bootstrap.Listen(net.JoinHostPort(cfg.Host, strconv.Itoa(cfg.BootstrapPort)), bootstrap.WithLogger(log))
		if err != nil {
			return nil, err
		}
		at = p.server.Endpoint()
	}
	opts = append(opts, kvsender.WithEngine(engine), kvsender.WithHostVRAM(), kvsender.WithLogger(log), kvsender.WithMemory(mem.buffers()...),
		kvsender.WithListen(ip, cfg.ControlPort), kvsender.WithBootstrap(at.String()), kvsender.WithCloseTimeout(closeTimeout),
		kvsender.WithAllocationPolicy(bootstrap.AllocationPolicy(cfg.AllocationPolicy)))
	if cfg.HTTPPort != 0 {
		opts = append(opts, kvsender.WithHTTPPort(cfg.HTTPPort))
	}
	if cfg.Parallel.LoadBalance != "" {
		opts = append(opts, kvsender.WithLoadBalance(cfg.Parallel.LoadBalance))
	}
	p.manager, err = kvsender.NewManager(ctx, layout, opts...)
	return p, err
}

func (p *prefill) ready() readyEvent {
	e := readyEvent{Event: "ready", Role: rolePrefill, Agent: p.manager.Agent(), RankPort: p.manager.ControlPort(),
		Engine: p.manager.Engine().Info().Kind.String()}
	e.LocalIP, _, _ = net.SplitHostPort(p.manager.Addr())
	if p.server != nil {
		e.BootstrapPort = p.server.Endpoint().Port
	}
	return e
}

func (p *prefill) commands() map[string]command {
	return map[string]command{"send": p.send, "abort": p.abort, "bench": p.bench}
}

// abort gives a room up. One that has been cleared meanwhile needs none.
func (p *prefill) abort(d *driver, line []byte) error {
	var args struct {
		Room *nixlkv.Room `json:"room"`
	}
	if err := parse(line, &args); err != nil {
		return err
	}
	room, err := roomArg(args.Room)
	if err != nil {
		return err
	}
	p.mu.Lock()
	s := p.open[room]
	p.mu.Unlock()
	if s != nil {
		s.Abort("")
	}
	d.events.emit(abortedEvent{Event: "aborted", Room: room})
	return nil
}

func (p *prefill) rooms() roomsEvent {
	stats := p.manager.Stats()
	e := roomsEvent{Event: "rooms", RequestStatus: map[nixlkv.Room]string{}, Failures: map[nixlkv.Room]string{},
		Peers: []string{}, Held: stats.Rooms}
	for _, peer := range stats.Peers {
		e.Peers = append(e.Peers, peer.Agent)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for room, s := range p.open {
		e.RequestStatus[room] = s.Status().String()
		var failed *nixlkv.KVTransferError
		if errors.As(s.Err(), &failed) {
			e.Failures[room] = failed.Reason
		}
	}
	return e
}

// openRoom opens a room and keeps its sender until clear.
func (p *prefill) openRoom(room nixlkv.Room) (*kvsender.Sender, error) {
	s, err := p.manager.Open(room)
	if err != nil {
		return nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.open[room] = s
	return s, nil
}

// clear ends the use of a room; its number may be used again.
func (p *prefill) clear(s *kvsender.Sender) error {
	// Before the sender is closed: from then on the number may be opened again.
	p.mu.Lock()
	if p.open[s.Room()] == s {
		delete(p.open, s.Room())
	}
	p.mu.Unlock()
	return s.Close()
}

// close ends the rank: rooms that are open fail, on both sides, then the rendezvous ends.
func (p *prefill) close(ctx context.Context) error {
	var errs []error
	if p.manager != nil {
		if err := p.manager.Shutdown(ctx); err != nil {
			errs = append(errs, fmt.Errorf("closing the rank: %w", err))
		}
	}
	if p.server != nil {
		errs = append(errs, p.server.Shutdown(ctx))
	}
	return errors.Join(errs...)
}
