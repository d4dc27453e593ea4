package cgo

import (
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/ebitengine/purego"

	"github.com/nixlkv/nixlkv/hostmem"
	"github.com/nixlkv/nixlkv/internal/engine"
)

// descriptors is the size of a large list: 64 regions of 1,024 pages.
const descriptors = 65536

func openForBench(b *testing.B, calls string) *Library {
	b.Helper()
	if calls == "cgo" && !haveShim {
		b.Skip("skip: built without cgo")
	}
	l, err := Open(Options{Calls: calls})
	if err != nil {
		b.Skip("skip: no NIXL library on this machine; make bench fetches one")
	}
	return l
}

// benchAgent is an agent with a buffer of count pages registered.
type benchAgent struct {
	*agent
	buf *hostmem.Buffer
}

func newBenchAgent(b *testing.B, l *Library, name string, bytes int) benchAgent {
	b.Helper()
	e, err := l.NewAgent(fmt.Sprintf("%s-%d-%d", name, os.Getpid(), time.Now().UnixNano()), engine.AgentConfig{ProgressThread: true, Sync: engine.SyncRW})
	if err != nil {
		b.Fatal(err)
	}
	a := e.(*agent)
	if _, err := a.CreateBackend("UCX", nil); err != nil {
		b.Fatal(err)
	}
	buf, err := hostmem.Alloc(bytes)
	if err != nil {
		b.Fatal(err)
	}
	if err := buf.Touch(); err != nil {
		b.Fatal(err)
	}
	reg := []engine.Region{{Addr: uint64(buf.Addr()), Len: uint64(bytes), FD: -1}}
	if err := a.Register(engine.DRAM, reg); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		if err := a.Deregister(engine.DRAM, reg); err != nil {
			b.Error(err)
		}
		if err := a.Destroy(); err != nil {
			b.Error(err)
		}
		if err := buf.Free(); err != nil {
			b.Error(err)
		}
	})
	return benchAgent{a, buf}
}

// pages describes the agent's buffer page by page, and as one run.
func (a benchAgent) pages(n, size int) ([]engine.Desc, []engine.Run) {
	d := make([]engine.Desc, n)
	for i := range d {
		d[i] = engine.Desc{Addr: uint64(a.buf.Addr()) + uint64(i*size), Len: uint64(size)}
	}
	return d, []engine.Run{{Addr: uint64(a.buf.Addr()), Len: uint64(size), Stride: uint64(size), Count: uint64(n)}}
}

func (a benchAgent) list(b *testing.B) engine.List {
	b.Helper()
	l, err := a.NewList(engine.DRAM)
	if err != nil {
		b.Fatal(err)
	}
	return l
}

func ok(b *testing.B, err error) {
	b.Helper()
	if err != nil {
		b.Fatal(err)
	}
}

// BenchmarkCall is the cost of one crossing into the library and back.
func BenchmarkCall(b *testing.B) {
	for _, calls := range []string{"purego", "cgo"} {
		b.Run(calls, func(b *testing.B) {
			l := openForBench(b, calls)
			a := newBenchAgent(b, l, "call", 4096)
			list := a.list(b)
			defer a.FreeList(list)
			b.ReportAllocs()
			if calls == "purego" {
				args := []uintptr{uintptr(list)}
				for b.Loop() {
					purego.SyscallN(a.sym[symListClear], args...)
				}
				return
			}
			for b.Loop() {
				a.hot.append(list, nil, 0)
			}
		})
	}
}

// BenchmarkList fills a list of 65,536 descriptors; ns/desc is what one costs.
func BenchmarkList(b *testing.B) {
	perDesc := func(b *testing.B) {
		b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/descriptors, "ns/desc")
	}
	for _, calls := range []string{"purego", "cgo"} {
		run := func(name string, fresh bool, fill func(a benchAgent, l engine.List)) {
			b.Run(name+"/"+calls, func(b *testing.B) {
				a := newBenchAgent(b, openForBench(b, calls), "list", 4096)
				l := a.list(b)
				fill(a, l)
				b.ReportAllocs()
				for b.Loop() {
					if fresh {
						a.FreeList(l)
						l = a.list(b)
					} else {
						ok(b, a.Clear(l))
					}
					fill(a, l)
				}
				a.FreeList(l)
				perDesc(b)
			})
		}
		var d []engine.Desc
		var r []engine.Run
		d, r = benchAgent{buf: benchBuffer(b)}.pages(descriptors, 4096)
		one := func(a benchAgent, l engine.List) {
			for i := range d {
				a.hot.append(l, d[i:i+1], ^uint64(0))
			}
		}
		batch := func(a benchAgent, l engine.List) { ok(b, a.Append(l, d)) }
		runs := func(a benchAgent, l engine.List) { ok(b, a.AppendRuns(l, r)) }
		run("one-by-one/fresh", true, one)
		run("one-by-one/reused", false, one)
		run("batch/fresh", true, batch)
		run("batch/reused", false, batch)
		run("strided/reused", false, runs)
	}
}

