//go:build linux && cgo

package control

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"sync/atomic"
	"syscall"
	"time"

	zmq "github.com/pebbe/zmq4"
	"go.uber.org/zap"

	"github.com/nixlkv/nixlkv"
)

type peerState uint8

const (
	idle       peerState = iota // no socket
	connecting                  // sockets, no connection yet
	connected
)

// peer is one endpoint in the sender's table: at most one connection, and what waits for it.
type peer struct {
	endpoint   Endpoint
	name       string
	state      peerState
	generation uint64 // of the current or last connection
	queue      messageQueue
	timer      timer // idle: next attempt or removal; connecting: attempt's end; connected: idle check

	push, monitor *zmq.Socket
	serial        uint64
	pushFD        int
	monitorFD     int
	watchingPush  bool

	lastUsed    time.Time // a message was given
	lastAttempt time.Time // a connection was begun, or lost
	failures    int       // attempts since the last connection
	handshake   error     // what went wrong in the current attempt's handshake
	cuts        int       // attempts in a row that the peer cut off in their handshakes
	refused     error     // the last clear refusal, while attempts end in the handshake
	trouble     error     // of the last attempt, nil once connected
	reconnect   bool      // lost: connect again without being asked
	untold      int       // events that the observer has not returned from
	lossUntold  bool      // a Disconnected is among them
	blocked     bool      // connected and not read
	stranger    bool      // no message but to a Stranger was ever given
}

// strangerIdle is when the connection to a stranger is let go.
const strangerIdle = time.Second

func (s *sender) idleTimeout(p *peer) time.Duration {
	if p.stranger {
		return min(strangerIdle, s.cfg.IdleTimeout)
	}
	return s.cfg.IdleTimeout
}

// befriend notes that an endpoint is none of a stranger.
func (s *sender) befriend(p *peer) {
	if p.stranger {
		p.stranger = false
		s.strangers--
	}
}

// maxUntold bounds the events of one endpoint that wait for the observer.
const maxUntold = 4

// mayConnect says whether the observer knows enough for another connection. It must know of a
// loss: what it does about it comes before anything is sent to a new process.
func (p *peer) mayConnect() bool { return !p.lossUntold && p.untold < maxUntold }

func formatGeneration(g uint64) string { return strconv.FormatUint(g, 10) }

func (p *peer) monitorToken() uint64 { return p.serial * 2 }
func (p *peer) pushToken() uint64    { return p.serial*2 + 1 }

func (p *peer) lostError(why string) error {
	return fmt.Errorf("%w: %s: %s", nixlkv.ErrPeerLost, p.name, why)
}

// newPeer adds an endpoint; nil if the table is full of endpoints that are connected or waited
// for, or has all the strangers that it may. Connections are not cut to make room: somebody may
// rely on learning of their end.
func (s *sender) newPeer(to Endpoint, stranger bool) *peer {
	if stranger && s.strangers >= s.cfg.Limits.Strangers {
		return nil
	}
	if len(s.peers) >= s.cfg.Limits.Endpoints {
		var oldest *peer
		for _, p := range s.peers {
			if p.state == idle && p.queue.n == 0 && p.untold == 0 && (oldest == nil || p.lastUsed.Before(oldest.lastUsed)) {
				oldest = p
			}
		}
		if oldest == nil {
			return nil
		}
		s.remove(oldest)
	}
	p := &peer{endpoint: to, name: to.String(), stranger: stranger}
	if stranger {
		s.strangers++
	}
	s.peers[to] = p
	s.counters.endpoints.Add(1)
	return p
}

func (s *sender) remove(p *peer) {
	s.timers.stop(&p.timer)
	s.befriend(p)
	s.setTrouble(p, nil)
	delete(s.peers, p.endpoint)
	s.counters.endpoints.Add(-1)
}

// hasten brings the next attempt to connect forward, for a message that waits.
func (s *sender) hasten(p *peer) {
	if p.state != idle || !p.mayConnect() {
		return // under way, or toldOf will do it
	}
	at := p.lastAttempt.Add(s.cfg.ReconnectMin)
	if !at.After(s.now) {
		s.connect(p)
	} else if !p.timer.armed() || at.Before(p.timer.at) {
		s.timers.set(&p.timer, p, at)
	}
}

