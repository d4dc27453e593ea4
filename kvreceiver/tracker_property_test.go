package kvreceiver

import (
	"errors"
	"math"
	"slices"
	"testing"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/internal/wire"
	"pgregory.net/rapid"
)

// ways are the messages of the ways in which a room can be told of.
func (s script) ways() map[string][]message {
	return map[string][]message{
		"notifications": s.notifications,
		"status":        s.statuses,
		"both":          slices.Concat(s.notifications, s.statuses),
	}
}

// In whatever order and however often messages come, the room is complete exactly once, with
// the last message that was missing of one of the two ways.
func TestTrackerCompletesOnce(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := anyScript.Draw(t, "room")
		way := rapid.SampledFrom([]string{"notifications", "status", "both"}).Draw(t, "way")
		ms := slices.Concat(s.ways()[way], s.noise()[:rapid.IntRange(0, 5).Draw(t, "noise")])
		j := s.tracker()
		switch completed, err := follow(j, s.roomShape, delivery(t, ms)); {
		case err != nil:
			t.Fatal(err)
		case !completed:
			t.Fatalf("not complete: %+v", j)
		}
	})
}

// With a message of each way missing the room is never complete, whatever else comes.
func TestTrackerWaitsForEveryMessage(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := anyScript.Draw(t, "room")
		drop := func(ms []message, what string) []message {
			i := rapid.IntRange(0, len(ms)-1).Draw(t, what)
			return slices.Concat(ms[:i], ms[i+1:])
		}
		ms := slices.Concat(drop(s.notifications, "missing notification"), drop(s.statuses, "missing status"), s.noise())
		if completed, err := follow(s.tracker(), s.roomShape, delivery(t, ms)); err != nil || completed {
			t.Fatalf("complete %v, %v", completed, err)
		}
	})
}

// mutants are trackers that are wrong in one way each, for the check of the check.
var mutants = map[string]func(script) judge{
	"needs a rank less": func(s script) judge {
		s.need--
		return s.tracker()
	},
	"ignores parts": func(s script) judge {
		return filter{s.tracker(), func(m message) []message {
			if m.tag != nil && m.tag.Kind == wire.TagKVPart {
				g := *m.tag
				g.Kind = wire.TagKV
				m.tag = &g
			}
			return []message{m}
		}}
	},
	"ignores state": func(s script) judge {
		s.components = nil
		return s.tracker()
	},
	"takes state of one source for all": func(s script) judge {
		return filter{s.tracker(), func(m message) []message {
			ms := []message{m}
			if m.tag != nil && m.tag.Kind == wire.TagState {
				for i := range s.need {
					g := *m.tag
					g.Source = 2 * i
					ms = append(ms, message{agent: m.agent, tag: &g})
				}
			}
			return ms
		}}
	},
	"takes one component for all": func(s script) judge {
		s.components = s.components[:min(1, len(s.components))]
		return s.tracker()
	},
	"ignores aux": func(s script) judge {
		return filter{s.tracker(), func(m message) []message { return append(s.allAux(), m) }}
	},
	"takes one aux for all": func(s script) judge {
		return filter{s.tracker(), func(m message) []message {
			if m.tag != nil && (m.tag.Kind == wire.TagAux || m.tag.Kind == wire.TagAuxNoKV) {
				return append(s.allAux(), m)
			}
			return []message{m}
		}}
	},
	"takes the last chunk for all": func(s script) judge {
		return filter{s.tracker(), func(m message) []message {
			ms := []message{m}
			if m.tag != nil && m.tag.Last && m.tag.Kind == wire.TagKV {
				for c := range m.tag.Chunk {
					ms = append(ms, message{agent: m.agent, tag: &wire.Tag{Kind: wire.TagKV, Room: room1, Source: m.tag.Source, Chunk: c}})
				}
			}
			return ms
		}}
	},
	"counts dummies": func(s script) judge {
		for i := range s.ranks {
			s.ranks[i].dummy = false
		}
		return s.tracker()
	},
	"counts a status twice": func(s script) judge { return &doubleCounter{tracker: s.tracker()} },
	"adds the two ways up": func(s script) judge {
		return filter{s.tracker(), func(m message) []message {
			ms := []message{m}
			if m.tag == nil && m.success {
				ms = append(ms, s.notifications[0])
			}
			return ms
		}}
	},
}

