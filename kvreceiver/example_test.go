package kvreceiver_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/bootstrap"
	"github.com/nixlkv/nixlkv/hostmem"
	"github.com/nixlkv/nixlkv/kvreceiver"
	"github.com/nixlkv/nixlkv/kvsender"
	"github.com/nixlkv/nixlkv/metadata"
	"github.com/nixlkv/nixlkv/nixl"
	"github.com/nixlkv/nixlkv/registry"
)

// A decode receives a request. Its prefill is in the same process here; it may be SGLang's, on
// another host.
func Example() {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	engine := must(nixl.Open(nixl.Embedded)) // nixl.Auto takes NIXL where it is installed
	defer engine.Close()
	prefill := startPrefill(ctx, engine)
	defer prefill.close()

	mem := newMemory()
	defer mem.buf.Free()
	m := must(kvreceiver.NewManager(ctx, mem.layout,
		kvreceiver.WithEngine(engine), kvreceiver.WithMemory(mem.buf), kvreceiver.WithMetadata(mem.slots)))
	defer m.Close()

	r := must(m.Open(7, prefill.addr))
	defer r.Close()
	go prefill.send(ctx, 7, []int32{0, 1}, "two pages of keys and values")

	check(r.Connect(ctx)) // finds the prefill's ranks, once for all rooms
	check(r.Publish(kvreceiver.Destination{Pages: []int32{5, 2}, Aux: kvreceiver.Aux(3)}))
	check(r.Wait(ctx))
	var rec metadata.Record
	check(r.Metadata(&rec, metadata.Want{}))
	fmt.Printf("first token %d, and %s\n", rec.OutputID, mem.page(5)[:28])
	// Output: first token 9906, and two pages of keys and values
}

// A room fails. Its pages must not be used for another request before Released has returned
// nil: until then the prefill may write to them.
func ExampleReceiver_Released() {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	engine := must(nixl.Open(nixl.Embedded))
	defer engine.Close()
	prefill := startPrefill(ctx, engine)
	defer prefill.close()

	mem := newMemory()
	defer mem.buf.Free()
	m := must(kvreceiver.NewManager(ctx, mem.layout, kvreceiver.WithEngine(engine), kvreceiver.WithMemory(mem.buf)))
	defer m.Close()

	r := must(m.Open(8, prefill.addr))
	defer r.Close()
	go prefill.fail(ctx, 8, "out of pages")
	check(r.Connect(ctx))
	check(r.Publish(kvreceiver.Destination{Pages: []int32{5, 2}, Aux: kvreceiver.Aux(3)}))

	var failed *kvreceiver.KVTransferError
	if err := r.Wait(ctx); errors.As(err, &failed) {
		fmt.Println(failed.Reason)
	}
	switch err := r.Released(ctx); {
	case err == nil:
		fmt.Println("the pages are free")
	case errors.Is(err, nixlkv.ErrReleaseUnconfirmed):
		fmt.Println("the pages are lost until the prefill is known to be dead")
	default:
		fmt.Println(err) // ctx has ended
	}
	// Output:
	// nixlkv: room given up: out of pages
	// the pages are free
}

// memory is what a worker has: here 16 pages of 4 KiB in one region, and 8 metadata slots.
type memory struct {
	buf    *hostmem.Buffer
	slots  *metadata.Buffers
	layout *registry.Layout
}

const (
	numPages = 16
	pageLen  = 4096
	auxSlots = 8
)

func newMemory() *memory {
	meta := must(metadata.NewLayout(metadata.SGLang0523, metadata.Options{}))
	size := numPages * pageLen
	for _, n := range meta.ItemLens() {
		size += auxSlots * int(n)
	}
	buf := must(hostmem.Alloc(size))
	l := &registry.Layout{PageSize: 16, KVHeads: 1, TotalKVHeads: 1}
	base := uint64(buf.Addr())
	l.KV = []registry.Region{{Base: base, Len: numPages * pageLen, ItemLen: pageLen, LayerID: registry.NoLayer, Kind: registry.DRAM}}
	var rows [][]byte
	at := uint64(numPages * pageLen)
	for _, n := range meta.ItemLens() {
		l.Aux = append(l.Aux, registry.AuxBuffer{Base: base + at, Len: auxSlots * n, ItemLen: n})
		rows = append(rows, buf.Bytes()[at:at+auxSlots*n])
		at += auxSlots * n
	}
	return &memory{buf: buf, slots: must(metadata.NewBuffers(meta, auxSlots, rows)), layout: l}
}

func (m *memory) page(p int32) []byte { return m.buf.Bytes()[p*pageLen:][:pageLen] }

// examplePrefill is the other side.
type examplePrefill struct {
	addr string // of its bootstrap server
	boot *bootstrap.Server
	m    *kvsender.Manager
	mem  *memory
	done chan struct{}
}

func startPrefill(ctx context.Context, engine *nixl.Engine) *examplePrefill {
	p := &examplePrefill{boot: must(bootstrap.Listen("127.0.0.1:0")), mem: newMemory(), done: make(chan struct{})}
	p.addr = p.boot.Endpoint().String()
	p.m = must(kvsender.NewManager(ctx, p.mem.layout, kvsender.WithEngine(engine), kvsender.WithMemory(p.mem.buf), kvsender.WithBootstrap(p.addr)))
	return p
}

// send sends a text in the first of some pages.
func (p *examplePrefill) send(ctx context.Context, room nixlkv.Room, pages []int32, text string) {
	defer close(p.done)
	s := must(p.m.Open(room))
	defer s.Close()
	must(s.WaitBootstrapped(ctx))
	check(s.Begin(kvsender.Plan{Pages: len(pages), Aux: kvsender.Aux(0)}))
	copy(p.mem.page(pages[0]), text)
	check(p.mem.slots.Encode(0, &metadata.Record{Room: room, OutputID: 9906}))
	check(s.Finish(pages, nil))
	check(s.Wait(ctx))
}

// fail gives a room up when its decode has come.
func (p *examplePrefill) fail(ctx context.Context, room nixlkv.Room, why string) {
	defer close(p.done)
	s := must(p.m.Open(room))
	defer s.Close()
	must(s.WaitBootstrapped(ctx))
	s.Abort(why)
}

func (p *examplePrefill) close() {
	<-p.done
	check(errors.Join(p.m.Close(), p.boot.Close(), p.mem.buf.Free()))
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
