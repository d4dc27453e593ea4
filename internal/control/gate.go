//go:build linux && cgo

package control

import (
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	zmq "github.com/pebbe/zmq4"
	"go.uber.org/zap"

	"github.com/nixlkv/nixlkv"
)

// gate decides who may connect to the PULL socket. libzmq asks it in the course of every
// handshake, before anything that the peer sends is read, over an inproc address of the
// Control's own context (ZAP, ZeroMQ RFC 27; zmq4's own handler is one for the whole process,
// and not used). A gate also keeps out what speaks a ZMTP before 3.0, which has no handshake
// to ask in.
type gate struct {
	cfg      *Config
	log      *zap.Logger
	counters *counters
	socket   *zmq.Socket
	poll     *poller
	stopping atomic.Bool
	stop     chan struct{} // closed with stopping
	done     chan struct{}
}

const (
	gateAddress = "inproc://zeromq.zap.01"
	gateDomain  = "nixlkv" // without one, libzmq does not ask about peers without CURVE
	gateVersion = "1.0"
)

// gated says whether not everybody may connect.
func (c *Config) gated() bool { return c.Curve != nil || !c.Allowed.Everywhere() }

// newGate starts the gate of a context; nil if everybody may connect.
func newGate(zctx *zmq.Context, cfg *Config, log *zap.Logger, counters *counters) (*gate, error) {
	if !cfg.gated() {
		return nil, nil
	}
	s, err := zctx.NewSocket(zmq.REP)
	if err != nil {
		return nil, fmt.Errorf("control: REP socket: %w", errno(err))
	}
	g := &gate{cfg: cfg, log: log, counters: counters, socket: s, stop: make(chan struct{}), done: make(chan struct{})}
	if g.poll, err = newPoller(); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	fd, err := s.GetFd()
	if err = errors.Join(err, s.SetLinger(0), s.Bind(gateAddress)); err == nil {
		err = g.poll.watch(fd, wakeToken+1)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("control: bind %s: %w", gateAddress, errno(err)), s.Close(), g.poll.close())
	}
	go g.run()
	return g, nil
}

// close ends the gate: nobody can connect any more.
func (g *gate) close() error {
	if g == nil {
		return nil
	}
	g.stopping.Store(true)
	close(g.stop)
	g.poll.wake()
	<-g.done
	return g.poll.close()
}

// run is the owner's goroutine.
func (g *gate) run() {
	defer close(g.done)
	for !g.stopping.Load() {
		if err := g.answerAll(); err != nil {
			g.log.Error("control: gate", zap.Error(errno(err)))
			<-g.stop // without answers nobody connects any more; without the socket everybody would
			break
		}
		if _, err := g.poll.wait(time.Time{}); err != nil {
			g.log.Error("control: gate stops", zap.Error(err))
			<-g.stop
			break
		}
	}
	if err := g.socket.Close(); err != nil {
		g.log.Error("control: close REP socket", zap.Error(errno(err)))
	}
}

// answerAll answers what was asked, and leaves the socket's descriptor armed.
func (g *gate) answerAll() error {
	for !g.stopping.Load() {
		state, err := g.socket.GetEvents()
		if err != nil || state&zmq.POLLIN == 0 {
			return err
		}
		request, err := g.socket.RecvMessageBytes(zmq.DONTWAIT)
		if err != nil {
			return err
		}
		q, err := parseGateRequest(request)
		if err == nil {
			err = g.cfg.admits(q)
		}
		code, text := "200", "OK"
		if err != nil {
			g.counters.peersRefused.Add(1)
			g.log.Warn("control: connection refused", zap.String("source", q.address), zap.Error(err))
			code, text = "400", "not allowed"
		}
		if _, err := g.socket.SendMessageDontwait(gateVersion, q.id, code, text, "", ""); err != nil {
			return err
		}
	}
	return nil
}

// gateRequest is libzmq's question.
type gateRequest struct {
	id        []byte
	address   string
	mechanism string
	key       string // the peer's public key in Z85, of CURVE
}

func parseGateRequest(frames [][]byte) (q gateRequest, err error) {
	if len(frames) > 1 {
		q.id = frames[1]
	}
	if len(frames) < 6 || string(frames[0]) != gateVersion {
		return q, fmt.Errorf("%w: question of %d frames", nixlkv.ErrMalformed, len(frames))
	}
	q.address, q.mechanism = string(frames[3]), string(frames[5])
	if q.mechanism == "CURVE" {
		if len(frames) != 7 || len(frames[6]) != 32 {
			return q, fmt.Errorf("%w: no CURVE key", nixlkv.ErrMalformed)
		}
		q.key = zmq.Z85encode(string(frames[6]))
	}
	return q, nil
}

// admits says why a peer may not connect.
func (c *Config) admits(q gateRequest) error {
	if a := parseSource(q.address); !c.Allowed.Allows(a) {
		return fmt.Errorf("%w: %v is not in an allowed network", nixlkv.ErrNotAllowed, a)
	}
	switch {
	case c.Curve == nil:
		return nil
	case q.mechanism != "CURVE":
		return fmt.Errorf("%w: no CURVE", nixlkv.ErrNotAllowed)
	case q.key == c.Curve.ServerKey || slices.Contains(c.Curve.ClientKeys, q.key):
		return nil
	}
	return fmt.Errorf("%w: CURVE key %s", nixlkv.ErrNotAllowed, q.key)
}