func (s script) allAux() []message {
	var ms []message
	for _, m := range s.notifications {
		if m.tag.Kind == wire.TagAux || m.tag.Kind == wire.TagAuxNoKV {
			ms = append(ms, message{agent: m.agent, tag: &wire.Tag{Kind: wire.TagAux, Room: room1}})
		}
	}
	return ms
}

// filter gives a tracker other messages than those that came.
type filter struct {
	*tracker
	change func(message) []message
}

func (f filter) pass(m message) (v verdict, err error) {
	for _, m := range f.change(m) {
		if got, e := m.give(f.tracker); got == complete || e != nil {
			v, err = got, e
		} else if v != complete {
			v = got
		}
	}
	return v, err
}

func (f filter) status(rank int, success bool, _ string) (verdict, error) {
	return f.pass(message{rank: rank, success: success})
}

func (f filter) notify(agent []byte, tag *wire.Tag) (verdict, error) {
	return f.pass(message{agent: string(agent), tag: tag})
}

// doubleCounter takes the same rank's success as another one's.
type doubleCounter struct {
	*tracker
	told int
}

func (d *doubleCounter) status(rank int, success bool, reason string) (verdict, error) {
	v, err := d.tracker.status(rank, success, reason)
	if r := d.rank(rank); r != nil && !r.dummy && success && err == nil {
		if d.told++; d.told == d.need {
			d.ended = true
			return complete, nil
		}
	}
	return v, err
}

// The properties above catch a tracker that completes a room early, in every way that is
// listed.
func TestTrackerPropertiesCatchMutants(t *testing.T) {
	caught := func(name string, seed int) bool {
		s := anyScript.Example(seed)
		order := rapid.Custom(func(t *rapid.T) []message {
			return delivery(t, slices.Concat(s.notifications, s.statuses, s.noise()))
		}).Example(seed)
		if completed, err := follow(s.tracker(), s.roomShape, order); err != nil || !completed {
			t.Fatalf("the tracker itself: complete %v, %v", completed, err)
		}
		// One way at a time as well: the other may come first and hide the mistake.
		for _, keep := range []func(message) bool{
			func(message) bool { return true },
			func(m message) bool { return m.tag != nil },
			func(m message) bool { return m.tag == nil },
		} {
			var some []message
			for _, m := range order {
				if keep(m) {
					some = append(some, m)
				}
			}
			mutant := mutants[name](script{roomShape{slices.Clone(s.ranks), s.need, s.components}, s.notifications, s.statuses})
			if _, err := follow(mutant, s.roomShape, some); err != nil {
				return true
			}
		}
		return false
	}
	for name := range mutants {
		t.Run(name, func(t *testing.T) {
			for seed := range 300 {
				if caught(name, seed) {
					return
				}
			}
			t.Error("no room in 300 shows that this tracker is wrong")
		})
	}
}

// What contradicts itself breaks the room, with a reason, and nothing afterwards makes it
// complete.
func TestTrackerContradictionsBreak(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := anyScript.Draw(t, "room")
		ms := delivery(t, s.notifications)
		ms = ms[:rapid.IntRange(0, len(ms)-1).Draw(t, "before")]
		j := s.tracker()
		f := newFacts(s.roomShape)
		for _, m := range ms {
			v, err := m.give(j)
			if f.learn(m); err != nil {
				t.Fatal(err)
			}
			if v == complete {
				return
			}
		}
		bad := rapid.SampledFrom(contradictions(s, f)).Draw(t, "contradiction")
		v, err := bad.give(j)
		if v != broken || !errors.Is(err, nixlkv.ErrMalformed) && !errors.Is(err, nixlkv.ErrLimit) {
			t.Fatalf("%v: verdict %d, %v", bad, v, err)
		}
		for _, m := range slices.Concat(s.notifications, s.statuses) {
			if v, err := m.give(j); v != ignored || err != nil {
				t.Fatalf("%v after the room broke: verdict %d, %v", m, v, err)
			}
		}
	})
}

