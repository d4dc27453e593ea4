package metadata

import "github.com/nixlkv/nixlkv"

// Record is what a prefill tells a decode about one request, besides its KV cache. The zero
// value of everything but Room is a request that brings none of it.
//
// A Record that is decoded into keeps its slices and reuses them; it shares no memory with
// the slot.
type Record struct {
	// Room is the request's room, 1 to nixlkv.MaxRoom. SGLang writes 0 for a request
	// without one, which its decode never takes; here it is an error.
	Room nixlkv.Room
	// OutputID is the first output token, sampled by the prefill.
	OutputID int32
	// CachedTokens counts what the prefill found in its caches.
	CachedTokens CachedTokens

	// Logprob is of the first output token.
	Logprob Logprob
	// TopLogprobs are the likeliest tokens at its place, at most MaxTopLogprobs.
	TopLogprobs []Logprob

	SamplingMask SamplingMask
	Draft        Draft
	Checksum     Checksum
}

// CachedTokens are the numbers in cached_tokens, in this order (MetadataBuffers.set_buf).
type CachedTokens struct {
	Cached  int32 // prompt tokens found in any cache
	Device  int32 // of these, on the GPU
	Host    int32 // in host memory
	Storage int32 // in storage
	Image   int32 // prompt tokens that stand for images
	Audio   int32 // for audio
	Video   int32 // for video
}

// Logprob is a token and its log probability.
type Logprob struct {
	Value float32 // all bits are kept, also those of a NaN
	Token int32
}

// SamplingMask is the set of tokens that the first output token was sampled from, after
// top-k, top-p and min-p, for a request with return_sampling_mask.
type SamplingMask struct {
	// Absent: the sampler gave no mask (length -1 on the wire). Up to 0.5.20 only, and
	// without Tokens and Logprobs.
	Absent bool
	// Tokens of the mask, at most Options.SamplingMaskTokens.
	Tokens []int32
	// Logprobs has one element, for the sampled token (sampling_logprobs_mode "selected",
	// the only one up to 0.5.20), or one a token of the mask ("support").
	Logprobs []float32
}

// Draft is the state that speculative decoding continues from, for EAGLE-like draft models.
// It is there if HiddenStates is not empty.
type Draft struct {
	// TopK are the draft model's likeliest next tokens, at most MaxTopK; as many as
	// speculative_eagle_topk, times the steps with a multi-layer EAGLE.
	TopK []DraftToken
	// HiddenStates are the draft model's, as they are in memory: Options.HiddenSize
	// elements of Options.HiddenDType.
	HiddenStates []byte
	// DSATopK are the positions that the draft model's sparse attention chose, relative to
	// the request, -1 where there are fewer. Options.DSATopK elements, or none. All of them
	// negative means the same as none, and is decoded as none.
	DSATopK []int32
}

// DraftToken is a candidate of the draft model.
type DraftToken struct {
	P     float32 // probability; all bits are kept
	Token int64
}

// Checksum is over the pages that the prefill sent, from 0.5.21 and only with
// Options.Checksums. Digest 0 means none: the decode then checks nothing.
type Checksum struct {
	Digest uint64 // Adler-32
	// Signature of the layout that the digest was taken of (kv_layout_signature), from
	// 0.5.23: a decode of another layout does not compare. 0 before, and without a digest.
	Signature uint64
}

// MaskLogprobs says whether a request has a sampling mask, and which logprobs with it.
type MaskLogprobs uint8

const (
	NoMask          MaskLogprobs = iota // no sampling mask was asked for
	SelectedLogprob                     // a mask, and the logprob of the sampled token
	SupportLogprobs                     // a mask, and the logprob of each of its tokens; from 0.5.21
)

// Want is what the decode knows of a request, and so what it reads from the slot; the slot
// itself does not say. The zero value reads the first token, the cached tokens and, with
// Options.Checksums, the checksum, which are always there.
type Want struct {
	Logprob      bool         // the request has return_logprob
	TopLogprobs  int          // its top_logprobs_num, 0 to MaxTopLogprobs; not without Logprob
	SamplingMask MaskLogprobs // its return_sampling_mask and sampling_logprobs_mode
	Draft        bool         // this decode has an EAGLE-like draft model; zeros if the prefill has none
	TopK         int          // how many draft tokens, 0 to MaxTopK; not without Draft
}

// check refuses what the layout cannot give.
func (w Want) check(l *Layout) error {
	switch {
	case w.TopLogprobs < 0 || w.TopLogprobs > MaxTopLogprobs:
		return valueErrorf(fieldTopLogprobsVal, "%d top logprobs wanted, a slot has %d", w.TopLogprobs, MaxTopLogprobs)
	case w.TopLogprobs > 0 && !w.Logprob:
		return valueErrorf(fieldTopLogprobsVal, "top logprobs wanted without the logprob")
	case w.TopK < 0 || w.TopK > MaxTopK:
		return valueErrorf(fieldTopKIndex, "%d draft tokens wanted, a slot has %d", w.TopK, MaxTopK)
	case w.TopK > 0 && !w.Draft:
		return valueErrorf(fieldTopKIndex, "draft tokens wanted without the draft state")
	case w.SamplingMask > SupportLogprobs:
		return valueErrorf(fieldMaskLogprobs, "unknown kind %d of logprobs", w.SamplingMask)
	case w.SamplingMask != NoMask && l.options.SamplingMaskTokens == 0:
		return valueErrorf(fieldMaskLen, "sampling mask wanted, the layout has none")
	case w.SamplingMask == SupportLogprobs && !l.release.supportLogprobs():
		return valueErrorf(fieldMaskLogprobs, "logprobs of all tokens wanted, SGLang %v has only the sampled one's", l.release)
	}
	return nil
}
