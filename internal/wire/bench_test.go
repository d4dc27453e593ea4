package wire

import (
	"fmt"
	"testing"
)

func BenchmarkParseTag(b *testing.B) {
	for _, c := range []string{"7311246508322714412_kv_12_1_3", "7311246508322714412_kv_12_1_3_part_1_4", "7311246508322714412_aux"} {
		text := []byte(c)
		b.Run(c[20:], func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := ParseTag(text); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkAppendKV(b *testing.B) {
	b.ReportAllocs()
	buf := make([]byte, 0, 64)
	for b.Loop() {
		buf = AppendKV(buf[:0], 7311246508322714412, 12, true, 3)
	}
}

func BenchmarkMetadata(b *testing.B) {
	for _, pages := range []int{16, 65536} {
		m := sampleMetadata()
		m.KVIndices = make([]int32, pages)
		for i := range m.KVIndices {
			m.KVIndices[i] = int32(i)
		}
		var e Encoder
		frames, err := e.Metadata(m)
		if err != nil {
			b.Fatal(err)
		}
		frames = clone(frames)
		b.Run(fmt.Sprintf("encode/%d", pages), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := e.Metadata(m); err != nil {
					b.Fatal(err)
				}
			}
		})
		b.Run(fmt.Sprintf("parse/%d", pages), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := ParseAtPrefill(frames, Limits{}); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkKVStatus(b *testing.B) {
	var e Encoder
	s := &KVStatus{Room: 7311246508322714412, Status: PollSuccess, PrefillRank: 3}
	frames, err := e.KVStatus(s)
	if err != nil {
		b.Fatal(err)
	}
	frames = clone(frames)
	b.Run("encode", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if _, err := e.KVStatus(s); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("parse", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if _, err := ParseAtDecode(frames, Limits{}); err != nil {
				b.Fatal(err)
			}
		}
	})
}
