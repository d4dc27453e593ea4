package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/kvreceiver"
)

// receiveArgs are the arguments of receive: where a room's pages go.
type receiveArgs struct {
	Room    *nixlkv.Room `json:"room"`
	Addr    string       `json:"bootstrap_addr"`
	KV      []int32      `json:"kv_indices"`
	Aux     *int         `json:"aux_index"`
	State   [][]int32    `json:"state_indices"`
	Prefix  int          `json:"decode_prefix_len"` // tokens
	DPRank  int          `json:"prefill_dp_rank"`
	Timeout *float64     `json:"timeout"` // the driver's own patience

	patience time.Duration
}

func (a *receiveArgs) validate() (err error) {
	if a.Addr == "" {
		return fmt.Errorf("%w: no bootstrap_addr", errCommand)
	}
	a.patience, err = seconds("timeout", a.Timeout, defaultPatience)
	return err
}

// destination says where the room goes.
func (a *receiveArgs) destination() kvreceiver.Destination {
	d := kvreceiver.Destination{Pages: a.KV, State: a.State, Prefix: a.Prefix}
	if a.Aux != nil {
		d.Aux = kvreceiver.Aux(*a.Aux)
	}
	return d
}

// receive opens a room and leaves the rest to a goroutine. The room is open before the next
// command is read, so that it can be aborted.
func (p *decode) receive(d *driver, line []byte) error {
	var a receiveArgs
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
	r, err := p.openRoom(room, a.Addr, a.DPRank)
	if err != nil {
		return err
	}
	d.spawn(&room, func(ctx context.Context) error { return p.receiveRoom(ctx, r, &a) })
	return nil
}

// receiveRoom receives a room and reports how it went. At the end of the driver's patience it
// reports where the room stands and leaves it there.
func (p *decode) receiveRoom(ctx context.Context, r *kvreceiver.Receiver, a *receiveArgs) error {
	published, err := p.receiveAndWait(ctx, r, a)
	if ctx.Err() != nil {
		return errors.Join(err, p.clear(r)) // the driver ends; nobody waits for the room
	}
	var failed *nixlkv.KVTransferError
	if err != nil && !errors.As(err, &failed) && !errors.Is(err, context.DeadlineExceeded) {
		return errors.Join(err, p.clear(r))
	}
	status, failure := r.Status(), r.Err()
	if status.Ended() {
		if err := p.clear(r); err != nil {
			return err
		}
	}
	e := newDone(r.Room(), status, failure)
	if status == nixlkv.Failed && !published && noPrefill(failed) {
		e = doneEvent{Event: "done", Room: r.Room(), Status: "NoPrefill"}
	}
	if err := p.addDigests(&e, a, published); err != nil {
		return err
	}
	p.events.emit(e)
	if status == nixlkv.Failed && published {
		err := r.Released(ctx)
		p.events.emit(releasedEvent{Event: "released", Room: r.Room(), Confirmed: err == nil})
	}
	return nil
}

// receiveAndWait gives the room's failure, the context's error when that or the driver's
// patience has ended, or an error that was not expected; and whether the pages were published.
func (p *decode) receiveAndWait(ctx context.Context, r *kvreceiver.Receiver, a *receiveArgs) (published bool, err error) {
	err = within(ctx, a.patience, func(ctx context.Context) error {
		if err := r.Connect(ctx); err != nil {
			return err
		}
		return r.WaitReady(ctx)
	})
	if err != nil {
		return false, err
	}
	if err := r.Publish(a.destination()); err != nil {
		return false, err
	}
	return true, within(ctx, a.patience, r.Wait)
}

// noPrefill says whether a room failed because its prefill could not be found: nothing is known
// of its ranks then.
func noPrefill(e *nixlkv.KVTransferError) bool {
	if e == nil || len(e.Ranks) > 0 {
		return false
	}
	for _, absent := range []error{nixlkv.ErrNotReady, nixlkv.ErrPeerLost, nixlkv.ErrTimeout} {
		if errors.Is(e, absent) {
			return true
		}
	}
	return false
}

// addDigests adds what lies in the room's slots: nothing where they were not published.
func (p *decode) addDigests(e *doneEvent, a *receiveArgs, published bool) (err error) {
	if e.Status == "NoPrefill" {
		return nil
	}
	if !published {
		e.KVSHA256, err = digest(p.mem.kv, nil)
		return err
	}
	if e.KVSHA256, err = digest(p.mem.kv, a.KV); err != nil {
		return err
	}
	if a.Aux != nil {
		if e.AuxSHA256, err = digest(p.mem.aux, []int32{int32(*a.Aux)}); err != nil {
			return err
		}
	}
	for i, slots := range a.State {
		sum, err := digest(p.mem.state[i], slots)
		if err != nil {
			return err
		}
		e.StateSHA256 = append(e.StateSHA256, sum)
	}
	return nil
}
