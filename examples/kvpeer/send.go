package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/kvsender"
)

// sendArgs are the arguments of send: a room's pages, which start after the decode's prefix,
// in chunks.
type sendArgs struct {
	Room     *nixlkv.Room `json:"room"`
	Chunks   [][]int32    `json:"chunks"`
	Aux      *int         `json:"aux_index"`
	State    [][]int32    `json:"state_indices"`
	KVTokens int          `json:"num_kv_tokens"` // that a chunk holds; 0: not told
	Gap      *float64     `json:"gap_s"`         // to sleep after every chunk
	Timeout  *float64     `json:"timeout"`       // the driver's own patience

	gap, patience time.Duration
}

func (a *sendArgs) validate() (err error) {
	if len(a.Chunks) == 0 {
		return fmt.Errorf("%w: chunks is empty; a room without pages has one chunk without", errCommand)
	}
	if a.KVTokens < 0 {
		return fmt.Errorf("%w: num_kv_tokens is %d", errCommand, a.KVTokens)
	}
	if a.gap, err = seconds("gap_s", a.Gap, 0); err != nil {
		return err
	}
	a.patience, err = seconds("timeout", a.Timeout, defaultPatience)
	return err
}

// plan says what the room will send.
func (a *sendArgs) plan() kvsender.Plan {
	var p kvsender.Plan
	for _, pages := range a.Chunks {
		p.Pages += len(pages)
		if len(pages) > 0 {
			p.Tokens += a.KVTokens
		}
	}
	if a.Aux != nil {
		p.Aux = kvsender.Aux(*a.Aux)
	}
	return p
}

// send opens a room and leaves the rest to a goroutine. The room is open before the next
// command is read, so that it can be aborted.
func (p *prefill) send(d *driver, line []byte) error {
	var a sendArgs
	if err := parse(line, &a); err != nil {
		return err
	}
	room, err := roomArg(a.Room)
	if err != nil {
		return err
	}
	if err := a.validate(); err != nil {
		return err
	}
	s, err := p.openRoom(room)
	if err != nil {
		return err
	}
	d.spawn(&room, func(ctx context.Context) error { return p.sendRoom(ctx, s, &a) })
	return nil
}

// sendRoom sends a room and reports how it went. At the end of the driver's patience it
// reports where the room stands and leaves it there.
func (p *prefill) sendRoom(ctx context.Context, s *kvsender.Sender, a *sendArgs) error {
	err := p.sendAndWait(ctx, s, a)
	var failed *nixlkv.KVTransferError
	if err != nil && !errors.As(err, &failed) && !errors.Is(err, context.DeadlineExceeded) {
		return errors.Join(err, p.clear(s))
	}
	status := s.Status()
	if !status.Ended() {
		p.events.done(s.Room(), status, nil)
		return nil
	}
	failure := s.Err()
	if err := p.clear(s); err != nil {
		return err
	}
	p.events.done(s.Room(), status, failure)
	return nil
}

// sendAndWait gives the room's failure, the context's error when that or the driver's
// patience has ended, or an error that was not expected.
func (p *prefill) sendAndWait(ctx context.Context, s *kvsender.Sender, a *sendArgs) error {
	s.Computed() // there is no model
	var prefix int
	err := within(ctx, a.patience, func(ctx context.Context) (err error) {
		prefix, err = s.WaitBootstrapped(ctx)
		return err
	})
	if err == nil {
		p.events.emit(bootstrappedEvent{Event: "bootstrapped", Room: s.Room(), DecodePrefixLen: prefix})
		err = sendChunks(ctx, s, a)
	}
	var failed *nixlkv.KVTransferError
	if err == nil || errors.As(err, &failed) {
		// A room that has failed ends when nothing of it is in flight any more.
		err = within(ctx, a.patience, s.Wait)
	}
	return err
}

// sendChunks gives the room's pages to the sender.
func sendChunks(ctx context.Context, s *kvsender.Sender, a *sendArgs) error {
	if err := s.Begin(a.plan()); err != nil {
		return err
	}
	for i, pages := range a.Chunks {
		var err error
		if i == len(a.Chunks)-1 {
			err = s.Finish(pages, a.State)
		} else {
			err = s.Send(pages)
		}
		if err != nil {
			return err
		}
		if err := pause(ctx, a.gap, s.Done()); err != nil {
			return err
		}
	}
	return nil
}

// within runs a wait for at most d.
func within(ctx context.Context, d time.Duration, wait func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	return wait(ctx)
}

// pause waits for d, unless the room or the context ends first.
func pause(ctx context.Context, d time.Duration, ended <-chan struct{}) error {
	if d == 0 {
		return nil
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ended:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
