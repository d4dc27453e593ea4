package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.uber.org/zap"

	"github.com/nixlkv/nixlkv/kvreceiver"
	"github.com/nixlkv/nixlkv/metadata"
)

// releaseTimeout bounds how long a decode that has failed waits for its prefill.
const releaseTimeout = 2 * time.Second

// decode is the side that the KV cache is sent to.
type decode struct {
	*program
	worker
	plan    *plan
	manager *kvreceiver.Manager
	met     bool     // the prefill has been found
	want    []origin // of each page of the pool

	latencies []time.Duration // of requests, from telling where they go
}

// run is the decode from start to end. When it returns, everything is closed.
func (d *decode) run(ctx context.Context) (err error) {
	defer func() { err = d.close(ctx, err) }()
	if err := d.open(ctx); err != nil {
		return err
	}
	for round := range d.plan.rounds {
		for _, batch := range d.plan.batches(round) {
			if err := d.receive(ctx, batch); err != nil {
				return err
			}
		}
		d.log.Info("round arrived, verifying it", zap.Int("round", round))
		if err := verify(ctx, d.pool, d.plan.shape, d.plan.seed, d.want); err != nil {
			return err
		}
	}
	d.log.Info("verified, parting")
	return d.report(d.stdout)
}

// open opens the engine, makes an empty cache and registers it.
func (d *decode) open(ctx context.Context) error {
	d.plan = newPlan(&d.config)
	d.want = make([]origin, d.plan.pool)
	if err := checkMemory(d.plan.shape.bytes(d.plan.pool)); err != nil {
		return err
	}
	if err := d.openEngine(d.program); err != nil {
		return err
	}
	d.log.Info("making an empty cache")
	layout, err := d.makeMemory(ctx, roleDecode, d.plan)
	if err != nil {
		return err
	}
	d.manager, err = kvreceiver.NewManager(ctx, layout,
		kvreceiver.WithEngine(d.engine), kvreceiver.WithMetadata(d.slots.Buffers),
		kvreceiver.WithListen(d.host, 0), kvreceiver.WithLogger(d.log), kvreceiver.WithMemory(d.memory()...),
		kvreceiver.WithWaitingTimeout(d.patience()), kvreceiver.WithReleaseTimeout(releaseTimeout), kvreceiver.WithCloseTimeout(closeTimeout))
	return err
}

// receive tells the prefill where requests go, and waits until they are there.
func (d *decode) receive(ctx context.Context, batch []request) (err error) {
	receivers := make([]*kvreceiver.Receiver, 0, len(batch))
	defer func() {
		for _, v := range receivers {
			err = errors.Join(err, v.Close()) // gives up what has not ended
		}
	}()
	d.log.Info("asking for requests", zap.Int("requests", len(batch)))
	for _, r := range batch {
		v, err := d.manager.Open(r.room, d.bootstrap)
		if err != nil {
			return err
		}
		receivers = append(receivers, v)
		if err := d.connect(ctx, v); err != nil {
			return err
		}
		if err := v.Publish(kvreceiver.Destination{Pages: r.targets, Aux: kvreceiver.Aux(r.target)}); err != nil {
			return err
		}
	}
	for i, v := range receivers {
		if err := d.await(ctx, v, batch[i]); err != nil {
			return err
		}
	}
	return nil
}

// connect finds the prefill. The first time it may not be there yet, and is asked again and
// again; after that it only has to be asked where something has changed.
func (d *decode) connect(ctx context.Context, v *kvreceiver.Receiver) error {
	if !d.met {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, d.patience())
		defer cancel()
	}
	err := v.Connect(ctx)
	d.met = d.met || err == nil
	return err
}

// await waits for a request and reads what the prefill tells of it.
func (d *decode) await(ctx context.Context, v *kvreceiver.Receiver, r request) error {
	if err := v.Wait(ctx); err != nil {
		return err
	}
	var rec metadata.Record
	if err := v.Metadata(&rec, metadata.Want{}); err != nil {
		return err
	}
	if rec.OutputID != r.token {
		return fmt.Errorf("room %d: first token %d, want %d", r.room, rec.OutputID, r.token)
	}
	arrive(d.want, r)
	m := v.Metrics()
	d.latencies = append(d.latencies, m.Ended.Sub(m.Published))
	d.log.Debug("request arrived", zap.Uint64("room", uint64(r.room)))
	return nil
}

// close gives everything back and gives the run's error, or what went wrong here.
func (d *decode) close(ctx context.Context, err error) error {
	err = explain(ctx, err)
	var manager func() error
	if d.manager != nil {
		manager = d.manager.Close
	}
	cleanup := d.worker.close(manager)
	if err != nil && cleanup != nil {
		d.log.Warn("cleaning up", zap.Error(cleanup))
		return err
	}
	return errors.Join(err, cleanup)
}
