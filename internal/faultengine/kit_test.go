package faultengine_test

import (
	"context"
	"fmt"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/nixlkv/nixlkv/hostmem"
	"github.com/nixlkv/nixlkv/internal/cgo"
	"github.com/nixlkv/nixlkv/internal/embedded"
	"github.com/nixlkv/nixlkv/internal/engine"
	"github.com/nixlkv/nixlkv/internal/faultengine"
	"github.com/nixlkv/nixlkv/nixl"
)

// patience bounds every wait of a test for something that has to happen.
const patience = 30 * time.Second

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

// eventually waits for what no event tells of.
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

// eachEngine runs a test over both engines, each of which can be made to fail.
func eachEngine(t *testing.T, f func(t *testing.T, e *nixl.Engine, faults *faultengine.Engine)) {
	t.Run("embedded", func(t *testing.T) { over(t, embedded.New(), nixl.Embedded, f) })
	t.Run("native", func(t *testing.T) {
		raw, err := cgo.Open(cgo.Options{})
		if err != nil {
			if os.Getenv(cgo.EnvLibrary) == "" {
				t.Skip("skip: no NIXL library on this machine; make test fetches one")
			}
			t.Fatal(err)
		}
		over(t, raw, nixl.Native, f)
	})
}

func over(t *testing.T, raw engine.Engine, kind nixl.Kind, f func(*testing.T, *nixl.Engine, *faultengine.Engine)) {
	faults := faultengine.New(raw)
	e := nixl.OpenOver(faults, kind, zap.NewNop())
	t.Cleanup(func() {
		faults.Clear()
		if err := e.Close(); err != nil {
			t.Error(err)
		}
		if s := e.Stats(); s.Agents != 0 {
			t.Errorf("agents left: %+v", s)
		}
	})
	f(t, e, faults)
}

var names atomic.Int64

// side is an agent with a page of memory.
type side struct {
	agent *nixl.Agent
	buf   *hostmem.Buffer
	list  *nixl.List
}

func newSide(t *testing.T, e *nixl.Engine, name string) *side {
	t.Helper()
	s := &side{}
	var err error
	s.buf, err = hostmem.Alloc(4096)
	ok(t, err)
	s.agent, err = e.NewAgent(fmt.Sprintf("%s-%d-%d", name, os.Getpid(), names.Add(1)))
	ok(t, err)
	_, err = s.agent.Register(nixl.Host(s.buf))
	ok(t, err)
	s.list, err = s.agent.NewList(nixl.DRAM)
	ok(t, err)
	ok(t, s.list.Append(nixl.Desc{Addr: uint64(s.buf.Addr()), Len: 4096}))
	t.Cleanup(func() {
		if err := s.agent.Close(); err != nil {
			t.Error(err)
		}
		if err := s.buf.Free(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// to gives a list of the other side's memory.
func (s *side) to(t *testing.T, o *side) *nixl.List {
	t.Helper()
	l, err := s.agent.NewList(nixl.DRAM)
	ok(t, err)
	ok(t, l.Append(nixl.Desc{Addr: uint64(o.buf.Addr()), Len: 4096}))
	return l
}

func (s *side) load(t *testing.T, o *side) (*nixl.Remote, error) {
	t.Helper()
	md, err := o.agent.LocalMetadata()
	ok(t, err)
	return s.agent.Load(md)
}

// drain adds what has come to messages.
func (s *side) drain(t *testing.T, messages []string) []string {
	t.Helper()
	var buf nixl.Notifications
	ok(t, s.agent.Notifications(&buf))
	for _, m := range buf.All() {
		messages = append(messages, string(m))
	}
	return messages
}
