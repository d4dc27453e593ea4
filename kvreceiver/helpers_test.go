package kvreceiver

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/internal/sentinels"
	"github.com/nixlkv/nixlkv/nixl"
	"github.com/nixlkv/nixlkv/registry"
)

func within(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

func ok(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// eventually waits for what no event tells of: a counter.
func eventually(t *testing.T, what string, done func() bool) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for end := time.After(patience); !done(); {
		select {
		case <-tick.C:
		case <-end:
			t.Fatalf("waiting for %s", what)
		}
	}
}

// openEngine gives an engine that is closed with the test, and must hold no agent then.
func openEngine(t *testing.T, k nixl.Kind) *nixl.Engine {
	t.Helper()
	e, err := nixl.Open(k)
	if err != nil {
		if k == nixl.Native && os.Getenv("NIXLKV_NIXL_LIB") == "" {
			t.Skip("skip: no NIXL library on this machine; make test fetches one")
		}
		t.Fatal(err)
	}
	closeEngine(t, e)
	return e
}

func closeEngine(t *testing.T, e *nixl.Engine) {
	t.Cleanup(func() {
		if s := e.Stats(); s.Agents != 0 {
			t.Errorf("agents left: %+v", s)
		}
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	})
}

// eachEngine runs a test over both engines.
func eachEngine(t *testing.T, f func(t *testing.T, e *nixl.Engine)) {
	for _, k := range []nixl.Kind{nixl.Embedded, nixl.Native} {
		t.Run(k.String(), func(t *testing.T) { f(t, openEngine(t, k)) })
	}
}

// eachDialect runs a test for both dialects of a prefill.
func eachDialect(t *testing.T, f func(t *testing.T, d dialect)) {
	for _, d := range dialects {
		t.Run(d.String(), func(t *testing.T) { f(t, d) })
	}
}

// quick are times that suit tests: nothing that has to happen takes long, nothing happens
// by itself.
func quick(e *nixl.Engine) []Option {
	return []Option{WithEngine(e), WithLossGrace(20 * time.Millisecond), WithSendTimeout(patience), WithReleaseTimeout(patience)}
}

// heartbeats sets the heartbeat without SGLang's floor.
func heartbeats(every time.Duration, failures int) Option {
	return func(c *config) { c.heartbeatInterval, c.heartbeatFailures = every, failures }
}

// newManager starts a decode that is closed with the test and must hold nothing then.
func newManager(t *testing.T, l *registry.Layout, opts ...Option) *Manager {
	t.Helper()
	m, err := NewManager(t.Context(), l, opts...)
	ok(t, err)
	t.Cleanup(func() { closeManager(t, m) })
	return m
}

func closeManager(t *testing.T, m *Manager) {
	t.Helper()
	err := m.Close()
	// What was given up stays so, and Close says it.
	if given := m.Stats().Unconfirmed; errors.Is(err, nixlkv.ErrReleaseUnconfirmed) != (given > 0) || err != nil && given == 0 {
		t.Fatalf("closing, with %d rooms not released in time: %v", given, err)
	}
	checkEmpty(t, m)
}

// checkEmpty checks that a closed manager holds nothing.
func checkEmpty(t *testing.T, m *Manager) {
	t.Helper()
	s := m.Stats()
	if s.Rooms != 0 || s.Waiting != 0 || s.Prefills != 0 || s.Ranks != 0 || s.Agent != (nixl.AgentStats{}) {
		t.Errorf("left after Close: %d rooms, %d waiting, %d prefills, %d ranks, agent %+v", s.Rooms, s.Waiting, s.Prefills, s.Ranks, s.Agent)
	}
	if s.Control.Panics != 0 || s.Control.Pending != 0 {
		t.Errorf("control: %+v", s.Control)
	}
	if len(m.lingering) != 0 || m.live != 0 || m.drain.open.Load() != 0 || len(m.drain.after) != 0 {
		t.Errorf("left after Close: %d lingering, %d live, %d watched, %d after a drain", len(m.lingering), m.live, m.drain.open.Load(), len(m.drain.after))
	}
}

// pair is a prefill and a decode.
type pair struct {
	t        *testing.T
	m        *Manager
	mem      *kitMemory // of the decode
	p        *site
	prefills *kitMemory
}

// newPair starts a prefill and a decode of a rank.
func newPair(t *testing.T, e *nixl.Engine, s shape, opts ...Option) *pair {
	t.Helper()
	return newPairOf(t, e, s, func(*registry.Layout) {}, nil, opts...)
}

// newPairOf is newPair with another layout of the decode, and memory with more in it.
func newPairOf(t *testing.T, e *nixl.Engine, s shape, change func(*registry.Layout), memory []memoryOption, opts ...Option) *pair {
	t.Helper()
	q := &pair{t: t, mem: newKitMemory(t, memory...), prefills: newKitMemory(t, memory...)}
	q.prefills.fill()
	l := q.mem.layout()
	change(l)
	q.p = newSite(t, e, q.prefills, s)
	q.m = newManager(t, l, append(quick(e), opts...)...)
	return q
}

// open opens a room at the pair's prefill.
func (q *pair) open(id nixlkv.Room, opts ...RoomOption) *Receiver {
	q.t.Helper()
	r, err := q.m.Open(id, q.p.addr, opts...)
	ok(q.t, err)
	return r
}

// publish opens and connects a room and tells its pages.
func (q *pair) publish(id nixlkv.Room, d Destination) *Receiver {
	q.t.Helper()
	r := q.open(id)
	ok(q.t, r.Connect(within(q.t)))
	ok(q.t, r.Publish(d))
	return r
}

// drained waits until what has to run behind a drain has run.
func (q *pair) drained() {
	q.t.Helper()
	done := make(chan struct{})
	q.m.afterDrain(func() { close(done) })
	select {
	case <-done:
	case <-time.After(patience):
		q.t.Fatal("no drain")
	}
}

// checkFailed checks how a room has failed.
func checkFailed(t *testing.T, r *Receiver, want error, text string) *KVTransferError {
	t.Helper()
	return checkError(t, r, r.Wait(within(t)), want, text)
}

func checkError(t *testing.T, r *Receiver, err error, want error, text string) *KVTransferError {
	t.Helper()
	var te *KVTransferError
	if !errors.As(err, &te) || te.Room != r.Room() || want != nil && !errors.Is(err, want) || !strings.Contains(err.Error(), text) {
		t.Fatalf("room %d: got %v, want %v with %q", r.Room(), err, want, text)
	}
	if err := sentinels.Repeated(err); err != nil {
		t.Error(err)
	}
	if te.Peer == "" || !strings.HasPrefix(err.Error(), "KVTransferError(bootstrap_room="+r.Room().String()+"): ") {
		t.Errorf("room %d: peer %q, %v", r.Room(), te.Peer, err)
	}
	if r.Status() != nixlkv.Failed || r.Err() == nil {
		t.Errorf("room %d: status %v, error %v", r.Room(), r.Status(), r.Err())
	}
	select {
	case <-r.Ready():
	default:
		t.Errorf("room %d: failed and not ready", r.Room())
	}
	return te
}

// isReleased says whether a room's pages are known to be released, or given up.
func isReleased(r *Receiver) bool {
	select {
	case <-r.r.released:
		return true
	default:
		return false
	}
}

func ended(r *Receiver) bool {
	select {
	case <-r.Done():
		return true
	default:
		return false
	}
}

// contextOf gives a context of so many milliseconds.
func contextOf(ms int) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.Background(), time.Duration(ms)*time.Millisecond)
}
