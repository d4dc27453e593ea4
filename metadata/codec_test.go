package metadata

import (
	"errors"
	"slices"
	"testing"

	"github.com/nixlkv/nixlkv"
)

// allOptions has every buffer.
var allOptions = Options{HiddenSize: 12, HiddenDType: Float16, SamplingMaskTokens: 20, DSATopK: 24}

func TestEncodeRefuses(t *testing.T) {
	tests := []struct {
		name    string
		release Release
		options Options
		change  func(*Record)
		buffer  field
	}{
		{"no room", SGLang0523, allOptions, func(r *Record) { r.Room = 0 }, fieldRoom},
		{"room of 64 bits", SGLang0523, allOptions, func(r *Record) { r.Room = nixlkv.MaxRoom + 1 }, fieldRoom},
		{"129 top logprobs", SGLang0523, allOptions, func(r *Record) { r.TopLogprobs = make([]Logprob, 129) }, fieldTopLogprobsVal},
		{"mask without buffers", SGLang0523, Options{}, func(r *Record) {
			*r = Record{Room: 1, SamplingMask: SamplingMask{Tokens: []int32{1}, Logprobs: []float32{0}}}
		}, fieldMaskLen},
		{"absent mask without buffers", SGLang0518, Options{}, func(r *Record) { *r = Record{Room: 1, SamplingMask: SamplingMask{Absent: true}} }, fieldMaskLen},
		{"absent mask too late", SGLang0521, allOptions, func(r *Record) { r.SamplingMask = SamplingMask{Absent: true} }, fieldMaskLen},
		{"absent mask with tokens", SGLang0520, allOptions, func(r *Record) { r.SamplingMask.Absent = true }, fieldMaskLen},
		{"mask too long", SGLang0520, allOptions, func(r *Record) { r.SamplingMask.Tokens = make([]int32, 21) }, fieldMaskIdx},
		{"mask without logprob", SGLang0523, allOptions, func(r *Record) { r.SamplingMask.Logprobs = nil }, fieldMaskLogprobs},
		{"logprobs of some tokens", SGLang0523, allOptions, func(r *Record) { r.SamplingMask.Logprobs = make([]float32, 3) }, fieldMaskLogprobs},
		{"logprobs of all tokens too early", SGLang0520, allOptions, func(r *Record) { r.SamplingMask.Logprobs = make([]float32, 20) }, fieldMaskLogprobs},
		{"17 draft tokens", SGLang0523, allOptions, func(r *Record) { r.Draft.TopK = make([]DraftToken, 17) }, fieldTopKIndex},
		{"short hidden states", SGLang0523, allOptions, func(r *Record) { r.Draft.HiddenStates = make([]byte, 23) }, fieldHiddenStates},
		{"long hidden states", SGLang0523, allOptions, func(r *Record) { r.Draft.HiddenStates = make([]byte, 25) }, fieldHiddenStates},
		{"draft tokens alone", SGLang0523, allOptions, func(r *Record) { r.Draft = Draft{TopK: r.Draft.TopK} }, fieldHiddenStates},
		{"DSA alone", SGLang0523, allOptions, func(r *Record) { r.Draft = Draft{DSATopK: r.Draft.DSATopK} }, fieldHiddenStates},
		{"DSA of other width", SGLang0523, allOptions, func(r *Record) { r.Draft.DSATopK = make([]int32, 23) }, fieldDSATopK},
		{"DSA without buffer", SGLang0523, Options{}, func(r *Record) {
			*r = Record{Room: 1, Draft: Draft{HiddenStates: make([]byte, 64), DSATopK: []int32{1}}}
		}, fieldDSATopK},
		{"checksum without buffer", SGLang0523, allOptions, func(r *Record) { r.Checksum.Digest = 1 }, fieldChecksum},
		{"signature too early", SGLang0522, Options{Checksums: true}, func(r *Record) { *r = Record{Room: 1, Checksum: Checksum{1, 1}} }, fieldChecksum},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			l := mustLayout(t, tt.release, tt.options)
			rec := fullRecord(l, testRand())
			tt.change(rec)
			row := newRow(l, 0xa5)
			var ve *ValueError
			if err := l.Encode(row, rec); !errors.As(err, &ve) || ve.Buffer != tt.buffer.String() || !errors.Is(err, ErrValue) {
				t.Errorf("got %v", err)
			}
			diffRows(t, l, row, newRow(l, 0xa5))
		})
	}
	l := mustLayout(t, SGLang0523, Options{})
	err := l.Encode(newRow(l, 0), &Record{Room: 1, TopLogprobs: make([]Logprob, 200)})
	if want := "metadata: value does not fit the slot: output_top_logprobs_val: 200 top logprobs, a slot has room for 128"; err == nil || err.Error() != want {
		t.Errorf("got %v", err)
	}
	if err := l.Encode(newRow(l, 0), nil); !errors.Is(err, ErrValue) {
		t.Errorf("no record: %v", err)
	}
}

