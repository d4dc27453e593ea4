package kvreceiver

import (
	"fmt"
	"math/bits"
	"slices"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/internal/wire"
)

// tracker decides when a room is complete, from what its prefill ranks told, in any order and
// any number of times. It is pure: it does no I/O, takes no lock and knows no time.
//
// A prefill tells in one of two ways, and the tracker takes whichever is complete first:
//
//   - KV_STATUS (SGLang 0.5.23, this library): each rank that sends tells Success once, when
//     everything that it had to write has landed.
//   - notifications that come with the writes (0.5.18 to 0.5.22): from every source all chunks,
//     whose number the last one tells, the aux slot, and all components of state that the room
//     has slots for.
//
// Which rank a source is a decode cannot tell in general, so the two are not mixed.
type tracker struct {
	need       int // ranks that send
	components []int
	limits     trackerLimits

	ranks   []rankProgress
	done    int // ranks that told Success
	sources []sourceProgress
	auxFrom []string // agents whose aux slot came
	ended   bool
}

// trackerLimits bound what notifications can make a tracker hold.
type trackerLimits struct {
	chunks int // of a source
	parts  int // of a chunk
}

// rankProgress is a prefill rank that got the room's metadata.
type rankProgress struct {
	number int  // by which KV_STATUS names it
	dummy  bool // sends nothing
	state  nixlkv.RankState
	reason string
	// settles: when the rank tells Failed it writes nothing any more (see quiet).
	settles bool
}

// sourceProgress is what notifications have told of one source.
type sourceProgress struct {
	source  int
	chunks  bitset // those that are complete
	arrived int
	total   int // chunks in all; unknown is -1
	parts   []chunkParts
	state   []int // components that came
}

// chunkParts is a chunk of which some parts came.
type chunkParts struct {
	chunk, total, arrived int
	parts                 bitset
}

// unknown is a number of chunks that was not told yet.
const unknown = -1

// verdict is what a message made of a room.
type verdict uint8

const (
	undecided verdict = iota
	ignored           // the message says nothing new, or is not about this room
	complete          // everything is there; given once
	broken            // it never will be; the error says why
)

// newTracker tracks a room of these ranks, of which need send. components are the numbers of
// the state components that the room has slots for.
func newTracker(ranks []rankProgress, need int, components []int, limits trackerLimits) *tracker {
	return &tracker{need: need, components: components, limits: limits, ranks: ranks}
}

// rank finds a rank by its number.
func (t *tracker) rank(number int) *rankProgress {
	i := slices.IndexFunc(t.ranks, func(r rankProgress) bool { return r.number == number })
	if i < 0 {
		return nil
	}
	return &t.ranks[i]
}

// status takes a KV_STATUS of success or failure.
func (t *tracker) status(number int, success bool, reason string) (verdict, error) {
	r := t.rank(number)
	if r == nil || r.spoke() || success && r.dummy {
		return ignored, nil
	}
	// A room that has ended still has to know which of its ranks write nothing any more.
	ended := t.ended
	if !success {
		r.state, r.reason = nixlkv.RankFailed, reason
		if ended {
			return ignored, nil
		}
		t.ended = true
		return broken, &rankError{number, reason}
	}
	r.state = nixlkv.RankDone
	if ended {
		return ignored, nil
	}
	t.done++
	return t.decide(), nil
}

// rankError is a failure that a prefill rank told. Its text is the rank's own reason.
type rankError struct {
	rank   int
	reason string
}

// noReason stands in for a reason that was not told, as in SGLang
// (CommonKVManager.DEFAULT_PREFILL_FAILURE_REASON).
const noReason = "Failed to get kvcache from prefill instance, it might be dead"

func (e *rankError) Error() string {
	if e.reason == "" {
		return noReason
	}
	return e.reason
}

func (e *rankError) Unwrap() error { return nixlkv.ErrPeerFailed }

// lost notes that the connection to a rank is gone. It says whether the room suffers: whether
// the rank still had something to tell.
func (t *tracker) lost(number int) bool {
	r := t.rank(number)
	if r == nil || r.spoke() {
		return false
	}
	r.state = nixlkv.RankLost
	return !t.ended && !r.dummy
}

// spoke says whether a rank has told its end.
func (r *rankProgress) spoke() bool {
	return r.state == nixlkv.RankDone || r.state == nixlkv.RankFailed
}