func (s *sender) peerAlarm(p *peer) {
	unused := s.now.Sub(p.lastUsed) >= s.idleTimeout(p)
	switch p.state {
	case connecting:
		s.attemptFailed(p, errTimedOut)
	case connected:
		if unused && p.queue.n == 0 {
			s.release(p, s.cfg.Linger)
		} else {
			s.timers.set(&p.timer, p, later(p.lastUsed.Add(s.idleTimeout(p)), s.now.Add(time.Second)))
		}
	case idle:
		switch {
		case !p.mayConnect(): // toldOf goes on
		case p.queue.n > 0 || (p.reconnect && !unused):
			s.connect(p)
		case p.untold == 0:
			s.remove(p)
		}
	}
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// toldOf goes on with an endpoint once the observer knows what became of its connection.
func (s *sender) toldOf(p *peer) {
	p.untold--
	if p.untold == 0 {
		p.lossUntold = false // a loss is the last there is to tell, for there is no connection after it
	}
	if p.state == idle {
		s.timers.set(&p.timer, p, later(p.lastAttempt.Add(s.cfg.ReconnectMin), s.now))
	}
}

func (s *sender) tell(p *peer, kind EventKind) {
	if s.notify.observer == nil {
		return
	}
	p.untold++
	p.lossUntold = p.lossUntold || kind == Disconnected
	s.notify.push(notification{peer: p, event: Event{p.endpoint, kind, p.generation}})
}

// connect begins an attempt with fresh sockets.
func (s *sender) connect(p *peer) {
	p.lastAttempt = s.now
	s.serial++
	p.serial = s.serial
	push, monitor, err := newPush(s.zctx, s.cfg, p.endpoint, p.serial)
	if err != nil {
		s.attemptFailed(p, err)
		return
	}
	p.push, p.monitor, p.state, p.handshake = push, monitor, connecting, nil
	if p.pushFD, err = push.GetFd(); err == nil {
		if p.monitorFD, err = monitor.GetFd(); err == nil {
			if err = s.poll.watch(p.monitorFD, p.monitorToken()); err == nil {
				s.watched[p.monitorToken()] = p
			}
		}
	}
	if err != nil {
		s.attemptFailed(p, errno(err))
		return
	}
	// libzmq has the same limit on each stage, and says nothing if an address family is missing.
	s.timers.set(&p.timer, p, s.now.Add(2*s.cfg.ConnectTimeout))
	s.readMonitor(p) // which arms its descriptor
}

func (s *sender) attemptFailed(p *peer, why error) {
	s.closeSockets(p, 0)
	p.failures++
	s.setTrouble(p, why)
	s.counters.connectFailures.Add(1)
	s.log.Info("control: cannot connect", zap.String("endpoint", p.name), zap.NamedError("reason", why), zap.Int("attempts", p.failures))
	pause := s.cfg.ReconnectMax
	if n := p.failures - 1; n < 30 {
		pause = min(pause, s.cfg.ReconnectMin<<n)
	}
	pause -= time.Duration(rand.Int64N(int64(pause)/4 + 1))
	s.timers.set(&p.timer, p, s.now.Add(max(pause, s.cfg.ReconnectMin)))
}

// ready serves a socket of p whose descriptor is readable. The descriptor only says that
// libzmq has commands for the socket, and is reset by asking for the socket's events.
func (s *sender) ready(p *peer, token uint64) {
	if token == p.monitorToken() {
		s.readMonitor(p)
	} else {
		s.flush(p)
	}
}

// readMonitor takes every event there is, and leaves the descriptor armed.
func (s *sender) readMonitor(p *peer) {
	monitor := p.monitor
	for p.monitor == monitor { // a transition may close it
		if state, err := monitor.GetEvents(); err != nil {
			s.broken(p, err)
		} else if state&zmq.POLLIN == 0 {
			return
		} else if event, _, value, err := monitor.RecvEvent(zmq.DONTWAIT); err == nil {
			s.monitored(p, event, value)
		} else if !isErrno(err, syscall.EAGAIN) {
			s.broken(p, err)
		}
	}
}

// monitored follows one connection through its life; there is no other after it.
func (s *sender) monitored(p *peer, event zmq.Event, value int) {
	switch event {
	case zmq.EVENT_HANDSHAKE_SUCCEEDED:
		s.established(p)
	case zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
		s.handshakeFailed(p, event, value)
	case zmq.EVENT_CLOSED, zmq.EVENT_CLOSE_FAILED, zmq.EVENT_DISCONNECTED:
		switch {
		case p.state == connected:
			s.lost(p, "closed by the peer")
		case p.handshake != nil:
			s.counters.handshakeFailed.Add(1)
			s.attemptFailed(p, p.handshake)
		default:
			p.cuts, p.refused = 0, nil
			s.attemptFailed(p, errUnreachable)
		}
	}
}

// handshakeFailed notes why the current attempt will fail. A connection that is cut off tells less
// than an attempt before it may have.
func (s *sender) handshakeFailed(p *peer, event zmq.Event, value int) {
	cut := event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL && syscall.Errno(value) != syscall.EAGAIN
	if !cut {
		p.cuts, p.refused = 0, nil
	} else {
		p.cuts++
	}
	if p.handshake = p.refused; p.handshake == nil {
		p.handshake = handshakeTrouble(event, value, s.cfg.Curve != nil, p.cuts)
	}
	if !cut && errors.Is(p.handshake, nixlkv.ErrNotAllowed) {
		p.refused = p.handshake
	}
}

func (s *sender) established(p *peer) {
	s.generation++
	p.state, p.generation, p.failures, p.reconnect = connected, s.generation, 0, false
	p.cuts, p.refused = 0, nil
	s.setTrouble(p, nil)
	s.counters.connects.Add(1)
	s.counters.connected.Add(1)
	s.log.Debug("control: connected", zap.String("endpoint", p.name), zap.Uint64("generation", p.generation))
	s.timers.set(&p.timer, p, s.now.Add(s.idleTimeout(p)))
	s.tell(p, Connected)
	s.flush(p)
}

// lost ends a connection that the peer or the network ended.
func (s *sender) lost(p *peer, why string) {
	s.closeSockets(p, 0)
	p.lastAttempt, p.reconnect = s.now, !p.stranger
	s.counters.disconnects.Add(1)
	s.log.Warn("control: connection lost", zap.String("endpoint", p.name), zap.String("reason", why),
		zap.Uint64("generation", p.generation), zap.Int("unsent", p.queue.n))
	s.tell(p, Disconnected)
	s.abandon(p, &s.counters.sendsLost, p.lostError(why))
	s.timers.set(&p.timer, p, s.now.Add(s.cfg.ReconnectMin))
}

// broken handles a call of libzmq that should not fail.
func (s *sender) broken(p *peer, err error) {
	if p.state == connected {
		s.lost(p, errno(err).Error())
	} else {
		s.attemptFailed(p, errno(err))
	}
}

// release ends a connection from this side.
func (s *sender) release(p *peer, linger time.Duration) {
	was := p.state
	s.closeSockets(p, linger)
	p.lastAttempt, p.reconnect, p.failures = time.Time{}, false, 0
	p.cuts, p.refused = 0, nil
	s.setTrouble(p, nil)
	if was == connected {
		s.tell(p, Released)
	}
	s.timers.set(&p.timer, p, s.now) // removed once the observer knows
}

func (s *sender) drop(p *peer) {
	s.release(p, 0)
	s.abandon(p, &s.counters.sendsLost, p.lostError("endpoint dropped"))
}

// abandon fails everything that waits for p.
func (s *sender) abandon(p *peer, reason *atomic.Uint64, err error) {
	for o := p.queue.head; o != nil; o = p.queue.head {
		s.unqueue(p, o)
		reason.Add(1)
		s.finish(o, 0, err)
	}
}

// flush sends what waits, until libzmq takes no more.
func (s *sender) flush(p *peer) {
	for p.state == connected && p.queue.n > 0 {
		o := p.queue.head
		switch sent, err := write(p.push, o.frames); {
		case err == nil:
			s.unqueue(p, o)
			s.counters.messagesOut.Add(1)
			s.counters.bytesOut.Add(uint64(o.bytes))
			s.finish(o, p.generation, nil)
		case sent == 0 && isErrno(err, syscall.EAGAIN):
			// Asking for the events also arms the descriptor.
			state, err := p.push.GetEvents()
			if err != nil {
				s.broken(p, err)
			} else if state&zmq.POLLOUT == 0 {
				s.waitToWrite(p)
				return
			}
		case isErrno(err, syscall.EAGAIN):
			// Only the end of a connection stops a message halfway.
			s.lost(p, "closed while writing")
		default:
			s.broken(p, err)
		}
	}
	s.drained(p)
}

// write gives a message to libzmq, which copies it. On an error it says how many frames
// were taken before.
func write(push *zmq.Socket, frames [][]byte) (int, error) {
	last := len(frames) - 1
	for i, f := range frames {
		flags := zmq.DONTWAIT
		if i < last {
			flags |= zmq.SNDMORE
		}
		if _, err := push.SendBytes(f, flags); err != nil {
			return i, err
		}
	}
	return len(frames), nil
}

// waitToWrite has flush called when there is room again.
func (s *sender) waitToWrite(p *peer) {
	if !p.blocked {
		p.blocked = true
		s.counters.blocked.Add(1)
	}
	if !p.watchingPush {
		if err := s.poll.watch(p.pushFD, p.pushToken()); err != nil {
			s.broken(p, err)
			return
		}
		p.watchingPush = true
		s.watched[p.pushToken()] = p
	}
}

// drained stops watching for room when nothing waits for it.
func (s *sender) drained(p *peer) {
	if p.queue.n > 0 {
		return
	}
	if p.blocked {
		p.blocked = false
		s.counters.blocked.Add(-1)
	}
	if p.watchingPush {
		p.watchingPush = false
		delete(s.watched, p.pushToken())
		if err := s.poll.unwatch(p.pushFD); err != nil {
			s.log.Error("control: unwatch", zap.Error(err))
		}
	}
}

// closeSockets leaves p idle. What waits in its queue stays.
func (s *sender) closeSockets(p *peer, linger time.Duration) {
	if p.state == connected {
		s.counters.connected.Add(-1)
	}
	p.state = idle
	if p.push == nil {
		return
	}
	if p.blocked {
		p.blocked = false
		s.counters.blocked.Add(-1)
	}
	for _, w := range []struct {
		token uint64
		fd    int
	}{{p.monitorToken(), p.monitorFD}, {p.pushToken(), p.pushFD}} {
		if s.watched[w.token] != nil {
			delete(s.watched, w.token)
			if err := s.poll.unwatch(w.fd); err != nil {
				s.log.Error("control: unwatch", zap.Error(err))
			}
		}
	}
	p.watchingPush = false
	if err := closePush(p.push, p.monitor, linger); err != nil {
		s.log.Error("control: close", zap.String("endpoint", p.name), zap.Error(err))
	}
	p.push, p.monitor = nil, nil
}
