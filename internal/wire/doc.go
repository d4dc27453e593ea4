// Package wire encodes and decodes what prefill and decode workers tell each other: the
// multipart messages on their ZMQ sockets and the tags of their NIXL notifications, as in
// SGLang 0.5.18 to 0.5.23 (sglang/srt/disaggregation/nixl/conn.py and common/conn.py). It
// does no I/O and keeps no state.
//
// Decoding takes bytes from outside: [ParseAtPrefill] and [ParseAtDecode] for messages,
// [ParseTag] for notifications. It never panics, allocates no more than [Limits] allow, and
// refuses with an error that names the message, the frame and what was found. What it
// returns holds no reference to the frames, except [Tag.Agent].
//
// Encoding goes through an [Encoder] for messages and through the Append functions for
// tags. What SGLang has a sender for comes out byte for byte as from that sender of release
// 0.5.23; earlier releases ignore the one frame that is new to them.
//
// Numbers are ASCII decimals without sign or leading zeros, the only form that SGLang's
// senders write. Packed arrays are little-endian.
package wire
