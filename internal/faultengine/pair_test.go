package faultengine_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/bootstrap"
	"github.com/nixlkv/nixlkv/hostmem"
	"github.com/nixlkv/nixlkv/internal/engine"
	"github.com/nixlkv/nixlkv/internal/faultengine"
	"github.com/nixlkv/nixlkv/kvreceiver"
	"github.com/nixlkv/nixlkv/kvsender"
	"github.com/nixlkv/nixlkv/nixl"
	"github.com/nixlkv/nixlkv/registry"
)

const (
	pages    = 16
	pageLen  = 256
	auxLen   = 64
	auxSlots = 8
)

// memory is a region of KV and an aux buffer.
type memory struct{ kv, aux *hostmem.Buffer }

func newMemory(t *testing.T) *memory {
	t.Helper()
	alloc := func(n int) *hostmem.Buffer {
		b, err := hostmem.Alloc(n)
		ok(t, err)
		t.Cleanup(func() {
			if err := b.Free(); err != nil {
				t.Error(err)
			}
		})
		return b
	}
	return &memory{alloc(pages * pageLen), alloc(auxSlots * auxLen)}
}

func (m *memory) layout() *registry.Layout {
	return &registry.Layout{
		PageSize: 16, KVHeads: 1,
		KV:  []registry.Region{{Base: uint64(m.kv.Addr()), Len: pages * pageLen, ItemLen: pageLen, LayerID: registry.NoLayer, Kind: registry.DRAM}},
		Aux: []registry.AuxBuffer{{Base: uint64(m.aux.Addr()), Len: auxSlots * auxLen, ItemLen: auxLen}},
	}
}

func (m *memory) page(n int) []byte { return m.kv.Bytes()[n*pageLen : (n+1)*pageLen] }

// pair is both sides of this library, in one process and over one engine.
type pair struct {
	t        *testing.T
	faults   *faultengine.Engine
	prefill  *kvsender.Manager
	decode   *kvreceiver.Manager
	from, to *memory
	addr     string
}

const settleTimeout = 100 * time.Millisecond

func newPair(t *testing.T, e *nixl.Engine, faults *faultengine.Engine) *pair {
	t.Helper()
	p := &pair{t: t, faults: faults, from: newMemory(t), to: newMemory(t)}
	for i, b := range p.from.kv.Bytes() {
		p.from.kv.Bytes()[i] = b + byte(i/pageLen) + 1
	}
	server, err := bootstrap.Listen("127.0.0.1:0")
	ok(t, err)
	p.addr = server.Endpoint().String()
	p.prefill, err = kvsender.NewManager(within(t), p.from.layout(), kvsender.WithEngine(e), kvsender.WithBootstrap(p.addr), kvsender.WithSettleTimeout(settleTimeout))
	ok(t, err)
	p.decode, err = kvreceiver.NewManager(within(t), p.to.layout(), kvreceiver.WithEngine(e), kvreceiver.WithReleaseTimeout(patience), kvreceiver.WithLossGrace(20*time.Millisecond))
	ok(t, err)
	t.Cleanup(func() {
		faults.Clear()
		for _, err := range []error{p.decode.Close(), p.prefill.Close(), server.Shutdown(within(t))} {
			if err != nil {
				t.Error(err)
			}
		}
		if s := p.prefill.Stats(); s.Rooms != 0 || s.Quarantined != 0 || s.Agent != (nixl.AgentStats{}) {
			t.Errorf("left at the prefill: %+v", s)
		}
		if s := p.decode.Stats(); s.Rooms != 0 || s.Waiting != 0 || s.Agent != (nixl.AgentStats{}) {
			t.Errorf("left at the decode: %+v", s)
		}
	})
	p.succeeds(1)
	return p
}

// begin runs a room up to where only its end is to be waited for: page 3 to page number mod pages.
func (p *pair) begin(id nixlkv.Room) (*kvsender.Sender, *kvreceiver.Receiver) {
	p.t.Helper()
	r, err := p.decode.Open(id, p.addr)
	ok(p.t, err)
	ok(p.t, r.Connect(within(p.t)))
	ok(p.t, r.Publish(kvreceiver.Destination{Pages: []int32{int32(id % pages)}, Aux: kvreceiver.Aux(1)}))
	s, err := p.prefill.Open(id)
	ok(p.t, err)
	ok(p.t, s.Begin(kvsender.Plan{Pages: 1, Aux: kvsender.Aux(2)}))
	ok(p.t, s.Finish([]int32{3}, nil))
	return s, r
}

