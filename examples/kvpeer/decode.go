package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/bootstrap"
	"github.com/nixlkv/nixlkv/kvreceiver"
	"github.com/nixlkv/nixlkv/nixl"
)

// releasePatience is how long a failed room waits for its prefill ranks, unless the environment
// says: SGLang 0.5.18 never answers, and whoever drives this program waits for its end.
const releasePatience = 3 * time.Second

// decode is a decode rank.
type decode struct {
	manager *kvreceiver.Manager
	mem     *memory
	events  *events
	log     *zap.Logger

	mu   sync.Mutex
	open map[nixlkv.Room]*kvreceiver.Receiver // not cleared
}

func openDecode(ctx context.Context, cfg *config, mem *memory, engine *nixl.Engine, log *zap.Logger, ev *events) (*decode, error) {
	layout, err := newLayout(cfg, mem)
	if err != nil {
		return nil, err
	}
	ip, err := cfg.localIP()
	if err != nil {
		return nil, err
	}
	fromEnv, err := kvreceiver.FromEnv()
	if err != nil {
		return nil, err
	}
	opts := append([]kvreceiver.Option{kvreceiver.WithReleaseTimeout(releasePatience)}, fromEnv...)
	opts = append(opts, kvreceiver.WithEngine(engine), kvreceiver.WithHostVRAM(), kvreceiver.WithLogger(log), kvreceiver.WithMemory(mem.buffers()...),
		kvreceiver.WithListen(ip, cfg.ControlPort), kvreceiver.WithCloseTimeout(closeTimeout),
		kvreceiver.WithAllocationPolicy(bootstrap.AllocationPolicy(cfg.AllocationPolicy)))
	m, err := kvreceiver.NewManager(ctx, layout, opts...)
	if err != nil {
		return nil, err
	}
	return &decode{manager: m, mem: mem, events: ev, log: log, open: map[nixlkv.Room]*kvreceiver.Receiver{}}, nil
}

func (p *decode) ready() readyEvent {
	e := readyEvent{Event: "ready", Role: roleDecode, Agent: p.manager.Agent(), RankPort: p.manager.ControlPort(),
		Engine: p.manager.Engine().Info().Kind.String()}
	e.LocalIP, _, _ = net.SplitHostPort(p.manager.Addr())
	return e
}

func (p *decode) commands() map[string]command {
	return map[string]command{"receive": p.receive, "abort": p.abort, "bench": p.bench}
}

// abort gives a room up. One that has been cleared meanwhile needs none.
func (p *decode) abort(d *driver, line []byte) error {
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
	r := p.open[room]
	p.mu.Unlock()
	if r != nil {
		r.Abort("")
	}
	d.events.emit(abortedEvent{Event: "aborted", Room: room})
	return nil
}

func (p *decode) rooms() roomsEvent {
	stats := p.manager.Stats()
	e := roomsEvent{Event: "rooms", RequestStatus: map[nixlkv.Room]string{}, Failures: map[nixlkv.Room]string{},
		Peers: []string{}, Held: stats.Rooms + stats.Waiting}
	p.mu.Lock()
	defer p.mu.Unlock()
	for room, r := range p.open {
		e.RequestStatus[room] = r.Status().String()
		var failed *nixlkv.KVTransferError
		if errors.As(r.Err(), &failed) {
			e.Failures[room] = failed.Reason
		}
	}
	return e
}

// openRoom opens a room and keeps its receiver until clear.
func (p *decode) openRoom(room nixlkv.Room, addr string, dpRank int) (*kvreceiver.Receiver, error) {
	r, err := p.manager.Open(room, addr, kvreceiver.WithDPRank(dpRank))
	if err != nil {
		return nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.open[room] = r
	return r, nil
}

// clear ends the use of a room; its number may be used again.
func (p *decode) clear(r *kvreceiver.Receiver) error {
	// Before the receiver is closed: from then on the number may be opened again.
	p.mu.Lock()
	if p.open[r.Room()] == r {
		delete(p.open, r.Room())
	}
	p.mu.Unlock()
	return r.Close()
}

// close ends the rank: rooms that are open fail, on both sides. Pages that no prefill has
// released are nobody's concern when the process ends.
func (p *decode) close(ctx context.Context) error {
	err := p.manager.Shutdown(ctx)
	if errors.Is(err, nixlkv.ErrReleaseUnconfirmed) {
		p.log.Warn("closing the rank", zap.Error(err))
		return nil
	}
	if err != nil {
		return fmt.Errorf("closing the rank: %w", err)
	}
	return nil
}
