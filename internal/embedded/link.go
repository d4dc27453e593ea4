package embedded

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nixlkv/nixlkv/internal/engine"
)

// welcomeWait bounds, over TCP, the wait for the welcome: until then nothing says that an
// agent is there, and one that is stopped can answer later.
const welcomeWait = 30 * time.Second

// maxControl bounds the answers to a target that asks for more than it ever gave.
const maxControl = 2 * MaxRegions

// control is a frame without a body.
type control struct {
	typ    frameType
	number uint64
}

// startLocked begins to connect, once. p.mu is held, p.err is nil.
func (p *peer) startLocked() {
	if p.started {
		return
	}
	p.started = true
	ctx, cancel := context.WithCancel(context.Background())
	p.cancel = cancel
	p.a.goroutines.Go(func() {
		defer cancel()
		p.run(ctx)
	})
}

// fail makes the peer unusable, for the first reason given. Who connects, reads, writes
// or copies stops soon; then run cleans up.
func (p *peer) fail(err error) {
	p.mu.Lock()
	if p.err != nil {
		p.mu.Unlock()
		return
	}
	p.err = err
	p.down.Store(true)
	p.wake.Broadcast()
	p.makeRoom()
	if p.started {
		p.cancel()
	}
	if p.conn != nil {
		// Not closed: that tells the peer that its memory was let go.
		p.conn.SetDeadline(longAgo)
	}
	started := p.started
	p.mu.Unlock()
	p.a.forget(p, errors.Is(err, engine.ErrPeerLost))
	if !started {
		p.finish()
	}
}

func (p *peer) finish() {
	p.a.mu.Lock()
	delete(p.a.allPeers, p)
	p.a.mu.Unlock()
	close(p.done)
}

// lost is the reason when the connection ended.
func (p *peer) lost(cause error) error {
	return fmt.Errorf("peer %q: %w: %w: %w", p.name, engine.ErrPeerLost, engine.ErrBackend, cause)
}

// run lives as long as the connection.
func (p *peer) run(ctx context.Context) {
	conn, err := p.a.dial(ctx, p.to)
	if err == nil {
		err = p.converse(conn)
	}
	p.fail(p.lost(err))
	p.cleanUp(conn)
	p.finish()
}

// converse reads and writes until either fails, and returns when both have stopped.
func (p *peer) converse(conn *connection) error {
	p.mu.Lock()
	p.conn = conn
	err := p.err
	if err == nil && conn.overTCP() {
		// What else may listen there need not know when to give up.
		err = conn.SetReadDeadline(time.Now().Add(welcomeWait))
	}
	p.mu.Unlock()
	if err != nil {
		return err
	}
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		w := linkWriter{p: p, out: newFrameWriter(conn)}
		p.fail(p.lost(w.run()))
	}()
	err = p.read(conn)
	if errors.Is(err, errProtocol) {
		p.a.stats.dropped.Add(1)
	}
	p.fail(p.lost(err))
	<-stopped
	return err
}

// cleanUp lets the peer's memory go, then closes the connection, then ends the requests
// that nobody else ends. Nothing is added to the queues any more, because err is set.
func (p *peer) cleanUp(conn *connection) {
	p.mu.Lock()
	var mappings []*mapping
	for _, m := range p.mappings {
		m.region.takeMapping()
		mappings = append(mappings, m.mapping)
	}
	p.mu.Unlock()
	for _, m := range mappings {
		m.revoke()
	}
	p.mapped.Wait()

	p.mu.Lock()
	left := p.waiting
	for _, reg := range p.asked {
		left = append(left, reg.answeredLocked()...)
	}
	for p.reads.len() > 0 {
		left = append(left, p.reads.pop())
	}
	for p.sends.len() > 0 {
		left = append(left, p.sends.pop().r)
	}
	for _, o := range p.awaiting {
		left = append(left, o.r)
	}
	left = append(left, p.sending, p.reading)
	left = slices.DeleteFunc(left, func(r *request) bool { return r == nil }) // of bare notifications
	p.waiting, p.asked, p.awaiting, p.sending, p.reading = nil, nil, nil, nil, nil
	err := p.err
	p.mu.Unlock()
	switch {
	case conn == nil:
	case len(left) > 0:
		conn.abort()
	default:
		conn.Close()
	}
	for _, r := range left {
		r.settle(err)
	}
}

