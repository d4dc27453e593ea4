package main

import (
	"context"
	"errors"
	"time"
)

// measureCopy copies the pages of the same requests to the same places in a second cache of
// this process, one page at a time in one thread: what the machine's memory can do. As with
// the transfers, the first request is left out if there are others.
func measureCopy(ctx context.Context, src *pool, requests []request) (m measurement, err error) {
	dst, err := newPool(ctx, "memcpy", src.shape, src.pages)
	if err != nil {
		return m, err
	}
	defer func() { err = errors.Join(err, dst.free()) }()

	if len(requests) > 1 {
		copyPages(dst, src, requests[0])
		requests = requests[1:]
	}
	samples := make([]sample, 0, len(requests))
	for _, r := range requests {
		if ctx.Err() != nil {
			return m, context.Cause(ctx)
		}
		start := time.Now()
		copyPages(dst, src, r)
		samples = append(samples, sample{bytes: src.shape.bytes(len(r.sources)), begun: start, ended: time.Now()})
	}
	m.add(samples)
	return m, nil
}

func copyPages(dst, src *pool, r request) {
	for region := range src.shape.regions() {
		for i, page := range r.sources {
			copy(dst.page(region, r.targets[i]), src.page(region, page))
		}
	}
}