// quiet says whether a rank has told that it writes nothing any more. Success always says so.
// Failed does up to SGLang 0.5.21, whose worker tells it once everything has settled, and from
// this library; later ones tell it too when the caller gives a room up (prefill_complete) or a
// rejected post may be on the wire (_NixlPostError in nixl/conn.py), and answer the abort later.
func (r *rankProgress) quiet() bool {
	return r.state == nixlkv.RankDone || r.state == nixlkv.RankFailed && r.settles
}

// notify takes a notification from an agent.
func (t *tracker) notify(agent []byte, tag *wire.Tag) (verdict, error) {
	if t.ended {
		return ignored, nil
	}
	v, err := t.take(agent, tag)
	switch {
	case err != nil:
		t.ended = true
		return broken, err
	case v == ignored:
		return v, nil
	}
	return t.decide(), nil
}

func (t *tracker) take(agent []byte, tag *wire.Tag) (verdict, error) {
	if tag.Kind == wire.TagAux || tag.Kind == wire.TagAuxNoKV {
		fresh, err := t.aux(agent)
		if err != nil || tag.Kind == wire.TagAux {
			return fresh, err
		}
	}
	s, err := t.source(tag.Source)
	if err != nil {
		return broken, err
	}
	switch tag.Kind {
	case wire.TagAuxNoKV:
		return undecided, s.tell(tag.Chunks, t.limits)
	case wire.TagState:
		if tag.Component < 0 || !slices.Contains(t.components, tag.Component) || slices.Contains(s.state, tag.Component) {
			return ignored, nil
		}
		s.state = append(s.state, tag.Component)
		return undecided, nil
	case wire.TagKV, wire.TagKVPart:
		return undecided, s.chunk(tag, t.limits)
	}
	return ignored, nil
}

// aux notes that an agent's copy of the aux slot came. Every source writes the slot, all with
// the same content; SGLang's decode goes by the first one, while another may still be written
// into a slot that has been given to the next request by then. So all are waited for.
func (t *tracker) aux(agent []byte) (verdict, error) {
	if slices.ContainsFunc(t.auxFrom, func(a string) bool { return a == string(agent) }) {
		return ignored, nil
	}
	if len(t.auxFrom) >= t.need {
		return broken, fmt.Errorf("%w: aux slots of more than %d agents: %.64q", nixlkv.ErrMalformed, t.need, agent)
	}
	t.auxFrom = append(t.auxFrom, string(agent))
	return undecided, nil
}

// source finds a source, or makes it.
func (t *tracker) source(number int) (*sourceProgress, error) {
	i := slices.IndexFunc(t.sources, func(s sourceProgress) bool { return s.source == number })
	if i >= 0 {
		return &t.sources[i], nil
	}
	if len(t.sources) >= t.need {
		return nil, fmt.Errorf("%w: notifications of more than %d sources: %d", nixlkv.ErrMalformed, t.need, number)
	}
	t.sources = append(t.sources, sourceProgress{source: number, total: unknown})
	return &t.sources[len(t.sources)-1], nil
}

// tell notes how many chunks a source sends.
func (s *sourceProgress) tell(total int, limits trackerLimits) error {
	switch {
	case total < 0 || total > limits.chunks:
		return fmt.Errorf("%w: source %d tells of %d chunks, at most %d", nixlkv.ErrLimit, s.source, total, limits.chunks)
	case s.total != unknown && s.total != total:
		return fmt.Errorf("%w: source %d tells of %d chunks, and of %d", nixlkv.ErrMalformed, s.source, s.total, total)
	case s.chunks.last() >= total:
		return fmt.Errorf("%w: source %d tells of %d chunks, but chunk %d came", nixlkv.ErrMalformed, s.source, total, s.chunks.last())
	case slices.ContainsFunc(s.parts, func(p chunkParts) bool { return p.chunk >= total }):
		return fmt.Errorf("%w: source %d tells of %d chunks, but a part of a later one came", nixlkv.ErrMalformed, s.source, total)
	}
	s.total = total
	return nil
}

