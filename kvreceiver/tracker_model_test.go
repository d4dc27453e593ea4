package kvreceiver

import (
	"errors"
	"fmt"
	"slices"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/internal/wire"
	"pgregory.net/rapid"
)

// judge is what is tested here: the tracker, or one that is wrong on purpose.
type judge interface {
	status(rank int, success bool, reason string) (verdict, error)
	notify(agent []byte, tag *wire.Tag) (verdict, error)
}

// message is one thing that a prefill tells of a room.
type message struct {
	agent   string // of a notification
	tag     *wire.Tag
	rank    int // of a status
	success bool
}

func (m message) String() string {
	if m.tag != nil {
		return fmt.Sprintf("%s from %s", m.tag.Append(nil), m.agent)
	}
	return fmt.Sprintf("status of rank %d: %v", m.rank, m.success)
}

func (m message) give(j judge) (verdict, error) {
	if m.tag != nil {
		return j.notify([]byte(m.agent), m.tag)
	}
	return j.status(m.rank, m.success, "")
}

// facts is a second, slow opinion of when a room is complete: it keeps everything that was
// told and looks through all of it each time.
type facts struct {
	shape roomShape
	told  map[int]bool // ranks
	aux   map[string]bool
	total map[int]int // by source
	came  map[[2]int]map[int]bool
	parts map[[2]int]int
	state map[[2]int]bool
}

func newFacts(s roomShape) *facts {
	return &facts{s, map[int]bool{}, map[string]bool{}, map[int]int{}, map[[2]int]map[int]bool{}, map[[2]int]int{}, map[[2]int]bool{}}
}

// learn takes a message that the tracker did not refuse.
func (f *facts) learn(m message) {
	if m.tag == nil {
		if i := slices.IndexFunc(f.shape.ranks, func(r rankProgress) bool { return r.number == m.rank }); i >= 0 && !f.shape.ranks[i].dummy {
			f.told[m.rank] = true
		}
		return
	}
	g := m.tag
	switch g.Kind {
	case wire.TagAux, wire.TagAuxNoKV:
		f.aux[m.agent] = true
		if g.Kind == wire.TagAuxNoKV {
			f.total[g.Source] = g.Chunks
		}
	case wire.TagState:
		f.state[[2]int{g.Source, g.Component}] = true
	case wire.TagKV, wire.TagKVPart:
		if g.Last {
			f.total[g.Source] = g.Chunk + 1
		}
		key := [2]int{g.Source, g.Chunk}
		if f.came[key] == nil {
			f.came[key] = map[int]bool{}
		}
		if g.Kind == wire.TagKV {
			f.parts[key] = -1 // all of it
		} else if f.parts[key] != -1 {
			f.parts[key] = g.Parts
			f.came[key][g.Part] = true
		}
	}
}

// byStatus and byNotifications say whether either way has told everything.
func (f *facts) byStatus() bool { return len(f.told) >= f.shape.need }

func (f *facts) byNotifications() bool {
	if len(f.aux) < f.shape.need || len(f.total) < f.shape.need {
		return false
	}
	for source, total := range f.total {
		for chunk := range total {
			key := [2]int{source, chunk}
			n, ok := f.parts[key]
			if !ok || n != -1 && len(f.came[key]) != n {
				return false
			}
		}
		for _, c := range f.shape.components {
			if !f.state[[2]int{source, c}] {
				return false
			}
		}
	}
	return true
}

func (f *facts) complete() bool { return f.byStatus() || f.byNotifications() }

// roomShape is a room as its decode knows it.
type roomShape struct {
	ranks      []rankProgress
	need       int
	components []int
}

var trackerTestLimits = trackerLimits{chunks: 256, parts: 8}

func (s roomShape) tracker() *tracker {
	return newTracker(slices.Clone(s.ranks), s.need, slices.Clone(s.components), trackerTestLimits)
}

// room1 is the number in the tags; the tracker does not look at it.
const room1 = nixlkv.Room(1)

