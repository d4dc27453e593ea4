package embedded

import (
	"crypto/subtle"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"
)

const (
	maxInbound = 4096             // connections of peers at once
	helloWait  = 30 * time.Second // for who connects to say who it is
	acceptWait = 50 * time.Millisecond
	maxReplies = 1024 // not written yet, before reading goes on

	// Anybody can connect over TCP: until they have said which agent they mean, few may be
	// there, and not for long.
	maxStrangers = 128
	strangerWait = 5 * time.Second
)

// inbound is the target's end of a connection: a peer that may write to and read from
// this agent's memory. One goroutine reads, one writes (inbound_send.go).
type inbound struct {
	a    *Agent
	conn *connection

	parked int // bytes of notifications; guarded by the inbox

	mu        sync.Mutex
	wake      sync.Cond // replies were added or written, or stopped is set
	name      string    // of the peer; set once, before anything else uses it
	stopped   bool
	replies   []reply
	reading   bool // a read is being answered
	lastGrant uint64
	grants    map[uint64]*grant       // by number
	granted   map[*localRegion]*grant // the same

	// The transfer whose writes come in, and how they went. Of the reading goroutine.
	transfer uint64
	outcome  result
	to       partPlaces // where the bytes of a write go
}

// grant is the memory of a region in a peer's hands. It is a use of the region.
type grant struct {
	number   uint64
	region   *localRegion
	recalled bool // the peer was asked to let go
}

// acceptAll takes connections until the listener is closed.
func (a *Agent) acceptAll(l net.Listener) {
	for {
		conn, err := l.Accept()
		switch {
		case errors.Is(err, net.ErrClosed):
			return
		case err != nil:
			// Most likely this process may open no more files. Connections wait in the
			// backlog meanwhile.
			pause := time.NewTimer(acceptWait)
			select {
			case <-pause.C:
			case <-a.quit:
				pause.Stop()
				return
			}
		case !a.admit(conn):
			a.stats.refused.Add(1)
		}
	}
}

// admit serves a connection, or closes it and gives false.
func (a *Agent) admit(c net.Conn) bool {
	if u, ok := c.(*net.UnixConn); ok && sameUser(u) != nil {
		c.Close()
		return false
	}
	conn, err := newConnection(c)
	if err != nil {
		return false
	}
	if conn.overTCP() && conn.giveUpAfter(a.tcp.timeout) != nil {
		return false
	}
	if !a.serve(conn) {
		conn.Close()
		return false
	}
	return true
}

// serve starts the goroutines of a connection, unless there are too many.
func (a *Agent) serve(conn *connection) bool {
	in := &inbound{
		a: a, conn: conn,
		grants:  make(map[uint64]*grant),
		granted: make(map[*localRegion]*grant),
	}
	in.wake.L = &in.mu
	in.to.a = a
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.destroyed || len(a.inbounds) >= maxInbound {
		return false
	}
	if conn.overTCP() {
		if a.strangers == maxStrangers {
			return false
		}
		a.strangers++
	}
	a.inbounds[in] = struct{}{}
	a.goroutines.Go(in.run)
	return true
}

func (a *Agent) listInbound() []*inbound {
	a.mu.Lock()
	defer a.mu.Unlock()
	all := make([]*inbound, 0, len(a.inbounds))
	for in := range a.inbounds {
		all = append(all, in)
	}
	return all
}

// stop makes both goroutines end soon.
func (in *inbound) stop() {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.stopped = true
	in.conn.SetDeadline(longAgo)
	in.wake.Broadcast()
}

// run lives as long as the connection. When it ends, the peer has let go of everything: an
// initiator closes only after that, and a process that died copies nothing.
func (in *inbound) run() {
	frames := newFrameReader(in.conn, in.conn)
	err := in.greet(frames)
	if in.conn.overTCP() {
		in.a.mu.Lock()
		in.a.strangers--
		in.a.mu.Unlock()
	}
	written := make(chan struct{})
	if err == nil {
		go func() {
			defer close(written)
			w := inboundWriter{in: in, out: newFrameWriter(in.conn), from: partPlaces{a: in.a}}
			w.run()
			in.stop()
		}()
		err = in.read(frames)
	} else {
		close(written)
	}
	switch {
	case errors.Is(err, errProtocol):
		in.a.stats.dropped.Add(1)
	case errors.Is(err, errVersion), errors.Is(err, errNotHere):
		in.a.stats.refused.Add(1)
	}
	in.stop()
	<-written
	in.a.inbox.forget(in)

	in.mu.Lock()
	for _, r := range in.replies {
		r.done()
	}
	for _, g := range in.grants {
		g.region.uses.release()
	}
	in.replies, in.grants, in.granted = nil, nil, nil
	in.mu.Unlock()
	in.conn.Close()
	in.a.mu.Lock()
	delete(in.a.inbounds, in)
	in.a.mu.Unlock()
}

// greet hears who calls. Nothing is done for who does not name this agent by its id, which
// is a secret that only its metadata tells.
func (in *inbound) greet(frames *frameReader) error {
	wait := helloWait
	if in.conn.overTCP() {
		wait = in.a.settings.strangerWait
	}
	if err := in.setDeadline(time.Now().Add(wait)); err != nil {
		return err
	}
	h, err := frames.header()
	if err != nil {
		return err
	}
	if h.typ != frameHello {
		return fmt.Errorf("%w: frame of type %d instead of a greeting", errProtocol, h.typ)
	}
	body, err := frames.rest(h)
	if err != nil {
		return err
	}
	greeting, err := parseHello(body)
	switch {
	case errors.Is(err, errVersion):
		in.refuse(refusedVersion)
		return err
	case err != nil:
		return err
	case subtle.ConstantTimeCompare(greeting.to[:], in.a.id[:]) == 0:
		in.refuse(refusedAgent)
		return errNotHere
	}
	if err := in.setDeadline(time.Time{}); err != nil {
		return err
	}
	in.mu.Lock()
	in.name = greeting.name
	in.mu.Unlock()
	in.reply(reply{typ: frameWelcome})
	return nil
}