// benchBuffer is memory that is described and never transferred.
func benchBuffer(b *testing.B) *hostmem.Buffer {
	b.Helper()
	buf, err := hostmem.Alloc(4096)
	ok(b, err)
	b.Cleanup(func() { ok(b, buf.Free()) })
	return buf
}

// BenchmarkListPython is NIXL's own Python API filling the same list from a numpy array,
// for comparison in the same run. PEER_PYTHON names a Python with nixl and numpy.
func BenchmarkListPython(b *testing.B) {
	python := os.Getenv("PEER_PYTHON")
	if python == "" {
		b.Skip("skip: PEER_PYTHON is not set")
	}
	n := 0
	var total time.Duration
	for b.Loop() {
		out, err := exec.Command(python, "testdata/list_bench.py", strconv.Itoa(descriptors)).Output()
		if err != nil {
			b.Fatal(err)
		}
		lines := strings.Fields(string(out)) // NIXL's log comes before the figure
		ns, err := strconv.ParseInt(lines[len(lines)-1], 10, 64)
		ok(b, err)
		total += time.Duration(ns)
		n++
	}
	b.ReportMetric(float64(total.Nanoseconds())/float64(n), "ns/op")
	b.ReportMetric(float64(total.Nanoseconds())/float64(n)/descriptors, "ns/desc")
}

// twoAgents are a source and a target with prepared lists of 65,536 pages each.
type twoAgents struct {
	from, to      benchAgent
	remote        engine.Remote
	local, target engine.Prepared
}

const benchPage = 4096

func newTwoAgents(b *testing.B, calls string) *twoAgents {
	b.Helper()
	l := openForBench(b, calls)
	t := &twoAgents{from: newBenchAgent(b, l, "from", descriptors*benchPage), to: newBenchAgent(b, l, "to", descriptors*benchPage)}
	md, err := t.to.LocalMetadata()
	ok(b, err)
	t.remote, _, err = t.from.LoadRemote(md)
	ok(b, err)
	list := t.from.list(b)
	defer t.from.FreeList(list)
	_, r := t.from.pages(descriptors, benchPage)
	ok(b, t.from.AppendRuns(list, r))
	t.local, err = t.from.PrepareLocal(list)
	ok(b, err)
	ok(b, t.from.Clear(list))
	_, r = t.to.pages(descriptors, benchPage)
	ok(b, t.from.AppendRuns(list, r))
	t.target, err = t.from.PrepareRemote(t.remote, list)
	ok(b, err)
	b.Cleanup(func() {
		ok(b, t.from.FreePrepared(t.local))
		ok(b, t.from.FreePrepared(t.target))
		ok(b, t.from.InvalidateRemote(t.remote))
		t.from.FreeRemote(t.remote)
	})
	return t
}

func (t *twoAgents) wait(b *testing.B, r engine.Request) {
	reqs, out := []engine.Request{r}, []engine.Status{engine.InProgress}
	for out[0] == engine.InProgress {
		t.from.Poll(reqs, out)
	}
	ok(b, out[0].Err())
}

// BenchmarkRequestByIndex makes and releases a request by 4,096 scattered indices.
func BenchmarkRequestByIndex(b *testing.B) {
	for _, calls := range []string{"purego", "cgo"} {
		b.Run(calls, func(b *testing.B) {
			t := newTwoAgents(b, calls)
			idx := make([]int32, 4096)
			for i, x := range rand.New(rand.NewPCG(1, 1)).Perm(descriptors)[:len(idx)] {
				idx[i] = int32(x)
			}
			spec := &engine.Spec{Op: engine.Write, LocalPrep: t.local, RemotePrep: t.target, LocalIndex: idx, RemoteIndex: idx,
				Notif: []byte("7_kv_0_1_0"), HasNotif: true}
			b.ReportAllocs()
			for b.Loop() {
				r, _, err := t.from.Create(spec)
				ok(b, err)
				ok(b, t.from.Release(r))
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/4096, "ns/index")
		})
	}
}

