package wire

import (
	"reflect"
	"testing"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/internal/reasons"
	"pgregory.net/rapid"
)

var (
	anyHost  = rapid.StringMatching(`[0-9A-Za-z.:%_-]{1,40}`)
	anyAgent = rapid.StringMatching(`[ -~]{1,60}`)
	anyRoom  = rapid.Map(rapid.Uint64Range(0, uint64(nixlkv.MaxRoom)), func(n uint64) nixlkv.Room { return nixlkv.Room(n) })
	anyCount = rapid.IntRange(0, maxInt)
	anyPlace = rapid.Custom(func(t *rapid.T) Endpoint {
		return Endpoint{anyHost.Draw(t, "ip"), rapid.IntRange(1, maxPort).Draw(t, "port")}
	})
	anyIndex = rapid.Int32Min(0)
)

// sliceOf draws a slice of n, nil if n is 0.
func sliceOf[T any](t *rapid.T, elem *rapid.Generator[T], n int, label string) []T {
	return orNil(rapid.SliceOfN(elem, n, n).Draw(t, label))
}

// listsLike draws lists of the shape of ptrs, or none; where a list may be empty, some are.
func listsLike[T any](t *rapid.T, elem *rapid.Generator[T], ptrs [][]uint64, mayBeEmpty bool, label string) [][]T {
	if rapid.Bool().Draw(t, "no "+label) {
		return nil
	}
	var out [][]T
	for _, p := range ptrs {
		n := len(p)
		if mayBeEmpty && rapid.Bool().Draw(t, "empty "+label) {
			n = 0
		}
		out = append(out, sliceOf(t, elem, n, label))
	}
	return out
}

var anyRegistration = rapid.Custom(func(t *rapid.T) *Registration {
	n := rapid.IntRange(0, 6).Draw(t, "regions")
	g := &Registration{
		From: anyPlace.Draw(t, "from"), Agent: anyAgent.Draw(t, "agent"),
		AgentMetadata: rapid.SliceOfN(rapid.Byte(), 1, 50).Draw(t, "agent metadata"),
		KVPtrs:        sliceOf(t, rapid.Uint64Range(0, 1<<64-1<<62), n, "kv"),
		ItemLens:      sliceOf(t, rapid.Uint64Range(1, 1<<31), n, "item lens"),
		Kinds:         sliceOf(t, rapid.SampledFrom([]Kind{VRAM, DRAM}), n, "kinds"),
		Slots:         rapid.Uint64Range(0, 1<<31).Draw(t, "slots"),
		AuxPtrs:       orNil(rapid.SliceOfN(rapid.Uint64(), 0, 4).Draw(t, "aux")),
		GPU:           anyCount.Draw(t, "gpu"), TPSize: rapid.IntRange(1, maxInt).Draw(t, "tp"),
		EngineRank: anyCount.Draw(t, "rank"), DCPSize: rapid.IntRange(1, maxInt).Draw(t, "dcp"),
		StagingBase: rapid.Uint64().Draw(t, "staging base"), StagingSize: rapid.Uint64().Draw(t, "staging size"),
		Frames: regFrames,
	}
	g.DCPRank = rapid.IntRange(0, g.DCPSize-1).Draw(t, "dcp rank")
	if rapid.Bool().Draw(t, "has layer ids") {
		g.LayerIDs = sliceOf(t, rapid.Uint32(), n, "layer ids")
	}
	for range rapid.IntRange(0, 3).Draw(t, "components") {
		g.StatePtrs = append(g.StatePtrs, orNil(rapid.SliceOfN(rapid.Uint64(), 0, 4).Draw(t, "state")))
	}
	g.StateItemLens = listsLike(t, rapid.Uint32(), g.StatePtrs, false, "state item lens")
	g.StateDims = listsLike(t, rapid.Uint32(), g.StatePtrs, true, "state dims")
	g.StateLayerIDs = listsLike(t, rapid.Uint32(), g.StatePtrs, true, "state layer ids")
	g.StateDataLens = listsLike(t, rapid.Uint64(), g.StatePtrs, false, "state data lens")
	return g
})

var anyMetadata = rapid.Custom(func(t *rapid.T) *Metadata {
	m := &Metadata{
		Room: anyRoom.Draw(t, "room"), From: anyPlace.Draw(t, "from"), Agent: anyAgent.Draw(t, "agent"),
		AuxIndex: anyCount.Draw(t, "aux"), Destinations: rapid.IntRange(1, maxInt).Draw(t, "destinations"),
		Prefix: anyCount.Draw(t, "prefix"), Dummy: rapid.Bool().Draw(t, "dummy"),
	}
	if m.Dummy {
		return m
	}
	m.KVIndices = orNil(rapid.SliceOfN(anyIndex, 0, 30).Draw(t, "kv"))
	for range rapid.IntRange(0, 3).Draw(t, "components") {
		m.StateIndices = append(m.StateIndices, orNil(rapid.SliceOfN(anyIndex, 0, 5).Draw(t, "state")))
	}
	return m
})