// chunk notes a chunk, or a part of one.
func (s *sourceProgress) chunk(tag *wire.Tag, limits trackerLimits) error {
	switch {
	case tag.Chunk < 0 || tag.Chunk >= limits.chunks:
		return fmt.Errorf("%w: source %d, chunk %d, at most %d", nixlkv.ErrLimit, s.source, tag.Chunk, limits.chunks)
	case s.total != unknown && tag.Chunk >= s.total:
		return fmt.Errorf("%w: source %d, chunk %d of %d", nixlkv.ErrMalformed, s.source, tag.Chunk, s.total)
	}
	if tag.Last {
		if err := s.tell(tag.Chunk+1, limits); err != nil {
			return err
		}
	}
	if tag.Kind == wire.TagKVPart {
		whole, err := s.part(tag, limits)
		if err != nil || !whole {
			return err
		}
	}
	if s.chunks.add(tag.Chunk) {
		s.arrived++
	}
	return nil
}

// maxOpenChunks bounds the chunks of a source of which only parts came: parts of a chunk are
// posted together.
const maxOpenChunks = 1024

// part notes a part of a chunk; whole says that it was the last one missing.
func (s *sourceProgress) part(tag *wire.Tag, limits trackerLimits) (whole bool, err error) {
	switch {
	case tag.Parts < 1 || tag.Parts > limits.parts:
		return false, fmt.Errorf("%w: part count mismatch: source %d, chunk %d in %d parts, at most %d",
			nixlkv.ErrMalformed, s.source, tag.Chunk, tag.Parts, limits.parts)
	case tag.Part < 0 || tag.Part >= tag.Parts:
		return false, fmt.Errorf("%w: part index out of range: source %d, chunk %d, part %d of %d",
			nixlkv.ErrMalformed, s.source, tag.Chunk, tag.Part, tag.Parts)
	case s.chunks.has(tag.Chunk):
		return false, nil // a repeat
	}
	i := slices.IndexFunc(s.parts, func(p chunkParts) bool { return p.chunk == tag.Chunk })
	if i < 0 {
		if len(s.parts) >= maxOpenChunks {
			return false, fmt.Errorf("%w: source %d has %d chunks of which only parts came", nixlkv.ErrLimit, s.source, len(s.parts))
		}
		s.parts = append(s.parts, chunkParts{chunk: tag.Chunk, total: tag.Parts})
		i = len(s.parts) - 1
	}
	p := &s.parts[i]
	if p.total != tag.Parts {
		return false, fmt.Errorf("%w: part count mismatch: source %d, chunk %d in %d parts, and in %d",
			nixlkv.ErrMalformed, s.source, tag.Chunk, p.total, tag.Parts)
	}
	if p.parts.add(tag.Part) {
		p.arrived++
	}
	if p.arrived < p.total {
		return false, nil
	}
	s.parts = slices.Delete(s.parts, i, i+1)
	return true, nil
}

// done says whether everything of a source came.
func (s *sourceProgress) done(components int) bool {
	return s.total != unknown && s.arrived == s.total && len(s.state) == components
}

// decide says whether the room is complete.
func (t *tracker) decide() verdict {
	if t.done < t.need && !t.notified() {
		return undecided
	}
	t.ended = true
	return complete
}

// notified says whether notifications have told everything.
func (t *tracker) notified() bool {
	if len(t.auxFrom) < t.need || len(t.sources) < t.need {
		return false
	}
	return !slices.ContainsFunc(t.sources, func(s sourceProgress) bool { return !s.done(len(t.components)) })
}

// sourcesDone counts the sources from which everything came, for people to read.
func (t *tracker) sourcesDone() int {
	n := 0
	for i := range t.sources {
		if t.sources[i].done(len(t.components)) {
			n++
		}
	}
	return n
}

// bitset is a set of small numbers.
type bitset struct{ words []uint64 }

// add says whether n is new.
func (b *bitset) add(n int) bool {
	if b.has(n) {
		return false
	}
	for n/64 >= len(b.words) {
		b.words = append(b.words, 0)
	}
	b.words[n/64] |= 1 << (n % 64)
	return true
}

func (b *bitset) has(n int) bool {
	return n/64 < len(b.words) && b.words[n/64]&(1<<(n%64)) != 0
}

// last gives the greatest number, -1 of an empty set.
func (b *bitset) last() int {
	if len(b.words) == 0 {
		return -1
	}
	top := len(b.words) - 1 // never 0: it was added for a number
	return top*64 + bits.Len64(b.words[top]) - 1
}
