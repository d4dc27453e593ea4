//go:build linux && cgo

package control

import (
	"errors"
	"strconv"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/nixlkv/nixlkv"
)

// Endpoints that take connections and never answer hold no more places than others leave them,
// until their deadlines: a peer that is not connected yet, and one that is, are served meanwhile.
func TestBlackHolesHoldUpNobody(t *testing.T) {
	in := newInbox()
	connected := endpoint(t, start(t, Config{Handler: in.handle}))
	fresh := endpoint(t, start(t, Config{Handler: in.handle}))
	c := start(t, Config{Linger: -1})
	mustSend(t, c, connected, "before")
	in.next(t)

	holes := blackHoles(t, 8)
	outcomes := make(chan error, 2*c.sender.cfg.Limits.Pending)
	flood := func(n int) {
		for i := range n {
			m := Message{To: holes[i%len(holes)], Frames: frames("x"), Deadline: time.Now().Add(time.Hour)}
			if err := c.SendAsync(m, func(_ uint64, err error) { outcomes <- err }); err != nil {
				outcomes <- err
			}
		}
	}
	quota, _ := c.sender.cfg.Limits.quotas()
	flood(c.sender.cfg.Limits.Pending)
	eventually(t, "the queues are full, and the rest is refused", func() bool { return c.Stats().Pending == quota })
	for len(outcomes) > 0 {
		if err := <-outcomes; !errors.Is(err, nixlkv.ErrSendBlocked) || !errors.Is(err, nixlkv.ErrLimit) {
			t.Fatal(err)
		}
	}
	const each = 100
	sent := make(chan error, 2*each)
	for i := range each {
		for _, to := range []Endpoint{connected, fresh} {
			m := Message{To: to, Frames: frames(strconv.Itoa(i))}
			if err := c.SendAsync(m, func(_ uint64, err error) { sent <- err }); err != nil {
				t.Fatalf("message %d to a good peer: %v", i, err)
			}
		}
		flood(8)
	}
	for range 2 * each {
		if err := receive(t, sent, "a completion"); err != nil {
			t.Fatalf("a message to a good peer: %v", err)
		}
	}
	for range 2 * each {
		in.next(t)
	}
}

// queued puts messages into the queues of a sender that nobody runs.
func queued(s *sender, p *peer, n, bytes int) (refused error) {
	for range n {
		o := &outgoing{to: p.endpoint, bytes: bytes, result: make(chan sendResult, 1)}
		s.counters.pending.Add(1)
		s.counters.pendingBytes.Add(int64(bytes))
		if err := s.makeRoom(p, o); err != nil {
			s.settle(o)
			refused = err
			continue
		}
		s.queue(p, o)
	}
	return refused
}

func TestSharesAreFair(t *testing.T) {
	for name, c := range map[string]struct {
		messages, bytes int // of all
		size            int // of one message
	}{"messages": {12, 1 << 20, 0}, "bytes": {1 << 20, 1200, 100}} {
		t.Run(name, func(t *testing.T) {
			cfg := &Config{Limits: Limits{Pending: c.messages * 4 / 3, PendingBytes: c.bytes * 4 / 3, MessageBytes: 1}}
			s := &sender{cfg: cfg, log: zap.NewNop(), counters: &counters{}, peers: map[Endpoint]*peer{}, now: time.Now()}
			var all []*peer
			for i := range 4 {
				p := &peer{endpoint: loopback(t, i+1)}
				s.peers[p.endpoint] = p
				all = append(all, p)
			}
			want := func(n ...int) {
				t.Helper()
				sum, waiting := 0, 0
				for i, n := range n {
					if got := all[i].queue.n; got != n {
						t.Errorf("%d messages wait for endpoint %d, want %d", got, i, n)
					}
					sum += n
					waiting += min(n, 1)
				}
				if s.queued != sum || s.queuedBytes != sum*c.size || s.waiting != waiting || s.counters.pending.Load() != int64(sum) {
					t.Errorf("%d, %d bytes, for %d endpoints, %d pending; want %d for %d",
						s.queued, s.queuedBytes, s.waiting, s.counters.pending.Load(), sum, waiting)
				}
			}
			if err := queued(s, all[0], 13, c.size); !errors.Is(err, nixlkv.ErrLimit) {
				t.Error(err)
			}
			want(12, 0, 0, 0)
			newest := all[0].queue.tail
			if err := queued(s, all[1], 5, c.size); err != nil {
				t.Error(err)
			}
			want(7, 5, 0, 0)
			if r := <-newest.result; !errors.Is(r.err, nixlkv.ErrSendBlocked) || !errors.Is(r.err, nixlkv.ErrLimit) {
				t.Error(r.err)
			}
			// It gives up no more than to an equal share.
			if err := queued(s, all[1], 5, c.size); !errors.Is(err, nixlkv.ErrLimit) {
				t.Error(err)
			}
			want(6, 6, 0, 0)
			s.now = s.now.Add(time.Second)
			if err := queued(s, all[2], 3, c.size); err != nil {
				t.Error(err)
			}
			if n := all[2].queue.n; n != 3 {
				t.Errorf("%d messages wait for the third", n)
			}
			// What can be written at once needs no place.
			all[3].state = connected
			if err := queued(s, all[3], 1, c.size); err != nil || all[3].queue.n != 1 || s.queued != 13 {
				t.Errorf("%v, %d wait", err, s.queued)
			}
			for _, p := range all {
				s.abandon(p, &s.counters.sendsLost, nixlkv.ErrClosed)
			}
			want(0, 0, 0, 0)
		})
	}
}
