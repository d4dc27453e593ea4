package faultengine_test

import (
	"context"
	"fmt"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nixlkv/nixlkv/hostmem"
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
	for _, k := range []nixl.Kind{nixl.Embedded, nixl.Native} {
		t.Run(k.String(), func(t *testing.T) {
			e, faults := faultengine.Open(t, k)
			f(t, e, faults)
		})
	}
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
