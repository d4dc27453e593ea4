package kvreceiver

import (
	"errors"
	"strings"
	"testing"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/internal/wire"
)

// tagOf reads a notification as it is on the wire.
func tagOf(t *testing.T, text string) *wire.Tag {
	t.Helper()
	g, err := wire.ParseTag([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return &g
}

// say is a step of a table: a notification "agent: tag", or a status "rank R done" or
// "rank R failed".
func say(t *testing.T, j judge, step string) (verdict, error) {
	t.Helper()
	if agent, tag, ok := strings.Cut(step, ": "); ok {
		return j.notify([]byte(agent), tagOf(t, tag))
	}
	var rank int
	f := strings.Fields(step)
	for _, c := range f[1] {
		rank = rank*10 + int(c-'0')
	}
	return j.status(rank, f[2] == "done", strings.Join(f[3:], " "))
}

// two is a room of two ranks that send and a dummy.
func two(components ...int) roomShape {
	return roomShape{ranks: []rankProgress{{number: 0}, {number: 1}, {number: 2, dummy: true}}, need: 2, components: components}
}

func one(components ...int) roomShape {
	return roomShape{ranks: []rankProgress{{number: 0}}, need: 1, components: components}
}

func TestTrackerSequences(t *testing.T) {
	for _, tc := range []struct {
		name  string
		shape roomShape
		steps []string // all but the last are undecided or ignored
		last  verdict
	}{
		{"one chunk", one(), []string{"a: 1_kv_0_1_0", "a: 1_aux"}, complete},
		{"aux first", one(), []string{"a: 1_aux", "a: 1_kv_0_1_0"}, complete},
		{"last chunk first", one(), []string{"a: 1_aux", "a: 1_kv_2_1_0", "a: 1_kv_0_0_0", "a: 1_kv_1_0_0"}, complete},
		{"a chunk twice is one", one(), []string{"a: 1_aux", "a: 1_kv_1_1_0", "a: 1_kv_1_1_0"}, undecided},
		{"an aux twice is one", two(), []string{"a: 1_kv_0_1_0", "b: 1_kv_0_1_1", "a: 1_aux", "a: 1_aux"}, ignored},
		{"parts in any order", one(), []string{"a: 1_aux", "a: 1_kv_0_1_0_part_2_3", "a: 1_kv_0_1_0_part_0_3", "a: 1_kv_0_1_0_part_1_3"}, complete},
		{"a part twice is one", one(), []string{"a: 1_aux", "a: 1_kv_0_1_0_part_0_2", "a: 1_kv_0_1_0_part_0_2"}, undecided},
		{"parts of two chunks do not add up", one(), []string{"a: 1_aux", "a: 1_kv_0_0_0_part_0_2", "a: 1_kv_1_1_0_part_1_2"}, undecided},
		{"no KV at all", one(), []string{"a: 1_aux_nokv_0_0"}, complete},
		{"no KV in the last chunk", one(), []string{"a: 1_aux_nokv_0_2", "a: 1_kv_1_0_0", "a: 1_kv_0_0_0"}, complete},
		{"no KV, chunks missing", one(), []string{"a: 1_aux_nokv_0_2", "a: 1_kv_1_0_0"}, undecided},
		{"state is waited for", one(0, 2), []string{"a: 1_kv_0_1_0", "a: 1_aux", "a: 1_state_0_2", "a: 1_state_0_2"}, ignored},
		{"state of every component", one(0, 2), []string{"a: 1_kv_0_1_0", "a: 1_aux", "a: 1_state_0_2", "a: 1_state_0_0"}, complete},
		{"state that is not the room's", one(1), []string{"a: 1_kv_0_1_0", "a: 1_aux", "a: 1_state_0_0"}, ignored},
		{"state comes first", one(0), []string{"a: 1_state_0_0", "a: 1_aux", "a: 1_kv_0_1_0"}, complete},
		{"one source of two", two(), []string{"a: 1_kv_0_1_0", "a: 1_aux", "b: 1_aux"}, undecided},
		{"one aux of two", two(), []string{"a: 1_kv_0_1_0", "a: 1_aux", "b: 1_kv_0_1_1"}, undecided},
		{"state of one source of two", two(0), []string{"a: 1_kv_0_1_0", "a: 1_aux", "b: 1_kv_0_1_1", "b: 1_aux", "a: 1_state_0_0"}, undecided},
		{"sources of other chunk counts", two(), []string{"a: 1_kv_0_0_0", "b: 1_aux_nokv_5_0", "a: 1_kv_1_1_0", "a: 1_aux"}, complete},
		{"all ranks tell success", two(), []string{"rank 1 done", "rank 0 done"}, complete},
		{"one rank twice", two(), []string{"rank 1 done", "rank 1 done"}, ignored},
		{"a dummy's success", two(), []string{"rank 1 done", "rank 2 done"}, ignored},
		{"a stranger's success", two(), []string{"rank 1 done", "rank 9 done"}, ignored},
		{"a stranger's failure", two(), []string{"rank 1 done", "rank 9 failed"}, ignored},
		{"the ways are not added up", two(), []string{"a: 1_kv_0_1_0", "a: 1_aux", "rank 1 done"}, undecided},
		{"a failure", two(), []string{"rank 1 done", "rank 0 failed out of memory"}, broken},
		{"a dummy's failure", two(), []string{"rank 2 failed"}, broken},
		{"failure after success", two(), []string{"rank 1 done", "rank 1 failed"}, ignored},
		{"two totals", one(), []string{"a: 1_kv_1_1_0", "a: 1_kv_3_1_0"}, broken},
		{"two totals, nokv", one(), []string{"a: 1_aux_nokv_0_3", "b: 1_aux_nokv_0_2"}, broken},
		{"a total below what came", one(), []string{"a: 1_kv_4_0_0", "a: 1_kv_3_1_0"}, broken},
		{"a total below a part that came", one(), []string{"a: 1_kv_4_0_0_part_0_2", "a: 1_kv_3_1_0"}, broken},
		{"a chunk past the total", one(), []string{"a: 1_kv_0_1_0", "a: 1_kv_1_0_0"}, broken},
		{"part counts differ", one(), []string{"a: 1_kv_0_1_0_part_0_2", "a: 1_kv_0_1_0_part_1_3"}, broken},
		{"too many parts", one(), []string{"a: 1_kv_0_1_0_part_0_9"}, broken},
		{"too many chunks", one(), []string{"a: 1_kv_256_0_0"}, broken},
		{"too many chunks told", one(), []string{"a: 1_aux_nokv_0_257"}, broken},
		{"too many sources", one(), []string{"a: 1_kv_0_0_0", "a: 1_kv_0_0_1"}, broken},
		{"too many sources, by state", one(0), []string{"a: 1_kv_0_0_0", "b: 1_state_7_0"}, broken},
		{"too many agents", one(), []string{"a: 1_aux", "b: 1_aux"}, broken},
	} {
		t.Run(tc.name, func(t *testing.T) {
			j := tc.shape.tracker()
			for i, step := range tc.steps {
				v, err := say(t, j, step)
				switch last := i == len(tc.steps)-1; {
				case last && v != tc.last:
					t.Errorf("%s: verdict %d, want %d", step, v, tc.last)
				case !last && v != undecided && v != ignored:
					t.Errorf("%s: verdict %d", step, v)
				case (err != nil) != (v == broken):
					t.Errorf("%s: verdict %d with error %v", step, v, err)
				}
			}
			if ended := tc.last == complete || tc.last == broken; j.ended != ended {
				t.Errorf("ended %v", j.ended)
			}
		})
	}
}

// The texts that operators of SGLang search for.
func TestTrackerReasons(t *testing.T) {
	for _, tc := range []struct {
		steps []string
		want  error
		text  string
	}{
		{[]string{"a: 1_kv_0_1_0_part_0_2", "a: 1_kv_0_1_0_part_1_3"}, nixlkv.ErrMalformed, "part count mismatch"},
		{[]string{"a: 1_kv_0_1_0_part_0_9"}, nixlkv.ErrMalformed, "part count mismatch"},
		{[]string{"a: 1_kv_256_0_0"}, nixlkv.ErrLimit, "source 0, chunk 256"},
		{[]string{"rank 0 failed"}, nixlkv.ErrPeerFailed, "Failed to get kvcache from prefill instance, it might be dead"},
		{[]string{"rank 0 failed CUDA error"}, nixlkv.ErrPeerFailed, "CUDA error"},
	} {
		j := one().tracker()
		var err error
		for _, s := range tc.steps {
			_, err = say(t, j, s)
		}
		if !errors.Is(err, tc.want) || !strings.Contains(err.Error(), tc.text) {
			t.Errorf("%q: got %v, want %v with %q", tc.steps, err, tc.want, tc.text)
		}
	}
	if _, err := one().tracker().notify([]byte("a"), &wire.Tag{Kind: wire.TagKVPart, Part: 3, Parts: 3}); err == nil || !strings.Contains(err.Error(), "part index out of range") {
		t.Errorf("got %v", err)
	}
}

// A room that failed for a reason of its own goes on noting what its ranks tell: one that has
// told its end writes nothing any more.
func TestTrackerNotesRanksAfterTheEnd(t *testing.T) {
	j := two().tracker()
	if v, _ := j.status(0, false, ""); v != broken {
		t.Fatalf("verdict %d", v)
	}
	if v, err := j.status(1, true, ""); v == complete || v == broken || err != nil {
		t.Errorf("verdict %d, %v", v, err)
	}
	if r := j.rank(1); !r.spoke() {
		t.Errorf("rank 1 told success after the end of the room, and is %v", r.state)
	}
	if suffers := j.lost(2); suffers || j.rank(2).state != nixlkv.RankLost {
		t.Errorf("dummy lost: suffers %v, %v", suffers, j.rank(2).state)
	}
	j = two().tracker()
	j.status(0, false, "")
	if v, err := j.status(1, false, "later"); v == broken || err != nil {
		t.Errorf("verdict %d, %v: a room breaks once", v, err)
	}
	if r := j.rank(1); r.state != nixlkv.RankFailed || r.reason != "later" {
		t.Errorf("rank 1 is %v, %q", r.state, r.reason)
	}
}

func TestTrackerLoss(t *testing.T) {
	j := two().tracker()
	j.status(0, true, "")
	for _, tc := range []struct {
		rank    int
		suffers bool
		state   nixlkv.RankState
	}{{0, false, nixlkv.RankDone}, {1, true, nixlkv.RankLost}, {2, false, nixlkv.RankLost}} {
		if got := j.lost(tc.rank); got != tc.suffers || j.rank(tc.rank).state != tc.state {
			t.Errorf("rank %d lost: suffers %v, state %v", tc.rank, got, j.rank(tc.rank).state)
		}
	}
	if j.lost(9) || j.rank(9) != nil {
		t.Error("a rank that is not the room's was lost")
	}
	// What a lost rank told last may still come.
	if v, err := j.status(1, true, ""); v != complete || err != nil {
		t.Errorf("verdict %d, %v", v, err)
	}
}

func TestTrackerCountsSources(t *testing.T) {
	j := two().tracker()
	for i, step := range []string{"a: 1_kv_0_1_0", "b: 1_kv_1_1_1", "a: 1_aux", "b: 1_kv_0_0_1"} {
		if _, err := say(t, j, step); err != nil {
			t.Fatal(err)
		}
		if got, want := j.sourcesDone(), []int{1, 1, 1, 2}[i]; got != want {
			t.Errorf("after %s: %d sources done, want %d", step, got, want)
		}
	}
}

func TestBitset(t *testing.T) {
	var b bitset
	if b.last() != -1 || b.has(0) || b.has(1000) {
		t.Errorf("the empty set: last %d", b.last())
	}
	for _, tc := range []struct {
		n, last int
		fresh   bool
	}{{63, 63, true}, {0, 63, true}, {63, 63, false}, {64, 64, true}, {200, 200, true}, {199, 200, true}, {200, 200, false}} {
		if fresh := b.add(tc.n); fresh != tc.fresh || b.last() != tc.last || !b.has(tc.n) {
			t.Errorf("add %d: fresh %v, last %d", tc.n, fresh, b.last())
		}
	}
	if b.has(1) || b.has(198) || len(b.words) != 4 {
		t.Errorf("set %b", b.words)
	}
}
