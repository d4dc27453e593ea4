//go:build linux && cgo

package control

import (
	"fmt"
	"time"

	"github.com/nixlkv/nixlkv"
)

// Places in the queues are shared fairly. What waits for a few endpoints that do not connect, or
// do not read, would otherwise take all of them until its deadlines pass, and messages to everybody
// else be refused. So once there is no place left, the endpoint that holds most of them gives up
// its newest message for one to an endpoint that holds less.

// quotas are what all queues may hold together. The rest of Limits.Pending and PendingBytes is for
// messages on their way to a queue, and for callbacks: were all of it queued, no message would come
// as far as to claim its share.
func (l *Limits) quotas() (messages, bytes int) {
	return max(1, l.Pending-l.Pending/4), max(l.MessageBytes, l.PendingBytes-l.PendingBytes/4)
}

// shareOf gives the part of all places, or of all bytes, that so much is, whichever is more.
func (s *sender) shareOf(messages, bytes int) float64 {
	m, b := s.cfg.Limits.quotas()
	return max(float64(messages)/float64(m), float64(bytes)/float64(b))
}

// makeRoom finds a place for a message to p, or says why there is none. One that can be written at
// once needs none.
func (s *sender) makeRoom(p *peer, o *outgoing) error {
	if p.state == connected && p.queue.n == 0 {
		return nil
	}
	messages, bytes := s.cfg.Limits.quotas()
	for s.queued+1 > messages || s.queuedBytes+o.bytes > bytes {
		want := s.shareOf(p.queue.n+1, p.queue.bytes+o.bytes)
		hog := s.hog(want)
		if hog == nil {
			return fmt.Errorf("%w: %d messages, %d bytes wait for %d endpoints", nixlkv.ErrLimit, s.queued, s.queuedBytes, s.waiting)
		}
		newest := hog.queue.tail
		s.counters.sendsRefused.Add(1)
		s.giveUp(newest, fmt.Errorf("%w: %s: %w: %d messages wait, more than for any other endpoint: %w",
			nixlkv.ErrSendBlocked, hog.endpoint, nixlkv.ErrLimit, hog.queue.n, hog.waitsFor()))
	}
	return nil
}

// hog gives the endpoint with the largest share, if that is more than so much; nil if there is
// none. Looking at every endpoint for each message of a flood would take long: that nobody had more
// counts for a moment.
func (s *sender) hog(than float64) *peer {
	if than >= s.most && s.now.Before(s.mostUntil) {
		return nil
	}
	var hog *peer
	for _, p := range s.peers {
		if share := s.shareOf(p.queue.n, p.queue.bytes); share > than {
			hog, than = p, share
		}
	}
	if hog == nil {
		s.most, s.mostUntil = than, s.now.Add(time.Millisecond)
	}
	return hog
}

// queue puts a message at the end of what waits for p.
func (s *sender) queue(p *peer, o *outgoing) {
	if p.queue.n == 0 {
		s.waiting++
	}
	p.queue.push(o)
	s.queued++
	s.queuedBytes += o.bytes
}

// unqueue takes a message out of what waits for p.
func (s *sender) unqueue(p *peer, o *outgoing) {
	p.queue.remove(o)
	s.timers.stop(&o.timer)
	s.queued--
	s.queuedBytes -= o.bytes
	if p.queue.n == 0 {
		s.waiting--
	}
}
