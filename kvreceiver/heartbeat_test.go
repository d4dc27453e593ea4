package kvreceiver

import (
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/nixl"
)

// A prefill whose bootstrap server does not answer any more is given up: its rooms fail,
// however far they are, and those of other prefills do not.
func TestHeartbeat(t *testing.T) {
	for name, end := range map[string]func(*site){
		"no connection": func(p *site) { _ = p.http.Close() },
		"not 200":       func(p *site) { p.refusing("/health", http.StatusServiceUnavailable, "busy") },
		"another 2xx":   func(p *site) { p.refusing("/health", http.StatusNoContent, "") },
	} {
		t.Run(name, func(t *testing.T) {
			q := newPair(t, openEngine(t, nixl.Embedded), shape{}, heartbeats(10*time.Millisecond, 3), WithReleaseTimeout(50*time.Millisecond))
			other := q.another(shape{})
			waits, told := q.published(1)
			connected := q.open(2)
			ok(t, connected.Connect(within(t)))
			opened := q.open(3)
			done, hers := q.published(4)
			q.p.ranks[0].serve(hers[0], byStatus, work{src: []int32{1, 2}})
			ok(t, done.Wait(within(t)))
			lives, theirs := other.published(5)
			q.p.untilAsked("GET /health", 2)
			end(q.p)
			for _, r := range []*Receiver{waits, connected, opened} {
				checkFailed(t, r, nixlkv.ErrPeerLost, "Lost connection with prefill instance (bootstrap_addr: "+q.p.addr+"): 3 heartbeats failed")
				_ = r.Released(within(t))
				ok(t, r.Close())
			}
			ok(t, done.Err())
			ok(t, done.Close())
			other.p.ranks[0].serve(theirs[0], byStatus, work{src: []int32{1, 2}})
			ok(t, lives.Wait(within(t)))
			ok(t, lives.Close())
			if s := q.m.Stats(); s.Missed < 3 || told[0].Room != 1 {
				t.Errorf("stats %+v", s)
			}
			// It answers again.
			asked := q.p.count("GET /route")
			if name == "no connection" {
				q.p.restart()
			}
			q.p.refusing("", 0, "")
			again := q.publish(6, Destination{Pages: []int32{1}, Aux: Aux(0)})
			q.p.ranks[0].serve(q.p.ranks[0].metadata(6), byStatus, work{src: []int32{1}})
			ok(t, again.Wait(within(t)))
			ok(t, again.Close())
			if n := q.p.count("GET /route"); n != asked+2 {
				t.Errorf("asked %d times", n-asked)
			}
		})
	}
}

// Failures that are not in a row do not count.
func TestHeartbeatOnAndOff(t *testing.T) {
	q := newPair(t, openEngine(t, nixl.Embedded), shape{}, heartbeats(5*time.Millisecond, 3))
	var n atomic.Int64
	q.p.mu.Lock()
	q.p.refuse = func(w http.ResponseWriter, r *http.Request) bool {
		if r.URL.Path != "/health" || n.Add(1)%3 == 0 {
			return false
		}
		w.WriteHeader(http.StatusBadGateway)
		return true
	}
	q.p.mu.Unlock()
	r, told := q.published(1)
	q.p.untilAsked("GET /health", 12)
	if ended(r) {
		t.Fatal(r.Err())
	}
	q.p.ranks[0].serve(told[0], byStatus, work{src: []int32{1, 2}})
	ok(t, r.Wait(within(t)))
	ok(t, r.Close())
	if s := q.m.Stats(); s.Missed < 7 {
		t.Errorf("missed %d", s.Missed)
	}
}

// A prefill that nothing is known of is not asked, and one that no room has used for long is
// forgotten.
func TestHeartbeatOfIdlePrefills(t *testing.T) {
	q := newPair(t, openEngine(t, nixl.Embedded), shape{}, heartbeats(5*time.Millisecond, 1))
	other := q.another(shape{})
	r := q.open(1) // never connected
	other.oneRoom(2, byStatus, 1, 1)
	other.p.untilAsked("GET /health", 3)
	if n := q.p.count("GET /health"); n != 0 {
		t.Errorf("asked %d times", n)
	}
	q.m.prefillsMu.Lock()
	for _, p := range q.m.prefills {
		p.used = time.Now().Add(-2 * forgetPrefillAfter)
	}
	q.m.prefillsMu.Unlock()
	eventually(t, "the idle prefill to go", func() bool { return q.m.Stats().Prefills == 1 })
	ok(t, r.Close())
}
