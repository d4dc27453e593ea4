package bootstrap_test

import (
	"context"
	"fmt"
	"log"
	"time"

	"github.com/nixlkv/nixlkv/bootstrap"
)

// A prefill of two ranks registers, and a decode worker finds the rank that it needs.
func Example() {
	server, err := bootstrap.Listen("127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	defer server.Close()
	client, err := bootstrap.NewClient(server.Endpoint().String())
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()

	for rank := range 2 {
		err := client.Register(ctx, bootstrap.RankInfo{
			AttnTPSize: 2, AttnTPRank: rank, RankIP: "10.0.0.7", RankPort: 41000 + rank,
			PageSize: 64, KVCacheDtype: "auto",
		})
		if err != nil {
			log.Fatal(err)
		}
	}

	decode := bootstrap.DecodeConfig{
		Geometry: bootstrap.Geometry{TP: 4, EngineRank: 3},
		PageSize: 64, KVCacheDtype: "auto",
	}
	prefill, err := client.Topology(ctx)
	if err != nil {
		log.Fatal(err)
	}
	if err := bootstrap.CheckDecode(prefill, decode); err != nil {
		log.Fatal(err)
	}
	ranks, err := bootstrap.MapRanks(prefill, decode.Geometry)
	if err != nil {
		log.Fatal(err)
	}
	dp, _, err := bootstrap.DecodeDPRank(prefill, 12345, bootstrap.NoDPRank, false)
	if err != nil {
		log.Fatal(err)
	}
	for _, target := range ranks.Targets {
		endpoint, err := client.Rank(ctx, target.In(dp))
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println("TP rank", target.TP, "at", endpoint.TCP())
	}
	fmt.Println("shared by", ranks.Destinations, "decode workers,", ranks.Responses, "response to wait for")
	// Output:
	// TP rank 1 at tcp://10.0.0.7:41001
	// shared by 2 decode workers, 1 response to wait for
}
