package kvreceiver

import (
	"bytes"
	"errors"
	"fmt"
	"testing"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/internal/wire"
	"pgregory.net/rapid"
)

// checkBounds says whether a tracker holds more than a room may make it hold.
func checkBounds(t *tracker) error {
	if len(t.sources) > t.need || len(t.auxFrom) > t.need {
		return fmt.Errorf("%d sources and %d agents, of %d ranks", len(t.sources), len(t.auxFrom), t.need)
	}
	words := func(bits int) int { return (bits + 63) / 64 }
	for _, s := range t.sources {
		if len(s.chunks.words) > words(t.limits.chunks) || len(s.parts) > t.limits.chunks || len(s.state) > len(t.components) {
			return fmt.Errorf("source %d holds %d words of chunks, %d chunks in parts, %d components", s.source, len(s.chunks.words), len(s.parts), len(s.state))
		}
		for _, p := range s.parts {
			if len(p.parts.words) > words(t.limits.parts) || p.arrived >= p.total || p.total > t.limits.parts {
				return fmt.Errorf("source %d, chunk %d: %d of %d parts, %d words", s.source, p.chunk, p.arrived, p.total, len(p.parts.words))
			}
		}
		if s.total > t.limits.chunks || s.total != unknown && s.arrived > s.total {
			return fmt.Errorf("source %d: %d of %d chunks", s.source, s.arrived, s.total)
		}
	}
	return nil
}

// watch gives a tracker whatever comes, true or not, and says what must not happen.
func watch(s roomShape, ms []message) error {
	j, f := s.tracker(), newFacts(s)
	ended := false
	for i, m := range ms {
		v, err := m.give(j)
		if (v == broken) != (err != nil) {
			return fmt.Errorf("message %d, %v: verdict %d with error %v", i, m, v, err)
		}
		if err != nil && !errors.Is(err, nixlkv.ErrMalformed) && !errors.Is(err, nixlkv.ErrLimit) && !errors.Is(err, nixlkv.ErrPeerFailed) {
			return fmt.Errorf("message %d, %v: an error without a name: %w", i, m, err)
		}
		if ended && v != ignored && v != undecided || err != nil && err.Error() == "" {
			return fmt.Errorf("message %d, %v: verdict %d after the end", i, m, v)
		}
		if !ended && v != broken {
			if m.tag != nil || m.success {
				f.learn(m)
			}
			if (v == complete) != f.complete() {
				return fmt.Errorf("message %d, %v: verdict %d, while by status %v, by notifications %v", i, m, v, f.byStatus(), f.byNotifications())
			}
		}
		ended = ended || v == complete || v == broken
		if err := checkBounds(j); err != nil {
			return fmt.Errorf("message %d, %v: %w", i, m, err)
		}
	}
	return nil
}

// Tags that no prefill would send all break the room or change nothing. What a tracker holds
// stays within bounds.
func TestTrackerTakesAnything(t *testing.T) {
	// Mostly numbers that collide, and a few that no room can have.
	number := rapid.OneOf(rapid.IntRange(0, 3), rapid.IntRange(0, 3), rapid.IntRange(0, 300), rapid.SampledFrom([]int{-1, 1<<63 - 1, -1 << 63}))
	any := rapid.Custom(func(t *rapid.T) message {
		if rapid.IntRange(0, 5).Draw(t, "status") == 0 {
			return message{rank: number.Draw(t, "rank"), success: rapid.IntRange(0, 9).Draw(t, "fails") > 0}
		}
		return message{
			agent: rapid.SampledFrom([]string{"a", "b", "c", ""}).Draw(t, "agent"),
			tag: &wire.Tag{
				Kind: wire.TagKind(rapid.IntRange(0, 7).Draw(t, "kind")), Source: number.Draw(t, "source"),
				Chunk: number.Draw(t, "chunk"), Last: rapid.IntRange(0, 3).Draw(t, "last") == 0, Part: number.Draw(t, "part"),
				Parts: number.Draw(t, "parts"), Chunks: number.Draw(t, "chunks"), Component: number.Draw(t, "component"),
			},
		}
	})
	rapid.Check(t, func(t *rapid.T) {
		s := roomShape{need: rapid.IntRange(1, 3).Draw(t, "need"), components: rapid.SampledFrom([][]int{nil, {0}, {0, 2}}).Draw(t, "components")}
		for i := range s.need + 1 {
			s.ranks = append(s.ranks, rankProgress{number: i, dummy: i == s.need})
		}
		if err := watch(s, rapid.SliceOfN(any, 0, 60).Draw(t, "messages")); err != nil {
			t.Fatal(err)
		}
	})
}

// FuzzTracker takes lines: "agent tag" is a notification, "= frame frame …" a control message.
func FuzzTracker(f *testing.F) {
	for _, seed := range []string{
		"a 7_kv_0_1_0\na 7_aux\n",
		"a 7_kv_0_0_0_part_0_2\na 7_kv_0_0_0_part_1_2\na 7_state_0_0\na 7_aux_nokv_0_1\n",
		"a 7_kv_0_1_0\na 7_aux\na 7_state_0_0\na 7_state_0_1\nb 7_kv_0_1_1\nb 7_aux\nb 7_state_1_0\nb 7_state_1_1\n",
		"= KV_STATUS 7 4 0 \n= KV_STATUS 7 4 1 \n= KV_STATUS 7 0 2 out-of-memory\n",
		"= ABORT_ACK 7 0 1\na 7_stg_0_1_0_0_0_1_x_y\n= WATERMARK 1 2\n\n=\n",
		"a 7_kv_99999999999999999999_1_0\na 7_kv_0_2_0\na 7_kv_0_1_0_part_5_2\n",
	} {
		f.Add(byte(2), byte(2), []byte(seed))
		f.Add(byte(1), byte(0), []byte(seed))
	}
	f.Fuzz(func(t *testing.T, need, components byte, data []byte) {
		s := roomShape{need: 1 + int(need%4)}
		for i := range s.need + 1 {
			s.ranks = append(s.ranks, rankProgress{number: i, dummy: i == s.need})
		}
		for c := range int(components % 4) {
			s.components = append(s.components, c)
		}
		var ms []message
		for line := range bytes.Lines(data) {
			if m, ok := fuzzMessage(bytes.TrimSuffix(line, []byte{'\n'})); ok {
				ms = append(ms, m)
			}
		}
		if err := watch(s, ms); err != nil {
			t.Fatal(err)
		}
	})
}

// fuzzMessage reads a line; ok is false for what a decode would not give to a tracker.
func fuzzMessage(line []byte) (m message, ok bool) {
	first, rest, _ := bytes.Cut(line, []byte{' '})
	if string(first) != "=" {
		tag, err := wire.ParseTag(rest)
		return message{agent: string(first), tag: &tag}, err == nil
	}
	msg, err := wire.ParseAtDecode(bytes.Split(rest, []byte{' '}), wire.Limits{})
	if s, is := msg.(*wire.KVStatus); err == nil && is && (s.Status == wire.PollSuccess || s.Status == wire.PollFailed) {
		return message{rank: s.PrefillRank, success: s.Status == wire.PollSuccess}, true
	}
	return message{}, false
}
