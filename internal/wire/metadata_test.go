package wire

import (
	"bytes"
	"math"
	"reflect"
	"slices"
	"testing"

	"github.com/nixlkv/nixlkv"
)

func sampleMetadata() *Metadata {
	return &Metadata{
		Room: 77, From: Endpoint{"10.0.0.1", 4000}, Agent: "decode-0", KVIndices: []int32{5, 3, math.MaxInt32},
		AuxIndex: 9, Destinations: 2, StateIndices: [][]int32{{1}, nil, {4, 5}}, Prefix: 64,
	}
}

func encodedMetadata(t *testing.T, m *Metadata) [][]byte {
	t.Helper()
	frames, err := new(Encoder).Metadata(m)
	if err != nil {
		t.Fatal(err)
	}
	return frames
}

// A flag decides; without one, no indices and no prefix mean dummy (TransferInfo.from_zmq).
func TestMetadataDummy(t *testing.T) {
	index := u32s(3)
	for _, c := range []struct {
		name           string
		kv             []byte
		prefix, flag   []byte
		frames         int
		dummy, refused bool
	}{
		{"flag 0", index, []byte("0"), []byte("0"), 11, false, false},
		{"flag 0 without indices", nil, []byte("0"), []byte("0"), 11, false, false},
		{"flag 1", nil, []byte("0"), []byte("1"), 11, true, false},
		{"flag 1 with a prefix", nil, []byte("64"), []byte("1"), 11, true, false},
		{"flag 1 with indices", index, []byte("0"), []byte("1"), 11, false, true},
		{"empty flag", index, []byte("0"), nil, 11, false, false},
		{"empty flag without indices", nil, []byte("0"), nil, 11, true, false},
		{"empty flag, full prefix hit", nil, []byte("64"), nil, 11, false, false},
		{"no flag", index, []byte("0"), nil, 10, false, false},
		{"no flag without indices", nil, []byte("0"), nil, 10, true, false},
		{"no flag, full prefix hit", nil, []byte("64"), nil, 10, false, false},
		{"empty prefix", nil, nil, nil, 10, true, false},
		{"no prefix", nil, nil, nil, 9, true, false},
		{"no prefix with indices", index, nil, nil, 9, false, false},
		{"shortest", nil, nil, nil, 8, true, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			frames := encodedMetadata(t, sampleMetadata())
			frames[metaKVIndices], frames[metaPrefix], frames[metaDummy] = c.kv, c.prefix, c.flag
			m, err := ParseAtPrefill(frames[:c.frames], Limits{})
			if c.refused {
				refused(t, err, metaKVIndices, nixlkv.ErrMalformed, "1 of a dummy, expected none")
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			got := m.(*Metadata)
			if got.Dummy != c.dummy {
				t.Errorf("dummy %v, want %v", got.Dummy, c.dummy)
			}
			if (got.StateIndices != nil) != (!c.dummy && c.frames > metaStateIndices) {
				t.Errorf("state %v", got.StateIndices)
			}
		})
	}
}

func TestMetadataDummySendsNoIndices(t *testing.T) {
	m := sampleMetadata()
	m.Dummy = true
	frames := encodedMetadata(t, m)
	if len(frames[metaKVIndices])+len(frames[metaStateIndices]) != 0 || string(frames[metaDummy]) != "1" ||
		string(frames[metaAuxIndex]) != "9" {
		t.Errorf("%q", frames)
	}
	m.KVIndices, m.StateIndices = nil, nil
	if got, err := ParseAtPrefill(frames, Limits{}); err != nil || !reflect.DeepEqual(got, Message(m)) {
		t.Errorf("%+v, %v", got, err)
	}
}

