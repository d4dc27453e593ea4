// Package nixlkv holds the words that both sides of a KV cache transfer share: the room
// that names a request, its status, and the errors that end it.
//
// A prefill worker sends the KV cache of a request to a decode worker over NVIDIA NIXL.
// The prefill side is package kvsender, the decode side package kvreceiver; both speak
// SGLang's own wire, so that either can be paired with SGLang workers from release 0.5.18
// on. Package nixl, which moves the bytes, can be used by itself.
package nixlkv