func (p *pair) arrived(id nixlkv.Room) bool {
	return bytes.Equal(p.to.page(int(id%pages)), p.from.page(3))
}

func (p *pair) succeeds(id nixlkv.Room) {
	p.t.Helper()
	clear(p.to.page(int(id % pages)))
	s, r := p.begin(id)
	ok(p.t, s.Wait(within(p.t)))
	ok(p.t, r.Wait(within(p.t)))
	if !p.arrived(id) {
		p.t.Errorf("room %d did not arrive", id)
	}
	ok(p.t, errors.Join(s.Close(), r.Close()))
}

// failed checks how a room has failed on a side.
func failed(t *testing.T, side string, err, want error, text string) {
	t.Helper()
	var te *nixlkv.KVTransferError
	if !errors.As(err, &te) || want != nil && !errors.Is(err, want) || !strings.Contains(err.Error(), text) {
		t.Errorf("%s: %v; want %v with %q", side, err, want, text)
	}
}

// A transfer that fails is known on both sides, with its reason, and costs no other room.
func TestBothSidesFail(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *nixl.Engine, faults *faultengine.Engine) {
		p := newPair(t, e, faults)
		id := nixlkv.Room(10)
		for _, do := range []faultengine.Do{faultengine.Reject, faultengine.Break, faultengine.Fail} {
			for skip, what := range []string{"KV transfer", "aux transfer"} {
				t.Run(fmt.Sprintf("%d/%s", do, what), func(t *testing.T) {
					p.t = t
					id++
					faults.Add(faultengine.Rule{On: faultengine.Writes, Do: do, Err: errMade, Skip: skip, Times: 1})
					s, r := p.begin(id)
					failed(t, "prefill", s.Wait(within(t)), engine.ErrBackend, what)
					failed(t, "decode", r.Wait(within(t)), nixlkv.ErrPeerFailed, what)
					failed(t, "decode", r.Err(), nil, "made up")
					ok(t, r.Released(within(t)))
					ok(t, errors.Join(s.Close(), r.Close()))
					id++
					p.succeeds(id)
				})
			}
		}
	})
}

// The pages of a room whose write may still land are not released, however it has failed and
// whoever gave it up; rooms beside it go on. When the write has landed they are.
func TestReleaseWaitsForTheWrite(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *nixl.Engine, faults *faultengine.Engine) {
		p := newPair(t, e, faults)
		for i, giveUp := range []func(*kvsender.Sender, *kvreceiver.Receiver){
			func(s *kvsender.Sender, _ *kvreceiver.Receiver) { s.Abort("") },
			func(_ *kvsender.Sender, r *kvreceiver.Receiver) { r.Abort("") },
			func(s *kvsender.Sender, r *kvreceiver.Receiver) { r.Abort(""); s.Abort("") },
		} {
			id := nixlkv.Room(100 + i)
			clear(p.to.page(int(id % pages)))
			f := faults.Add(faultengine.Rule{On: faultengine.Writes, Do: faultengine.Stall, Times: 2})
			s, r := p.begin(id)
			ok(t, f.Wait(within(t), 2))
			giveUp(s, r)
			failed(t, "prefill", s.Wait(within(t)), nixlkv.ErrReleaseUnconfirmed, "2 transfers have not settled")
			p.succeeds(id + 16*1000 + 1)
			r.Abort("")
			failed(t, "decode", r.Wait(within(t)), nixlkv.ErrAborted, "")
			p.succeeds(id + 16*2000 + 2)
			ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
			if err := r.Released(ctx); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("released with a write that may land: %v", err)
			}
			cancel()
			if got := p.prefill.Stats(); got.Quarantined != 1 || p.decode.Stats().AbortAcks != uint64(i) {
				t.Errorf("%d rooms in quarantine, %d aborts answered", got.Quarantined, p.decode.Stats().AbortAcks)
			}
			f.Release()
			ok(t, r.Released(within(t)))
			if !p.arrived(id) {
				t.Error("released before the write has landed")
			}
			ok(t, errors.Join(s.Close(), r.Close()))
			eventually(t, "the room to be forgotten", func() bool {
				return p.prefill.Stats().Rooms == 0 && p.prefill.Stats().Quarantined == 0 && p.decode.Stats().Waiting == 0
			})
		}
	})
}
