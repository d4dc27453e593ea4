package wire

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"testing"

	"github.com/nixlkv/nixlkv"
)

// golden is what testdata/golden.py wrote for one release: messages and tags made by
// SGLang's own senders, with what SGLang's own parsers read from them.
type golden struct {
	Release  string
	Messages []struct {
		Kind, Name string
		Frames     [][]byte
		Parsed     json.RawMessage
	}
	Tags []struct {
		Name string
		Tags []struct {
			Tag    string
			Parsed goldenTag
		}
	}
}

type goldenRegistration struct {
	Endpoint      string     `json:"endpoint"`
	Port          int        `json:"dst_port"`
	Agent         string     `json:"agent_name"`
	AgentMetadata []byte     `json:"agent_metadata"`
	KVPtrs        []uint64   `json:"dst_kv_ptrs"`
	Kinds         []string   `json:"dst_kv_mem_kinds"`
	AuxPtrs       []uint64   `json:"dst_aux_ptrs"`
	StatePtrs     [][]uint64 `json:"dst_state_data_ptrs"`
	GPU           int        `json:"gpu_id"`
	TPSize        int        `json:"decode_tp_size"`
	EngineRank    int        `json:"decode_tp_rank"`
	ItemLen       uint64     `json:"dst_kv_item_len"`
	ItemLens      []uint64   `json:"dst_kv_item_lens"`
	LayerIDs      []uint32   `json:"dst_kv_layer_ids"`
	DCPSize       int        `json:"dst_dcp_size"`
	DCPRank       int        `json:"dst_dcp_rank"`
	Slots         uint64     `json:"dst_num_slots"`
	StateItemLens [][]uint32 `json:"dst_state_item_lens"`
	StateDims     [][]uint32 `json:"dst_state_dim_per_tensor"`
	StateLayerIDs [][]uint32 `json:"dst_state_layer_ids"`
	StateDataLens [][]uint64 `json:"dst_state_data_lens"`
	StagingBase   uint64     `json:"staging_base_ptr"`
	StagingSize   uint64     `json:"staging_total_size"`
}

// goldenSmall holds what the other messages have.
type goldenSmall struct {
	Room         nixlkv.Room `json:"room"`
	Endpoint     string      `json:"endpoint"`
	Port         int         `json:"dst_port"`
	Agent        string      `json:"agent_name"`
	KVIndices    []int32     `json:"dst_kv_indices"`
	AuxIndex     int         `json:"dst_aux_index"`
	Destinations int         `json:"required_dst_info_num"`
	StateIndices [][]int32   `json:"dst_state_indices"`
	Prefix       int         `json:"decode_prefix_len"`
	Dummy        bool        `json:"is_dummy"`
	Generation   *uint64     `json:"generation"`
	Rank         int         `json:"prefill_rank"`
	Status       KVPoll      `json:"status"`
	Reason       string      `json:"reason"`
	To           string      `json:"to"`
}

// goldenTag is what a SGLang decode tracked for one tag.
type goldenTag struct {
	Room       nixlkv.Room
	Chunk      *int
	Last       bool
	Source     int
	Part       *int
	Parts      int
	Aux        bool
	Expected   *int
	State      bool
	ChunkIndex *int `json:"chunk_idx"`
	PageStart  int  `json:"page_start"`
	Pages      int
	Agent      string
}

func orNil[T any](s []T) []T {
	if len(s) == 0 {
		return nil
	}
	return s
}

func listsOrNil[T any](s [][]T) [][]T {
	for i := range s {
		s[i] = orNil(s[i])
	}
	return orNil(s)
}

func loadGolden(t *testing.T) []golden {
	t.Helper()
	files, err := filepath.Glob("testdata/golden/*.json")
	if err != nil || len(files) != 6 {
		t.Fatalf("golden files: %d, %v", len(files), err)
	}
	out := make([]golden, len(files))
	for i, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(b, &out[i]); err != nil {
			t.Fatalf("%s: %v", f, err)
		}
	}
	return out
}