func TestMetadataRefused(t *testing.T) {
	for _, c := range []struct {
		name   string
		frame  int
		to     []byte
		target error
		text   string
	}{
		{"room with sign", metaRoom, []byte("-1"), nixlkv.ErrMalformed, `"-1"`},
		{"room of 64 bits", metaRoom, []byte("9223372036854775808"), nixlkv.ErrMalformed, "above 9223372036854775807"},
		{"none in lower case", metaRoom, []byte("none"), nixlkv.ErrMalformed, `"none"`},
		{"no address", metaIP, nil, nixlkv.ErrMalformed, "no address"},
		{"port", metaPort, []byte("x"), nixlkv.ErrMalformed, `"x"`},
		{"agent", metaAgent, []byte("dé"), nixlkv.ErrMalformed, "printable ASCII"},
		{"half an index", metaKVIndices, make([]byte, 6), ErrTruncated, "6 bytes, not a multiple of 4"},
		{"negative index", metaKVIndices, u32s(1, 0xffffffff), nixlkv.ErrPageRange, "-1 at position 1"},
		{"aux index None", metaAuxIndex, []byte("None"), nixlkv.ErrAuxIndex, `"None" is not a decimal number`},
		{"no aux index", metaAuxIndex, nil, nixlkv.ErrAuxIndex, `""`},
		{"aux index too large", metaAuxIndex, []byte("2147483648"), nixlkv.ErrAuxIndex, "above"},
		{"no destinations", metaDestinations, []byte("0"), nixlkv.ErrMalformed, "0, expected at least 1"},
		{"negative state index", metaStateIndices, packLists(nil, [][]int32{{1}, {0, -7}}), nixlkv.ErrState, "component 1: index -7 at position 1"},
		{"state", metaStateIndices, []byte{2, 0, 0, 0}, ErrTruncated, "2 lists have a header of 12"},
		{"prefix", metaPrefix, []byte("1.5"), nixlkv.ErrMalformed, `"1.5"`},
		{"flag", metaDummy, []byte("2"), nixlkv.ErrMalformed, `"2", expected 0 or 1`},
		{"flag in words", metaDummy, []byte("True"), nixlkv.ErrMalformed, `"True"`},
	} {
		t.Run(c.name, func(t *testing.T) {
			frames := encodedMetadata(t, sampleMetadata())
			frames[c.frame] = c.to
			m, err := ParseAtPrefill(frames, Limits{})
			if m != nil {
				t.Fatalf("accepted: %+v", m)
			}
			fe := refused(t, err, c.frame, c.target, c.text)
			if fe.Message != "room metadata" || fe.Field != metadataFields[c.frame] {
				t.Errorf("%+v", fe)
			}
			if c.frame > metaAgent && (!fe.HasRoom || fe.Room != 77 || fe.Agent != "decode-0" || fe.From.Port != 4000) {
				t.Errorf("sender of %v: %+v", err, fe)
			}
		})
	}
	frames := encodedMetadata(t, sampleMetadata())
	_, err := ParseAtPrefill(frames[:7], Limits{})
	if fe := refused(t, err, -1, ErrTruncated, "7 frames, at least 8"); fe.Room != 77 {
		t.Errorf("%+v", fe)
	}
	frames[metaKVIndices] = make([]byte, 4*11)
	_, err = ParseAtPrefill(frames, Limits{Indices: 10})
	refused(t, err, metaKVIndices, nixlkv.ErrLimit, "11 entries, at most 10")
	_, err = ParseAtPrefill(frames, Limits{FrameSize: 40})
	if fe := refused(t, err, metaKVIndices, nixlkv.ErrLimit, "44 bytes"); fe.Room != 77 {
		t.Errorf("%+v", fe)
	}
}

func TestMetadataNotEncoded(t *testing.T) {
	for frame, spoil := range map[int]func(*Metadata){
		metaRoom:         func(m *Metadata) { m.Room = nixlkv.MaxRoom + 1 },
		metaIP:           func(m *Metadata) { m.From.IP = "" },
		metaPort:         func(m *Metadata) { m.From.Port = 65536 },
		metaAgent:        func(m *Metadata) { m.Agent = "\x7f" },
		metaKVIndices:    func(m *Metadata) { m.KVIndices[1] = -1 },
		metaAuxIndex:     func(m *Metadata) { m.AuxIndex = -1 },
		metaDestinations: func(m *Metadata) { m.Destinations = 0 },
		metaStateIndices: func(m *Metadata) { m.StateIndices[2][0] = -1 },
		metaPrefix:       func(m *Metadata) { m.Prefix = -1 },
	} {
		m := sampleMetadata()
		spoil(m)
		frames, err := new(Encoder).Metadata(m)
		if frames != nil {
			t.Errorf("frame %d: encoded", frame)
		}
		if fe := refused(t, err, frame, nil, metadataFields[frame]); fe.Room != m.Room || !fe.HasRoom {
			t.Errorf("%+v", fe)
		}
	}
}

// An encoder's frames are its own until it is used again, and do not run into each other.
func TestEncoderReuse(t *testing.T) {
	var e Encoder
	m := sampleMetadata()
	first, err := e.Metadata(m)
	if err != nil {
		t.Fatal(err)
	}
	want := clone(first)
	_ = append(first[metaIP], "overrun"...)
	sameFrames(t, first, want)
	if _, err := e.KVStatus(&KVStatus{Room: 1, Status: PollSuccess}); err != nil {
		t.Fatal(err)
	}
	again, err := e.Metadata(m)
	if err != nil {
		t.Fatal(err)
	}
	sameFrames(t, again, want)
	if n := testing.AllocsPerRun(100, func() { _, err = e.Metadata(m) }); n != 0 || err != nil {
		t.Errorf("%v allocations, %v", n, err)
	}
}

func TestMetadataExtraFrames(t *testing.T) {
	frames := encodedMetadata(t, sampleMetadata())
	want := sampleMetadata()
	want.Extra = 2
	got, err := ParseAtPrefill(append(slices.Clone(frames), []byte("x"), bytes.Repeat([]byte{1}, 100)), Limits{})
	if err != nil || !reflect.DeepEqual(got, Message(want)) {
		t.Errorf("%+v, %v", got, err)
	}
}
