package registry_test

import (
	"errors"
	"fmt"
	"log"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/registry"
)

// A worker with two layers of MHA describes its memory: first the K regions, then the V
// regions, each 512 pages of 64 tokens.
func Example() {
	const pages, page = 512, 64 * 8 * 128 * 2 // tokens × heads × head size × bytes
	layout := &registry.Layout{
		PageSize: 64, KVHeads: 8, TotalKVHeads: 32,
		Ranks: registry.Ranks{TP: 4, TPRank: 1, EngineRank: 1},
		Aux:   []registry.AuxBuffer{{Base: 0x10_0000, Len: 64 * 1024, ItemLen: 64}},
	}
	for i := range uint64(4) {
		layout.KV = append(layout.KV, registry.Region{
			Base: 0x7f00_0000_0000 + i<<32, Len: pages * page, ItemLen: page,
			LayerID: registry.NoLayer, Kind: registry.VRAM,
		})
	}
	if err := layout.Validate(); err != nil {
		log.Fatal(err)
	}
	kind, err := layout.SourceKind()
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(layout.Pages(), "pages in", kind, "and", layout.AuxSlots(), "aux slots")

	layout.KV[3].ItemLen--
	layout.Ranks.TPRank = 4
	fmt.Println(layout.Validate())
	// Output:
	// 512 pages in VRAM and 1024 aux slots
	// KV[3].Len: nixlkv: KV regions do not match: expected a multiple of ItemLen 131071, got 67108864
	// Ranks.TPRank: nixlkv: unsupported topology: expected 0 to 3, got 4
}

// A prefill keeps its decode peers with a plan for each. Here a plan is a string.
func ExampleTable() {
	table := registry.NewTable(registry.TableConfig[string]{
		Drop: func(peer *registry.Peer, plan string, reason error) {
			fmt.Printf("dropped %q: %v\n", plan, reason)
		},
	})
	defer table.Close()

	preparation, outcome, err := table.Register(&registry.Peer{
		Agent: "decode-0", Addr: "10.0.0.9:41000", Dialect: registry.Status,
		KV: []registry.Region{{Base: 0x7f00_0000_0000, Len: 1 << 20, ItemLen: 1 << 10, Kind: registry.VRAM}},
	})
	if err != nil {
		log.Fatal(err)
	}
	for preparation != nil { // nil for a repeat; one follows if the peer registers anew meanwhile
		p := preparation.Peer()
		preparation, err = preparation.Attach(fmt.Sprintf("%d pages to %s", p.Pages(), p.Agent))
		if err != nil {
			log.Fatal(err)
		}
	}
	fmt.Println(outcome)

	lease, err := table.Acquire("decode-0") // for a room
	if err != nil {
		log.Fatal(err)
	}
	for _, agent := range table.ByAddr("10.0.0.9:41000") { // its connection broke
		table.MarkStale(agent, nixlkv.ErrPeerLost)
	}
	_, err = table.Acquire("decode-0") // for another room
	fmt.Println(errors.Is(err, nixlkv.ErrPeerStale))
	fmt.Println("still held:", lease.Plan())
	lease.Release()
	// Output:
	// added
	// true
	// still held: 1024 pages to decode-0
	// dropped "1024 pages to decode-0": nixlkv: peer gone
}
