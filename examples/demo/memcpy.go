package main

import (
	"context"
	"errors"
	"time"
)

// measureCopy copies the pages of the same requests to the same places in a second cache of
// this process, one page at a time in one thread: what the machine's memory can do. As with
// the transfers, the first request is left out if there are others.
func measureCopy(ctx context.Context, src *pool, jobs []job) (m measurement, err error) {
	dst, err := newPool(ctx, "memcpy", src.shape, src.pages)
	if err != nil {
		return m, err
	}
	defer func() { err = errors.Join(err, dst.free()) }()

	if len(jobs) > 1 {
		copyPages(dst, src, jobs[0])
		jobs = jobs[1:]
	}
	begin := time.Now()
	for _, j := range jobs {
		if ctx.Err() != nil {
			return m, context.Cause(ctx)
		}
		start := time.Now()
		copyPages(dst, src, j)
		m.add(src.shape.bytes(len(j.sources)), time.Since(start))
	}
	m.wall = time.Since(begin)
	return m, nil
}

func copyPages(dst, src *pool, j job) {
	for region := range src.shape.regions() {
		for i, page := range j.sources {
			copy(dst.page(region, j.targets[i]), src.page(region, page))
		}
	}
}
