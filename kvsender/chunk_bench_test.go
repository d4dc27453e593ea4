package kvsender

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"syscall"
	"testing"
	"time"

	"github.com/nixlkv/nixlkv/hostmem"
	"github.com/nixlkv/nixlkv/nixl"
	"github.com/nixlkv/nixlkv/registry"
)

const (
	benchRegions = 64
	benchPages   = 1024
)

// benchPlan plans 64 regions of many pages, benchPages of which make a chunk.
func benchPlan(tb testing.TB) *peerPlan {
	l := &registry.Layout{KV: regions(benchRegions, 1<<32)}
	p := &registry.Peer{KV: regions(benchRegions, 1<<40)}
	for i := range benchRegions {
		l.KV[i].Base, p.KV[i].Base = 1<<32+uint64(i)<<24, 1<<40+uint64(i)<<24
		l.KV[i].Len, p.KV[i].Len = 1<<24, 1<<24
	}
	return mustPlan(tb, l, p)
}

// scattered gives pages of which no two follow each other, contiguous ones that all do.
func scattered(limit int) chunkPages {
	r := rand.New(rand.NewPCG(1, 2))
	pick := func() []int32 {
		out := make([]int32, benchPages)
		for i, x := range r.Perm(limit / 2)[:benchPages] {
			out[i] = int32(2 * x)
		}
		return out
	}
	return chunkPages{src: pick(), dst: pick()}
}

func contiguous() chunkPages {
	return chunkPages{src: numbers(benchPages), dst: numbers(benchPages)}
}

// emitter holds the buffers of a worker.
type emitter struct {
	runs     []run
	src, dst []int32
	from, to []nixl.Desc
	scratch  []int32
}

func (e *emitter) indices(s *segment, c chunkPages) int {
	e.src, e.dst = s.appendIndices(e.src[:0], e.dst[:0], c)
	return len(e.src)
}

func (e *emitter) descs(s *segment, c chunkPages) int {
	e.runs = appendRuns(e.runs[:0], c)
	e.from, e.to = s.appendDescs(e.from[:0], e.to[:0], e.runs)
	return len(e.from)
}

func (e *emitter) check(plan *peerPlan, c chunkPages) error {
	if err := checkPages(plan, c); err != nil {
		return err
	}
	var err error
	e.scratch, err = checkDistinct(c.dst, e.scratch)
	return err
}

// After the first chunk, buffers are as large as they have to be.
func TestChunkAllocations(t *testing.T) {
	plan := benchPlan(t)
	s := &plan.segments[0]
	var e emitter
	for name, c := range map[string]chunkPages{"scattered": scattered(1 << 16), "contiguous": contiguous()} {
		got := testing.AllocsPerRun(10, func() {
			if err := e.check(plan, c); err != nil {
				t.Fatal(err)
			}
			e.indices(s, c)
			s.cheaperByDesc(len(c.src), len(e.runs))
			e.descs(s, c)
		})
		if got != 0 {
			t.Errorf("%s: %v allocations a chunk", name, got)
		}
	}
	l, p := auxSides([]uint64{64, 512, 8}, 3)
	a, err := planAux(l, p)
	if err != nil {
		t.Fatal(err)
	}
	if got := testing.AllocsPerRun(10, func() {
		e.from, e.to, err = a.appendDescs(e.from[:0], e.to[:0], 3, 4)
	}); got != 0 || err != nil {
		t.Errorf("aux: %v allocations, %v", got, err)
	}
}

// BenchmarkChunkEmit is what a chunk costs before NIXL sees it, of 64 regions × 1,024 pages.
func BenchmarkChunkEmit(b *testing.B) {
	plan := benchPlan(b)
	s := &plan.segments[0]
	pieces := float64(benchPages * benchRegions)
	for _, c := range []struct {
		name  string
		pages chunkPages
	}{{"scattered", scattered(1 << 16)}, {"contiguous", contiguous()}} {
		var e emitter
		report := func(b *testing.B) {
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/pieces, "ns/piece")
		}
		b.Run("index/"+c.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				e.indices(s, c.pages)
			}
			report(b)
		})
		b.Run("desc/"+c.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				e.descs(s, c.pages)
			}
			report(b)
		})
		b.Run("check/"+c.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if err := e.check(plan, c.pages); err != nil {
					b.Fatal(err)
				}
			}
			report(b)
		})
	}
}