// read handles what the target sends.
func (p *peer) read(conn *connection) error {
	var fds *fdReader
	frames := newFrameReader(conn, conn)
	if !conn.overTCP() {
		fds = newFDReader(conn.unix)
		defer fds.close()
		frames = newFrameReader(fds, conn)
	}
	h, body, err := frames.next()
	if err != nil {
		return err
	}
	if h.typ == frameRefused {
		_, err := parseRefusal(body)
		return err
	}
	id, err := parseWelcome(body)
	if err != nil || h.typ != frameWelcome || id != p.id {
		return fmt.Errorf("%w: not welcomed by the agent that was meant", errProtocol)
	}
	if err := p.welcome(); err != nil {
		return err
	}
	for {
		h, body, err := frames.next()
		if err != nil {
			return err
		}
		switch h.typ {
		case frameRegion:
			err = p.onRegion(h.number, body, fds)
		case frameUnmap:
			err = p.onUnmap(h.number)
		case frameData:
			err = p.onData(h.number, frames)
		case frameReadDone:
			err = p.onReadDone(h.number, body)
		case frameDone:
			err = p.onDone(h.number, body)
		default:
			err = fmt.Errorf("%w: frame of type %d from a target", errProtocol, h.typ)
		}
		if err != nil {
			return err
		}
	}
}

// welcome lets the requests go that waited for it.
func (p *peer) welcome() error {
	p.mu.Lock()
	if p.err != nil {
		defer p.mu.Unlock()
		return p.err
	}
	if err := p.conn.SetReadDeadline(time.Time{}); err != nil {
		p.mu.Unlock()
		return err
	}
	p.ready = true
	waiting := p.waiting
	p.waiting = nil
	var launch []*request
	for _, r := range waiting {
		if p.admitLocked(r) {
			launch = append(launch, r)
		}
	}
	p.mu.Unlock()
	close(p.welcomed)
	for _, r := range launch {
		r.launch(false)
	}
	return nil
}

// admitLocked asks for the memory that a request needs and that is not mapped yet. It
// gives true if the request need not wait for it. p.mu is held.
func (p *peer) admitLocked(r *request) bool {
	if err := p.goneLocked(r); err != nil {
		r.failWith(err)
		return true
	}
	for _, pos := range r.plan.remotes {
		reg := r.regions[pos]
		switch reg.way() {
		case routeUnknown:
			if !reg.shared || p.conn.overTCP() {
				reg.setRoute(routeSocket)
				continue
			}
			p.askLocked(reg)
		case routeMapped, routeSocket:
			continue
		}
		reg.waiters = append(reg.waiters, r)
		r.missing++
	}
	return r.missing == 0
}

// askLocked asks for a region's memory. p.mu is held.
func (p *peer) askLocked(reg *remoteRegion) {
	reg.setRoute(routeAsked)
	p.asked[reg.id] = reg
	p.control = append(p.control, control{frameMap, reg.id})
	p.wake.Signal()
}

// goneLocked says if a request touches memory that newer metadata is without. p.mu is
// held.
func (p *peer) goneLocked(r *request) error {
	for _, pos := range r.plan.remotes {
		if reg := r.regions[pos]; reg.gone {
			return withdrawn(p, reg)
		}
	}
	return nil
}

// answeredLocked gives the requests that wait for nothing else any more. peer.mu is held.
func (r *remoteRegion) answeredLocked() []*request {
	var free []*request
	for _, w := range r.waiters {
		if w.missing--; w.missing == 0 {
			free = append(free, w)
		}
	}
	r.waiters = nil
	return free
}

func withdrawn(p *peer, r *remoteRegion) error {
	return fmt.Errorf("peer %q took its %d bytes at %#x back: %w: %w", p.name, r.n, r.addr, engine.ErrNotRegistered, engine.ErrNotFound)
}

// onRegion maps memory that was asked for.
func (p *peer) onRegion(id uint64, body []byte, fds *fdReader) error {
	answer, err := parseRegion(body)
	if err != nil {
		return err
	}
	p.mu.Lock()
	reg := p.asked[id]
	_, known := p.mappings[answer.grant]
	p.mu.Unlock()
	if reg == nil || known {
		return fmt.Errorf("%w: answer for region %d, grant %d, that was not asked for", errProtocol, id, answer.grant)
	}
	var m *mapping
	if answer.code == codeOK {
		if fd := fds.take(answer.dev, answer.inode); fd >= 0 {
			// What cannot be mapped goes through the connection.
			m, _ = newMapping(fd, answer.off, reg.n, answer.grant, p.unmapped)
			unix.Close(fd)
		}
	}

	p.mu.Lock()
	delete(p.asked, id)
	gone := reg.gone
	switch {
	case m != nil:
		p.mapped.Add(1)
		p.mappings[answer.grant] = remoteMapping{m, reg}
		if gone {
			reg.setRoute(routeLeaving)
		} else {
			reg.mapping.Store(m)
			reg.setRoute(routeMapped)
		}
	case answer.code == codeOK:
		reg.setRoute(routeSocket)
		p.control = append(p.control, control{frameUnmapped, answer.grant})
		p.wake.Signal()
	default:
		reg.setRoute(routeUnknown)
		for _, r := range reg.waiters {
			r.failWith(withdrawn(p, reg))
		}
	}
	launch := reg.answeredLocked()
	p.mu.Unlock()
	if m != nil && gone {
		m.revoke()
	}
	for _, r := range launch {
		r.launch(false)
	}
	return nil
}