func TestWantRefuses(t *testing.T) {
	tests := []struct {
		name    string
		release Release
		options Options
		want    Want
		buffer  field
	}{
		{"129 top logprobs", SGLang0523, allOptions, Want{Logprob: true, TopLogprobs: 129}, fieldTopLogprobsVal},
		{"fewer than none", SGLang0523, allOptions, Want{Logprob: true, TopLogprobs: -1}, fieldTopLogprobsVal},
		{"top logprobs alone", SGLang0523, allOptions, Want{TopLogprobs: 1}, fieldTopLogprobsVal},
		{"17 draft tokens", SGLang0523, allOptions, Want{Draft: true, TopK: 17}, fieldTopKIndex},
		{"fewer draft tokens than none", SGLang0523, allOptions, Want{Draft: true, TopK: -1}, fieldTopKIndex},
		{"draft tokens alone", SGLang0523, allOptions, Want{TopK: 1}, fieldTopKIndex},
		{"mask without buffers", SGLang0523, Options{}, Want{SamplingMask: SelectedLogprob}, fieldMaskLen},
		{"all logprobs too early", SGLang0520, allOptions, Want{SamplingMask: SupportLogprobs}, fieldMaskLogprobs},
		{"unknown logprobs", SGLang0523, allOptions, Want{SamplingMask: 3}, fieldMaskLogprobs},
	}
	for _, tt := range tests {
		l := mustLayout(t, tt.release, tt.options)
		row := newRow(l, 0)
		if err := l.Encode(row, &Record{Room: 1}); err != nil {
			t.Fatal(err)
		}
		rec := fullRecord(l, testRand())
		var ve *ValueError
		if err := l.DecodeInto(rec, row, 1, tt.want); !errors.As(err, &ve) || ve.Buffer != tt.buffer.String() {
			t.Errorf("%s: got %v", tt.name, err)
		}
		sameRecord(t, rec, fullRecord(l, testRand()))
	}
}

// A mask length that cannot be is an error where the mask is wanted, and only there.
func TestDecodeMaskLength(t *testing.T) {
	for _, r := range Releases() {
		l := mustLayout(t, r, allOptions)
		for n, ok := range map[int32]bool{0: true, 20: true, 21: false, 1 << 30: false, -1: r.absentMasks(), -2: false, -1 << 31: false} {
			row := newRow(l, 0)
			if err := l.Encode(row, &Record{Room: 5}); err != nil {
				t.Fatal(err)
			}
			putInt32s(row[l.index[fieldMaskLen]], n)
			rec := fullRecord(l, testRand())
			err := l.DecodeInto(rec, row, 5, Want{SamplingMask: SelectedLogprob})
			if (err == nil) != ok || err != nil && !errors.Is(err, nixlkv.ErrMalformed) {
				t.Errorf("%v, length %d: %v", r, n, err)
			}
			if err != nil {
				sameRecord(t, rec, fullRecord(l, testRand()))
			} else if rec.SamplingMask.Absent != (n < 0) || len(rec.SamplingMask.Tokens) != int(max(n, 0)) {
				t.Errorf("%v, length %d: %+v", r, n, rec.SamplingMask)
			}
			if err := l.DecodeInto(rec, row, 5, Want{}); err != nil {
				t.Error(err)
			}
		}
	}
}

func TestDecodeRoom(t *testing.T) {
	l := mustLayout(t, SGLang0523, Options{})
	row := newRow(l, 0)
	rec := &Record{}
	if err := l.DecodeInto(rec, row, 9, Want{}); !errors.Is(err, ErrNotWritten) || errors.Is(err, nixlkv.ErrCorruptMetadata) {
		t.Errorf("got %v", err)
	}
	putUint64s(row[l.index[fieldRoom]], 1<<63+9)
	var re *RoomError
	if err := l.DecodeInto(rec, row, 9, Want{}); !errors.As(err, &re) || *re != (RoomError{9, 1<<63 + 9}) || !errors.Is(err, nixlkv.ErrCorruptMetadata) {
		t.Errorf("got %v", err)
	}
	for _, room := range []nixlkv.Room{0, nixlkv.MaxRoom + 1} {
		if err := l.DecodeInto(rec, row, room, Want{}); !errors.Is(err, ErrValue) {
			t.Errorf("room %d: got %v", room, err)
		}
	}
	if err := l.DecodeInto(nil, row, 9, Want{}); !errors.Is(err, ErrValue) {
		t.Errorf("no record: %v", err)
	}
}

