package kvreceiver

import (
	"net/http"
	"testing"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/bootstrap"
	"github.com/nixlkv/nixlkv/internal/wire"
	"github.com/nixlkv/nixlkv/nixl"
	"github.com/nixlkv/nixlkv/registry"
)

// Rooms of several prefill ranks: each that sends has its share, a dummy has none, and the
// room is complete when all that send have told.
func TestRanks(t *testing.T) {
	heads := func(n int) func(*site) {
		return func(p *site) {
			for i, r := range p.ranks {
				r.lo, r.hi = i%n*kitPage/n, (i%n+1)*kitPage/n
			}
		}
	}
	layers := func(p *site) {
		for i, r := range p.ranks {
			r.first, r.last = i*kitRegions/len(p.ranks), (i+1)*kitRegions/len(p.ranks)
		}
	}
	tp := func(n, rank int) func(*registry.Layout) {
		return func(l *registry.Layout) {
			l.Ranks, l.KVHeads, l.TotalKVHeads = registry.Ranks{TP: n, TPRank: rank % n, EngineRank: rank}, 4/n, 4
		}
	}
	for _, tc := range []struct {
		name         string
		prefill      shape
		decode       func(*registry.Layout)
		share        func(*site)
		opts         []Option
		real, dummy  []int // indices of the prefill's ranks
		destinations int
	}{
		{"P 2, D 1", shape{tp: 2}, tp(1, 0), heads(2), nil, []int{0, 1}, nil, 1},
		{"P 4, D 2, second rank", shape{tp: 4}, tp(2, 1), heads(2), nil, []int{2, 3}, nil, 1},
		{"P 1, D 2, second rank", shape{tp: 1}, tp(2, 1), func(*site) {}, nil, []int{0}, nil, 2},
		{"P 2, D 2, engine rank 3", shape{tp: 2}, tp(2, 3), func(*site) {}, nil, []int{1}, nil, 1},
		{"MLA, P 2, D 1", shape{tp: 2}, func(l *registry.Layout) { l.MLA = true }, func(*site) {}, nil, []int{0}, []int{1}, 1},
		{"hybrid MLA, P 2, D 1", shape{tp: 2}, func(l *registry.Layout) { l.HybridMLA = true }, heads(2), nil, []int{0, 1}, nil, 1},
		{"PP 2", shape{pp: 2}, func(*registry.Layout) {}, layers, nil, []int{0, 1}, nil, 1},
		{"PP 2, stage by stage", shape{pp: 2}, func(l *registry.Layout) { l.Ranks = registry.Ranks{PP: 2, PPRank: 1} }, func(*site) {}, nil, []int{1}, nil, 1},
		{"CP 2", shape{cp: 2}, func(*registry.Layout) {}, func(*site) {}, nil, []int{0}, nil, 1},
		{"all of CP 2", shape{cp: 2}, func(*registry.Layout) {}, layers, []Option{WithAllCPRanks()}, []int{0, 1}, nil, 1},
	} {
		t.Run(tc.name, func(t *testing.T) {
			eachDialect(t, func(t *testing.T, d dialect) {
				q := newPairOf(t, openEngine(t, nixl.Embedded), tc.prefill, tc.decode, nil, tc.opts...)
				tc.share(q.p)
				src, dst := []int32{5, 6, 1}, []int32{9, 8, 0}
				r := q.publish(77, Destination{Pages: dst, Aux: Aux(1)})
				for i, k := range tc.real {
					p := q.p.ranks[k]
					m := p.metadata(77)
					if m.Dummy || m.Destinations != tc.destinations {
						t.Errorf("metadata %+v", m)
					}
					if ended(r) {
						t.Fatalf("ended before rank %d of %d sent", i, len(tc.real))
					}
					p.serve(m, d, work{src: src, slot: 4, chunks: []int{1, 2}})
				}
				for _, k := range tc.dummy {
					if m := q.p.ranks[k].metadata(77); !m.Dummy || len(m.KVIndices) != 0 {
						t.Errorf("metadata of a dummy: %+v", m)
					}
				}
				ok(t, r.Wait(within(t)))
				ok(t, r.Released(within(t)))
				q.mem.compare(q.prefills, placed{src: src, dst: dst, srcSlot: 4, dstSlot: 1})
				ok(t, r.Close())
				for i, p := range q.p.ranks {
					if n := has(p, func(wire.Message) bool { return true }); n != 0 && len(tc.dummy) == 0 {
						t.Errorf("rank %d got %d messages more", i, n)
					}
				}
				if s := q.m.Stats(); s.Ranks != len(tc.real)+len(tc.dummy) || s.Unknown != 0 {
					t.Errorf("stats %+v", s)
				}
			})
		})
	}
}