func TestGoldenMessages(t *testing.T) {
	for _, g := range loadGolden(t) {
		seen := map[string]int{}
		for _, m := range g.Messages {
			seen[m.Kind]++
			t.Run(g.Release+"/"+m.Kind+"/"+m.Name, func(t *testing.T) {
				if m.Kind == "registration" {
					checkGoldenRegistration(t, g.Release, m.Frames, m.Parsed)
					return
				}
				var want goldenSmall
				if err := json.Unmarshal(m.Parsed, &want); err != nil {
					t.Fatal(err)
				}
				checkGoldenSmall(t, m.Kind, m.Frames, want)
			})
		}
		if seen["registration"] != 4 || seen["room"] != 24 || seen["abort"] != 2 {
			t.Errorf("%s: cases %v", g.Release, seen)
		}
		if has := g.Release >= "0.5.20"; (seen["status"] == 3) != has {
			t.Errorf("%s: cases %v", g.Release, seen)
		}
	}
}

func checkGoldenRegistration(t *testing.T, release string, frames [][]byte, parsed json.RawMessage) {
	var j goldenRegistration
	if err := json.Unmarshal(parsed, &j); err != nil {
		t.Fatal(err)
	}
	want := &Registration{
		From: Endpoint{j.Endpoint, j.Port}, Agent: j.Agent, AgentMetadata: j.AgentMetadata,
		KVPtrs: orNil(j.KVPtrs), ItemLens: orNil(j.ItemLens), LayerIDs: orNil(j.LayerIDs), Slots: j.Slots,
		AuxPtrs: j.AuxPtrs, StatePtrs: listsOrNil(j.StatePtrs), StateItemLens: listsOrNil(j.StateItemLens),
		StateDims: listsOrNil(j.StateDims), StateLayerIDs: listsOrNil(j.StateLayerIDs),
		StateDataLens: listsOrNil(j.StateDataLens), GPU: j.GPU, TPSize: j.TPSize, EngineRank: j.EngineRank,
		DCPSize: j.DCPSize, DCPRank: j.DCPRank, StagingBase: j.StagingBase, StagingSize: j.StagingSize,
		Frames: len(frames),
	}
	for _, k := range j.Kinds {
		want.Kinds = append(want.Kinds, map[string]Kind{"VRAM": VRAM, "DRAM": DRAM}[k])
	}
	got, err := ParseAtPrefill(frames, Limits{})
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(got, Message(want)) {
		t.Fatalf("parsed\n%+v\nwant\n%+v", got, want)
	}
	dialect, count := DialectNotifications, 24
	if release == "0.5.23" {
		dialect, count = DialectStatus, 25
	}
	if want.Dialect() != dialect || len(frames) != count {
		t.Errorf("%v in %d frames, want %v in %d", want.Dialect(), len(frames), dialect, count)
	}
	var e Encoder
	again, err := e.Registration(want)
	if err != nil {
		t.Fatal(err)
	}
	if len(again) != 25 {
		t.Fatalf("%d frames, want 25", len(again))
	}
	sameFrames(t, again[:count], frames)
}

