package kvsender

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/internal/sentinels"
	"github.com/nixlkv/nixlkv/internal/wire"
	"github.com/nixlkv/nixlkv/nixl"
	"github.com/nixlkv/nixlkv/registry"
)

func within(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func ok(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func open(t *testing.T, m *Manager, id nixlkv.Room) *Sender {
	t.Helper()
	s, err := m.Open(id)
	ok(t, err)
	return s
}

// pair is a prefill and a decode over one engine.
type pairUp struct {
	m   *Manager
	src *kitMemory
	d   *decode
}

func newPair(t *testing.T, e *nixl.Engine, frames int, opts ...Option) *pairUp {
	t.Helper()
	return newPairOf(t, e, frames, func(*registry.Layout) {}, opts...)
}

// newPairOf is newPair with a prefill of another layout over the same memory.
func newPairOf(t *testing.T, e *nixl.Engine, frames int, edit func(*registry.Layout), opts ...Option) *pairUp {
	t.Helper()
	p := &pairUp{src: newKitMemory(t, 4)}
	p.src.fill()
	l := p.src.layout()
	edit(l)
	var err error
	p.m, err = NewManager(t.Context(), l, append([]Option{WithEngine(e)}, opts...)...)
	ok(t, err)
	p.d = newDecode(t, e, p.m, newKitMemory(t, 4), frames)
	t.Cleanup(func() {
		closeManager(t, p.m)
		p.d.close()
		p.src.free(t)
		p.d.mem.free(t)
	})
	return p
}

// dialects are the two ways in which success is told.
var dialects = []struct {
	name   string
	frames int
}{{"notifications", 24}, {"status", 25}}

func eachDialect(t *testing.T, f func(t *testing.T, e *nixl.Engine, frames int)) {
	eachEngine(t, func(t *testing.T, e *nixl.Engine) {
		for _, d := range dialects {
			t.Run(d.name, func(t *testing.T) { f(t, e, d.frames) })
		}
	})
}

func TestRoom(t *testing.T) {
	eachDialect(t, func(t *testing.T, e *nixl.Engine, frames int) {
		p := newPair(t, e, frames)
		p.d.register(p.d.registration())
		for round, early := range []bool{false, true} {
			id := nixlkv.Room(1<<40 + round)
			src, dst := []int32{1, 2, 3, 8, 9}, []int32{3, 4, 9, 10, 11}
			var s *Sender
			if early {
				p.d.tell(id, dst, 2)
				s = open(t, p.m, id)
			} else {
				s = open(t, p.m, id)
				p.d.tell(id, dst, 2)
			}
			prefix, err := s.WaitBootstrapped(within(t))
			ok(t, err)
			if prefix != 0 {
				t.Errorf("prefix %d", prefix)
			}
			ok(t, s.Begin(Plan{Pages: 5, Aux: Aux(5)}))
			ok(t, s.Send(src[:3]))
			ok(t, s.Finish(src[3:], nil))
			ok(t, s.Wait(within(t)))
			ok(t, s.Wait(within(t)))
			if st := s.Status(); st != nixlkv.Success {
				t.Errorf("status %v", st)
			}
			if frames == 25 {
				if st := p.d.status(id); st.Status != wire.PollSuccess || st.PrefillRank != 0 || st.Reason != "" {
					t.Errorf("status %+v", st)
				}
			} else {
				p.d.until("three notifications", func() bool { return len(p.d.tags) == 3 })
				checkTags(t, p.d.tags, id, 2)
				p.d.tags = nil
			}
			p.d.compare(p.src, src, dst, 5, 2)
			p.d.clear()
			m := s.Metrics()
			if m.Bytes != 5*4*kitPage+kitAux || m.Chunks != 2 || m.Pages != 20 || m.Transfers != 3 || m.Ended.Before(m.Posted) || m.Posted.Before(m.Bootstrapped) {
				t.Errorf("metrics %+v", m)
			}
			ok(t, s.Close())
			ok(t, s.Close())
			if err := s.Send(nil); !errors.Is(err, nixlkv.ErrClosed) {
				t.Errorf("send after close: %v", err)
			}
		}
		if frames == 24 && len(p.d.statuses) != 0 || frames == 25 && len(p.d.tags) != 0 {
			t.Errorf("told in the other dialect: %+v, %+v", p.d.statuses, p.d.tags)
		}
		if s := p.m.Stats(); s.Rooms != 0 || s.Succeeded != 2 || s.Failed != 0 || s.Refused != 0 {
			t.Errorf("stats %+v", s)
		}
	})
}

// checkTags checks the notifications of a room of so many chunks, all with pages.
func checkTags(t *testing.T, tags []wire.Tag, id nixlkv.Room, chunks int) {
	t.Helper()
	seen := map[int]bool{}
	aux := 0
	for _, g := range tags {
		if g.Room != id {
			t.Errorf("tag of room %d: %+v", g.Room, g)
		}
		switch g.Kind {
		case wire.TagKV:
			if seen[g.Chunk] || g.Last != (g.Chunk == chunks-1) || g.Source != 0 {
				t.Errorf("tag %+v", g)
			}
			seen[g.Chunk] = true
		case wire.TagAux:
			aux++
		default:
			t.Errorf("tag %+v", g)
		}
	}
	if len(seen) != chunks || aux != 1 {
		t.Errorf("%d chunks and %d aux, want %d and 1", len(seen), aux, chunks)
	}
}

func TestFullPrefixHit(t *testing.T) {
	eachDialect(t, func(t *testing.T, e *nixl.Engine, frames int) {
		p := newPair(t, e, frames)
		p.d.register(p.d.registration())
		s := open(t, p.m, 9)
		p.d.tell(9, nil, 3, func(m *wire.Metadata) { m.Prefix = 16 })
		prefix, err := s.WaitBootstrapped(within(t))
		ok(t, err)
		if prefix != 16 {
			t.Errorf("prefix %d, want 16", prefix)
		}
		ok(t, s.Begin(Plan{Aux: Aux(4)}))
		ok(t, s.Finish(nil, nil))
		ok(t, s.Wait(within(t)))
		if frames == 25 {
			p.d.status(9)
		} else {
			p.d.until("the notification", func() bool { return len(p.d.tags) == 1 })
			if g := p.d.tags[0]; g.Kind != wire.TagAuxNoKV || g.Chunks != 0 {
				t.Errorf("tag %+v", g)
			}
		}
		p.d.compare(p.src, nil, nil, 4, 3)
		ok(t, s.Close())
	})
}

func TestManyRoomsSideBySide(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *nixl.Engine) {
		p := newPair(t, e, 25)
		p.d.register(p.d.registration())
		const n = 60
		senders := make([]*Sender, n)
		var src, dst []int32
		for i := range n {
			senders[i] = open(t, p.m, nixlkv.Room(i+1))
			src, dst = append(src, int32(n-1-i)), append(dst, int32(i))
			ok(t, senders[i].Begin(Plan{Pages: 1, Aux: Aux(7)}))
			ok(t, senders[i].Finish([]int32{int32(n - 1 - i)}, nil)) // before its decode has told anything
		}
		for i := n - 1; i >= 0; i-- {
			p.d.tell(nixlkv.Room(i+1), []int32{int32(i)}, 0)
		}
		for _, s := range senders {
			ok(t, s.Wait(within(t)))
		}
		events, complete := p.m.Poll(nil)
		if !complete || len(events) != n {
			t.Errorf("%d events, complete %v", len(events), complete)
		}
		for _, ev := range events {
			if ev.Status != nixlkv.Success || ev.Err != nil || ev.Sender.Room() != ev.Room {
				t.Errorf("event %+v", ev)
			}
		}
		for _, s := range senders {
			p.d.status(s.Room())
			ok(t, s.Close())
		}
		p.d.compare(p.src, src, dst, 7, 0)
	})
}

