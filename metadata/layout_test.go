package metadata

import (
	"errors"
	"reflect"
	"strings"
	"testing"

	"github.com/nixlkv/nixlkv"
)

func mustLayout(t testing.TB, r Release, o Options) *Layout {
	t.Helper()
	l, err := NewLayout(r, o)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func TestParseRelease(t *testing.T) {
	for _, r := range Releases() {
		got, err := ParseRelease(r.String())
		if err != nil || got != r {
			t.Errorf("%v: got %v, %v", r, got, err)
		}
	}
	for _, bad := range []string{"", "unknown", "0.5.17", "0.5.24", "0.5.18 ", "v0.5.18", "0.5.23.post1"} {
		if r, err := ParseRelease(bad); !errors.Is(err, nixlkv.ErrUnsupported) {
			t.Errorf("%q: got %v, %v", bad, r, err)
		}
	}
	if s := Release(99).String(); s != "Release(99)" {
		t.Error(s)
	}
	if s := DType(99).String(); s != "DType(99)" || DType(99).Size() != 0 {
		t.Error(s, DType(99).Size())
	}
}

func TestItemLens(t *testing.T) {
	draft := Options{HiddenSize: 7168, HiddenDType: BFloat16}
	tests := []struct {
		release Release
		options Options
		want    []uint64
	}{
		{SGLang0518, Options{}, []uint64{64, 64, 64, 64, 512, 512, 64, 128, 64, 64}},
		{SGLang0523, Options{}, []uint64{64, 64, 64, 64, 512, 512, 64, 128, 64, 64}},
		{SGLang0519, draft, []uint64{64, 64, 64, 64, 512, 512, 64, 128, 14336, 64}},
		{SGLang0520, Options{SamplingMaskTokens: 4096}, []uint64{64, 64, 64, 64, 512, 512, 64, 16384, 64, 64, 128, 64, 64}},
		{SGLang0521, Options{SamplingMaskTokens: 4096}, []uint64{64, 64, 64, 64, 512, 512, 64, 16384, 16384, 64, 128, 64, 64}},
		{SGLang0518, Options{DSATopK: 2048}, []uint64{64, 64, 64, 64, 512, 512, 64, 128, 64, 8192, 64}},
		{SGLang0522, Options{Checksums: true}, []uint64{64, 64, 64, 64, 512, 512, 64, 128, 64, 64, 64}},
		{SGLang0523, Options{HiddenSize: 6144, HiddenDType: Float32, SamplingMaskTokens: 100, DSATopK: 2048, Checksums: true},
			[]uint64{64, 64, 64, 64, 512, 512, 64, 400, 400, 64, 128, 24576, 8192, 64, 64}},
	}
	for _, tt := range tests {
		l := mustLayout(t, tt.release, tt.options)
		if got := l.ItemLens(); !reflect.DeepEqual(got, tt.want) {
			t.Errorf("%v %+v:\n got %v\nwant %v", tt.release, tt.options, got, tt.want)
		}
		if l.Release() != tt.release || l.Options() != tt.options {
			t.Errorf("layout of %v %+v says %v %+v", tt.release, tt.options, l.Release(), l.Options())
		}
		if err := l.Validate(tt.want); err != nil {
			t.Error(err)
		}
	}
}

func TestNewLayoutRefuses(t *testing.T) {
	tests := []struct {
		name    string
		release Release
		options Options
		want    error
	}{
		{"no release", 0, Options{}, nixlkv.ErrUnsupported},
		{"later release", SGLang0523 + 1, Options{}, nixlkv.ErrUnsupported},
		{"checksums too early", SGLang0520, Options{Checksums: true}, nixlkv.ErrUnsupported},
		{"checksums too early, by options", SGLang0518, Options{Checksums: true}, ErrOptions},
		{"negative hidden size", SGLang0523, Options{HiddenSize: -1, HiddenDType: Float16}, ErrOptions},
		{"negative mask", SGLang0523, Options{SamplingMaskTokens: -1}, ErrOptions},
		{"negative DSA", SGLang0523, Options{DSATopK: -1}, ErrOptions},
		{"size without type", SGLang0523, Options{HiddenSize: 16}, ErrOptions},
		{"type without size", SGLang0523, Options{HiddenDType: Float16}, ErrOptions},
		{"integer hidden states", SGLang0523, Options{HiddenSize: 16, HiddenDType: Int32}, ErrOptions},
		{"unknown type", SGLang0523, Options{HiddenSize: 16, HiddenDType: 99}, ErrOptions},
		{"huge hidden size", SGLang0523, Options{HiddenSize: MaxItemLen/2 + 1, HiddenDType: Float16}, ErrOptions},
		{"huge mask", SGLang0523, Options{SamplingMaskTokens: 1<<63 - 1}, ErrOptions},
		{"huge DSA", SGLang0523, Options{DSATopK: 1 << 62}, ErrOptions},
	}
	for _, tt := range tests {
		if l, err := NewLayout(tt.release, tt.options); l != nil || !errors.Is(err, tt.want) {
			t.Errorf("%s: got %v, %v", tt.name, l, err)
		}
	}
	mustLayout(t, SGLang0523, Options{HiddenSize: MaxItemLen / 2, HiddenDType: Float16})
}

func TestValidate(t *testing.T) {
	with := func(lens []uint64, i int, n uint64) []uint64 {
		out := append([]uint64{}, lens...)
		out[i] = n
		return out
	}
	l := mustLayout(t, SGLang0521, Options{SamplingMaskTokens: 32, Checksums: true})
	lens := l.ItemLens()
	older := mustLayout(t, SGLang0520, Options{SamplingMaskTokens: 32}).ItemLens()
	tests := []struct {
		name string
		peer []uint64
		want LayoutError
		text string
	}{
		{"other length", with(lens, 0, 4), LayoutError{0, "output_ids", 64, 4, 14}, "buffer 0 (output_ids): want item length 64, got 4"},
		{"zero length", with(lens, 5, 0), LayoutError{5, "output_top_logprobs_idx", 512, 0, 14}, "buffer 5 (output_top_logprobs_idx): want item length 512, got 0"},
		{"masks of an older release", older, LayoutError{8, "output_token_sampling_logprobs", 128, 64, 13}, "buffer 8 (output_token_sampling_logprobs): want item length 128, got 64"},
		{"no checksums", lens[:13], LayoutError{13, "kv_checksum", 64, 0, 13}, "buffer 13 (kv_checksum) missing"},
		{"none", nil, LayoutError{0, "output_ids", 64, 0, 0}, "buffer 0 (output_ids) missing"},
		{"one more, of length 0", append(with(lens, 0, 64), 0), LayoutError{14, "", 0, 0, 15}, "buffer 14 too many, with item length 0"},
		{"one more", append(with(lens, 0, 64), 96), LayoutError{14, "", 0, 96, 15}, "buffer 14 too many, with item length 96"},
	}
	for _, tt := range tests {
		err := l.Validate(tt.peer)
		var got *LayoutError
		if !errors.As(err, &got) || *got != tt.want || !errors.Is(err, nixlkv.ErrMismatch) || !strings.Contains(err.Error(), tt.text) {
			t.Errorf("%s: got %v", tt.name, err)
		}
	}
}

// What a layout gives out is the caller's to change.
func TestLayoutIsImmutable(t *testing.T) {
	l := mustLayout(t, SGLang0523, Options{})
	l.ItemLens()[0] = 1
	l.Buffers()[0].ItemLen = 1
	if l.ItemLens()[0] != 64 || l.Buffers()[0].ItemLen != 64 {
		t.Error("layout was changed from outside")
	}
}
