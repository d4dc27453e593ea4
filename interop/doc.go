// Package interop holds the tests of this library against SGLang's own transfer code,
// releases 0.5.18 to 0.5.23, and against itself. It exports nothing.
//
// The tests start ranks of a prefill and of a decode as processes: this library's are
// examples/kvpeer, SGLang's are testdata/peer/sglang_peer.py, which runs the transfer modules of
// a release unmodified, on a machine without a GPU. A setup says what both sides look like, a case
// which pages go where; what arrived is compared, as digests, with what two SGLang ranks of one
// release make of the same case. Those answers are in testdata/golden, and
//
//	go test ./interop -run TestSGLangPairs -update
//
// writes them anew. Where this library has to differ from SGLang, the case itself says what is
// right. In every case, no byte may be written that was not asked for.
//
// Setups that have the same prefill share it: starting a rank takes longer than its cases do.
//
// # Transfer paths
//
// The tables cases_*_test.go have every path that a prefill of this library takes:
//
//	path                                        SGLang's prefill   SGLang's decode
//	whole pages, TP, PP, CP, MLA, drafts        0.5.18             0.5.18
//	MLA stages that do not name their layers    0.5.21             0.5.18
//	host memory, mixed kinds, longer pages      0.5.18             0.5.18
//	heads by slices, few heads, drafts, stages  0.5.18             0.5.18
//	heads by slices into host memory            refused by SGLang  0.5.18
//	one head, TP 2 to TP 4                      fails in SGLang    0.5.18
//	DCP                                         0.5.18             0.5.18
//	DCP, a draft shared by the ranks            0.5.18, 0.5.19     0.5.18, 0.5.19
//	DCP, a draft whole on every rank            0.5.20             0.5.20
//	KV cache sharding                           0.5.23             0.5.23
//	layers dealt out to CP ranks                0.5.18             0.5.18
//	mamba, swa, dsa, swa_ring, c128_state,
//	minimax_index_k; stages, hybrid MLA         0.5.18             0.5.18
//	dsa_tail, qsa_pending, qsa_compressed       0.5.20             0.5.18
//	block_scale(_swa), minimax_dense_kv         0.5.21             0.5.18
//	swa by head slices                          0.5.22             0.5.18
//	request_row                                 0.5.23             0.5.18
//
// A release is the first whose side is tested, with all that follow it; both roles of this library
// are also tested with each other. What a release cannot do is skipped, and the skip says why. A
// decode is not told types of state, so one of 0.5.18 takes those of later releases.
//
// Not tested here, for want of a GPU: chunks that SGLang's prefill packs for DCP (it sends what
// does not fit the buffer as it does here), the descriptors that 0.5.23 prepares for state, and GPU
// memory itself; what is VRAM on the wire is host memory on both sides. Staging buffers and
// enable_cp_tp_group_sharing are not tested because this library refuses them.
//
// PEER_PYTHON names a Python with SGLang's dependencies and SGLANG_SRC a folder of its
// releases; make test fetches both. Without them the tests are skipped, unless CI is true or
// NIXLKV_REQUIRE_PEERS is 1: then they fail.
package interop
