package kvsender

import (
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/bootstrap"
	"github.com/nixlkv/nixlkv/internal/wire"
)

// clumsy panics on the messages that it is told to.
type clumsy struct {
	on atomic.Pointer[func(wire.Message) bool]
}

func (c *clumsy) option() Option {
	return func(cfg *config) {
		cfg.taking = func(msg wire.Message) {
			if on := c.on.Load(); on != nil && (*on)(msg) {
				panic("clumsy")
			}
		}
	}
}

func (c *clumsy) over(f func(wire.Message) bool) { c.on.Store(&f) }

// A message whose handling panics fails what it was about, here and at the decode, and nothing
// else.
func TestPanicFailsTheRoom(t *testing.T) {
	var c clumsy
	core, logs := observer.New(zap.ErrorLevel)
	p := newPair(t, embeddedEngine(t), 25, c.option(), WithLogger(zap.New(core)))
	p.d.register(p.d.registration())
	p.transfer(t, 1)
	panics := uint64(0)
	panicked := func() {
		t.Helper()
		panics++
		eventually(t, "the panic is counted", func() bool { return p.m.Stats().Control.Panics == panics })
	}

	// Metadata of a room that is open, and of one that is not.
	c.over(func(m wire.Message) bool { _, is := m.(*wire.Metadata); return is })
	s, other := open(t, p.m, 2), open(t, p.m, 3)
	p.d.tell(2, []int32{1}, 0)
	wantFailure(t, s, p.d, nixlkv.ErrInternal, "clumsy")
	panicked()
	p.d.tell(9, []int32{1}, 0)
	p.d.toldOf(9, nixlkv.ErrInternal.Error())
	panicked()

	// An abort of a room whose decode is known: it is told once.
	c.over(func(m wire.Message) bool { _, is := m.(*wire.Abort); return is })
	p.d.tell(3, []int32{1}, 0)
	_, err := other.WaitBootstrapped(within(t))
	ok(t, err)
	p.d.send(new(wire.Encoder).Abort(&wire.Abort{Room: 3, From: p.d.endpoint(), Generation: 1, HasGeneration: true}))
	wantFailure(t, other, p.d, nixlkv.ErrInternal, "clumsy")
	panicked()

	// One in the name of somebody else fails no room of another's.
	c.over(func(m wire.Message) bool { a, is := m.(*wire.Abort); return is && a.From == elsewhere })
	third := open(t, p.m, 4)
	p.d.tell(4, []int32{1}, 0)
	_, err = third.WaitBootstrapped(within(t))
	ok(t, err)
	p.d.send(new(wire.Encoder).Abort(&wire.Abort{Room: 4, From: elsewhere}))
	panicked()
	p.transfer(t, 5)
	if err := third.Err(); err != nil {
		t.Errorf("another's room failed: %v", err)
	}

	// A registration: rooms of the decode are told why it cannot be sent to.
	c.over(func(m wire.Message) bool { _, is := m.(*wire.Registration); return is })
	g := p.d.registration()
	g.Agent = "another"
	p.d.register(g)
	panicked()
	p.d.tell(6, []int32{1}, 0, func(m *wire.Metadata) { m.Agent = "another" })
	fourth := open(t, p.m, 6)
	ok(t, fourth.Begin(Plan{Pages: 1, Aux: Aux(1)}))
	ok(t, fourth.Finish([]int32{1}, nil))
	wantFailure(t, fourth, p.d, nixlkv.ErrInternal, "clumsy")

	p.transfer(t, 7)
	p.d.until("what came for it", func() bool { return true })
	p.d.mu.Lock()
	statuses := slices.Clone(p.d.statuses)
	p.d.mu.Unlock()
	for _, st := range statuses {
		if st.Room != 1 && st.Room != 5 && st.Room != 7 {
			t.Errorf("told again: %+v", st)
		}
	}
	all := logs.FilterMessage("control: panic in handler").All()
	if len(all) == 0 || !strings.Contains(all[0].ContextMap()["stack"].(string), "kvsender.(*Manager).receive") {
		t.Errorf("no stack is logged: %+v", all)
	}
	for _, s := range []*Sender{s, other, third, fourth} {
		ok(t, s.Close())
	}
}

// The decode that waits for a room to be computed is told too.
func TestPanicOverAQuestion(t *testing.T) {
	var c clumsy
	p := newPair(t, embeddedEngine(t), 25, c.option(), WithAllocationPolicy(bootstrap.PrefillCompleteAllocation))
	p.d.register(p.d.registration())
	c.over(func(m wire.Message) bool { _, is := m.(*wire.Bootstrap); return is })
	s := open(t, p.m, 2)
	p.d.ask(2)
	wantFailure(t, s, p.d, nixlkv.ErrInternal, "clumsy")
	ok(t, s.Close())
}