// BenchmarkPoll asks for the status of 64 settled requests at once.
func BenchmarkPoll(b *testing.B) {
	for _, calls := range []string{"purego", "cgo"} {
		b.Run(calls, func(b *testing.B) {
			t := newTwoAgents(b, calls)
			reqs, out := make([]engine.Request, 64), make([]engine.Status, 64)
			for i := range reqs {
				idx := []int32{int32(i)}
				r, _, err := t.from.Create(&engine.Spec{Op: engine.Write, LocalPrep: t.local, RemotePrep: t.target, LocalIndex: idx, RemoteIndex: idx, Post: true})
				ok(b, err)
				t.wait(b, r)
				reqs[i] = r
			}
			b.ReportAllocs()
			for b.Loop() {
				t.from.Poll(reqs, out)
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/64, "ns/request")
			for _, r := range reqs {
				ok(b, t.from.Release(r))
			}
		})
	}
}

// BenchmarkNotifications sends 64 notifications and drains them; what counts here are the
// allocations, and the time of the drain alone (ns/drained).
func BenchmarkNotifications(b *testing.B) {
	for _, calls := range []string{"purego", "cgo"} {
		b.Run(calls, func(b *testing.B) {
			t := newTwoAgents(b, calls)
			msg := []byte("1234567890123_kv_0_1_0")
			var buf engine.Notifications
			var draining time.Duration
			b.ReportAllocs()
			for b.Loop() {
				for range 64 {
					ok(b, t.from.Notify(t.remote, msg))
				}
				for got := 0; got < 64; {
					start := time.Now()
					ok(b, t.to.Notifications(&buf))
					if buf.Count > 0 {
						draining += time.Since(start)
					}
					got += buf.Count
				}
			}
			b.ReportMetric(float64(draining.Nanoseconds())/float64(b.N)/64, "ns/drained")
		})
	}
}

// BenchmarkEmptyDrain asks for notifications where there are none, as a receiver's loop
// does most of the time.
func BenchmarkEmptyDrain(b *testing.B) {
	for _, calls := range []string{"purego", "cgo"} {
		b.Run(calls, func(b *testing.B) {
			a := newBenchAgent(b, openForBench(b, calls), "drain", 4096)
			var buf engine.Notifications
			b.ReportAllocs()
			for b.Loop() {
				ok(b, a.Notifications(&buf))
			}
		})
	}
}

// BenchmarkWrite moves 16 MiB in blocks of three sizes, made, posted, awaited and released.
func BenchmarkWrite(b *testing.B) {
	for _, block := range []int{4 << 10, 64 << 10, 1 << 20} {
		b.Run(fmt.Sprintf("%dKiB", block>>10), func(b *testing.B) {
			t := newTwoAgents(b, "")
			const total = 16 << 20
			list, target := t.from.list(b), t.from.list(b)
			d, _ := t.from.pages(total/block, block)
			rand.New(rand.NewPCG(2, 2)).Shuffle(len(d), func(i, j int) { d[i], d[j] = d[j], d[i] })
			e := make([]engine.Desc, len(d))
			for i := range d {
				e[i] = d[i]
				e[i].Addr += uint64(t.to.buf.Addr()) - uint64(t.from.buf.Addr())
			}
			ok(b, t.from.Append(list, d))
			ok(b, t.from.Append(target, e))
			spec := &engine.Spec{Op: engine.Write, LocalList: list, RemoteList: target, Remote: t.remote, Post: true}
			b.SetBytes(total)
			b.ReportAllocs()
			for b.Loop() {
				r, st, err := t.from.Create(spec)
				ok(b, err)
				if st == engine.InProgress {
					t.wait(b, r)
				}
				ok(b, t.from.Release(r))
			}
			t.from.FreeList(list)
			t.from.FreeList(target)
		})
	}
}
