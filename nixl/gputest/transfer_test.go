//go:build gpu && linux

package gputest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/nixlkv/nixlkv/nixl"
)

// transferLimit is what no healthy machine needs, the first connection included.
const transferLimit = 30 * time.Second

// pair is which GPUs the two processes use.
type pair struct {
	name      string
	gpus      int // that it needs
	peer      int // the peer's CUDA ordinal
	peerSees1 bool
}

var pairs = []pair{
	{name: "one GPU", gpus: 1, peer: 0},
	{name: "two GPUs", gpus: 2, peer: 1},
	// Ordinals are a process's own: what the peer calls 0 is another GPU here.
	{name: "two GPUs of one ordinal", gpus: 2, peer: 0, peerSees1: true},
}

// move is one piece of a transfer, n bytes, by offsets into the two memories.
type move struct{ local, remote, n int }

// shape is what a transfer consists of. None touches everything, so that a write beside
// its place is seen.
type shape struct {
	name    string
	moves   []move
	indexed bool // the moves are pages; their numbers index prepared lists
}

func shapes() []shape {
	rng := rand.New(rand.NewPCG(1, 2))
	local, remote := rng.Perm(pages), rng.Perm(pages)
	shuffled := make([]move, pages/2)
	for i := range shuffled {
		shuffled[i] = move{local[i] * pageSize, remote[i] * pageSize, pageSize}
	}
	return []shape{
		{name: "one piece", moves: []move{{pageSize, pageSize, size - 2*pageSize}}},
		{name: "odd bytes", moves: []move{{1, 3, 5}, {pageSize + 7, 5*pageSize + 1, 1001}, {size - 1, size - 2, 1}}},
		{name: "shuffled pages", moves: shuffled, indexed: true},
	}
}

// transfer is one case: from and to the memories of two kinds.
type transfer struct {
	op           nixl.Op
	local, peer  nixl.Mem
	shape        shape
	notification string
}

// TestTransfers moves every kind of memory to and from GPU memory, both ways, between two
// processes.
func TestTransfers(t *testing.T) {
	inv := need(t)
	for _, p := range pairs {
		t.Run(p.name, func(t *testing.T) {
			if len(inv.Devices) < p.gpus {
				t.Skipf("skip: not tested, needs %d GPUs, and CUDA sees %d", p.gpus, len(inv.Devices))
			}
			var env []string
			if p.peerSees1 {
				env = append(env, "CUDA_VISIBLE_DEVICES="+inv.Devices[1].UUID)
			}
			there := startPeer(t, peerConfig{uniqueName("peer"), p.peer}, env...)
			here := startWorker(t, inv.Devices[0].Ordinal)
			remote := must(here.agent.Load(there.hello.Metadata))(t)
			seed := uint64(1)
			for _, mems := range [][2]nixl.Mem{{nixl.VRAM, nixl.VRAM}, {nixl.VRAM, nixl.DRAM}, {nixl.DRAM, nixl.VRAM}} {
				for _, op := range []nixl.Op{nixl.Write, nixl.Read} {
					for _, s := range shapes() {
						x := transfer{op, mems[0], mems[1], s, ""}
						t.Run(x.name(), func(t *testing.T) {
							here.lock(t)
							x.notification = t.Name()
							x.run(t, here, there, remote, seed)
						})
						seed += 2
					}
				}
			}
		})
	}
}

func (x *transfer) name() string {
	verb, to := "write ", " to "
	if x.op == nixl.Read {
		verb, to = "read ", " from "
	}
	kinds := map[nixl.Mem]string{nixl.DRAM: "DRAM", nixl.VRAM: "VRAM"}
	return verb + kinds[x.local] + to + kinds[x.peer] + ", " + x.shape.name
}

// lock makes the worker's CUDA context current for a further goroutine. The thread ends
// with it.
func (w *worker) lock(t testing.TB) {
	t.Helper()
	runtime.LockOSThread()
	check(t, w.cuda.MakeCurrent())
}

func (x *transfer) run(t *testing.T, w *worker, p *peer, remote *nixl.Remote, seed uint64) {
	local, there := pattern(seed), pattern(seed+1)
	check(t, w.fill(x.local, local))
	p.do(t, peerRequest{Cmd: "fill", Mem: x.peer, Seed: seed + 1})
	for _, m := range x.shape.moves {
		if x.op == nixl.Write {
			copy(there[m.remote:][:m.n], local[m.local:])
		} else {
			copy(local[m.local:][:m.n], there[m.remote:])
		}
	}
	tr := w.agent.NewTransfer()
	if x.shape.indexed {
		x.createIndexed(t, tr, w, p, remote)
	} else {
		x.create(t, tr, w, p, remote)
	}
	ctx, cancel := context.WithTimeout(t.Context(), transferLimit)
	defer cancel()
	check(t, tr.Wait(ctx))
	// The notification says that the bytes are there.
	got, want := p.notifications(t, 1), notification{w.agent.Name(), x.notification}
	if len(got) != 1 || got[0] != want {
		t.Errorf("notifications %q, want %q", got, want)
	}
	same(t, "the peer's memory", p.do(t, peerRequest{Cmd: "contents", Mem: x.peer}).Contents, there)
	same(t, "local memory", must(w.contents(x.local))(t), local)
	check(t, tr.Release())
}

