package nixl

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
)

// The tests in this file say what every engine does the same.

func TestTransferByDescriptors(t *testing.T) {
	eachEngine(t, func(t *testing.T, c engineCase) {
		e := c.open(t)
		p, d := newSide(t, e, 1<<20), newSide(t, e, 1<<20)
		r := p.load(t, d)
		fillPattern(p.buf.Bytes(), 1)
		fillPattern(d.buf.Bytes(), 2)
		was := bytes.Clone(d.buf.Bytes())

		local := p.list(t, p.desc(0, 4096), p.desc(8192, 100), p.desc(70000, 1))
		remote := p.list(t, d.desc(65536, 4096), d.desc(1<<20-100, 100), d.desc(3, 1))
		x := p.a.NewTransfer()
		check(t, x.Create(Write, local, r, remote, TransferOptions{Notif: []byte("7_kv_0_1_0")}))
		check(t, x.Post())
		wait(t, x)
		if got := drained(t, d.a, 1); got[0] != [2]string{p.a.Name(), "7_kv_0_1_0"} {
			t.Errorf("notification %q", got)
		}
		want := bytes.Clone(was)
		copy(want[65536:], p.buf.Bytes()[:4096])
		copy(want[1<<20-100:], p.buf.Bytes()[8192:8292])
		want[3] = p.buf.Bytes()[70000]
		if !bytes.Equal(d.buf.Bytes(), want) {
			t.Error("the written bytes are not those of the source, or others changed")
		}
		check(t, x.Release())

		fillPattern(d.buf.Bytes(), 3)
		before := bytes.Clone(p.buf.Bytes())
		check(t, x.Create(Read, local, r, remote, TransferOptions{Post: true}))
		wait(t, x)
		copy(before, d.buf.Bytes()[65536:65536+4096])
		copy(before[8192:], d.buf.Bytes()[1<<20-100:])
		before[70000] = d.buf.Bytes()[3]
		if !bytes.Equal(p.buf.Bytes(), before) {
			t.Error("the bytes read are not those of the peer, or others changed")
		}
		check(t, x.Release())
		check(t, local.Free())
		check(t, remote.Free())
	})
}

func TestTransferByIndex(t *testing.T) {
	const page, pages = 4096, 256
	eachEngine(t, func(t *testing.T, c engineCase) {
		e := c.open(t)
		p, d := newSide(t, e, page*pages), newSide(t, e, page*pages)
		r := p.load(t, d)
		l := must[*List](t)(p.a.NewList(DRAM))
		check(t, l.AppendRuns(Run{Addr: uint64(p.buf.Addr()), Len: page, Stride: page, Count: pages}))
		local := must[*Prepared](t)(p.a.Prepare(l))
		check(t, l.Clear())
		check(t, l.AppendRuns(Run{Addr: uint64(d.buf.Addr()), Len: page, Stride: page, Count: pages}))
		remote := must[*Prepared](t)(r.Prepare(l))
		check(t, l.Free())
		if local.Len() != pages || remote.Len() != pages {
			t.Fatalf("prepared %d and %d descriptors", local.Len(), remote.Len())
		}

		rng := rand.New(rand.NewPCG(1, 2))
		x := p.a.NewTransfer()
		for round := range 8 {
			n := 1 + rng.IntN(pages)
			src, dst := indices(rng, pages, n), indices(rng, pages, n)
			if round%2 == 1 { // runs that can be merged
				slices.Sort(src)
				slices.Sort(dst)
			}
			stampBlocks(p.buf.Bytes(), page, uint64(round))
			clear(d.buf.Bytes())
			check(t, x.CreateIndexed(Write, local, src, remote, dst, TransferOptions{Post: true, NoMerge: round%4 == 3}))
			wait(t, x)
			want := make([]byte, page*pages)
			for i := range src {
				copy(want[int(dst[i])*page:][:page], p.buf.Bytes()[int(src[i])*page:][:page])
			}
			if !bytes.Equal(d.buf.Bytes(), want) {
				t.Fatalf("round %d: wrong bytes", round)
			}
			check(t, x.Release())
		}
		check(t, local.Free())
		check(t, remote.Free())
	})
}