// BenchmarkChunkNative is what NIXL makes of a chunk in each form, up to the point of posting,
// for pages in runs of several lengths: where indexCost and descCost come from. cpu-ns/page
// is the thread's CPU time for one page of one region, both sides together. With MALLOC_TRIM_THRESHOLD_
// and MALLOC_MMAP_THRESHOLD_ set high it leaves out page faults of what NIXL allocates.
func BenchmarkChunkNative(b *testing.B) {
	e, err := nixl.Open(nixl.Native)
	if err != nil {
		if os.Getenv("NIXLKV_NIXL_LIB") != "" {
			b.Fatal(err)
		}
		b.Skip("skip: no NIXL library on this machine; make bench fetches one")
	}
	p := benchNative(b, e)
	for _, run := range []int{1, 2, 4, 8, 16, benchPages} {
		p.c = inRuns(run)
		b.Run(fmt.Sprintf("run=%d/index", run), func(b *testing.B) { p.measure(b, p.index) })
		b.Run(fmt.Sprintf("run=%d/desc", run), func(b *testing.B) { p.measure(b, p.desc) })
	}
}

// inRuns gives benchPages of twice as many pages, in runs of n with gaps as long.
func inRuns(n int) chunkPages {
	out := make([]int32, benchPages)
	for i := range out {
		out[i] = int32(i + i/n*n)
	}
	return chunkPages{src: out, dst: out}
}

// nativePlan is a segment between two agents of this process.
type nativePlan struct {
	s        *segment
	c        chunkPages
	remote   *nixl.Remote
	src, dst *nixl.Prepared
	from, to *nixl.List
	transfer *nixl.Transfer
	buffers  emitter
}

func (p *nativePlan) measure(b *testing.B, create func() error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	b.ReportAllocs()
	start := threadTime(b)
	for b.Loop() {
		if err := create(); err != nil {
			b.Fatal(err)
		}
		if err := p.transfer.Release(); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(threadTime(b)-start)/float64(b.N)/(benchPages*benchRegions), "cpu-ns/page")
}

// threadTime is the CPU time of this thread.
func threadTime(b *testing.B) time.Duration {
	const thisThread = 1 // RUSAGE_THREAD
	var u syscall.Rusage
	if err := syscall.Getrusage(thisThread, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

func (p *nativePlan) index() error {
	p.buffers.indices(p.s, p.c)
	return p.transfer.CreateIndexed(nixl.Write, p.src, p.buffers.src, p.dst, p.buffers.dst, nixl.TransferOptions{})
}

func (p *nativePlan) desc() error {
	p.buffers.descs(p.s, p.c)
	if err := errors.Join(p.from.Clear(), p.to.Clear(), p.from.Append(p.buffers.from...), p.to.Append(p.buffers.to...)); err != nil {
		return err
	}
	return p.transfer.Create(nixl.Write, p.from, p.remote, p.to, nixl.TransferOptions{})
}

// benchNative registers 64 regions of 2,048 pages of 64 bytes at two agents.
func benchNative(b *testing.B, e *nixl.Engine) *nativePlan {
	const pages, pageLen = 2 * benchPages, 64
	ok := func(err error) {
		b.Helper()
		if err != nil {
			b.Fatal(err)
		}
	}
	side := func(name string) (*nixl.Agent, []registry.Region) {
		a, err := e.NewAgent(name, nixl.WithBackend("UCX", nil))
		ok(err)
		buf, err := hostmem.Alloc(benchRegions * pages * pageLen)
		ok(err)
		var kv []registry.Region
		var regs []nixl.Region
		for i := range benchRegions {
			off := i * pages * pageLen
			regs = append(regs, nixl.HostRange(buf, off, pages*pageLen))
			kv = append(kv, registry.Region{Base: uint64(buf.Addr()) + uint64(off), Len: pages * pageLen, ItemLen: pageLen, LayerID: registry.NoLayer, Kind: registry.DRAM})
		}
		_, err = a.Register(regs...)
		ok(err)
		b.Cleanup(func() {
			ok(a.Close())
			ok(buf.Free())
		})
		return a, kv
	}
	prefill, src := side("prefill-bench")
	decode, dst := side("decode-bench")
	md, err := decode.LocalMetadata()
	ok(err)
	remote, err := prefill.Load(md)
	ok(err)
	s := &mustPlan(b, &registry.Layout{KV: src}, &registry.Peer{KV: dst}).segments[0]
	p := &nativePlan{s: s, remote: remote, transfer: prefill.NewTransfer()}
	for _, x := range []struct {
		list **nixl.List
		prep **nixl.Prepared
		runs []nixl.Run
		bind func(*nixl.List) (*nixl.Prepared, error)
	}{{&p.from, &p.src, s.appendSourceRuns(nil), prefill.Prepare}, {&p.to, &p.dst, s.appendDestinationRuns(nil), remote.Prepare}} {
		*x.list, err = prefill.NewList(nixl.DRAM)
		ok(err)
		ok((*x.list).AppendRuns(x.runs...))
		*x.prep, err = x.bind(*x.list)
		ok(err)
	}
	return p
}
