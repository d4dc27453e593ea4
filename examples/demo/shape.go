package main

import "fmt"

// shape is the KV cache of a model as a paged server keeps it: one region of memory for the
// K of each layer and one for the V, every region an array of pages of equal size. A page
// number stands for the same tokens in all regions.
type shape struct {
	layers     int
	kvHeads    int
	headDim    int
	elemBytes  int
	pageTokens int
}

// llama3 is Llama-3-8B in 16-bit floats with 16 tokens a page. The model has 32 layers;
// fewer make a smaller run with pages of the same size.
func llama3(layers int) shape {
	return shape{layers: layers, kvHeads: 8, headDim: 128, elemBytes: 2, pageTokens: 16}
}

const llama3Layers = 32

// regions counts the regions: K of every layer, then V of every layer, in SGLang's order.
func (s shape) regions() int { return 2 * s.layers }

// pageBytes is the size of one page in one region.
func (s shape) pageBytes() int { return s.pageTokens * s.kvHeads * s.headDim * s.elemBytes }

// bytes is what a number of pages takes in all regions together.
func (s shape) bytes(pages int) int64 {
	return int64(pages) * int64(s.regions()) * int64(s.pageBytes())
}

// regionName says what a region holds.
func (s shape) regionName(region int) string {
	if region < s.layers {
		return fmt.Sprintf("K of layer %d", region)
	}
	return fmt.Sprintf("V of layer %d", region-s.layers)
}

// String describes the model.
func (s shape) String() string {
	name := "Llama-3-8B"
	if s.layers != llama3Layers {
		name += " cut down"
	}
	return fmt.Sprintf("%s: %d layers, K and V, %d KV heads × %d × %d bytes", name, s.layers, s.kvHeads, s.headDim, s.elemBytes)
}