// indices picks n distinct ones of m, in random order.
func indices(rng *rand.Rand, m, n int) []int32 {
	out := make([]int32, n)
	for i, x := range rng.Perm(m)[:n] {
		out[i] = int32(x)
	}
	return out
}

func TestNotifications(t *testing.T) {
	eachEngine(t, func(t *testing.T, c engineCase) {
		e := c.open(t)
		p, d := newSide(t, e, 4096), newSide(t, e, 4096)
		r := p.load(t, d)
		var sent [][]byte
		for i, n := range []int{0, 1, 255, 256, 4096, 60000} {
			b := make([]byte, n)
			fillPattern(b, uint64(i+1))
			sent = append(sent, b)
		}
		sent = append(sent, []byte("zero\x00inside\x00"), []byte("\xff\xfe_\n"))
		for _, m := range sent {
			check(t, r.Notify(m))
		}
		// The same with a transfer, replaced at each posting.
		x := p.a.NewTransfer()
		check(t, x.Create(Write, p.list(t, p.desc(0, 64)), r, p.list(t, d.desc(0, 64)), TransferOptions{Notif: []byte{}}))
		check(t, x.Post())
		wait(t, x)
		for _, m := range sent {
			check(t, x.PostNotif(m))
			wait(t, x)
		}
		check(t, x.Post()) // the last one again
		wait(t, x)
		check(t, x.Release())

		want := map[string]int{"": 1, string(sent[len(sent)-1]): 1}
		for _, m := range sent {
			want[string(m)] += 2
		}
		got := map[string]int{}
		for _, n := range drained(t, d.a, 2*len(sent)+2) {
			if n[0] != p.a.Name() {
				t.Errorf("notification of %q", n[0])
			}
			got[n[1]]++
		}
		for m, n := range want {
			if got[m] != n {
				t.Errorf("message of %d bytes came %d times, want %d", len(m), got[m], n)
			}
		}
		if len(got) != len(want) {
			t.Errorf("%d different messages, want %d", len(got), len(want))
		}
	})
}

// Many in one drain, larger than the drain buffer's first size.
func TestNotificationsInOneDrain(t *testing.T) {
	eachEngine(t, func(t *testing.T, c engineCase) {
		e := c.open(t)
		p, d := newSide(t, e, 4096), newSide(t, e, 4096)
		r := p.load(t, d)
		const n = 2000
		for i := range n {
			check(t, r.Notify(fmt.Appendf(nil, "%d_kv_%d_0_0", 1<<40+i, i)))
		}
		check(t, r.Notify([]byte("last")))
		seen := map[string]bool{}
		for _, m := range drained(t, d.a, n+1) {
			if seen[m[1]] {
				t.Errorf("%q came twice", m[1])
			}
			seen[m[1]] = true
		}
		if len(seen) != n+1 {
			t.Errorf("got %d different notifications, want %d", len(seen), n+1)
		}
	})
}

func TestPollMany(t *testing.T) {
	const n, size = 64, 1024
	eachEngine(t, func(t *testing.T, c engineCase) {
		e := c.open(t)
		p, d := newSide(t, e, n*size), newSide(t, e, n*size)
		r := p.load(t, d)
		fillPattern(p.buf.Bytes(), 9)
		ts, out := make([]*Transfer, n+1), make([]Status, n+1)
		for i := range n {
			ts[i] = p.a.NewTransfer()
			check(t, ts[i].Create(Write, p.list(t, p.desc(i*size, size)), r, p.list(t, d.desc(i*size, size)), TransferOptions{Post: true}))
		}
		ts[n] = p.a.NewTransfer() // never posted: neither done nor in progress
		for {
			check(t, p.a.Poll(ts, out))
			if !slices.Contains(out[:n], InProgress) {
				break
			}
		}
		for i, st := range out[:n] {
			if st != Success {
				t.Errorf("transfer %d: %v", i, st)
			}
			check(t, ts[i].Release())
		}
		if out[n] == Success || out[n] == InProgress {
			t.Errorf("a transfer that was never posted is %v", out[n])
		}
		if bad := differing(d.buf.Bytes(), p.buf.Bytes(), size); bad != 0 {
			t.Errorf("%d of %d blocks are wrong", bad, n)
		}
	})
}

