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
// PEER_PYTHON names a Python with SGLang's dependencies and SGLANG_SRC a folder of its
// releases; make test fetches both. Without them the tests are skipped, unless CI is true or
// NIXLKV_REQUIRE_PEERS is 1: then they fail.
package interop
