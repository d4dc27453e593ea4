package wire

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"testing"

	"github.com/nixlkv/nixlkv"
)

// encode encodes any message.
func encode(e *Encoder, m Message) ([][]byte, error) {
	switch m := m.(type) {
	case *Registration:
		return e.Registration(m)
	case *Metadata:
		return e.Metadata(m)
	case *Abort:
		return e.Abort(m)
	case *Bootstrap:
		return e.Bootstrap(m)
	case *KVStatus:
		return e.KVStatus(m)
	case *AbortAck:
		return e.AbortAck(m)
	}
	return nil, fmt.Errorf("message of type %T", m)
}

// forget clears what says how a message arrived.
func forget(m Message) {
	switch m := m.(type) {
	case *Registration:
		m.Frames = regFrames
	case *Metadata:
		m.Extra = 0
	case *Abort:
		m.Extra = 0
	case *Bootstrap:
		m.Extra = 0
	case *KVStatus:
		m.Extra = 0
	case *AbortAck:
		m.Extra = 0
	}
}

// joined puts frames into one piece of fuzz input: a uint16 length before each.
func joined(frames [][]byte) []byte {
	var b []byte
	for _, f := range frames {
		b = append(binary.LittleEndian.AppendUint16(b, uint16(len(f))), f...)
	}
	return b
}

// cutUp undoes joined, whatever the input.
func cutUp(b []byte) [][]byte {
	var frames [][]byte
	for len(b) >= 2 {
		n := min(int(binary.LittleEndian.Uint16(b)), len(b)-2)
		frames, b = append(frames, b[2:2+n]), b[2+n:]
	}
	return frames
}

// fuzzMessages asks that parsing never panics, refuses with a typed error, and that what is
// parsed, encoded and parsed again is the same.
func fuzzMessages(f *testing.F, parse func([][]byte, Limits) (Message, error)) {
	f.Fuzz(func(t *testing.T, input []byte) {
		frames := cutUp(input)
		kept := clone(frames)
		m, err := parse(frames, Limits{})
		if !slices.EqualFunc(frames, kept, bytes.Equal) {
			t.Fatal("the frames were written to")
		}
		if err != nil {
			var fe *FrameError
			if m != nil || !errors.As(err, &fe) || len(err.Error()) > 400 {
				t.Fatalf("%+v, %v", m, err)
			}
			return
		}
		again, err := encode(&Encoder{}, m)
		if err != nil {
			t.Fatalf("%+v is not encoded: %v", m, err)
		}
		back, err := parse(again, Limits{})
		if err != nil {
			t.Fatalf("%+v is not parsed again: %v", m, err)
		}
		forget(m)
		if !reflect.DeepEqual(m, back) {
			t.Fatalf("%+v, again %+v", m, back)
		}
		twice, err := encode(&Encoder{}, back)
		if err != nil || !reflect.DeepEqual(again, twice) {
			t.Fatalf("%q, again %q, %v", again, twice, err)
		}
	})
}

func FuzzParseAtPrefill(f *testing.F) {
	var e Encoder
	for _, m := range []Message{
		sample(), sampleMetadata(),
		&Metadata{Room: 1, From: Endpoint{"h", 1}, Agent: "a", Destinations: 1, Dummy: true},
		&Abort{Room: 5}, &Abort{Room: 5, From: Endpoint{"::1", 7}, Generation: 3, HasGeneration: true},
		&Bootstrap{Room: 5, From: Endpoint{"::1", 7}},
	} {
		frames, err := encode(&e, m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(joined(frames))
		f.Add(joined(frames[:len(frames)/2]))
		f.Add(joined(append(clone(frames), []byte("later"))))
	}
	f.Add(joined(split("STAGING_RSP|1|0|0|0|0|a")))
	fuzzMessages(f, ParseAtPrefill)
}

func FuzzParseAtDecode(f *testing.F) {
	for _, s := range []string{
		"KV_STATUS|1|4|0|", "KV_STATUS|1|0|0|reason \xff", "ABORT_ACK|1|0", "ABORT_ACK|1|0|7|later",
		"STAGING_REQ|1|0|4|a", "CHUNK_READY|1|0|0|4|a|0", "HELLO", "",
	} {
		f.Add(joined(split(s)))
	}
	fuzzMessages(f, ParseAtDecode)
}

func FuzzParseTag(f *testing.F) {
	for _, c := range tagCases {
		f.Add([]byte(c.text))
	}
	f.Add([]byte("5_kv_0_2_0"))
	f.Fuzz(func(t *testing.T, b []byte) {
		tag, err := ParseTag(b)
		if err != nil {
			if !errors.Is(err, nixlkv.ErrMalformed) && !errors.Is(err, nixlkv.ErrLimit) {
				t.Fatal(err)
			}
			return
		}
		if again := tag.Append(nil); !bytes.Equal(again, b) {
			t.Fatalf("%q, again %q", b, again)
		}
	})
}

func FuzzUnpackLists(f *testing.F) {
	f.Add([]byte{2, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0})
	f.Add([]byte{0xff, 0xff, 0xff, 0xff})
	f.Add([]byte{1, 0, 0, 0, 0xfc, 0xff, 0xff, 0xff})
	f.Fuzz(func(t *testing.T, b []byte) {
		lists, err := unpackLists[uint32](b, 16, 16)
		if err != nil {
			return
		}
		if again := packLists(nil, lists); len(lists) > 0 && !bytes.Equal(again, b) {
			t.Fatalf("%x, again %x", b, again)
		}
	})
}