var anyTag = rapid.Custom(func(t *rapid.T) Tag {
	g := Tag{Kind: TagKind(rapid.IntRange(int(TagKV), int(TagStaging)).Draw(t, "kind")), Room: anyRoom.Draw(t, "room")}
	count := func(label string) int { return anyCount.Draw(t, label) }
	switch g.Kind {
	case TagKV, TagKVPart, TagStaging:
		g.Chunk, g.Last, g.Source = count("chunk"), rapid.Bool().Draw(t, "last"), count("source")
	case TagAuxNoKV:
		g.Source, g.Chunks = count("source"), count("chunks")
	case TagState:
		g.Source, g.Component = count("source"), count("component")
	}
	switch g.Kind {
	case TagKVPart:
		g.Parts = rapid.IntRange(1, maxInt).Draw(t, "parts")
		g.Part = rapid.IntRange(0, g.Parts-1).Draw(t, "part")
	case TagStaging:
		g.ChunkIndex, g.PageStart, g.Pages = count("index"), count("start"), count("pages")
		g.Agent = []byte(anyAgent.Draw(t, "agent"))
	}
	return g
})

// same encodes, parses and compares.
func same(t *rapid.T, parse func([][]byte, Limits) (Message, error), frames [][]byte, err error, want Message) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	got, err := parse(frames, Limits{})
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(got, want) {
		t.Fatalf("%+v, want %+v", got, want)
	}
}

func TestPropertyRegistration(t *testing.T) {
	var e Encoder
	rapid.Check(t, func(t *rapid.T) {
		g := anyRegistration.Draw(t, "registration")
		frames, err := e.Registration(g)
		same(t, ParseAtPrefill, frames, err, g)
	})
}

func TestPropertyMetadata(t *testing.T) {
	var e Encoder
	rapid.Check(t, func(t *rapid.T) {
		m := anyMetadata.Draw(t, "metadata")
		frames, err := e.Metadata(m)
		same(t, ParseAtPrefill, frames, err, m)
	})
}

func TestPropertySmallMessages(t *testing.T) {
	var e Encoder
	rapid.Check(t, func(t *rapid.T) {
		room, place, rank := anyRoom.Draw(t, "room"), anyPlace.Draw(t, "place"), anyCount.Draw(t, "rank")
		generation, has := rapid.Uint64().Draw(t, "generation"), rapid.Bool().Draw(t, "has generation")
		if !has {
			generation = 0
		}
		a := &Abort{Room: room, Generation: generation, HasGeneration: has}
		if has || rapid.Bool().Draw(t, "has address") {
			a.From = place
		}
		frames, err := e.Abort(a)
		same(t, ParseAtPrefill, frames, err, a)

		b := &Bootstrap{Room: room, From: place}
		frames, err = e.Bootstrap(b)
		same(t, ParseAtPrefill, frames, err, b)

		k := &AbortAck{Room: room, PrefillRank: rank, Generation: generation, HasGeneration: has}
		frames, err = e.AbortAck(k)
		same(t, ParseAtDecode, frames, err, k)

		s := &KVStatus{
			Room: room, PrefillRank: rank, Status: KVPoll(rapid.IntRange(0, 4).Draw(t, "status")),
			Reason: rapid.StringN(0, 200, reasons.Sent).Filter(func(s string) bool { return reasons.Bound(s, reasons.Sent) == s }).Draw(t, "reason"),
		}
		frames, err = e.KVStatus(s)
		same(t, ParseAtDecode, frames, err, s)
	})
}

func TestPropertyTags(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		want := anyTag.Draw(t, "tag")
		got, err := ParseTag(want.Append(nil))
		if err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(got, want) {
			t.Fatalf("%+v, want %+v", got, want)
		}
	})
}

// A message with any one of its frames replaced is refused or gives a message that can be
// encoded; nothing else.
func TestPropertySpoiledFrame(t *testing.T) {
	var e Encoder
	rapid.Check(t, func(t *rapid.T) {
		frames, err := e.Registration(anyRegistration.Draw(t, "registration"))
		if rapid.Bool().Draw(t, "room") {
			frames, err = e.Metadata(anyMetadata.Draw(t, "metadata"))
		}
		if err != nil {
			t.Fatal(err)
		}
		frames = clone(frames)
		frames[rapid.IntRange(0, len(frames)-1).Draw(t, "frame")] = rapid.SliceOfN(rapid.Byte(), 0, 40).Draw(t, "bytes")
		if m, err := ParseAtPrefill(frames, Limits{}); err == nil {
			if _, err := encode(&Encoder{}, m); err != nil {
				t.Fatalf("%+v: %v", m, err)
			}
		}
	})
}
