//go:build linux

package hostmem_test

import (
	"errors"
	"fmt"

	"github.com/nixlkv/nixlkv/hostmem"
)

func Example() {
	b, err := hostmem.Alloc(1<<20, hostmem.Name("kv-cache"), hostmem.HugePages())
	if err != nil {
		fmt.Println(err)
		return
	}
	copy(b.Bytes(), "keys and values")

	// What registers the memory with a transport holds a pin for as long.
	if err := b.Pin(); err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(errors.Is(b.Free(), hostmem.ErrInUse))
	if err := b.Unpin(); err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(b.Free())
	// Output:
	// true
	// <nil>
}