func (x *transfer) options() nixl.TransferOptions {
	return nixl.TransferOptions{Notif: []byte(x.notification), Post: true}
}

// create makes and posts the transfer from lists of descriptors.
func (x *transfer) create(t *testing.T, tr *nixl.Transfer, w *worker, p *peer, remote *nixl.Remote) {
	local, there := must(w.agent.NewList(x.local))(t), must(w.agent.NewList(x.peer))(t)
	l, r := w.start(x.local), p.start(x.peer)
	for _, m := range x.shape.moves {
		check(t, local.Append(nixl.Desc{Addr: l.Addr + uint64(m.local), Len: uint64(m.n), Dev: l.Dev}))
		check(t, there.Append(nixl.Desc{Addr: r.Addr + uint64(m.remote), Len: uint64(m.n), Dev: r.Dev}))
	}
	check(t, tr.Create(x.op, local, remote, there, x.options()))
	check(t, local.Free())
	check(t, there.Free())
}

// createIndexed makes and posts the transfer from prepared lists of all pages.
func (x *transfer) createIndexed(t *testing.T, tr *nixl.Transfer, w *worker, p *peer, remote *nixl.Remote) {
	all := func(m nixl.Mem, start nixl.Desc) *nixl.List {
		l := must(w.agent.NewList(m))(t)
		check(t, l.AppendRuns(nixl.Run{Addr: start.Addr, Len: pageSize, Dev: start.Dev, Stride: pageSize, Count: pages}))
		return l
	}
	ll, rl := all(x.local, w.start(x.local)), all(x.peer, p.start(x.peer))
	local, there := must(w.agent.Prepare(ll))(t), must(remote.Prepare(rl))(t)
	var li, ri []int32
	for _, m := range x.shape.moves {
		li, ri = append(li, int32(m.local/pageSize)), append(ri, int32(m.remote/pageSize))
	}
	check(t, tr.CreateIndexed(x.op, local, li, there, ri, x.options()))
	for _, free := range []func() error{local.Free, there.Free, ll.Free, rl.Free} {
		check(t, free())
	}
}

// TestManyThreads writes from several threads of one agent at once, each to a part of the
// peer's GPU memory of its own.
func TestManyThreads(t *testing.T) {
	const threads, rounds, share = 8, 16, size / 8
	inv := need(t)
	there := startPeer(t, peerConfig{uniqueName("peer"), inv.Devices[0].Ordinal})
	here := startWorker(t, inv.Devices[0].Ordinal)
	remote := must(here.agent.Load(there.hello.Metadata))(t)
	want := pattern(1)
	check(t, here.fill(nixl.VRAM, want))
	there.do(t, peerRequest{Cmd: "fill", Mem: nixl.VRAM, Seed: 2})

	var wg sync.WaitGroup
	errs := make([]error, threads)
	for i := range threads {
		wg.Go(func() {
			runtime.LockOSThread()
			errs[i] = here.cuda.MakeCurrent()
			if errs[i] == nil {
				errs[i] = here.writeShare(remote, there.start(nixl.VRAM), i, share, rounds)
			}
		})
	}
	wg.Wait()
	check(t, errors.Join(errs...))
	missing := map[notification]bool{}
	for i := range threads {
		for round := range rounds {
			missing[notification{here.agent.Name(), shareTag(i, round)}] = true
		}
	}
	for _, n := range there.notifications(t, threads*rounds) {
		if !missing[n] {
			t.Errorf("unexpected or repeated: %q", n)
		}
		delete(missing, n)
	}
	same(t, "the peer's memory", there.do(t, peerRequest{Cmd: "contents", Mem: nixl.VRAM}).Contents, want)
}

func shareTag(i, round int) string { return fmt.Sprintf("thread %d, round %d", i, round) }

// writeShare writes the i-th share of the GPU memory to the peer, again and again.
func (w *worker) writeShare(remote *nixl.Remote, to nixl.Desc, i, share, rounds int) error {
	local, err := w.agent.NewList(nixl.VRAM)
	if err != nil {
		return err
	}
	there, err := w.agent.NewList(nixl.VRAM)
	if err != nil {
		return err
	}
	from := w.start(nixl.VRAM)
	from.Addr, from.Len = from.Addr+uint64(i*share), uint64(share)
	to.Addr, to.Len = to.Addr+uint64(i*share), uint64(share)
	if err := errors.Join(local.Append(from), there.Append(to)); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), transferLimit)
	defer cancel()
	tr := w.agent.NewTransfer()
	for round := range rounds {
		o := nixl.TransferOptions{Notif: []byte(shareTag(i, round)), Post: true}
		if err := tr.Create(nixl.Write, local, remote, there, o); err != nil {
			return err
		}
		if err := tr.Wait(ctx); err != nil {
			return err
		}
		if err := tr.Release(); err != nil {
			return err
		}
	}
	return errors.Join(local.Free(), there.Free())
}
