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

// gate stands at the PULL socket's door. It decides who may connect: libzmq asks it in the course
// of every handshake, before anything that the peer sends is read, over an inproc address of the
// Control's own context (ZAP, ZeroMQ RFC 27; zmq4's own handler is one for the whole process, and
// not used). Being asked also keeps out what speaks a ZMTP before 3.0, which has no handshake to
// ask in. Where everybody may connect it is not asked. And it watches the monitor of the PULL
// socket for handshakes that libzmq itself refuses.
type gate struct {
	cfg      *Config
	log      *zap.Logger
	counters *counters
	poll     *poller
	asked    *zmq.Socket // REP, to libzmq's questions; nil if everybody may connect
	monitor  *zmq.Socket // of the PULL socket
	incoming *incoming
	stopping atomic.Bool
	stop     chan struct{} // closed with stopping
	done     chan struct{} // nil before run
}

const (
	gateAddress = "inproc://zeromq.zap.01"
	gateDomain  = "nixlkv" // without one, libzmq does not ask about peers without CURVE
	gateVersion = "1.0"

	zapToken, incomingToken = wakeToken + 1, wakeToken + 2
)

// gated says whether not everybody may connect.
func (c *Config) gated() bool { return c.Curve != nil || !c.Allowed.Everywhere() }

// newGate makes the gate of a context. Nobody can connect before it runs.
func newGate(zctx *zmq.Context, cfg *Config, log *zap.Logger, counters *counters) (*gate, error) {
	g := &gate{cfg: cfg, log: log, counters: counters, stop: make(chan struct{})}
	var err error
	if g.poll, err = newPoller(); err != nil || !cfg.gated() {
		return g, err
	}
	if g.asked, err = zctx.NewSocket(zmq.REP); err != nil {
		return nil, errors.Join(fmt.Errorf("control: REP socket: %w", errno(err)), g.poll.close())
	}
	err = errors.Join(g.asked.SetLinger(0), g.asked.Bind(gateAddress))
	if err == nil {
		err = g.watch(g.asked, zapToken)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("control: bind %s: %w", gateAddress, errno(err)), g.close())
	}
	return g, nil
}

// follow takes the monitor of the PULL socket, which is bound to a port. It is the gate's to close.
func (g *gate) follow(monitor *zmq.Socket, port uint16) error {
	g.monitor = monitor
	g.incoming = newIncoming(g.log, g.counters, g.cfg.gated(), port)
	return g.watch(monitor, incomingToken)
}

func (g *gate) watch(s *zmq.Socket, token uint64) error {
	fd, err := s.GetFd()
	if err != nil {
		return errno(err)
	}
	return g.poll.watch(fd, token)
}

func (g *gate) unwatch(s *zmq.Socket) {
	if fd, err := s.GetFd(); err != nil || g.poll.unwatch(fd) != nil {
		g.log.Error("control: unwatch", zap.Error(errno(err)))
	}
}

// start begins to let peers in.
func (g *gate) start() {
	g.done = make(chan struct{})
	go g.run()
}

// close ends the gate: nobody can connect any more. The PULL socket is closed by then.
func (g *gate) close() error {
	if g.done != nil {
		g.stopping.Store(true)
		close(g.stop)
		g.poll.wake()
		<-g.done
	}
	var errs []error
	for _, s := range []*zmq.Socket{g.asked, g.monitor} {
		if s != nil {
			errs = append(errs, s.Close())
		}
	}
	return errors.Join(append(errs, g.poll.close())...)
}

// run is the owner's goroutine.
func (g *gate) run() {
	defer close(g.done)
	answers := g.asked != nil
	for !g.stopping.Load() {
		var until time.Time
		if answers {
			if err := g.answerAll(); err != nil {
				// Without answers nobody connects any more; without the socket everybody would.
				g.log.Error("control: gate", zap.Error(errno(err)))
				answers = false
				g.unwatch(g.asked)
			}
		}
		if err := g.followAll(); err != nil {
			g.counters.receiveErrors.Add(1)
			g.log.Error("control: monitor of the PULL socket", zap.Error(errno(err)))
			until = time.Now().Add(errorPause)
		}
		if _, err := g.poll.wait(until); err != nil {
			g.log.Error("control: gate stops", zap.Error(err))
			<-g.stop
		}
	}
}

// followAll takes what the monitor has told, and leaves its descriptor armed.
func (g *gate) followAll() error {
	defer g.incoming.settle()
	for !g.stopping.Load() {
		state, err := g.monitor.GetEvents()
		if err != nil || state&zmq.POLLIN == 0 {
			return err
		}
		event, _, value, err := g.monitor.RecvEvent(zmq.DONTWAIT)
		if err != nil {
			return err
		}
		g.incoming.event(event, value)
	}
	return nil
}

// answerAll answers what was asked, and leaves the socket's descriptor armed.
func (g *gate) answerAll() error {
	for !g.stopping.Load() {
		state, err := g.asked.GetEvents()
		if err != nil || state&zmq.POLLIN == 0 {
			return err
		}
		request, err := g.asked.RecvMessageBytes(zmq.DONTWAIT)
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
			g.counters.refused.note(parseSource(q.address), err.Error(), time.Now())
			g.log.Warn("control: connection refused", zap.String("source", q.address), zap.Error(err))
			code, text = "400", "not allowed"
		}
		if _, err := g.asked.SendMessageDontwait(gateVersion, q.id, code, text, "", ""); err != nil {
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
