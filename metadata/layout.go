package metadata

import (
	"fmt"
	"slices"

	"github.com/nixlkv/nixlkv"
)

// What every release has room for in a slot, in elements.
const (
	// MaxTopLogprobs: MetadataBuffers.__init__, max_top_logprobs_num; no scheduler passes
	// another number.
	MaxTopLogprobs = 128
	// MaxTopK: draft tokens (output_topk_p, output_topk_index).
	MaxTopK = 16
	// MaxItemLen bounds the item length of any buffer, in bytes. It is this package's own:
	// real ones are at most some 100 KiB.
	MaxItemLen = 1 << 30

	// rowWidth: rows are padded to 64 bytes, the least that RDMA is good at.
	rowWidth        = 16
	roomWidth       = 8
	defaultHidden   = 16 // Scheduler.init_disaggregation without speculative decoding
	fixedBuffers    = 10
	maskBuffers     = 3
	optionalBuffers = maskBuffers + 2
)

// DType is the element type of a buffer. The zero value is none.
type DType uint8

// Raw is one byte of something else: hidden states whose type is not known.
const (
	Int32 DType = iota + 1
	Int64
	Uint64
	Float32
	Float16
	BFloat16
	Raw
)

var (
	dtypeNames = [...]string{"none", "int32", "int64", "uint64", "float32", "float16", "bfloat16", "raw"}
	dtypeSizes = [...]int{0, 4, 8, 8, 4, 2, 2, 1}
)

// String gives PyTorch's name of the type.
func (d DType) String() string {
	if int(d) < len(dtypeNames) {
		return dtypeNames[d]
	}
	return fmt.Sprintf("DType(%d)", uint8(d))
}

// Size gives the bytes of an element, 0 for an unknown type.
func (d DType) Size() int {
	if int(d) < len(dtypeSizes) {
		return dtypeSizes[d]
	}
	return 0
}

// Options are the settings of a server that decide which buffers it has. The zero value is a
// server without any of them.
type Options struct {
	// HiddenSize and HiddenDType are of the draft model's hidden states, for EAGLE-like
	// speculative decoding: ModelConfig.spec_hidden_size and dtype
	// (get_draft_recurrent_hidden_state_spec). Both zero without: then the buffer is there
	// still, 16 float32 wide and unused (Scheduler.init_disaggregation). Float32, Float16,
	// BFloat16, or Raw with the size in bytes.
	HiddenSize  int
	HiddenDType DType
	// SamplingMaskTokens is M, the tokens that a sampling mask can have; 0 without sampling
	// masks. Up to 0.5.19 it is SGLANG_DISAGGREGATION_SAMPLING_MASK_MAX_TOKENS (0); from
	// 0.5.20 --sampling-mask-max-tokens (4096), and masks are there only with
	// SGLANG_ENABLE_DISAGG_SAMPLING_MASK.
	SamplingMaskTokens int
	// DSATopK is D, index_topk of a model whose configuration has
	// index_share_for_mtp_iteration; 0 for others (get_dsa_seed_metadata_dim). It follows
	// the model alone: both sides have the buffer, speculating or not.
	DSATopK int
	// Checksums: --disaggregation-enable-kv-checksum, from 0.5.21.
	Checksums bool
}

func (o Options) validate(r Release) error {
	switch {
	case !r.known():
		return fmt.Errorf("metadata: %w: SGLang release %v", nixlkv.ErrUnsupported, r)
	case o.HiddenSize < 0 || o.SamplingMaskTokens < 0 || o.DSATopK < 0:
		return fmt.Errorf("%w: negative size in %+v", ErrOptions, o)
	case o.Checksums && !r.checksums():
		return fmt.Errorf("%w: %w: SGLang %v has no KV checksums", ErrOptions, nixlkv.ErrUnsupported, r)
	case (o.HiddenSize == 0) != (o.HiddenDType == 0):
		return fmt.Errorf("%w: hidden states of size %d and type %v: both or none", ErrOptions, o.HiddenSize, o.HiddenDType)
	}
	switch o.HiddenDType {
	case 0, Float32, Float16, BFloat16, Raw:
		return nil
	}
	return fmt.Errorf("%w: hidden states of type %v", ErrOptions, o.HiddenDType)
}

// field numbers the buffers that any release may have, in the order of get_buf_infos.
type field uint8

const (
	fieldOutputIDs field = iota
	fieldCachedTokens
	fieldLogprobVal
	fieldLogprobIdx
	fieldTopLogprobsVal
	fieldTopLogprobsIdx
	fieldMaskLen
	fieldMaskIdx
	fieldMaskLogprobs
	fieldTopKP
	fieldTopKIndex
	fieldHiddenStates
	fieldDSATopK
	fieldRoom
	fieldChecksum
	numFields
)

