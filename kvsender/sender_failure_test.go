package kvsender

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/internal/wire"
	"github.com/nixlkv/nixlkv/nixl"
)

func TestFailuresReachBothSides(t *testing.T) {
	eachDialect(t, func(t *testing.T, e *nixl.Engine, frames int) {
		p := newPair(t, e, frames)
		p.d.register(p.d.registration())
		id := nixlkv.Room(100)
		for _, tc := range []struct {
			name  string
			pages []int32
			aux   int
			plan  Plan
			send  []int32
			want  error
			text  string
		}{
			{"too few destination pages", []int32{1}, 0, Plan{Pages: 2, Aux: Aux(0)}, []int32{1, 2}, nixlkv.ErrPageCount, "insufficient destination pages"},
			{"destination page out of range", []int32{kitPages}, 0, Plan{Pages: 1, Aux: Aux(0)}, []int32{1}, nixlkv.ErrPageRange, "destination page 64"},
			{"destination page twice", []int32{5, 5}, 0, Plan{Pages: 2, Aux: Aux(0)}, []int32{1, 2}, nixlkv.ErrPageRange, "twice"},
			{"source page out of range", []int32{1}, 0, Plan{Pages: 1, Aux: Aux(0)}, []int32{kitPages}, nixlkv.ErrPageRange, "source page 64"},
			{"negative source page", []int32{1}, 0, Plan{Pages: 1, Aux: Aux(0)}, []int32{-1}, nixlkv.ErrPageRange, "source page -1"},
			{"no aux slot", []int32{1}, 0, Plan{Pages: 1}, nil, nixlkv.ErrAuxIndex, "Missing aux index"},
			{"aux slot out of range", []int32{1}, 0, Plan{Pages: 1, Aux: Aux(kitSlots)}, nil, nixlkv.ErrAuxIndex, "out of range"},
			{"aux slot past the decode's memory", []int32{1}, 1 << 20, Plan{Pages: 1, Aux: Aux(0)}, []int32{1}, nil, "aux"},
			{"more pages than planned", []int32{1, 2}, 0, Plan{Pages: 1, Aux: Aux(0)}, []int32{1, 2}, nixlkv.ErrPageCount, "Begin said 1"},
			{"fewer pages than planned", []int32{1, 2}, 0, Plan{Pages: 2, Aux: Aux(0)}, []int32{1}, nixlkv.ErrPageCount, "Begin said 2"},
		} {
			t.Run(tc.name, func(t *testing.T) {
				p.d.t = t
				id++
				s := open(t, p.m, id)
				p.d.tell(id, tc.pages, tc.aux)
				_, err := s.WaitBootstrapped(within(t))
				ok(t, err)
				if err := s.Begin(tc.plan); err == nil {
					err = s.Finish(tc.send, nil)
					if err != nil && !errors.As(err, new(*KVTransferError)) {
						t.Errorf("Finish: %v", err)
					}
				}
				wantFailure(t, s, p.d, tc.want, tc.text)
			})
		}
		// The next good room works.
		p.d.t = t
		p.d.clear()
		p.d.tags = nil
		s := open(t, p.m, 7)
		p.d.tell(7, []int32{3}, 1)
		ok(t, s.Begin(Plan{Pages: 1, Aux: Aux(2)}))
		ok(t, s.Finish([]int32{4}, nil))
		ok(t, s.Wait(within(t)))
		p.d.compare(p.src, []int32{4}, []int32{3}, 2, 1)
		ok(t, s.Close())
	})
}

func TestDecodeAborts(t *testing.T) {
	eachDialect(t, func(t *testing.T, e *nixl.Engine, frames int) {
		p := newPair(t, e, frames)
		p.d.register(p.d.registration())
		abort := func(id nixlkv.Room, gen uint64, has bool) {
			p.d.send(new(wire.Encoder).Abort(&wire.Abort{Room: id, From: p.d.endpoint(), Generation: gen, HasGeneration: has}))
		}
		// Unknown to the prefill: acknowledged at once.
		abort(50, 3, true)
		if a := p.d.ack(50); !a.HasGeneration || a.Generation != 3 || a.PrefillRank != 0 {
			t.Errorf("ack %+v", a)
		}
		// Without a generation the acknowledgement has none.
		abort(51, 0, false)
		if a := p.d.ack(51); a.HasGeneration {
			t.Errorf("ack %+v", a)
		}
		// An open room that waits.
		s := open(t, p.m, 52)
		p.d.tell(52, []int32{1}, 0)
		_, err := s.WaitBootstrapped(within(t))
		ok(t, err)
		abort(52, 9, true)
		wantFailure(t, s, nil, nixlkv.ErrAborted, "Aborted by decode-side abort notification.")
		p.d.ack(52)
		// A room announced and not yet opened.
		p.d.tell(53, []int32{1}, 0)
		abort(53, 1, true)
		p.d.ack(53)
		wantFailure(t, open(t, p.m, 53), nil, nixlkv.ErrAborted, "Aborted by decode-side abort notification.")
		// The same, and the number is announced anew before anybody opened it.
		p.d.tell(54, []int32{1}, 0)
		abort(54, 1, true)
		p.d.ack(54)
		p.d.tell(54, []int32{9}, 0)
		abort(55, 1, true)
		p.d.ack(55) // messages are taken in order: the metadata has been
		s = open(t, p.m, 54)
		_, err = s.WaitBootstrapped(within(t))
		ok(t, err)
		ok(t, s.Close())
		// The number is used again straight after, and again after success.
		for range 3 {
			s = open(t, p.m, 52)
			p.d.tell(52, []int32{6}, 1)
			ok(t, s.Begin(Plan{Pages: 1, Aux: Aux(1)}))
			ok(t, s.Finish([]int32{2}, nil))
			ok(t, s.Wait(within(t)))
			ok(t, s.Close())
		}
		p.d.compare(p.src, []int32{2}, []int32{6}, 1, 1)
		abort(52, 11, true)
		p.d.ack(52)
	})
}

