package metadata

import (
	"fmt"
	"testing"
)

// served are layouts and records of the sizes that servers have.
var served = []struct {
	name    string
	release Release
	options Options
	record  func(l *Layout) *Record
}{
	{"first token", SGLang0523, Options{}, func(*Layout) *Record { return &Record{Room: 1, OutputID: 2} }},
	{"20 logprobs", SGLang0523, Options{}, func(*Layout) *Record {
		return &Record{Room: 1, TopLogprobs: make([]Logprob, 20)}
	}},
	{"draft 7168 bfloat16, DSA 2048", SGLang0523, Options{HiddenSize: 7168, HiddenDType: BFloat16, DSATopK: 2048}, func(l *Layout) *Record {
		r := fullRecord(l, testRand())
		r.TopLogprobs = nil
		return r
	}},
	{"everything, masks 4096", SGLang0523, Options{HiddenSize: 7168, HiddenDType: BFloat16, DSATopK: 2048, SamplingMaskTokens: 4096, Checksums: true},
		func(l *Layout) *Record { return fullRecord(l, testRand()) }},
}

func TestNoAllocations(t *testing.T) {
	for _, s := range served {
		l := mustLayout(t, s.release, s.options)
		b, err := NewBuffers(l, 2, newMemory(l, 2))
		if err != nil {
			t.Fatal(err)
		}
		rec, got := s.record(l), Record{}
		want := wantOf(rec)
		row, err := b.AppendRow(nil, 1)
		if err != nil {
			t.Fatal(err)
		}
		calls := map[string]func() error{
			"Layout.Encode":      func() error { return l.Encode(row, rec) },
			"Layout.DecodeInto":  func() error { return l.DecodeInto(&got, row, rec.Room, want) },
			"Buffers.Encode":     func() error { return b.Encode(1, rec) },
			"Buffers.DecodeInto": func() error { return b.DecodeInto(&got, 1, rec.Room, want) },
			"Buffers.CheckRoom":  func() error { return b.CheckRoom(1, rec.Room) },
			"Buffers.AppendRow":  func() (err error) { row, err = b.AppendRow(row[:0], 1); return err },
		}
		if err := b.Encode(1, rec); err != nil {
			t.Fatal(err)
		}
		for name, call := range calls {
			n := testing.AllocsPerRun(20, func() {
				if err := call(); err != nil {
					t.Fatal(err)
				}
			})
			if n != 0 {
				t.Errorf("%s, %s: %v allocations", s.name, name, n)
			}
		}
	}
}

func BenchmarkEncode(b *testing.B) {
	for _, s := range served {
		b.Run(s.name, func(b *testing.B) {
			l := mustLayout(b, s.release, s.options)
			row, rec := newRow(l, 0), s.record(l)
			b.ReportAllocs()
			for b.Loop() {
				if err := l.Encode(row, rec); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkDecodeInto(b *testing.B) {
	for _, s := range served {
		b.Run(s.name, func(b *testing.B) {
			l := mustLayout(b, s.release, s.options)
			row, rec, got := newRow(l, 0), s.record(l), Record{}
			want := wantOf(rec)
			if err := l.Encode(row, rec); err != nil {
				b.Fatal(err)
			}
			if err := l.DecodeInto(&got, row, rec.Room, want); err != nil { // makes the slices
				b.Fatal(err)
			}
			b.ReportAllocs()
			for b.Loop() {
				if err := l.DecodeInto(&got, row, rec.Room, want); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkDetect(b *testing.B) {
	for _, n := range []int{0, 2048} {
		b.Run(fmt.Sprintf("DSA %d", n), func(b *testing.B) {
			lens := mustLayout(b, SGLang0523, Options{DSATopK: n}).ItemLens()
			b.ReportAllocs()
			for b.Loop() {
				if _, err := Detect(lens); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