// contradictions lists messages that cannot be true, as far as it is known what came.
func contradictions(s script, f *facts) []message {
	kv := func(source int, g wire.Tag) message {
		g.Source, g.Room = source, room1
		if g.Kind == 0 {
			g.Kind = wire.TagKV
		}
		return message{agent: "agent-0", tag: &g}
	}
	ms := []message{
		kv(0, wire.Tag{Chunk: trackerTestLimits.chunks}),
		kv(0, wire.Tag{Chunk: math.MaxInt, Last: true}),
		kv(0, wire.Tag{Chunk: -1}),
		kv(0, wire.Tag{Kind: wire.TagAuxNoKV, Chunks: trackerTestLimits.chunks + 1}),
		kv(0, wire.Tag{Kind: wire.TagAuxNoKV, Chunks: -1}),
		kv(0, wire.Tag{Kind: wire.TagKVPart, Parts: 0}),
		kv(0, wire.Tag{Kind: wire.TagKVPart, Parts: trackerTestLimits.parts + 1}),
		kv(0, wire.Tag{Kind: wire.TagKVPart, Part: 2, Parts: 2}),
		kv(0, wire.Tag{Kind: wire.TagKVPart, Part: -1, Parts: 2}),
	}
	if total, ok := f.total[0]; ok {
		ms = append(ms,
			kv(0, wire.Tag{Chunk: total}),
			kv(0, wire.Tag{Chunk: total, Last: true}),
			kv(0, wire.Tag{Kind: wire.TagAuxNoKV, Chunks: total + 1}))
	}
	for key, n := range f.parts {
		if key[0] != 0 {
			continue
		}
		ms = append(ms, kv(0, wire.Tag{Kind: wire.TagAuxNoKV, Chunks: key[1]})) // a chunk came that is not among them
		if n > 1 && len(f.came[key]) < n {
			ms = append(ms, kv(0, wire.Tag{Kind: wire.TagKVPart, Chunk: key[1], Parts: n + 1}))
		}
	}
	if sources := seenSources(f); len(sources) == s.need {
		ms = append(ms, kv(1, wire.Tag{Chunk: 0}), kv(1, wire.Tag{Kind: wire.TagState}))
	}
	if len(f.aux) == s.need {
		ms = append(ms, message{agent: "stranger", tag: &wire.Tag{Kind: wire.TagAux, Room: room1}})
	}
	return ms
}

func seenSources(f *facts) map[int]bool {
	seen := map[int]bool{}
	for source := range f.total {
		seen[source] = true
	}
	for key := range f.parts {
		seen[key[0]] = true
	}
	for key := range f.state {
		seen[key[0]] = true
	}
	return seen
}

// A rank that fails breaks the room, once; what it told before does not count any more.
func TestTrackerFailureBreaks(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := anyScript.Draw(t, "room")
		ms := rapid.Permutation(s.statuses).Draw(t, "order")
		ms = ms[:rapid.IntRange(0, len(ms)-1).Draw(t, "before")]
		j := s.tracker()
		if _, err := follow(j, s.roomShape, ms); err != nil {
			t.Fatal(err)
		}
		var left []int
		for _, r := range j.ranks {
			if r.state == nixlkv.RankSilent {
				left = append(left, r.number)
			}
		}
		bad := rapid.SampledFrom(left).Draw(t, "rank that fails")
		v, err := j.status(bad, false, "out of memory")
		var re *rankError
		if v != broken || !errors.As(err, &re) || re.rank != bad || err.Error() != "out of memory" || !errors.Is(err, nixlkv.ErrPeerFailed) {
			t.Fatalf("verdict %d, %v", v, err)
		}
		for _, m := range slices.Concat(s.statuses, s.notifications) {
			if v, _ := m.give(j); v == complete || v == broken {
				t.Fatalf("%v after the room broke: verdict %d", m, v)
			}
		}
		if !j.rank(bad).spoke() || j.rank(bad).state != nixlkv.RankFailed || j.rank(bad).reason != "out of memory" {
			t.Fatalf("rank %+v", j.rank(bad))
		}
	})
}
