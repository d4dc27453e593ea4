package changes

import (
	"slices"
	"sync"
	"testing"

	"pgregory.net/rapid"
)

// drain empties a list.
func drain(l *List[int]) (items []int, complete bool) {
	complete = l.Drain(func(i int) { items = append(items, i) })
	return items, complete
}

// A list gives what was added, in order and once, up to its bound, which is lower until it is
// drained for the first time.
func TestList(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		limit := rapid.IntRange(0, 2*Unpolled).Draw(t, "limit")
		l := New[int](limit)
		bound, next := min(limit, Unpolled), 0
		for range rapid.IntRange(1, 5).Draw(t, "rounds") {
			n := rapid.IntRange(0, 3*Unpolled).Draw(t, "added")
			var want []int
			for range n {
				if l.Add(next) != (len(want) < bound) {
					t.Fatalf("item %d of at most %d: added %v", len(want), bound, len(want) >= bound)
				}
				if len(want) < bound {
					want = append(want, next)
				}
				next++
			}
			got, complete := drain(l)
			if !slices.Equal(got, want) || complete != (n <= bound) {
				t.Fatalf("%d added, %d of at most %d there, complete %v", n, len(got), bound, complete)
			}
			bound = limit
		}
	})
}

// What is added while the list is drained comes the next time.
func TestAddWhileDrained(t *testing.T) {
	l := New[int](10)
	l.Add(1)
	l.Add(2)
	var got []int
	l.Drain(func(i int) {
		got = append(got, i)
		l.Add(10 * i)
	})
	if !slices.Equal(got, []int{1, 2}) {
		t.Errorf("got %d", got)
	}
	if got, complete := drain(l); !slices.Equal(got, []int{10, 20}) || !complete {
		t.Errorf("got %d, complete %v", got, complete)
	}
}

// A list that was drained holds on to nothing.
func TestDrainedIsForgotten(t *testing.T) {
	l := New[*int](4)
	for range 3 {
		for range 4 {
			l.Add(new(int))
		}
		l.Drain(func(*int) {})
		for _, kept := range [][]*int{l.items[:cap(l.items)], l.spare[:cap(l.spare)]} {
			if i := slices.IndexFunc(kept, func(p *int) bool { return p != nil }); i >= 0 {
				t.Fatalf("item %d is kept", i)
			}
		}
	}
}

// Nothing is lost or comes twice where several goroutines add and drain.
func TestConcurrent(t *testing.T) {
	const goroutines, each = 4, 1000
	l := New[int](goroutines * each)
	drain(l)
	var mu sync.Mutex
	seen := make([]int, goroutines*each)
	take := func() {
		if !l.Drain(func(i int) { mu.Lock(); seen[i]++; mu.Unlock() }) {
			t.Error("not complete")
		}
	}
	var wg sync.WaitGroup
	for g := range goroutines {
		wg.Go(func() {
			for i := range each {
				l.Add(g*each + i)
				if i%16 == 0 {
					take()
				}
			}
		})
	}
	wg.Wait()
	take()
	if i := slices.IndexFunc(seen, func(n int) bool { return n != 1 }); i >= 0 {
		t.Errorf("item %d came %d times", i, seen[i])
	}
}
