// Command loopback is the smallest complete program: a prefill and a decode in one process,
// which move the KV cache of one request.
//
//	go run ./examples/loopback
//
// In a deployment the two are processes on two hosts, each with its half of this, and a router
// gives both the request, its room and the address of the prefill's bootstrap server.
package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/bootstrap"
	"github.com/nixlkv/nixlkv/kvreceiver"
	"github.com/nixlkv/nixlkv/kvsender"
	"github.com/nixlkv/nixlkv/metadata"
	"github.com/nixlkv/nixlkv/nixl"
)

func main() {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	if err := run(ctx, os.Stdout, nixl.Auto); err != nil {
		fmt.Fprintln(os.Stderr, "loopback:", err)
		os.Exit(1)
	}
}

// run brings both sides up, moves a request and ends them.
func run(ctx context.Context, out io.Writer, kind nixl.Kind) (err error) {
	ending := func(end func() error) { err = errors.Join(err, end()) }
	engine, err := nixl.Open(kind) // a process has one, for all its agents
	if err != nil {
		return err
	}
	defer ending(engine.Close)

	// The prefill. Its rank 0 serves the rendezvous, at which every rank registers.
	boot, err := bootstrap.Listen("127.0.0.1:0")
	if err != nil {
		return err
	}
	defer ending(boot.Close)
	addr := boot.Endpoint().String()
	source, err := newMemory()
	if err != nil {
		return err
	}
	sender, err := kvsender.NewManager(ctx, source.layout,
		kvsender.WithEngine(engine), kvsender.WithMemory(source.buf), kvsender.WithBootstrap(addr))
	if err != nil {
		return errors.Join(err, source.free())
	}
	defer ending(func() error { return source.freeAfter(sender.Close()) })

	// The decode.
	target, err := newMemory()
	if err != nil {
		return err
	}
	receiver, err := kvreceiver.NewManager(ctx, target.layout,
		kvreceiver.WithEngine(engine), kvreceiver.WithMemory(target.buf), kvreceiver.WithMetadata(target.slots))
	if err != nil {
		return errors.Join(err, target.free())
	}
	defer ending(func() error { return target.freeAfter(receiver.Close()) })

	// A request of three pages. Each side has allocated pages and a metadata slot of its own.
	const room = 4711
	from, to := []int32{12, 13, 40}, []int32{7, 3, 4}
	sent := make(chan error, 1)
	go func() { sent <- prefill(ctx, sender, source, room, from, 0) }()
	token, err := decode(ctx, receiver, addr, room, to, 5)
	if err := errors.Join(err, <-sent); err != nil {
		return err
	}
	for i := range to {
		for region := range regions {
			if !bytes.Equal(target.page(region, to[i]), source.page(region, from[i])) {
				return fmt.Errorf("page %d, region %d: not what was sent", to[i], region)
			}
		}
	}
	_, err = fmt.Fprintf(out, "room %d over the %v engine: %d pages of %d regions arrived, and first token %d\n",
		room, engine.Info().Kind, len(to), regions, token)
	return err
}

// prefill computes a request's KV cache, here a page at a time, and sends it.
func prefill(ctx context.Context, m *kvsender.Manager, mem *memory, room nixlkv.Room, pages []int32, slot int) error {
	s, err := m.Open(room)
	if err != nil {
		return err
	}
	defer s.Close() // gives the room up if it has not ended
	// The decode tells where the pages go, and how many tokens it has already: here none.
	if _, err := s.WaitBootstrapped(ctx); err != nil {
		return err
	}
	if err := s.Begin(kvsender.Plan{Pages: len(pages), Aux: kvsender.Aux(slot)}); err != nil {
		return err
	}
	for ; len(pages) > 1; pages = pages[1:] {
		mem.compute(pages[:1])
		if err := s.Send(pages[:1]); err != nil { // never blocks
			return err
		}
	}
	mem.compute(pages)
	if err := mem.slots.Encode(slot, &metadata.Record{Room: room, OutputID: 9906}); err != nil {
		return err
	}
	if err := s.Finish(pages, nil); err != nil {
		return err
	}
	return s.Wait(ctx) // the pages are read until the room has ended
}

// decode receives a request's KV cache, and gives the first token.
func decode(ctx context.Context, m *kvreceiver.Manager, addr string, room nixlkv.Room, pages []int32, slot int) (int32, error) {
	r, err := m.Open(room, addr)
	if err != nil {
		return 0, err
	}
	defer r.Close()
	// Finds the prefill's ranks, once for all rooms.
	if err := r.Connect(ctx); err != nil {
		return 0, err
	}
	if err := r.Publish(kvreceiver.Destination{Pages: pages, Aux: kvreceiver.Aux(slot)}); err != nil {
		return 0, err
	}
	if err := r.Wait(ctx); err != nil {
		return 0, err // the pages may be used again once r.Released gives nil
	}
	var rec metadata.Record
	err = r.Metadata(&rec, metadata.Want{})
	return rec.OutputID, err
}