func TestRowOfOtherSize(t *testing.T) {
	l := mustLayout(t, SGLang0523, allOptions)
	calls := map[string]func(row [][]byte) error{
		"Encode":     func(row [][]byte) error { return l.Encode(row, &Record{Room: 1}) },
		"DecodeInto": func(row [][]byte) error { return l.DecodeInto(&Record{}, row, 1, Want{}) },
		"CheckRoom":  func(row [][]byte) error { return l.CheckRoom(row, 1) },
	}
	for name, call := range calls {
		for i, b := range l.Buffers() {
			for _, n := range []uint64{0, b.ItemLen - 1, b.ItemLen + 1} {
				row := newRow(l, 0)
				row[i] = make([]byte, n)
				var be *BufferError
				if err := call(row); !errors.As(err, &be) || *be != (BufferError{i, b.Name, b.ItemLen, n}) || !errors.Is(err, ErrBuffer) {
					t.Errorf("%s, %s of %d bytes: %v", name, b.Name, n, err)
				}
			}
		}
		row := newRow(l, 0)
		row[1] = row[1][:60]
		if err, want := call(row), "metadata: buffer does not fit the layout: buffer 1 (cached_tokens): want 64 bytes, got 60"; err == nil || err.Error() != want {
			t.Errorf("%s: got %v", name, err)
		}
		for _, bad := range [][][]byte{nil, row[1:], append(slices.Clone(row), nil)} {
			if err := call(bad); !errors.Is(err, ErrBuffer) {
				t.Errorf("%s, %d buffers: %v", name, len(bad), err)
			}
		}
	}
}

// Nothing of a record is in the slot any more after the next one.
func TestEncodeOverwrites(t *testing.T) {
	for _, r := range Releases() {
		l := mustLayout(t, r, allOptions)
		used, fresh := newRow(l, 0), newRow(l, 0)
		if err := l.Encode(used, fullRecord(l, testRand())); err != nil {
			t.Fatal(err)
		}
		for _, row := range [][][]byte{used, fresh} {
			if err := l.Encode(row, &Record{Room: 3, OutputID: 4}); err != nil {
				t.Fatal(err)
			}
		}
		diffRows(t, l, used, fresh)
	}
}

// DSA positions that are all negative are none: that is how a prefill without them writes it.
func TestDSANone(t *testing.T) {
	l := mustLayout(t, SGLang0523, allOptions)
	for _, tt := range []struct {
		dsa  []int32
		want int
	}{
		{nil, 0},
		{slices.Repeat([]int32{-1}, 24), 0},
		{append(slices.Repeat([]int32{-1}, 23), 0), 24},
	} {
		row := newRow(l, 7)
		rec := fullRecord(l, testRand())
		rec.Draft.DSATopK = tt.dsa
		if err := l.Encode(row, rec); err != nil {
			t.Fatal(err)
		}
		if err := l.DecodeInto(rec, row, rec.Room, Want{Draft: true}); err != nil || len(rec.Draft.DSATopK) != tt.want {
			t.Errorf("%v: got %v, %v", tt.dsa, rec.Draft.DSATopK, err)
		}
	}
}

// A decoded record keeps its values when the slot is used again.
func TestDecodeCopies(t *testing.T) {
	l := mustLayout(t, SGLang0523, allOptions)
	row := newRow(l, 0)
	want := fullRecord(l, testRand())
	if err := l.Encode(row, want); err != nil {
		t.Fatal(err)
	}
	var got Record
	if err := l.DecodeInto(&got, row, want.Room, wantOf(want)); err != nil {
		t.Fatal(err)
	}
	for _, b := range row {
		clear(b)
	}
	sameRecord(t, &got, want)
}

// A record that is decoded into keeps nothing of what it held, whatever layout that was of.
func TestDecodeEmptiesRecord(t *testing.T) {
	o := allOptions
	o.Checksums = true
	for _, r := range Releases() {
		l := mustLayout(t, r, Options{})
		row := newRow(l, 0)
		want := &Record{Room: 3, OutputID: 4}
		if err := l.Encode(row, want); err != nil {
			t.Fatal(err)
		}
		got := fullRecord(mustLayout(t, SGLang0523, o), testRand())
		got.SamplingMask.Absent = true
		if err := l.DecodeInto(got, row, 3, Want{}); err != nil {
			t.Fatal(err)
		}
		sameRecord(t, got, want)
	}
}

// Before 0.5.23 the word of the signature has no meaning, and may hold anything.
func TestDecodeSignature(t *testing.T) {
	for r, want := range map[Release]Checksum{SGLang0521: {Digest: 5}, SGLang0522: {Digest: 5}, SGLang0523: {5, 6}} {
		l := mustLayout(t, r, Options{Checksums: true})
		row := newRow(l, 0)
		if err := l.Encode(row, &Record{Room: 3}); err != nil {
			t.Fatal(err)
		}
		putUint64s(row[l.index[fieldChecksum]], 5, 6)
		var rec Record
		if err := l.DecodeInto(&rec, row, 3, Want{}); err != nil || rec.Checksum != want {
			t.Errorf("%v: got %+v, %v", r, rec.Checksum, err)
		}
	}
}
