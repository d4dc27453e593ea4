package nixl

import (
	"math/rand/v2"
	"os"
	"runtime"
	"strconv"
	"strings"
	"testing"
)

// After a warm-up nothing grows: not in the library, not in the process.
func TestSteadyState(t *testing.T) {
	const pages, page, transfers = 64, 4096, 10_000
	eachEngine(t, func(t *testing.T, c engineCase) {
		e := c.open(t)
		p, d := newSide(t, e, pages*page), newSide(t, e, pages*page)
		r := p.load(t, d)
		l := blockList(t, p.a, uint64(p.buf.Addr()), page, pages)
		local := must[*Prepared](t)(p.a.Prepare(l))
		check(t, l.Clear())
		check(t, l.AppendRuns(Run{Addr: uint64(d.buf.Addr()), Len: page, Stride: page, Count: pages}))
		remote := must[*Prepared](t)(r.Prepare(l))
		byList, byIndex := p.a.NewTransfer(), p.a.NewTransfer()
		ll, rl := must[*List](t)(p.a.NewList(DRAM)), must[*List](t)(p.a.NewList(DRAM))
		rng := rand.New(rand.NewPCG(3, 4))
		var notifs Notifications
		seen := 0
		run := func(n int) {
			for i := range n {
				x := byIndex
				if i%2 == 0 {
					src, dst := indices(rng, pages, 16), indices(rng, pages, 16)
					check(t, x.CreateIndexed(Write, local, src, remote, dst, TransferOptions{Post: true, Notif: []byte("7_kv_0_0_0")}))
				} else {
					x = byList
					check(t, ll.Clear())
					check(t, rl.Clear())
					check(t, ll.Append(p.desc(i%pages*page, page)))
					check(t, rl.Append(d.desc(i*7%pages*page, page)))
					check(t, x.Create(Write, ll, r, rl, TransferOptions{Post: true, Notif: []byte("7_kv_1_1_0")}))
				}
				wait(t, x)
				check(t, x.Release())
				check(t, d.a.Notifications(&notifs))
				seen += notifs.Len()
			}
		}
		run(transfers / 5)
		before, stats := processState(t), p.a.Stats()
		run(transfers)
		after := processState(t)
		if got := p.a.Stats(); got != stats {
			t.Errorf("agent: %+v, was %+v", got, stats)
		}
		if after.fds != before.fds || after.goroutines > before.goroutines {
			t.Errorf("process: %+v, was %+v", after, before)
		}
		if grown := after.rss - before.rss; grown > 8<<20 {
			t.Errorf("resident memory grew by %d KiB over %d transfers", grown>>10, transfers)
		}
		t.Logf("before %+v, after %+v", before, after)
		seen += len(drained(t, d.a, transfers+transfers/5-seen))
		if seen != transfers+transfers/5 {
			t.Errorf("%d notifications of %d transfers", seen, transfers+transfers/5)
		}
	})
}

type procState struct {
	rss, fds, goroutines int
}

func processState(t *testing.T) procState {
	t.Helper()
	runtime.GC()
	b, err := os.ReadFile("/proc/self/statm")
	check(t, err)
	pages, err := strconv.Atoi(strings.Fields(string(b))[1])
	check(t, err)
	fds, err := os.ReadDir("/proc/self/fd")
	check(t, err)
	return procState{pages * os.Getpagesize(), len(fds), runtime.NumGoroutine()}
}
