package metadata

import (
	"fmt"

	"github.com/nixlkv/nixlkv"
)

// DecodeInto reads a slot, given as one slice a buffer, each exactly a row long, for the
// request of that room. It reads what want says, as SGLang's decode does
// (DecodeTransferQueue._commit_transfer_to_req), and empties everything else in rec.
//
// Errors: ErrNotWritten if the slot holds no room yet, *RoomError (nixlkv.ErrCorruptMetadata)
// if it holds another; nixlkv.ErrMalformed for a sampling mask whose length cannot be;
// *BufferError or another that wraps ErrBuffer for the row, *ValueError for a room or a want
// that cannot be met. Then rec is as it was.
//
// It allocates only to make rec's slices larger.
func (l *Layout) DecodeInto(rec *Record, row [][]byte, room nixlkv.Room, want Want) error {
	if err := l.checkRow(row); err != nil {
		return err
	}
	return slot{l: l, buffers: row}.decode(rec, room, want)
}

// CheckRoom looks at the room alone: nil if the slot holds this room, else ErrNotWritten or a
// *RoomError. SGLang's decode keeps a request waiting while its slot holds no room
// (_apply_metadata_gate).
func (l *Layout) CheckRoom(row [][]byte, room nixlkv.Room) error {
	if err := l.checkRow(row); err != nil {
		return err
	}
	return slot{l: l, buffers: row}.checkRoom(room)
}

func (s slot) checkRoom(room nixlkv.Room) error {
	if room == 0 || room > nixlkv.MaxRoom {
		return valueErrorf(fieldRoom, "room %d is not in 1 to %d", room, nixlkv.MaxRoom)
	}
	switch got := getUint64(s.of(fieldRoom), 0); got {
	case uint64(room):
		return nil
	case 0:
		return ErrNotWritten
	default:
		return &RoomError{Want: room, Got: got}
	}
}

func (s slot) decode(rec *Record, room nixlkv.Room, want Want) error {
	if rec == nil {
		return fmt.Errorf("%w: no record", ErrValue)
	}
	if err := want.check(s.l); err != nil {
		return err
	}
	if err := s.checkRoom(room); err != nil {
		return err
	}
	maskLen, err := s.maskLen(want)
	if err != nil {
		return err
	}

	rec.Room = room
	rec.OutputID = getInt32(s.of(fieldOutputIDs), 0)
	c := s.of(fieldCachedTokens)
	rec.CachedTokens = CachedTokens{
		Cached: getInt32(c, 0), Device: getInt32(c, 1), Host: getInt32(c, 2), Storage: getInt32(c, 3),
		Image: getInt32(c, 4), Audio: getInt32(c, 5), Video: getInt32(c, 6),
	}

	rec.Logprob = Logprob{}
	if want.Logprob {
		rec.Logprob = Logprob{getFloat32(s.of(fieldLogprobVal), 0), getInt32(s.of(fieldLogprobIdx), 0)}
	}
	rec.TopLogprobs = resize(rec.TopLogprobs, want.TopLogprobs)
	vals, idx := s.of(fieldTopLogprobsVal), s.of(fieldTopLogprobsIdx)
	for i := range rec.TopLogprobs {
		rec.TopLogprobs[i] = Logprob{getFloat32(vals, i), getInt32(idx, i)}
	}

	s.decodeMask(&rec.SamplingMask, maskLen, want.SamplingMask)
	s.decodeDraft(&rec.Draft, want)

	rec.Checksum = Checksum{}
	if sum := s.of(fieldChecksum); sum != nil {
		rec.Checksum.Digest = getUint64(sum, 0)
		if s.l.release.signatures() {
			rec.Checksum.Signature = getUint64(sum, 1)
		}
	}
	return nil
}

// maskLen reads how many tokens the mask has, -1 if it is absent. SGLang takes a length out of
// range for a slice's end, and so a part of the row; here it is an error.
func (s slot) maskLen(want Want) (int, error) {
	if want.SamplingMask == NoMask {
		return 0, nil
	}
	n := int(getInt32(s.of(fieldMaskLen), 0))
	if n > s.l.options.SamplingMaskTokens || n < -1 || n == -1 && !s.l.release.absentMasks() {
		return 0, fmt.Errorf("metadata: %w: sampling mask of %d tokens, a slot has room for %d",
			nixlkv.ErrMalformed, n, s.l.options.SamplingMaskTokens)
	}
	return n, nil
}

func (s slot) decodeMask(m *SamplingMask, n int, kind MaskLogprobs) {
	m.Absent = n < 0
	logprobs := 0
	switch {
	case m.Absent:
		n = 0
	case kind == SelectedLogprob:
		logprobs = 1
	case kind == SupportLogprobs:
		logprobs = n
	}
	m.Tokens = resize(m.Tokens, n)
	getInt32s(m.Tokens, s.of(fieldMaskIdx))
	m.Logprobs = resize(m.Logprobs, logprobs)
	getFloat32s(m.Logprobs, s.of(fieldMaskLogprobs))
}

func (s slot) decodeDraft(d *Draft, want Want) {
	d.TopK = resize(d.TopK, want.TopK)
	p, idx := s.of(fieldTopKP), s.of(fieldTopKIndex)
	for i := range d.TopK {
		d.TopK[i] = DraftToken{getFloat32(p, i), getInt64(idx, i)}
	}
	if !want.Draft {
		d.HiddenStates, d.DSATopK = d.HiddenStates[:0], d.DSATopK[:0]
		return
	}
	d.HiddenStates = append(d.HiddenStates[:0], s.of(fieldHiddenStates)...)
	d.DSATopK = resize(d.DSATopK, s.l.options.DSATopK)
	if !getInt32s(d.DSATopK, s.of(fieldDSATopK)) {
		d.DSATopK = d.DSATopK[:0]
	}
}
