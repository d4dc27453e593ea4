package nixl

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nixlkv/nixlkv/hostmem"
	"github.com/nixlkv/nixlkv/internal/cgo"
	"github.com/nixlkv/nixlkv/internal/engine"
)

// engineCase is one way to run the conformance tests.
type engineCase struct {
	name  string
	kind  Kind
	calls string
	tcp   bool // as if every peer were on another host
}

var puregoCase = engineCase{name: "native-purego", kind: Native, calls: "purego"}

// engineCases lists every engine, and every way to call the native one that this build has.
func engineCases() []engineCase {
	cs := []engineCase{{name: "embedded", kind: Embedded}, {name: "embedded-tcp", kind: Embedded, tcp: true}, puregoCase}
	if haveCgo {
		cs = append(cs, engineCase{name: "native-cgo", kind: Native, calls: "cgo"})
	}
	return cs
}

// eachEngine runs a test over every engine.
func eachEngine(t *testing.T, f func(t *testing.T, c engineCase)) {
	for _, c := range engineCases() {
		t.Run(c.name, func(t *testing.T) {
			if c.kind == Native {
				needNative(t)
			}
			f(t, c)
		})
	}
}

// needNative skips where there is no NIXL, unless the environment promises one.
func needNative(t testing.TB) {
	if _, err := Open(Native); err != nil {
		if os.Getenv(cgo.EnvLibrary) != "" {
			t.Fatal(err)
		}
		t.Skip("skip: no NIXL library on this machine; make test fetches one")
	}
}

func (c engineCase) open(t testing.TB) *Engine {
	t.Helper()
	e, err := Open(c.kind, WithCalls(c.calls))
	if err != nil {
		t.Fatal(err)
	}
	if c.tcp {
		e = OpenOver(tcpEngine{e.raw}, Embedded, e.log)
	}
	t.Cleanup(func() {
		if err := e.Close(); err != nil {
			t.Error(err)
		}
		if s := e.Stats(); s != (EngineStats{}) {
			t.Errorf("left after Close: %+v", s)
		}
		freeBuffers(t)
	})
	return e
}

// buffers are what alloc gave to running tests. They are freed after the test's engine is
// closed: registered memory cannot be.
var buffers struct {
	sync.Mutex
	of map[string][]*hostmem.Buffer
}

func freeBuffers(t testing.TB) {
	buffers.Lock()
	defer buffers.Unlock()
	for _, b := range buffers.of[t.Name()] {
		if err := b.Free(); err != nil && !errors.Is(err, hostmem.ErrFreed) {
			t.Error(err)
		}
	}
	delete(buffers.of, t.Name())
}

func (c engineCase) peer(size int) peerConfig {
	return peerConfig{Engine: c.kind.String(), Calls: c.calls, TCP: c.tcp, Name: uniqueName("peer"), Size: size}
}

// loopbackTCP has an agent reach all peers over TCP.
var loopbackTCP = TCP{Listen: "127.0.0.1:0", Only: true}

// tcpEngine makes agents as if they had been asked for WithTCP(loopbackTCP).
type tcpEngine struct{ engine.Engine }

func (e tcpEngine) NewAgent(name string, cfg engine.AgentConfig) (engine.Agent, error) {
	a, err := e.Engine.NewAgent(name, cfg)
	if err != nil {
		return nil, err
	}
	return tcpAgent{a}, nil
}

type tcpAgent struct{ engine.Agent }

func (a tcpAgent) CreateBackend(plugin string, params map[string]string) (engine.Backend, error) {
	return a.Agent.CreateBackend(plugin, loopbackTCP.params(params))
}

var names atomic.Int64

func uniqueName(s string) string {
	return fmt.Sprintf("%s-%d-%d", s, os.Getpid(), names.Add(1))
}

func newAgent(t testing.TB, e *Engine, opts ...AgentOption) *Agent {
	t.Helper()
	a, err := e.NewAgent(uniqueName("agent"), opts...)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// alloc gives a buffer that is freed when the test and its engine have ended.
func alloc(t testing.TB, n int) *hostmem.Buffer {
	t.Helper()
	b, err := hostmem.Alloc(n)
	if err != nil {
		t.Fatal(err)
	}
	buffers.Lock()
	defer buffers.Unlock()
	if buffers.of == nil {
		buffers.of = map[string][]*hostmem.Buffer{}
	}
	buffers.of[t.Name()] = append(buffers.of[t.Name()], b)
	return b
}

// must ends the test on an error.
func must[T any](t testing.TB) func(T, error) T {
	return func(v T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// wait waits for a transfer within a bound that no healthy machine reaches.
func wait(t testing.TB, x *Transfer) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	if err := x.Wait(ctx); err != nil {
		t.Fatal(err)
	}
}

// side is an agent with one registered buffer, for tests within one process.
type side struct {
	a   *Agent
	buf *hostmem.Buffer
	reg *Registration
}

func newSide(t testing.TB, e *Engine, n int, opts ...AgentOption) *side {
	t.Helper()
	buf := alloc(t, n)
	a := newAgent(t, e, opts...)
	return &side{a, buf, must[*Registration](t)(a.Register(Host(buf)))}
}

// load makes s know o.
func (s *side) load(t testing.TB, o *side) *Remote {
	t.Helper()
	return must[*Remote](t)(s.a.Load(must[[]byte](t)(o.a.LocalMetadata())))
}

func (s *side) desc(off, n int) Desc {
	return Desc{Addr: uint64(s.buf.Addr()) + uint64(off), Len: uint64(n)}
}

// list makes a DRAM list of an agent.
func (s *side) list(t testing.TB, descs ...Desc) *List {
	t.Helper()
	l := must[*List](t)(s.a.NewList(DRAM))
	check(t, l.Append(descs...))
	return l
}

// drained drains an agent in this process until n notifications are there.
func drained(t testing.TB, a *Agent, n int) [][2]string {
	t.Helper()
	var buf Notifications
	var got [][2]string
	for end := time.Now().Add(20 * time.Second); len(got) < n; {
		if time.Now().After(end) {
			t.Fatalf("got %d of %d notifications: %q", len(got), n, got)
		}
		check(t, a.Notifications(&buf))
		for from, msg := range buf.All() {
			got = append(got, [2]string{string(from), string(msg)})
		}
	}
	return got
}
