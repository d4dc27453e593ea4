package embedded

import (
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
)

// inbound is the target's end of a connection: a peer that may write to and read from
// this agent's memory. One goroutine reads, one writes (inbound_send.go).
type inbound struct {
	a    *Agent
	conn *net.UnixConn

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
}

// grant is the memory of a region in a peer's hands. It is a use of the region.
type grant struct {
	number   uint64
	region   *localRegion
	recalled bool // the peer was asked to let go
}

// acceptAll takes connections until the listener is closed.
func (a *Agent) acceptAll(l *net.UnixListener) {
	for {
		conn, err := l.AcceptUnix()
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
		case sameUser(conn) != nil || !a.serve(conn):
			a.stats.refused.Add(1)
			conn.Close()
		}
	}
}

// serve starts the goroutines of a connection, unless there are too many.
func (a *Agent) serve(conn *net.UnixConn) bool {
	in := &inbound{
		a: a, conn: conn,
		grants:  make(map[uint64]*grant),
		granted: make(map[*localRegion]*grant),
	}
	in.wake.L = &in.mu
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.destroyed || len(a.inbounds) >= maxInbound {
		return false
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
	written := make(chan struct{})
	go func() {
		defer close(written)
		w := inboundWriter{in: in}
		w.run()
		in.stop()
	}()
	if err := in.read(); errors.Is(err, errProtocol) {
		in.a.stats.dropped.Add(1)
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

// read handles what the initiator sends.
func (in *inbound) read() error {
	if err := in.setReadDeadline(time.Now().Add(helloWait)); err != nil {
		return err
	}
	frames := newFrameReader(in.conn)
	h, body, err := frames.next()
	if err != nil {
		return err
	}
	greeting, err := parseHello(body)
	if err != nil || h.typ != frameHello || greeting.to != in.a.id {
		return fmt.Errorf("%w: not greeted, or another agent was meant", errProtocol)
	}
	if err := in.setReadDeadline(time.Time{}); err != nil {
		return err
	}
	in.mu.Lock()
	in.name = greeting.name
	in.mu.Unlock()
	in.reply(reply{typ: frameWelcome})
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
			err = in.onWrite(h.number, body)
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

// setReadDeadline leaves the deadline of stop alone.
func (in *inbound) setReadDeadline(t time.Time) error {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.stopped {
		return errStopped
	}
	return in.conn.SetReadDeadline(t)
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

// onWrite copies bytes into this agent's memory.
func (in *inbound) onWrite(number uint64, body []byte) error {
	table, payload, err := parseWrite(body)
	if err != nil {
		return err
	}
	if number != in.transfer {
		in.transfer, in.outcome = number, result{}
	}
	for i := range table.len() {
		if in.outcome.code != codeOK {
			break
		}
		pt := table.at(i)
		in.outcome = in.a.withPart(pt, func(mem []byte) { copy(mem, payload) })
		payload = payload[pt.n:]
	}
	return nil
}

// withPart runs f on the memory of a part, if it is registered; until f returns it cannot
// be deregistered.
func (a *Agent) withPart(pt part, f func(mem []byte)) result {
	reg := a.region(pt.region)
	if reg == nil || !reg.uses.acquire() {
		return result{codeNotRegistered, pt}
	}
	defer reg.uses.release()
	addr, ok := reg.contains(pt.off, pt.n)
	if !ok {
		return result{codeNotRegistered, pt}
	}
	if guardFaults(func() { f(memoryAt(addr, pt.n)) }) != nil {
		return result{codeFault, pt}
	}
	return result{}
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