func TestPrefillGivesUp(t *testing.T) {
	eachDialect(t, func(t *testing.T, e *nixl.Engine, frames int) {
		p := newPair(t, e, frames)
		p.d.register(p.d.registration())
		s := open(t, p.m, 60)
		p.d.tell(60, []int32{1}, 0)
		_, err := s.WaitBootstrapped(within(t))
		ok(t, err)
		s.Abort("")
		wantFailure(t, s, p.d, nixlkv.ErrAborted, "Aborted by AbortReq.")
		s = open(t, p.m, 63)
		p.d.tell(63, []int32{1}, 0)
		_, err = s.WaitBootstrapped(within(t))
		ok(t, err)
		s.FailedElsewhere([]nixlkv.RankReport{{Rank: 1, State: nixlkv.RankFailed, Reason: "out of memory"}})
		wantFailure(t, s, p.d, nixlkv.ErrAnotherRank, "NIXL KVSender Exception")
	})
}

func TestBootstrapTimeout(t *testing.T) {
	eachDialect(t, func(t *testing.T, e *nixl.Engine, frames int) {
		p := newPair(t, e, frames, WithBootstrapTimeout(200*time.Millisecond))
		p.d.register(p.d.registration())
		s := open(t, p.m, 61) // one decode of two tells
		p.d.tell(61, []int32{1}, 0, func(m *wire.Metadata) { m.Destinations = 2 })
		wantFailure(t, s, p.d, nixlkv.ErrTimeout, "timed out after 0.2s in KVPoll.Bootstrapping")
		p.d.tell(62, []int32{1}, 0) // nobody opens it
		if st := p.d.status(62); !strings.Contains(st.Reason, "never opened") {
			t.Errorf("told %+v", st)
		}
	})
}

func TestRefusedDecodes(t *testing.T) {
	eachDialect(t, func(t *testing.T, e *nixl.Engine, frames int) {
		p := newPair(t, e, frames)
		fails := func(id nixlkv.Room, want error, text string) {
			t.Helper()
			s := open(t, p.m, id)
			p.d.tell(id, []int32{1}, 0)
			ok(t, s.Begin(Plan{Pages: 1, Aux: Aux(0)}))
			ok(t, s.Finish([]int32{1}, nil))
			wantFailure(t, s, p.d, want, text)
		}
		g := p.d.registration()
		g.KVPtrs, g.ItemLens, g.Kinds = g.KVPtrs[:2], g.ItemLens[:2], g.Kinds[:2]
		p.d.register(g)
		fails(71, nixlkv.ErrRegions, "decode registered fewer KV regions (2) than prefill (4)")
		g = p.d.registration()
		g.AgentMetadata = []byte("no metadata of any engine")
		p.d.register(g)
		fails(72, nil, "metadata")
		// Garbage of all kinds changes nothing.
		for _, frames := range [][][]byte{{}, {{}}, {[]byte("hello")}, {[]byte("NixlMsgGuard")}, {[]byte("NixlMsgGuard"), []byte("None")},
			{[]byte("NixlMsgGuard"), []byte("12"), []byte("127.0.0.1")}, {[]byte("ABORT")}, {[]byte("ABORT"), []byte("x")}, {[]byte("WATERMARK"), []byte("1")}} {
			if len(frames) > 0 {
				p.d.sendRaw(frames)
			}
		}
		p.d.register(p.d.registration())
		s := open(t, p.m, 73)
		p.d.tell(73, []int32{1}, 0)
		ok(t, s.Begin(Plan{Pages: 1, Aux: Aux(0)}))
		ok(t, s.Finish([]int32{1}, nil))
		ok(t, s.Wait(within(t)))
		p.d.compare(p.src, []int32{1}, []int32{1}, 0, 0)
		if st := p.m.Stats(); st.Refused < 6 {
			t.Errorf("refused %d messages", st.Refused)
		}
		ok(t, s.Close())
	})
}

func TestCloseFailsOpenRooms(t *testing.T) {
	eachDialect(t, func(t *testing.T, e *nixl.Engine, frames int) {
		p := newPair(t, e, frames)
		p.d.register(p.d.registration())
		s := open(t, p.m, 90)
		p.d.tell(90, []int32{1}, 0)
		_, err := s.WaitBootstrapped(within(t))
		ok(t, err)
		ok(t, p.m.Close())
		wantFailure(t, s, p.d, nixlkv.ErrClosed, "shutting down")
		if _, err := p.m.Open(91); !errors.Is(err, nixlkv.ErrClosed) {
			t.Errorf("open after close: %v", err)
		}
	})
}
