package wire

import (
	"bytes"
	"fmt"
	"strconv"

	"github.com/nixlkv/nixlkv"
)

// TagKind says what a notification announces.
type TagKind uint8

// The kinds of notifications (NixlKVManager.transfer_worker and update_transfer_status up
// to 0.5.22; 0.5.23 has none). The zero value is none of them.
const (
	TagKV      TagKind = iota + 1 // a chunk of KV
	TagKVPart                     // one of several parts of a chunk
	TagAux                        // the aux slot
	TagAuxNoKV                    // the aux slot, where the last chunk has no KV
	TagState                      // one state component
	TagStaging                    // a chunk in a staging buffer, which this library does not have
)

var tagKindNames = [...]string{TagKV: "kv", TagKVPart: "kv part", TagAux: "aux", TagAuxNoKV: "aux nokv", TagState: "state", TagStaging: "stg"}

// String gives the kind as in the tag.
func (k TagKind) String() string {
	if k > 0 && int(k) < len(tagKindNames) {
		return tagKindNames[k]
	}
	return "TagKind(" + strconv.Itoa(int(k)) + ")"
}

// Tag is a notification, attached to the NIXL write that it announces. Chunks, parts and
// components count from 0.
type Tag struct {
	Kind   TagKind
	Room   nixlkv.Room
	Source int // the prefill rank, see SourceRank; not in TagAux

	Chunk int  // KV, part and staging: number of the chunk among those with pages
	Last  bool // KV, part and staging: the last chunk

	Part, Parts int // part: which of how many
	Chunks      int // nokv: how many numbered chunks came before
	Component   int // state: which component

	ChunkIndex, PageStart, Pages int    // staging
	Agent                        []byte // staging: the decode's agent; aliases what was parsed
}

// maxTag bounds a tag: seven numbers and the longest agent name.
const maxTag = 512

// tagFields is how many fields a kind has. All are always sent, though SGLang's decode
// does without some.
var tagFields = [...]int{TagKV: 5, TagKVPart: 8, TagAux: 2, TagAuxNoKV: 5, TagState: 4, TagStaging: 9}

// ParseTag reads a notification. It does not allocate unless it fails; Tag.Agent aliases b.
//
// Errors wrap nixlkv.ErrMalformed, for kinds that are unknown [ErrUnknown]. A part that is
// not one of its parts is refused here; a number of parts that changes within a chunk can
// only be seen by who tracks the room.
func ParseTag(b []byte) (Tag, error) {
	if len(b) > maxTag {
		return Tag{}, fmt.Errorf("notification: %w", tooMany("bytes", len(b), maxTag))
	}
	f := splitTag(b)
	t := Tag{Kind: f.kind()}
	if t.Kind == 0 {
		return Tag{}, fmt.Errorf("notification %s: %w", quoted(b), ErrUnknown)
	}
	if want := tagFields[t.Kind]; f.n != want {
		return Tag{}, fmt.Errorf("notification %s: %w", quoted(b), malformed("%v of %d fields, expected %d", t.Kind, f.n, want))
	}
	t.Room = nixlkv.Room(f.number(0, uint64(nixlkv.MaxRoom)))
	switch t.Kind {
	case TagKV, TagKVPart, TagStaging:
		t.Chunk, t.Last, t.Source = f.count(2), f.flag(3), f.count(4)
	case TagAuxNoKV:
		t.Source, t.Chunks = f.count(3), f.count(4)
	case TagState:
		t.Source, t.Component = f.count(2), f.count(3)
	}
	switch t.Kind {
	case TagKVPart:
		t.Part, t.Parts = f.count(6), f.count(7)
	case TagStaging:
		t.ChunkIndex, t.PageStart, t.Pages = f.count(5), f.count(6), f.count(7)
		if t.Agent = f.at[8]; checkAgent(t.Agent, maxTag) != nil {
			f.fail(8)
		}
	}
	if f.failed {
		return Tag{}, fmt.Errorf("notification %s: %w", quoted(b), malformed("field %d of %v: %s", f.bad, t.Kind, quoted(f.at[f.bad])))
	}
	if t.Kind == TagKVPart && t.Part >= t.Parts {
		return Tag{}, fmt.Errorf("notification %s: %w", quoted(b), malformed("part index out of range: %d of %d", t.Part, t.Parts))
	}
	return t, nil
}