// A room of two ranks is not complete with what one of them tells, however often, nor with
// what ranks tell that are not the room's.
func TestRanksAreToldApart(t *testing.T) {
	q := newPair(t, openEngine(t, nixl.Embedded), shape{tp: 2})
	a, b := q.p.ranks[0], q.p.ranks[1]
	r := q.publish(5, Destination{Pages: []int32{1}, Aux: Aux(0)})
	m := a.metadata(5)
	a.serve(m, byStatus, work{src: []int32{1}})
	a.tell(m.From, 5, wire.PollSuccess, "")
	for _, status := range []wire.KVPoll{wire.PollSuccess, wire.PollFailed, wire.PollWaitingForInput} {
		a.tellAs(99, m.From, 5, status, "not mine")
	}
	for _, status := range []wire.KVPoll{wire.PollBootstrapping, wire.PollWaitingForInput, wire.PollTransferring} {
		b.tell(m.From, 5, status, "")
	}
	eventually(t, "eight statuses", func() bool { return q.m.Stats().Statuses == 8 })
	if ended(r) || r.Status() != nixlkv.WaitingForInput {
		t.Fatalf("%v, %v", r.Status(), r.Err())
	}
	if s := q.m.Stats(); s.Unknown+s.Ignored != 7 {
		t.Errorf("stats %+v", s)
	}
	b.serve(b.metadata(5), byStatus, work{src: []int32{1}})
	ok(t, r.Wait(within(t)))
	ok(t, r.Close())
}

// The request's DP rank decides which ranks are asked.
func TestDPRanks(t *testing.T) {
	q := newPair(t, openEngine(t, nixl.Embedded), shape{dp: 3})
	for _, tc := range []struct {
		id   nixlkv.Room
		opts []RoomOption
		want int
	}{{4, nil, 1}, {5, nil, 2}, {6, nil, 0}, {7, []RoomOption{WithDPRank(2)}, 2}, {8, []RoomOption{WithDPRank(bootstrap.NoDPRank)}, 2}} {
		r := q.open(tc.id, tc.opts...)
		ok(t, r.Connect(within(t)))
		ok(t, r.Publish(Destination{Pages: []int32{3}, Aux: Aux(0)}))
		p := q.p.ranks[tc.want]
		p.serve(p.metadata(tc.id), byStatus, work{src: []int32{3}})
		ok(t, r.Wait(within(t)))
		ok(t, r.Close())
	}
	r := q.open(9, WithDPRank(3))
	checkError(t, r, r.Connect(within(t)), nixlkv.ErrNoSuchRank, "DP rank 3")
	ok(t, r.Close())
}

// Where only the prefill knows a room's DP rank it is asked until it does.
func TestDPRankQuery(t *testing.T) {
	ask := func(i *bootstrap.RankInfo) { i.LoadBalanceMethod = "round_robin" }
	for name, tc := range map[string]struct {
		shape shape
		opts  []Option
	}{
		"not following": {shape{dp: 2, info: ask}, nil},
		"forced":        {shape{dp: 2}, []Option{WithForceQuery()}},
	} {
		t.Run(name, func(t *testing.T) {
			q := newPair(t, openEngine(t, nixl.Embedded), tc.shape, tc.opts...)
			r := q.open(8)
			came := make(chan error, 1)
			go func() { came <- r.Connect(within(t)) }()
			q.p.untilAsked("POST /query_dp_ranks", 2)
			select {
			case err := <-came:
				t.Fatalf("connected without knowing the rank: %v", err)
			default:
			}
			c, err := bootstrap.NewClient(q.p.addr)
			ok(t, err)
			defer c.Close()
			ok(t, c.RegisterDPRank(within(t), 8, 1))
			ok(t, <-came)
			ok(t, r.Publish(Destination{Pages: []int32{3}, Aux: Aux(0)}))
			p := q.p.ranks[1]
			p.serve(p.metadata(8), byStatus, work{src: []int32{3}})
			ok(t, r.Wait(within(t)))
			ok(t, r.Close())
			// A rank that the prefill does not have.
			q.p.refusing("/query_dp_ranks", http.StatusOK, `{"9": 7}`)
			r = q.open(9)
			checkError(t, r, r.Connect(within(t)), nixlkv.ErrNoSuchRank, "DP rank 7")
			ok(t, r.Close())
			// Nobody ever tells.
			q.p.refusing("", 0, "")
			r = q.open(10)
			ctx, cancel := contextOf(2000)
			defer cancel()
			checkError(t, r, r.Connect(ctx), nixlkv.ErrNotReady, "room 10")
			ok(t, r.Close())
		})
	}
}
