package embedded

import (
	"math"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/nixlkv/nixlkv/internal/engine"
)

// TestSpanIndex compares the index with looking at every region.
func TestSpanIndex(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		spans := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) span {
			addr := rapid.Uint64Range(1, 60).Draw(t, "addr")
			return span{addr, addr + rapid.Uint64Range(1, 20).Draw(t, "len")}
		}), 0, 12).Draw(t, "spans")
		x := newSpanIndex(spans, func(s span) span { return s })
		for range 20 {
			addr := rapid.Uint64Range(0, 90).Draw(t, "at")
			n := rapid.OneOf(rapid.Uint64Range(0, 25), rapid.Uint64Range(math.MaxUint64-80, math.MaxUint64)).Draw(t, "n")
			want := slices.ContainsFunc(spans, func(s span) bool {
				return addr >= s.addr && addr <= s.end && n <= 1000 && addr+n <= s.end
			})
			got := x.find(addr, n, rapid.IntRange(-1, 13).Draw(t, "hint"))
			if (got >= 0) != want {
				t.Fatalf("%d bytes at %d: position %d, want found %v", n, addr, got, want)
			}
			if got >= 0 && !x.regs[got].covers(addr, n) {
				t.Fatalf("%d bytes at %d are not in %v", n, addr, x.regs[got])
			}
		}
	})
}

// TestPlan checks that a plan copies exactly the pairs given, byte by byte, merged only
// where both sides go on in their regions.
func TestPlan(t *testing.T) {
	const unit, regions = 10, 3 // region k is [100k, 100k+100)
	type pair struct{ l, r place }
	var p plan // used again, as requests do
	rapid.Check(t, func(t *rapid.T) {
		pairs := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) pair {
			pl := func(what string) place {
				pos := rapid.Uint32Range(0, regions-1).Draw(t, what)
				return place{addr: uint64(pos)*100 + unit*rapid.Uint64Range(0, 9).Draw(t, what), n: unit, pos: pos}
			}
			return pair{pl("local"), pl("remote")}
		}), 1, 30).Draw(t, "pairs")
		// Runs are what merging is for.
		for i := 1; i < len(pairs); i++ {
			prev := pairs[i-1]
			if rapid.Bool().Draw(t, "run") && prev.l.addr%100 < 90 && prev.r.addr%100 < 90 {
				pairs[i] = prev
				pairs[i].l.addr += unit
				pairs[i].r.addr += unit
			}
		}
		apart := rapid.Bool().Draw(t, "apart")
		p.reset(len(pairs), regions, regions, apart)
		type copied struct{ from, to uint64 }
		var want, got []copied
		merged := 0
		for i, pr := range pairs {
			if err := p.add(i, pr.l, pr.r); err != nil {
				t.Fatal(err)
			}
			for b := range uint64(unit) {
				want = append(want, copied{pr.l.addr + b, pr.r.addr + b})
			}
			if i == 0 || apart || pairs[i-1].l.pos != pr.l.pos || pairs[i-1].r.pos != pr.r.pos ||
				pairs[i-1].l.addr+unit != pr.l.addr || pairs[i-1].r.addr+unit != pr.r.addr {
				merged++
			}
		}
		if len(p.items) != merged || p.bytes != uint64(len(want)) {
			t.Fatalf("%d items of %d bytes, want %d of %d", len(p.items), p.bytes, merged, len(want))
		}
		// In shares and pieces of any size, as workers take them.
		var at cursor
		for end := (cursor{i: len(p.items)}); at.before(end); {
			to := at.after(p.items, rapid.Uint64Range(1, 50).Draw(t, "share"))
			for share := at; ; {
				part, ok := share.next(p.items, to, rapid.Uint64Range(1, 30).Draw(t, "piece"))
				if !ok {
					break
				}
				if part.remote/100 != uint64(part.pos) {
					t.Fatalf("%+v is not in its region", part)
				}
				for b := range part.n {
					got = append(got, copied{part.local + b, part.remote + b})
				}
			}
			at = to
		}
		if !slices.Equal(got, want) {
			t.Fatalf("copied %v, want %v", got, want)
		}
		used := func(side func(pair) uint32) []uint32 {
			var u []uint32
			for _, pr := range pairs {
				if !slices.Contains(u, side(pr)) {
					u = append(u, side(pr))
				}
			}
			return u
		}
		if l, r := used(func(p pair) uint32 { return p.l.pos }), used(func(p pair) uint32 { return p.r.pos }); !slices.Equal(p.locals, l) || !slices.Equal(p.remotes, r) {
			t.Fatalf("regions %v and %v, want %v and %v", p.locals, p.remotes, l, r)
		}
	})
}