func checkGoldenSmall(t *testing.T, kind string, frames [][]byte, j goldenSmall) {
	parse, from := ParseAtPrefill, Endpoint{j.Endpoint, j.Port}
	var want Message
	var encode func(*Encoder) ([][]byte, error)
	var generation uint64
	if j.Generation != nil {
		generation = *j.Generation
	}
	switch kind {
	case "room":
		m := &Metadata{
			Room: j.Room, From: from, Agent: j.Agent, KVIndices: orNil(j.KVIndices), AuxIndex: j.AuxIndex,
			Destinations: j.Destinations, StateIndices: listsOrNil(j.StateIndices), Prefix: j.Prefix, Dummy: j.Dummy,
		}
		if m.Dummy {
			m.StateIndices = nil
		}
		want = m
		if len(frames) == metaFrames { // what is absent cannot be encoded
			encode = func(e *Encoder) ([][]byte, error) { return e.Metadata(m) }
		}
	case "abort":
		m := &Abort{Room: j.Room, From: from, Generation: generation, HasGeneration: j.Generation != nil}
		want, encode = m, func(e *Encoder) ([][]byte, error) { return e.Abort(m) }
	case "bootstrap":
		m := &Bootstrap{Room: j.Room, From: from}
		want, encode = m, func(e *Encoder) ([][]byte, error) { return e.Bootstrap(m) }
	case "ack":
		m := &AbortAck{Room: j.Room, PrefillRank: j.Rank, Generation: generation, HasGeneration: j.Generation != nil}
		parse, want, encode = ParseAtDecode, m, func(e *Encoder) ([][]byte, error) { return e.AbortAck(m) }
	case "status":
		m := &KVStatus{Room: j.Room, Status: j.Status, PrefillRank: j.Rank, Reason: j.Reason}
		parse, want, encode = ParseAtDecode, m, func(e *Encoder) ([][]byte, error) { return e.KVStatus(m) }
	case "staging":
		if j.To == "decode" {
			parse = ParseAtDecode
		}
		if m, err := parse(frames, Limits{}); m != nil || !isAll(err, ErrStaging, nixlkv.ErrUnsupported) {
			t.Fatalf("%v, %v", m, err)
		}
		return
	default:
		t.Fatalf("kind %q", kind)
	}
	got, err := parse(frames, Limits{})
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(got, want) {
		t.Fatalf("parsed\n%+v\nwant\n%+v", got, want)
	}
	if encode == nil {
		return
	}
	again, err := encode(&Encoder{})
	if err != nil {
		t.Fatal(err)
	}
	sameFrames(t, again, frames)
}

func sameFrames(t *testing.T, got, want [][]byte) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("%d frames, want %d", len(got), len(want))
	}
	for i := range want {
		if !bytes.Equal(got[i], want[i]) {
			t.Errorf("frame %d: %q, want %q", i, got[i], want[i])
		}
	}
}

func TestGoldenTags(t *testing.T) {
	for _, g := range loadGolden(t) {
		if (len(g.Tags) > 0) != (g.Release != "0.5.23") {
			t.Errorf("%s: %d tag cases", g.Release, len(g.Tags))
		}
		for _, c := range g.Tags {
			for _, tag := range c.Tags {
				got, err := ParseTag([]byte(tag.Tag))
				if err != nil {
					t.Errorf("%s: %s: %v", g.Release, c.Name, err)
					continue
				}
				want := tag.Parsed.tag()
				if got.Kind == TagState {
					want.Component = got.Component // a SGLang decode does not look at it
				}
				if !reflect.DeepEqual(got, want) {
					t.Errorf("%s: %s: %s parsed\n%+v\nwant\n%+v", g.Release, c.Name, tag.Tag, got, want)
				}
				if again := got.Append(nil); string(again) != tag.Tag {
					t.Errorf("%s: %s: appended %s, want %s", g.Release, c.Name, again, tag.Tag)
				}
			}
		}
	}
}

// tag gives the Tag that tells what was tracked.
func (j goldenTag) tag() Tag {
	t := Tag{Room: j.Room, Source: j.Source, Last: j.Last, Parts: j.Parts, PageStart: j.PageStart, Pages: j.Pages}
	if j.Chunk != nil {
		t.Chunk = *j.Chunk
	}
	switch {
	case j.ChunkIndex != nil:
		t.Kind, t.ChunkIndex, t.Agent = TagStaging, *j.ChunkIndex, []byte(j.Agent)
	case j.Part != nil:
		t.Kind, t.Part = TagKVPart, *j.Part
	case j.Chunk != nil:
		t.Kind = TagKV
	case j.Expected != nil:
		t.Kind, t.Chunks = TagAuxNoKV, *j.Expected
	case j.Aux:
		t.Kind = TagAux
	case j.State:
		t.Kind = TagState
	}
	return t
}
