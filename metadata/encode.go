package metadata

import (
	"fmt"

	"github.com/nixlkv/nixlkv"
)

// Encode writes a record into a slot, given as one slice a buffer, each exactly a row long.
//
// The bytes are those that MetadataBuffers.set_buf (and set_kv_checksum, if the layout has
// checksums) leaves in a slot that was never used, whatever was there before. Where SGLang
// writes nothing (logprobs that were not asked for, the tail of top logprobs, the draft state
// of a server without a draft model) it leaves an earlier request's values and relies on the
// decode not to look.
//
// Errors: *BufferError or another that wraps ErrBuffer for the row, *ValueError for a value
// that does not fit or that SGLang refuses. Then nothing is written. Encode does not allocate
// and keeps neither row nor record.
func (l *Layout) Encode(row [][]byte, rec *Record) error {
	if err := l.checkRow(row); err != nil {
		return err
	}
	return slot{l: l, buffers: row}.encode(rec)
}

func (l *Layout) checkRow(row [][]byte) error {
	if len(row) != len(l.buffers) {
		return fmt.Errorf("%w: %d buffers, want %d", ErrBuffer, len(row), len(l.buffers))
	}
	for i := range row {
		if b := &l.buffers[i]; uint64(len(row[i])) != b.ItemLen {
			return &BufferError{Index: i, Buffer: b.Name, Want: b.ItemLen, Got: uint64(len(row[i]))}
		}
	}
	return nil
}

// slot is a row of a layout's buffers: row number index of each.
type slot struct {
	l       *Layout
	buffers [][]byte
	index   int
}

// of gives the row of one buffer, nil if the layout has no such buffer.
func (s slot) of(f field) []byte {
	i := s.l.index[f]
	if i < 0 {
		return nil
	}
	n := int(s.l.buffers[i].ItemLen)
	return s.buffers[i][s.index*n : (s.index+1)*n : (s.index+1)*n]
}

func (s slot) encode(rec *Record) error {
	if err := s.l.checkRecord(rec); err != nil {
		return err
	}
	c := &rec.CachedTokens
	putInt32s(s.of(fieldOutputIDs), rec.OutputID)
	putInt32s(s.of(fieldCachedTokens), c.Cached, c.Device, c.Host, c.Storage, c.Image, c.Audio, c.Video)
	putFloat32s(s.of(fieldLogprobVal), rec.Logprob.Value)
	putInt32s(s.of(fieldLogprobIdx), rec.Logprob.Token)

	vals, idx := s.of(fieldTopLogprobsVal), s.of(fieldTopLogprobsIdx)
	for i, t := range rec.TopLogprobs {
		putFloat32(vals, i, t.Value)
		putInt32(idx, i, t.Token)
	}
	clear(vals[4*len(rec.TopLogprobs):])
	clear(idx[4*len(rec.TopLogprobs):])

	if s.l.options.SamplingMaskTokens > 0 {
		m := &rec.SamplingMask
		n := int32(len(m.Tokens))
		if m.Absent {
			n = -1
		}
		putInt32s(s.of(fieldMaskLen), n)
		putInt32s(s.of(fieldMaskIdx), m.Tokens...)
		putFloat32s(s.of(fieldMaskLogprobs), m.Logprobs...)
	}

	s.encodeDraft(&rec.Draft)

	putUint64s(s.of(fieldRoom), uint64(rec.Room))
	if s.l.options.Checksums {
		putUint64s(s.of(fieldChecksum), rec.Checksum.Digest, rec.Checksum.Signature)
	}
	return nil
}

func (s slot) encodeDraft(d *Draft) {
	p, idx := s.of(fieldTopKP), s.of(fieldTopKIndex)
	for i, t := range d.TopK {
		putFloat32(p, i, t.P)
		putInt64(idx, i, t.Token)
	}
	clear(p[4*len(d.TopK):])
	clear(idx[8*len(d.TopK):])

	hidden := s.of(fieldHiddenStates)
	clear(hidden[copy(hidden, d.HiddenStates):])

	if dsa := s.of(fieldDSATopK); len(d.DSATopK) > 0 {
		putInt32s(dsa, d.DSATopK...)
	} else {
		for i := range dsa {
			dsa[i] = 0xff // int32 -1, the filling of MetadataBuffers.__init__ and set_buf
		}
	}
}

// checkRecord refuses what has no place in the slot, before anything is written.
func (l *Layout) checkRecord(rec *Record) error {
	switch {
	case rec == nil:
		return fmt.Errorf("%w: no record", ErrValue)
	case rec.Room == 0 || rec.Room > nixlkv.MaxRoom:
		return valueErrorf(fieldRoom, "room %d is not in 1 to %d", rec.Room, nixlkv.MaxRoom)
	case len(rec.TopLogprobs) > MaxTopLogprobs:
		return valueErrorf(fieldTopLogprobsVal, "%d top logprobs, a slot has room for %d", len(rec.TopLogprobs), MaxTopLogprobs)
	case rec.Checksum != (Checksum{}) && !l.options.Checksums:
		return valueErrorf(fieldChecksum, "a checksum, the layout has none")
	case rec.Checksum.Signature != 0 && !l.release.signatures():
		return valueErrorf(fieldChecksum, "a signature, SGLang %v has none", l.release)
	}
	if err := l.checkMask(&rec.SamplingMask); err != nil {
		return err
	}
	return l.checkDraft(&rec.Draft)
}

func (l *Layout) checkMask(m *SamplingMask) error {
	tokens, logprobs := len(m.Tokens), len(m.Logprobs)
	switch {
	case l.options.SamplingMaskTokens == 0 && (m.Absent || tokens > 0 || logprobs > 0):
		return valueErrorf(fieldMaskLen, "a sampling mask, the layout has none")
	case m.Absent && !l.release.absentMasks():
		return valueErrorf(fieldMaskLen, "absent mask, SGLang %v reads no length of -1", l.release)
	case m.Absent && (tokens > 0 || logprobs > 0):
		return valueErrorf(fieldMaskLen, "absent mask of %d tokens and %d logprobs", tokens, logprobs)
	case tokens > l.options.SamplingMaskTokens:
		return valueErrorf(fieldMaskIdx, "%d tokens, a slot has room for %d", tokens, l.options.SamplingMaskTokens)
	case logprobs == 1, logprobs == tokens && (tokens == 0 || l.release.supportLogprobs()):
		return nil
	}
	return valueErrorf(fieldMaskLogprobs, "%d logprobs for %d tokens", logprobs, tokens)
}

func (l *Layout) checkDraft(d *Draft) error {
	if len(d.HiddenStates) == 0 {
		if len(d.TopK) > 0 || len(d.DSATopK) > 0 {
			return valueErrorf(fieldHiddenStates, "draft state without hidden states")
		}
		return nil
	}
	hidden := l.buffers[l.index[fieldHiddenStates]].ItemLen
	switch {
	case uint64(len(d.HiddenStates)) != hidden:
		return valueErrorf(fieldHiddenStates, "%d bytes, want %d", len(d.HiddenStates), hidden)
	case len(d.TopK) > MaxTopK:
		return valueErrorf(fieldTopKIndex, "%d draft tokens, a slot has room for %d", len(d.TopK), MaxTopK)
	case len(d.DSATopK) > 0 && len(d.DSATopK) != l.options.DSATopK:
		return valueErrorf(fieldDSATopK, "%d positions, want %d", len(d.DSATopK), l.options.DSATopK)
	}
	return nil
}