func TestPlanErrors(t *testing.T) {
	var p plan
	p.reset(1, 1, 1, true)
	wantErr(t, p.add(0, place{n: 1}, place{n: 2}), engine.ErrInvalidParam)
	if err := p.add(0, place{n: math.MaxUint64}, place{n: math.MaxUint64}); err != nil {
		t.Fatal(err)
	}
	wantErr(t, p.add(1, place{n: 1}, place{n: 1}), engine.ErrInvalidParam)
	// Empty items are passed over.
	p.reset(1, 1, 1, true)
	for _, n := range []uint64{0, 3, 0, 0, 2, 0} {
		if err := p.add(0, place{n: n}, place{n: n}); err != nil {
			t.Fatal(err)
		}
	}
	var sizes []uint64
	for at := (cursor{}); ; {
		part, ok := at.next(p.items, cursor{i: len(p.items)}, 2)
		if !ok {
			break
		}
		sizes = append(sizes, part.n)
	}
	if !slices.Equal(sizes, []uint64{2, 1, 2}) {
		t.Fatalf("pieces %v", sizes)
	}
}

// TestTable runs against a map: a word means its object until it is released, and never
// again.
func TestTable(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var tab table[int]
		live, dead := map[uintptr]int{}, []uintptr{0, 1, 2 << 32, math.MaxUint64}
		for i := range rapid.IntRange(1, 300).Draw(t, "steps") {
			if len(live) == 0 || rapid.IntRange(0, 2).Draw(t, "what") > 0 {
				w, v, err := tab.alloc()
				if _, taken := live[w]; err != nil || taken || slices.Contains(dead, w) {
					t.Fatalf("word %#x again, %v", w, err)
				}
				*v, live[w] = i, i
			} else {
				w := rapid.SampledFrom(sortedKeys(live)).Draw(t, "word")
				delete(live, w)
				dead = append(dead, w)
				if !tab.release(w) {
					t.Fatalf("word %#x was not there", w)
				}
			}
			for w, want := range live {
				if v := tab.get(w); v == nil || *v != want {
					t.Fatalf("word %#x means %v, want %d", w, v, want)
				}
			}
			for _, w := range dead {
				if tab.get(w) != nil || tab.release(w) {
					t.Fatalf("word %#x means something", w)
				}
			}
			if n := tab.count(); n != len(live) {
				t.Fatalf("%d live, want %d", n, len(live))
			}
		}
	})
}

func sortedKeys(m map[uintptr]int) []uintptr {
	var keys []uintptr
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}

// TestTableGenerations: a slot whose generations are used up stays out of use.
func TestTableGenerations(t *testing.T) {
	var tab table[int]
	first, _, err := tab.alloc()
	if err != nil || !tab.release(first) {
		t.Fatal(err)
	}
	tab.at(0).gen.Store(math.MaxUint32 - 1)
	last, _, err := tab.alloc()
	if err != nil || uint32(last) != 0 || !tab.release(last) {
		t.Fatalf("word %#x, %v", last, err)
	}
	next, _, err := tab.alloc()
	if err != nil || uint32(next) == 0 || tab.get(last) != nil || tab.get(first) != nil {
		t.Fatalf("word %#x, %v", next, err)
	}
}

func TestTableFull(t *testing.T) {
	var tab table[struct{}]
	for range maxHandles {
		if _, _, err := tab.alloc(); err != nil {
			t.Fatal(err)
		}
	}
	_, _, err := tab.alloc()
	wantErr(t, err, engine.ErrBackend)
}

func TestFIFO(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var q fifo[int]
		var want []int
		for i := range rapid.IntRange(1, 200).Draw(t, "steps") {
			if len(want) == 0 || rapid.Bool().Draw(t, "push") {
				q.push(i)
				want = append(want, i)
			} else {
				peek := *q.peek()
				if pop := q.pop(); peek != want[0] || pop != want[0] {
					t.Fatalf("%d, %d, want %d", peek, pop, want[0])
				}
				want = want[1:]
			}
			if q.len() != len(want) {
				t.Fatalf("%d queued, want %d", q.len(), len(want))
			}
		}
	})
}

func TestCost(t *testing.T) {
	var m costModel
	_, err := m.estimate(1)
	wantErr(t, err, engine.ErrUnsupported)
	for range 50 {
		m.observe(1<<20, time.Millisecond)
	}
	near, err := m.estimate(1<<20 + 1)
	if err != nil || near.Duration < 990*time.Microsecond || near.Duration > 1010*time.Microsecond || near.Margin > 10*time.Microsecond {
		t.Fatalf("%+v, %v", near, err)
	}
	far, err := m.estimate(1 << 30)
	if err != nil || far.Duration < time.Second || far.Margin < far.Duration {
		t.Fatalf("%+v, %v", far, err)
	}
	small, err := m.estimate(1)
	if err != nil || small.Duration <= 0 || small.Duration > time.Millisecond || small.Margin < small.Duration {
		t.Fatalf("%+v, %v", small, err)
	}
	if c, err := m.estimate(math.MaxUint64); err != nil || c.Duration <= 0 || c.Margin <= 0 {
		t.Fatalf("%+v, %v", c, err)
	}
}