// refuse says why there will be no welcome. The other end may not wait for it.
func (in *inbound) refuse(reason refusalReason) {
	in.conn.Write(refusal{version: protocolVersion, reason: reason}.append(nil))
}

// read handles what the initiator sends.
func (in *inbound) read(frames *frameReader) error {
	for {
		if err := in.waitForRoom(); err != nil {
			return err
		}
		h, body, err := frames.next()
		if err != nil {
			return err
		}
		switch h.typ {
		case frameMap:
			err = in.onMap(h.number)
		case frameUnmapped:
			in.onUnmapped(h.number)
		case frameWrite:
			err = in.onWrite(h.number, body, frames)
		case frameRead:
			err = in.onRead(h.number, body)
		case frameCommit:
			err = in.onCommit(h, body)
		default:
			err = fmt.Errorf("%w: frame of type %d from an initiator", errProtocol, h.typ)
		}
		if err != nil {
			return err
		}
	}
}

var errStopped = errors.New("connection is being closed")

// setDeadline leaves the deadline of stop alone.
func (in *inbound) setDeadline(t time.Time) error {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.stopped {
		return errStopped
	}
	return in.conn.SetDeadline(t)
}

// waitForRoom bounds what waits to be written: an initiator that asks and does not read
// is not listened to meanwhile.
func (in *inbound) waitForRoom() error {
	in.mu.Lock()
	defer in.mu.Unlock()
	for len(in.replies) >= maxReplies && !in.stopped {
		in.wake.Wait()
	}
	if in.stopped {
		return errStopped
	}
	return nil
}

// onMap grants a region's memory to the peer.
func (in *inbound) onMap(id uint64) error {
	reg := in.a.region(id)
	if in.conn.overTCP() {
		return fmt.Errorf("%w: memory asked for over TCP", errProtocol)
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	answer := reply{typ: frameRegion, number: id, result: result{code: codeNotRegistered}}
	if reg != nil && reg.shared {
		if in.granted[reg] != nil {
			return fmt.Errorf("%w: region %d is granted already", errProtocol, id)
		}
		// Two uses: the grant's, and the answer's, which needs the descriptor.
		if reg.uses.acquire() {
			if reg.uses.acquire() {
				in.lastGrant++
				g := &grant{number: in.lastGrant, region: reg}
				in.grants[g.number], in.granted[reg] = g, g
				answer.result.code, answer.region, answer.grant = codeOK, reg, g.number
			} else {
				reg.uses.release()
			}
		}
	}
	in.replyLocked(answer)
	return nil
}

// onUnmapped takes a grant back. One that is not known was taken back before.
func (in *inbound) onUnmapped(number uint64) {
	in.mu.Lock()
	g := in.grants[number]
	if g != nil {
		delete(in.grants, number)
		delete(in.granted, g.region)
	}
	in.mu.Unlock()
	if g != nil {
		g.region.uses.release()
	}
}

// recall asks the peer, once, to let these regions go. They are shut, so no grant follows.
func (in *inbound) recall(regions []*localRegion) {
	in.mu.Lock()
	defer in.mu.Unlock()
	for _, reg := range regions {
		if g := in.granted[reg]; g != nil && !g.recalled {
			g.recalled = true
			in.replyLocked(reply{typ: frameUnmap, number: g.number})
		}
	}
}

// holds says whether the peer has the region, and the peer's name.
func (in *inbound) holds(reg *localRegion) (name string, ok bool) {
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.name, in.granted[reg] != nil
}

// onWrite reads bytes into this agent's memory.
func (in *inbound) onWrite(number uint64, body []byte, frames *frameReader) error {
	table, err := parseWrite(body, frames.left)
	if err != nil {
		return err
	}
	if number != in.transfer {
		in.transfer, in.outcome = number, result{}
	}
	in.to.start(table)
	in.to.outcome = in.outcome // nothing more is written of a transfer that went wrong
	if err := frames.receive(&in.to); err != nil {
		return err
	}
	in.outcome = in.to.finish()
	return nil
}

// onRead hands the writer a read.
func (in *inbound) onRead(number uint64, body []byte) error {
	table, err := parseRead(body)
	if err != nil {
		return err
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.reading {
		return fmt.Errorf("%w: two reads at once", errProtocol)
	}
	in.reading = true
	in.replyLocked(reply{typ: frameReadDone, number: number, table: append(parts(nil), table...)})
	return nil
}

// onCommit ends a transfer: its notification is delivered if its writes went well.
func (in *inbound) onCommit(h header, body []byte) error {
	if h.flags&flagNotification == 0 && len(body) > 0 {
		return fmt.Errorf("%w: commit with %d bytes that are no notification", errProtocol, len(body))
	}
	answer := reply{typ: frameDone, number: h.number}
	if h.number == in.transfer {
		answer.result = in.outcome
		in.transfer, in.outcome = 0, result{}
	}
	if h.flags&flagNotification != 0 && answer.result.code == codeOK {
		accepted, err := in.a.inbox.deliver(in, h.number, body)
		if err != nil || !accepted {
			return err
		}
	}
	in.reply(answer)
	return nil
}
