// Package metadata is what is in the aux slots of a transfer: SGLang's MetadataBuffers
// (sglang/srt/disaggregation/utils.py), typed, for the releases 0.5.18 to 0.5.23.
//
// With the last chunk of a request the prefill sends, besides KV pages, one slot of
// metadata: the first output token, how much of the prompt was cached, logprobs, the state
// that speculative decoding continues from, and the room, by which the decode sees that the
// slot is its own. A slot is one row of each of 10 to 15 buffers; every buffer is an array of
// rows of equal length (its item length), registered by itself, and a slot is copied buffer by
// buffer from the prefill's slot index to the decode's.
//
// # Layouts
//
// [NewLayout] gives the buffers of a release with its [Options], in the order in which they
// are registered, with the elements of a row and what is in them:
//
//	output_ids                      int32    16       [0] the first output token
//	cached_tokens                   int32    16       [0:7], see CachedTokens
//	output_token_logprobs_val       float32  16       [0]
//	output_token_logprobs_idx       int32    16       [0]
//	output_top_logprobs_val         float32  128
//	output_top_logprobs_idx         int32    128
//	output_token_sampling_mask_len  int32    16       [0], with sampling masks
//	output_token_sampling_mask_idx  int32    M        with sampling masks
//	output_token_sampling_logprobs  float32  16 or M  with sampling masks; M from 0.5.21
//	output_topk_p                   float32  16
//	output_topk_index               int64    16
//	output_hidden_states            any      H        16 float32 without speculative decoding
//	output_dsa_topk_indices         int32    D        with DSA top-k; -1 where nothing is
//	bootstrap_room                  uint64   8        [0] the room
//	kv_checksum                     uint64   8        with checksums, from 0.5.21
//
// Everything is little-endian. The two sides must have the same layout: item lengths are not
// on the wire, and the prefill steps through the decode's buffers with its own. A shorter or
// longer row on the other side lands in other slots, and nothing tells. [Layout.Validate]
// compares two layouts where both are known, [Detect] finds out what a list of item lengths
// can be.
//
// SGLang keeps the buffers in pageable host memory, and registers them with NIXL as DRAM.
// On Ascend NPUs they are device memory and the uint64 buffers int64, with
// SGLANG_MOONCAKE_CUSTOM_MEM_POOL=INTRA_NODE_NVLINK they are CUDA memory; neither changes a
// byte of the layout.
//
// # Slots
//
// [Layout.Encode] writes a [Record] into a row as set_buf would into one that was never
// used. SGLang leaves in a slot what an earlier request had put there and this one has not;
// Encode overwrites it, so that nothing of one request reaches another.
//
// [Layout.DecodeInto] reads it. A slot does not tell whether its request had logprobs, how
// many, or whether there is a draft state: both sides know from the request, and [Want] says
// it here, like the request's own attributes do in DecodeTransferQueue._commit_transfer_to_req.
//
// The room in a slot is a check and no signal. Buffers are copied one by one, in no order:
// read a slot when the transfer is known to be complete.
//
// A Layout is immutable and safe for concurrent use. [Buffers] adds bounds and slot indices
// to memory of the caller's; different slots may be used concurrently.
package metadata
