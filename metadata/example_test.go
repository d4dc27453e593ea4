package metadata_test

import (
	"errors"
	"fmt"
	"log"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/metadata"
)

// A prefill fills its slot 2, the transfer copies it row by row to the decode's slot 5, and the
// decode reads it.
func Example() {
	layout, err := metadata.NewLayout(metadata.SGLang0523, metadata.Options{
		HiddenSize: 4096, HiddenDType: metadata.BFloat16, // an EAGLE draft model
	})
	if err != nil {
		log.Fatal(err)
	}
	// Memory of 8 slots a side; a server takes it from package hostmem and registers it.
	memory := func() (m [][]byte) {
		for _, n := range layout.ItemLens() {
			m = append(m, make([]byte, 8*n))
		}
		return m
	}
	prefill, err := metadata.NewBuffers(layout, 8, memory())
	if err != nil {
		log.Fatal(err)
	}
	decode, err := metadata.NewBuffers(layout, 8, memory())
	if err != nil {
		log.Fatal(err)
	}

	const room nixlkv.Room = 4611686018427387904
	err = prefill.Encode(2, &metadata.Record{
		Room:         room,
		OutputID:     9906,
		CachedTokens: metadata.CachedTokens{Cached: 512, Device: 512},
		Logprob:      metadata.Logprob{Value: -0.25, Token: 9906},
		TopLogprobs:  []metadata.Logprob{{Value: -0.25, Token: 9906}, {Value: -1.75, Token: 13225}},
	})
	if err != nil {
		log.Fatal(err)
	}

	want := metadata.Want{Logprob: true, TopLogprobs: 2} // as the request says
	var rec metadata.Record
	fmt.Println(errors.Is(decode.DecodeInto(&rec, 5, room, want), metadata.ErrNotWritten))

	from, _ := prefill.AppendRow(nil, 2)
	to, _ := decode.AppendRow(nil, 5)
	for i := range from { // what a NIXL write does
		copy(to[i], from[i])
	}
	if err := decode.DecodeInto(&rec, 5, room, want); err != nil {
		log.Fatal(err)
	}
	fmt.Println(rec.OutputID, rec.CachedTokens.Cached, rec.TopLogprobs)

	err = decode.CheckRoom(5, 77)
	fmt.Println(errors.Is(err, nixlkv.ErrCorruptMetadata), err)
	// Output:
	// true
	// 9906 512 [{-0.25 9906} {-1.75 13225}]
	// true nixlkv: metadata corruption: slot holds room 4611686018427387904, want room 77
}

// The peer's item lengths are known, say from its log, and its release is not.
func ExampleDetect() {
	lens := []uint64{64, 64, 64, 64, 512, 512, 64, 16384, 64, 64, 128, 8192, 64}
	fits, err := metadata.Detect(lens)
	if err != nil {
		log.Fatal(err)
	}
	for _, f := range fits {
		fmt.Printf("%v: masks of %d tokens, hidden states of %d bytes\n",
			f.Releases, f.Options.SamplingMaskTokens, f.Options.HiddenSize)
	}
	// Output:
	// [0.5.18 0.5.19 0.5.20]: masks of 4096 tokens, hidden states of 8192 bytes
}

// Two servers that differ in one setting.
func ExampleLayout_Validate() {
	prefill, err := metadata.NewLayout(metadata.SGLang0521, metadata.Options{SamplingMaskTokens: 4096})
	if err != nil {
		log.Fatal(err)
	}
	decode, err := metadata.NewLayout(metadata.SGLang0521, metadata.Options{SamplingMaskTokens: 1024})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(prefill.Validate(decode.ItemLens()))
	// Output:
	// metadata: buffer 7 (output_token_sampling_mask_idx): want item length 16384, got 4096: nixlkv: prefill and decode are configured differently
}