// unmapped follows the end of a mapping.
func (p *peer) unmapped(m *mapping) {
	p.mu.Lock()
	reg := p.mappings[m.grant].region
	delete(p.mappings, m.grant)
	p.control = append(p.control, control{frameUnmapped, m.grant})
	p.wake.Signal()
	if len(reg.waiters) > 0 {
		// Only now: the target grants a region to a connection once at a time.
		p.askLocked(reg)
	} else {
		reg.setRoute(routeUnknown)
	}
	p.mu.Unlock()
	p.mapped.Done()
}

// onUnmap lets a grant go. The answer follows when nobody copies there any more.
func (p *peer) onUnmap(grant uint64) error {
	p.mu.Lock()
	m, known := p.mappings[grant]
	switch {
	case known && m.region.mapping.Load() == m.mapping:
		m.region.takeMapping()
	case !known && len(p.control) >= maxControl:
		p.mu.Unlock()
		return fmt.Errorf("%w: too many grants taken back", errProtocol)
	case !known:
		// Let go before the question came, or never mapped.
		p.control = append(p.control, control{frameUnmapped, grant})
		p.wake.Signal()
	}
	p.mu.Unlock()
	if known {
		m.revoke()
	}
	return nil
}

// onData puts bytes of a read where they belong.
func (p *peer) onData(number uint64, frames *frameReader) error {
	n := frames.left
	p.mu.Lock()
	r := p.reading
	ok := r != nil && r.readNumber == number && n <= r.expected
	if ok {
		r.expected -= n
	}
	p.mu.Unlock()
	if !ok {
		return fmt.Errorf("%w: %d bytes of a read that were not asked for", errProtocol, n)
	}
	to := itemPlaces{r: r, at: r.at}
	err := frames.receive(&to)
	r.at = to.at
	return err
}

// onReadDone asks for more of the request, or ends it.
func (p *peer) onReadDone(number uint64, body []byte) error {
	res, err := parseResult(body)
	if err != nil {
		return err
	}
	p.mu.Lock()
	r := p.reading
	if r == nil || r.readNumber != number || res.code == codeOK && r.expected != 0 {
		p.mu.Unlock()
		return fmt.Errorf("%w: end of read %d, which has bytes left or was not asked for", errProtocol, number)
	}
	if err := p.check(res); err != nil {
		r.failWith(err)
	}
	at := r.at
	_, more := r.nextSocket(&at, maxRead)
	if more && r.failure.Load() == nil {
		p.moreRead = true
		r = nil
	} else {
		p.reading = nil
	}
	p.wake.Signal()
	p.mu.Unlock()
	if r != nil {
		r.readEnded()
	}
	return nil
}

// onDone ends a transfer or a notification.
func (p *peer) onDone(number uint64, body []byte) error {
	res, err := parseResult(body)
	if err != nil {
		return err
	}
	p.mu.Lock()
	o, ok := p.awaiting[number]
	if !ok {
		p.mu.Unlock()
		return fmt.Errorf("%w: answer to transfer %d, which does not wait for one", errProtocol, number)
	}
	delete(p.awaiting, number)
	p.window -= o.cost
	if o.r == nil {
		p.queued -= o.cost
		p.makeRoom()
	}
	p.wake.Signal()
	p.mu.Unlock()
	if o.r != nil {
		o.r.settle(p.check(res))
	}
	return nil
}

// check turns a target's answer into an error.
func (p *peer) check(res result) error {
	switch res.code {
	case codeOK:
		return nil
	case codeNotRegistered:
		return fmt.Errorf("peer %q has no %d bytes at %d of region %d: %w: %w", p.name, res.part.n, res.part.off, res.part.region, engine.ErrNotRegistered, engine.ErrNotFound)
	}
	return fmt.Errorf("peer %q cannot access its %d bytes at %d of region %d: %w", p.name, res.part.n, res.part.off, res.part.region, engine.ErrBackend)
}