// tagSplit is a tag cut at underscores. What follows the eighth one is the agent name,
// underscores and all.
type tagSplit struct {
	at     [9][]byte
	n      int
	bad    int // the first field that is wrong, if failed
	failed bool
}

func splitTag(b []byte) tagSplit {
	var f tagSplit
	for more := true; more; f.n++ {
		if f.n == len(f.at)-1 {
			f.at[f.n], more = b, false
		} else {
			f.at[f.n], b, more = bytes.Cut(b, []byte{'_'})
		}
	}
	return f
}

// kind reads what is announced; 0 if it is nothing known.
func (f *tagSplit) kind() TagKind {
	switch string(f.at[1]) {
	case "kv":
		if string(f.at[5]) == "part" {
			return TagKVPart
		}
		return TagKV
	case "aux":
		if string(f.at[2]) == "nokv" {
			return TagAuxNoKV
		}
		return TagAux
	case "state":
		return TagState
	case "stg":
		return TagStaging
	}
	return 0
}

func (f *tagSplit) fail(i int) {
	if !f.failed {
		f.bad, f.failed = i, true
	}
}

func (f *tagSplit) number(i int, limit uint64) uint64 {
	n, fault := parseDecimal(f.at[i], limit)
	if fault != decimalOK {
		f.fail(i)
	}
	return n
}

func (f *tagSplit) count(i int) int { return int(f.number(i, maxInt)) }

func (f *tagSplit) flag(i int) bool { return f.number(i, 1) == 1 }

// Append appends the tag, in the form that [ParseTag] reads. Numbers must not be negative;
// the kind must be one of the named ones.
func (t *Tag) Append(dst []byte) []byte {
	switch t.Kind {
	case TagKV:
		return AppendKV(dst, t.Room, t.Chunk, t.Last, t.Source)
	case TagKVPart:
		return AppendKVPart(dst, t.Room, t.Chunk, t.Last, t.Source, t.Part, t.Parts)
	case TagAux:
		return AppendAux(dst, t.Room)
	case TagAuxNoKV:
		return AppendAuxNoKV(dst, t.Room, t.Source, t.Chunks)
	case TagState:
		return AppendState(dst, t.Room, t.Source, t.Component)
	case TagStaging:
		dst = appendChunk(dst, t.Room, "_stg", t.Chunk, t.Last, t.Source)
		dst = appendField(appendField(appendField(dst, t.ChunkIndex), t.PageStart), t.Pages)
		return append(append(dst, '_'), t.Agent...)
	}
	return dst
}

// AppendKV appends the tag of a chunk that is written in one piece.
func AppendKV(dst []byte, room nixlkv.Room, chunk int, last bool, source int) []byte {
	return appendChunk(dst, room, "_kv", chunk, last, source)
}

// AppendKVPart appends the tag of one of several writes that make up a chunk.
func AppendKVPart(dst []byte, room nixlkv.Room, chunk int, last bool, source, part, parts int) []byte {
	dst = append(AppendKV(dst, room, chunk, last, source), "_part"...)
	return appendField(appendField(dst, part), parts)
}

// AppendAux appends the tag of the aux slot of a room whose last chunk has KV.
func AppendAux(dst []byte, room nixlkv.Room) []byte {
	return append(appendRoom(dst, room), "_aux"...)
}

// AppendAuxNoKV appends the tag of the aux slot of a room whose last chunk has no KV, with
// the number of chunks that had.
func AppendAuxNoKV(dst []byte, room nixlkv.Room, source, chunks int) []byte {
	dst = append(appendRoom(dst, room), "_aux_nokv"...)
	return appendField(appendField(dst, source), chunks)
}

// AppendState appends the tag of a state component.
func AppendState(dst []byte, room nixlkv.Room, source, component int) []byte {
	dst = append(appendRoom(dst, room), "_state"...)
	return appendField(appendField(dst, source), component)
}

func appendChunk(dst []byte, room nixlkv.Room, kind string, chunk int, last bool, source int) []byte {
	dst = appendField(append(appendRoom(dst, room), kind...), chunk)
	if last {
		dst = append(dst, "_1"...)
	} else {
		dst = append(dst, "_0"...)
	}
	return appendField(dst, source)
}

func appendRoom(dst []byte, room nixlkv.Room) []byte {
	return strconv.AppendUint(dst, uint64(room), 10)
}

func appendField(dst []byte, n int) []byte {
	return strconv.AppendInt(append(dst, '_'), int64(n), 10)
}
