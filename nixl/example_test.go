package nixl_test

import (
	"context"
	"fmt"
	"time"

	"github.com/nixlkv/nixlkv/hostmem"
	"github.com/nixlkv/nixlkv/nixl"
)

// Two agents in one process; between processes the metadata travels by whatever connects
// them.
func Example() {
	src, dst := must(hostmem.Alloc(1<<20)), must(hostmem.Alloc(1<<20))
	defer src.Free()
	defer dst.Free()
	engine := must(nixl.Open(nixl.Embedded)) // nixl.Auto takes NIXL where it is installed
	defer engine.Close()                     // also ends what was made from it

	// The decode side registers memory; its metadata is what the prefill side needs.
	decode := must(engine.NewAgent("decode"))
	must(decode.Register(nixl.Host(dst)))
	metadata := must(decode.LocalMetadata())

	prefill := must(engine.NewAgent("prefill"))
	must(prefill.Register(nixl.Host(src)))
	peer := must(prefill.Load(metadata))

	// One piece, written to offset 4096, and a notification that follows it.
	n := copy(src.Bytes(), "keys and values")
	local, remote := must(prefill.NewList(nixl.DRAM)), must(prefill.NewList(nixl.DRAM))
	check(local.Append(nixl.Desc{Addr: uint64(src.Addr()), Len: uint64(n)}))
	check(remote.Append(nixl.Desc{Addr: uint64(dst.Addr()) + 4096, Len: uint64(n)}))
	write := prefill.NewTransfer()
	check(write.Create(nixl.Write, local, peer, remote, nixl.TransferOptions{Post: true, Notif: []byte("room 7")}))

	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	check(write.Wait(ctx))
	var arrived nixl.Notifications
	for arrived.Len() == 0 && ctx.Err() == nil {
		check(decode.Notifications(&arrived))
	}
	for from, msg := range arrived.All() {
		fmt.Printf("%s from %s: %s\n", msg, from, dst.Bytes()[4096:4096+n])
	}
	// Output: room 7 from prefill: keys and values
}

func must[T any](v T, err error) T {
	check(err)
	return v
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}
