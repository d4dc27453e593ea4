package embedded

import (
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/nixlkv/nixlkv/internal/engine"
)

// BenchmarkWrite moves 256 MiB in descriptors of 32 KiB that are apart, to each kind of
// memory; "copy" is what the machine does without an engine.
func BenchmarkWrite(b *testing.B) {
	const size, page = 256 << 20, 32 << 10
	b.Run("copy", func(b *testing.B) {
		src, dst := foreign(b, size), shared(b, size)
		fill(src.data, 1)
		fill(dst.data, 2)
		b.SetBytes(size)
		for b.Loop() {
			for off := 0; off < size; off += page {
				copy(dst.data[off:off+page], src.data[off:])
			}
		}
	})
	for _, kind := range kinds {
		for _, workers := range []int{1, 2} {
			b.Run(fmt.Sprintf("%s/workers=%d", kind.name, workers), func(b *testing.B) {
				p := newPair(b, kind, size, WithWorkers(workers))
				fill(p.local.data, 1)
				fill(p.peer.data, 2)
				spec := p.spec(b, engine.Write, page)
				spec.NoMerge = true
				run(b, p, transfer(b, p.a, spec), size)
			})
		}
	}
}

func run(b *testing.B, p *pair, r engine.Request, size int64) {
	post := func() {
		if _, err := p.a.Post(r, nil, false); err != nil {
			b.Fatal(err)
		}
		for poll(p.a, r) == engine.InProgress {
			// As a completion loop does. One that yields without a pause keeps Go's scheduler
			// from looking at the sockets, and measures that.
			time.Sleep(20 * time.Microsecond)
		}
		if err := p.a.Reason(r); err != nil {
			b.Fatal(err)
		}
	}
	post() // connects and maps
	b.SetBytes(size)
	b.ReportAllocs()
	for b.Loop() {
		post()
	}
}

// BenchmarkSmall is the way of a small chunk: 64 KiB and a notification, to its end.
func BenchmarkSmall(b *testing.B) {
	for _, kind := range kinds {
		b.Run(kind.name, func(b *testing.B) {
			const size = 64 << 10
			p := newPair(b, kind, size)
			spec := p.spec(b, engine.Write, 4096)
			spec.NoMerge, spec.HasNotif, spec.Notif = true, true, []byte("room_kv_0_1_0")
			r := transfer(b, p.a, spec)
			stop := make(chan struct{})
			defer close(stop)
			go func() { // the target's owner
				var buf engine.Notifications
				for {
					select {
					case <-stop:
						return
					default:
						if p.b.Notifications(&buf) != nil {
							return
						}
						runtime.Gosched()
					}
				}
			}()
			run(b, p, r, size)
		})
	}
}

// BenchmarkCreate makes and releases requests of 4,096 descriptors out of 65,536.
func BenchmarkCreate(b *testing.B) {
	const page, total, count = 4096, 1 << 16, 4096
	p := newPair(b, memfdKind, page*total)
	var index [count]int32
	for i := range index {
		index[i] = int32((i * 7) % total) // none next to the last
	}
	local, remote := newList(b, p.a, p.local.pages(page)...), newList(b, p.a, p.peer.pages(page)...)
	lp, err := p.a.PrepareLocal(local)
	if err != nil {
		b.Fatal(err)
	}
	rp, err := p.a.PrepareRemote(p.remote, remote)
	if err != nil {
		b.Fatal(err)
	}
	defer p.a.FreePrepared(lp)
	defer p.a.FreePrepared(rp)
	create := func(b *testing.B, spec engine.Spec) {
		b.ReportAllocs()
		for b.Loop() {
			r, _, err := p.a.Create(&spec)
			if err != nil {
				b.Fatal(err)
			}
			if err := p.a.Release(r); err != nil {
				b.Fatal(err)
			}
		}
	}
	b.Run("index=4096", func(b *testing.B) {
		create(b, engine.Spec{Op: engine.Write, LocalPrep: lp, RemotePrep: rp, LocalIndex: index[:], RemoteIndex: index[:]})
	})
	b.Run("list=65536", func(b *testing.B) {
		create(b, engine.Spec{Op: engine.Write, Remote: p.remote, LocalList: local, RemoteList: remote, NoMerge: true})
	})
	b.Run("prepare=65536", func(b *testing.B) {
		for b.Loop() {
			h, err := p.a.PrepareLocal(local)
			if err != nil {
				b.Fatal(err)
			}
			if err := p.a.FreePrepared(h); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("poll=4096", func(b *testing.B) {
		r := transfer(b, p.a, engine.Spec{Op: engine.Write, LocalPrep: lp, RemotePrep: rp, LocalIndex: index[:], RemoteIndex: index[:]})
		reqs, out := make([]engine.Request, 4096), make([]engine.Status, 4096)
		for i := range reqs {
			reqs[i] = r
		}
		b.ReportAllocs()
		for b.Loop() {
			p.a.Poll(reqs, out)
		}
	})
}