func TestPluginsAndParameters(t *testing.T) {
	eachEngine(t, func(t *testing.T, c engineCase) {
		e := c.open(t)
		a := newAgent(t, e, WithTelemetry())
		plugins := must[[]string](t)(a.Plugins())
		if len(plugins) == 0 {
			t.Fatal("no plugins")
		}
		if c.kind == Native && !slices.Contains(plugins, DefaultBackend) {
			t.Errorf("plugins %q lack %s", plugins, DefaultBackend)
		}
		params, mems, err := a.PluginParams(DefaultBackend)
		check(t, err)
		if !slices.Contains(mems, DRAM) {
			t.Errorf("%s serves %v", DefaultBackend, mems)
		}
		t.Logf("%s: %v %v", DefaultBackend, params, mems)
		if _, _, err := a.PluginParams("NO_SUCH_PLUGIN"); err == nil {
			t.Error("parameters of a plugin that does not exist")
		}
		if _, err := a.CreateBackend("NO_SUCH_PLUGIN", nil); err == nil {
			t.Error("a backend that does not exist was created")
		}
	})
}

func TestTelemetryAndCost(t *testing.T) {
	eachEngine(t, func(t *testing.T, c engineCase) {
		e := c.open(t)
		p, d := newSide(t, e, 1<<16, WithTelemetry()), newSide(t, e, 1<<16)
		r := p.load(t, d)
		x := p.a.NewTransfer()
		check(t, x.Create(Write, p.list(t, p.desc(0, 1<<14), p.desc(1<<15, 1<<14)), r, p.list(t, d.desc(0, 1<<14), d.desc(1<<15, 1<<14)), TransferOptions{}))
		if _, err := x.Telemetry(); err == nil {
			t.Error("telemetry of a transfer that was not posted")
		}
		check(t, x.Post())
		wait(t, x)
		m := must[Telemetry](t)(x.Telemetry())
		if m.Bytes != 1<<15 || m.Descriptors == 0 || m.Descriptors > 2 {
			t.Errorf("telemetry %+v", m)
		}
		if cost, err := x.EstimateCost(); err == nil && cost.Duration <= 0 {
			t.Errorf("cost %+v", cost)
		}
		check(t, x.Release())
	})
}

// A metadata blob of a peer that registered before, and one more buffer after: loading anew
// reaches both.
func TestLoadAgainAfterRegistering(t *testing.T) {
	eachEngine(t, func(t *testing.T, c engineCase) {
		e := c.open(t)
		p, d := newSide(t, e, 4096), newSide(t, e, 4096)
		r := p.load(t, d)
		more := alloc(t, 4096)
		reg := must[*Registration](t)(d.a.Register(Host(more)))
		local := p.list(t, p.desc(0, 64))
		remote := p.list(t, Desc{Addr: uint64(more.Addr()), Len: 64})
		x := p.a.NewTransfer()
		if err := x.Create(Write, local, r, remote, TransferOptions{Post: true}); err == nil {
			t.Fatal("memory was written that the loaded metadata does not name")
		}
		fillPattern(p.buf.Bytes(), 4)
		r2 := p.load(t, d)
		check(t, x.Create(Write, local, r2, remote, TransferOptions{Post: true}))
		wait(t, x)
		if !bytes.Equal(more.Bytes()[:64], p.buf.Bytes()[:64]) {
			t.Error("wrong bytes")
		}
		check(t, x.Release())
		check(t, r.Invalidate())
		check(t, r2.Check())
		check(t, r2.Invalidate())
		check(t, reg.Deregister())
	})
}
