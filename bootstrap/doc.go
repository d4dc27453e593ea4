// Package bootstrap is the rendezvous of prefill and decode workers, over HTTP as SGLang
// speaks it (releases 0.5.18 to 0.5.23, disaggregation/common/conn.py).
//
// Every prefill rank registers its address at the prefill's bootstrap server. A decode
// worker asks that server for the prefill's [Topology], works out with [MapRanks] which
// ranks hold the KV cache it needs, and asks for their addresses one by one:
//
//	topology, err := client.Topology(ctx)
//	err = bootstrap.CheckDecode(topology, decode)
//	ranks, err := bootstrap.MapRanks(topology, decode.Geometry)
//	for _, t := range ranks.Targets {
//		endpoint, err := client.Rank(ctx, t.In(dpRank))
//		…
//	}
//
// [Server] and [Client] work with SGLang's own on the other end, of any of these releases.
// What is arithmetic or parsing ([MapRanks], [CheckDecode], [DecodeDPRank], [ParseTopology],
// [ParseRankInfo], addresses) does no I/O.
//
// Like SGLang's, the server trusts its network unless it is given [WithTLS] and
// [WithToken]; SGLang's workers know neither.
package bootstrap