// wantFailure checks how a room failed on this side, and what its decode was told.
func wantFailure(t *testing.T, s *Sender, d *decode, want error, text string) {
	t.Helper()
	err := s.Wait(within(t))
	var te *KVTransferError
	if !errors.As(err, &te) || te.Room != s.Room() || want != nil && !errors.Is(err, want) || !strings.Contains(err.Error(), text) {
		t.Errorf("got %v, want %v with %q", err, want, text)
	}
	if err := sentinels.Repeated(err); err != nil {
		t.Error(err)
	}
	if s.Status() != nixlkv.Failed || s.Err() == nil {
		t.Errorf("status %v, error %v", s.Status(), s.Err())
	}
	if d != nil {
		if st := d.status(s.Room()); st.Status != wire.PollFailed || !strings.Contains(st.Reason, text) {
			t.Errorf("the decode was told %+v, want a failure with %q", st, text)
		}
	}
	ok(t, s.Close())
}

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

func TestDummyDecode(t *testing.T) {
	eachDialect(t, func(t *testing.T, e *nixl.Engine, frames int) {
		p := newPair(t, e, frames)
		p.d.register(p.d.registration())
		s := open(t, p.m, 80)
		p.d.tell(80, nil, 0, func(m *wire.Metadata) { m.Dummy = true })
		_, err := s.WaitBootstrapped(within(t))
		ok(t, err)
		ok(t, s.Begin(Plan{Pages: 2, Aux: Aux(0)}))
		ok(t, s.Finish([]int32{1, 2}, nil))
		ok(t, s.Wait(within(t)))
		ok(t, s.Close())
		p.d.compare(p.src, nil, nil, -1, 0)
		if len(p.d.statuses) != 0 || len(p.d.tags) != 0 {
			t.Errorf("a dummy was told %+v, %+v", p.d.statuses, p.d.tags)
		}
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

func TestOpenTwice(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *nixl.Engine) {
		p := newPair(t, e, 25)
		s := open(t, p.m, 1)
		if _, err := p.m.Open(1); !errors.Is(err, nixlkv.ErrRoomInUse) {
			t.Errorf("got %v", err)
		}
		if _, err := p.m.Open(nixlkv.MaxRoom + 1); !errors.Is(err, nixlkv.ErrMalformed) {
			t.Errorf("got %v", err)
		}
		ok(t, s.Close())
		ok(t, open(t, p.m, 1).Close())
	})
}

func TestFromEnv(t *testing.T) {
	for _, tc := range []struct {
		env  map[string]string
		want error
		n    int
	}{
		{nil, nil, 0},
		{map[string]string{EnvBootstrapTimeout: "12", EnvQueueSize: "2", EnvAllCPRanks: "yes", EnvForceQuery: "1", EnvStagingBuffer: "0"}, nil, 4},
		{map[string]string{EnvNIXLBackend: "UCX", EnvNIXLParams: `{"num_threads":"3"}`}, nil, 1},
		{map[string]string{EnvNIXLParams: `{"num_threads":3}`}, nixlkv.ErrMalformed, 0},
		{map[string]string{EnvNIXLParams: `[]`}, nixlkv.ErrMalformed, 0},
		{map[string]string{EnvBootstrapTimeout: "soon"}, nixlkv.ErrMalformed, 0},
		{map[string]string{EnvAllCPRanks: "maybe"}, nixlkv.ErrMalformed, 0},
		{map[string]string{EnvStagingBuffer: "true"}, nil, 1},
		{map[string]string{EnvStagingBuffer: "perhaps"}, nixlkv.ErrMalformed, 0},
	} {
		opts, err := fromEnv(func(k string) (string, bool) { v, ok := tc.env[k]; return v, ok })
		if !errors.Is(err, tc.want) || len(opts) != tc.n {
			t.Errorf("%v: %d options, %v", tc.env, len(opts), err)
		}
	}
	opts, err := fromEnv(func(k string) (string, bool) { return "7", k == EnvBootstrapTimeout })
	ok(t, err)
	c := defaultConfig()
	for _, o := range opts {
		o(&c)
	}
	if c.bootstrapTimeout != 7*time.Second || !slices.Equal([]int{c.workers}, []int{DefaultWorkers}) {
		t.Errorf("config %+v", c)
	}
}