var fieldNames = [numFields]string{
	"output_ids", "cached_tokens", "output_token_logprobs_val", "output_token_logprobs_idx",
	"output_top_logprobs_val", "output_top_logprobs_idx", "output_token_sampling_mask_len",
	"output_token_sampling_mask_idx", "output_token_sampling_logprobs", "output_topk_p",
	"output_topk_index", "output_hidden_states", "output_dsa_topk_indices", "bootstrap_room",
	"kv_checksum",
}

func (f field) String() string { return fieldNames[f] }

// Buffer is one buffer of a layout.
type Buffer struct {
	Name    string // SGLang's name (attribute of MetadataBuffers)
	DType   DType
	Width   int    // elements a slot
	ItemLen uint64 // bytes a slot: Width elements of DType

	field field
}

// Layout is the buffers of one release with one set of options. It is immutable.
type Layout struct {
	release Release
	options Options
	buffers []Buffer
	index   [numFields]int // position in buffers, -1 if the layout has no such buffer
}

// NewLayout gives the layout that a server of the release has with the options
// (MetadataBuffers.__init__ and get_buf_infos, and their caller
// Scheduler.init_disaggregation). Errors wrap ErrOptions or nixlkv.ErrUnsupported.
func NewLayout(r Release, o Options) (*Layout, error) {
	if err := o.validate(r); err != nil {
		return nil, err
	}
	l := &Layout{release: r, options: o, buffers: make([]Buffer, 0, fixedBuffers+optionalBuffers)}
	for f := range l.index {
		l.index[f] = -1
	}
	for f := range numFields {
		t, width := l.shape(f)
		if width == 0 {
			continue
		}
		if width > MaxItemLen/t.Size() {
			return nil, fmt.Errorf("%w: %v of %d elements is over %d bytes", ErrOptions, f, width, MaxItemLen)
		}
		l.index[f] = len(l.buffers)
		l.buffers = append(l.buffers, Buffer{Name: f.String(), DType: t, Width: width, ItemLen: uint64(width * t.Size()), field: f})
	}
	return l, nil
}

// shape gives type and width of a buffer, width 0 if the layout has none.
func (l *Layout) shape(f field) (DType, int) {
	o := &l.options
	switch f {
	case fieldOutputIDs, fieldCachedTokens, fieldLogprobIdx:
		return Int32, rowWidth
	case fieldLogprobVal:
		return Float32, rowWidth
	case fieldTopLogprobsVal:
		return Float32, MaxTopLogprobs
	case fieldTopLogprobsIdx:
		return Int32, MaxTopLogprobs
	case fieldMaskLen:
		if o.SamplingMaskTokens > 0 {
			return Int32, rowWidth
		}
	case fieldMaskIdx:
		return Int32, o.SamplingMaskTokens
	case fieldMaskLogprobs:
		if o.SamplingMaskTokens > 0 && !l.release.supportLogprobs() {
			return Float32, rowWidth
		}
		return Float32, o.SamplingMaskTokens
	case fieldTopKP:
		return Float32, MaxTopK
	case fieldTopKIndex:
		return Int64, MaxTopK
	case fieldHiddenStates:
		if o.HiddenSize == 0 {
			return Float32, defaultHidden
		}
		return o.HiddenDType, o.HiddenSize
	case fieldDSATopK:
		return Int32, o.DSATopK
	case fieldRoom:
		return Uint64, roomWidth
	case fieldChecksum:
		if o.Checksums {
			return Uint64, roomWidth
		}
	}
	return 0, 0
}

// Release gives the release that the layout is of.
func (l *Layout) Release() Release { return l.release }

// Options gives the options that the layout was made with.
func (l *Layout) Options() Options { return l.options }

// Buffers gives the buffers in the order in which they are registered. The slice is the
// caller's.
func (l *Layout) Buffers() []Buffer { return slices.Clone(l.buffers) }

// ItemLens gives the bytes a slot takes in each buffer, in order: KVArgs.aux_item_lens, what
// a registration of the buffers asks for. The slice is the caller's.
func (l *Layout) ItemLens() []uint64 {
	lens := make([]uint64, len(l.buffers))
	for i := range l.buffers {
		lens[i] = l.buffers[i].ItemLen
	}
	return lens
}

// Validate compares the layout with a peer's aux item lengths. The error is a *LayoutError
// that names the first buffer that differs, with both lengths; it wraps nixlkv.ErrMismatch.
//
// SGLang compares no lengths. 0.5.23 tells of another number of buffers in its log and sends
// the leading ones (CommonKVManager.check_peer_aux_buffer_count), which is right only if the
// missing one is the last; before, the transfer fails or writes astray.
func (l *Layout) Validate(peer []uint64) error {
	for i := range max(len(l.buffers), len(peer)) {
		e := LayoutError{Index: i, Count: len(peer)}
		if i < len(l.buffers) {
			e.Buffer, e.Want = l.buffers[i].Name, l.buffers[i].ItemLen
		}
		if i < len(peer) {
			e.Got = peer[i]
		}
		if i >= len(l.buffers) || e.Want != e.Got {
			return &e
		}
	}
	return nil
}