// script is a room with everything that its prefill tells in the two ways.
type script struct {
	roomShape
	notifications []message
	statuses      []message
}

var anyScript = rapid.Custom(func(t *rapid.T) script {
	var s script
	s.need = rapid.IntRange(1, 4).Draw(t, "ranks that send")
	for i := range s.need {
		s.ranks = append(s.ranks, rankProgress{number: 10 + 3*i})
		s.statuses = append(s.statuses, message{rank: 10 + 3*i, success: true})
	}
	for i := range rapid.IntRange(0, 2).Draw(t, "dummies") {
		s.ranks = append(s.ranks, rankProgress{number: 100 + i, dummy: true})
	}
	for c := range 3 {
		if rapid.Bool().Draw(t, "state component") {
			s.components = append(s.components, c)
		}
	}
	for i := range s.need {
		s.notifications = append(s.notifications, sourceMessages(t, fmt.Sprintf("agent-%d", i), 2*i, s.components)...)
	}
	return s
})

// sourceMessages gives all notifications of one source.
func sourceMessages(t *rapid.T, agent string, source int, components []int) []message {
	var ms []message
	say := func(g wire.Tag) {
		g.Room, g.Source = room1, source
		ms = append(ms, message{agent: agent, tag: &g})
	}
	chunks := rapid.IntRange(0, 4).Draw(t, "chunks")
	bare := chunks == 0 || rapid.Bool().Draw(t, "last chunk without KV")
	for c := range chunks {
		last := !bare && c == chunks-1
		parts := rapid.SampledFrom([]int{0, 0, 1, 2, 3}).Draw(t, "parts")
		if parts == 0 {
			say(wire.Tag{Kind: wire.TagKV, Chunk: c, Last: last})
		}
		for p := range parts {
			say(wire.Tag{Kind: wire.TagKVPart, Chunk: c, Last: last, Part: p, Parts: parts})
		}
	}
	if bare {
		say(wire.Tag{Kind: wire.TagAuxNoKV, Chunks: chunks})
	} else {
		ms = append(ms, message{agent: agent, tag: &wire.Tag{Kind: wire.TagAux, Room: room1}})
	}
	for _, c := range components {
		say(wire.Tag{Kind: wire.TagState, Component: c})
	}
	return ms
}

// noise is what may come besides and says nothing: of dummies, of ranks and components that
// are not the room's.
func (s script) noise() []message {
	ms := []message{
		{rank: 999, success: true}, {rank: 999}, {rank: 100, success: true},
		{agent: "agent-0", tag: &wire.Tag{Kind: wire.TagState, Room: room1, Component: 7}},
		{agent: "agent-0", tag: &wire.Tag{Kind: wire.TagStaging, Room: room1}},
	}
	return ms
}

// delivery draws an order in which messages come, some of them more than once.
func delivery(t *rapid.T, ms []message) []message {
	for range rapid.IntRange(0, 6).Draw(t, "repeats") {
		ms = append(ms, rapid.SampledFrom(ms).Draw(t, "repeated"))
	}
	return rapid.Permutation(ms).Draw(t, "order")
}

// follow gives messages to a judge, and compares each verdict with what the facts say. It
// returns what is wrong, and whether the room became complete.
func follow(j judge, s roomShape, ms []message) (completed bool, err error) {
	f := newFacts(s)
	for i, m := range ms {
		v, err := m.give(j)
		f.learn(m)
		switch {
		case err != nil || v == broken:
			return completed, fmt.Errorf("message %d, %v: refused: %v, %w", i, m, v, errors.Join(err))
		case completed && v != ignored:
			return completed, fmt.Errorf("message %d, %v: %v after the end", i, m, v)
		case !completed && (v == complete) != f.complete():
			return completed, fmt.Errorf("message %d, %v: verdict %d, while by status %v, by notifications %v", i, m, v, f.byStatus(), f.byNotifications())
		}
		completed = completed || v == complete
	}
	return completed, nil
}
