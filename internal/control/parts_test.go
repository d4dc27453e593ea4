//go:build linux && cgo

package control

import (
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"
)

// Timers and queues against slices, under every operation that the sender uses.
func TestTimersProperty(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var ts timers
		all := make([]timer, 8)
		set := map[int]int{} // timer to time
		base := time.Now()
		draw := func() int { return rapid.IntRange(0, len(all)-1).Draw(t, "timer") }
		soonest := func() (time.Time, bool) {
			best, found := 0, false
			for _, at := range set {
				if !found || at < best {
					best, found = at, true
				}
			}
			return base.Add(time.Duration(best)), found
		}
		t.Repeat(map[string]func(*rapid.T){
			"set": func(t *rapid.T) {
				i, at := draw(), rapid.IntRange(0, 20).Draw(t, "at")
				ts.set(&all[i], i, base.Add(time.Duration(at)))
				set[i] = at
			},
			"stop": func(*rapid.T) {
				i := draw()
				ts.stop(&all[i])
				delete(set, i)
			},
			"due": func(t *rapid.T) {
				now := rapid.IntRange(0, 20).Draw(t, "now")
				first, some := soonest()
				got := ts.due(base.Add(time.Duration(now)))
				if due := some && !first.After(base.Add(time.Duration(now))); due != (got != nil) {
					t.Fatalf("due is %v, got %v", due, got)
				}
				if got != nil {
					if !got.at.Equal(first) || set[got.owner.(int)] != int(first.Sub(base)) {
						t.Fatalf("%v is not the soonest", got.owner)
					}
					delete(set, got.owner.(int))
				}
			},
			"": func(t *rapid.T) {
				if first, some := soonest(); ts.next().IsZero() == some || (some && !ts.next().Equal(first)) {
					t.Fatalf("next is %v", ts.next())
				}
				for i := range all {
					if _, armed := set[i]; armed != all[i].armed() {
						t.Fatalf("timer %d armed: %v", i, all[i].armed())
					}
				}
			},
		})
	})
}

func TestMessageQueueProperty(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var q messageQueue
		var model []*outgoing
		t.Repeat(map[string]func(*rapid.T){
			"push": func(t *rapid.T) {
				o := &outgoing{bytes: rapid.IntRange(0, 9).Draw(t, "bytes")}
				q.push(o)
				model = append(model, o)
			},
			"remove": func(t *rapid.T) {
				if len(model) == 0 {
					t.Skip("skip: the case is empty")
				}
				i := rapid.IntRange(0, len(model)-1).Draw(t, "index")
				q.remove(model[i])
				if o := model[i]; o.queue != nil || o.next != nil || o.prev != nil {
					t.Fatal("still linked")
				}
				model = slices.Delete(model, i, i+1)
			},
			"": func(t *rapid.T) {
				var got []*outgoing
				bytes := 0
				for o := q.head; o != nil; o = o.next {
					if o.queue != &q || (o.next == nil) != (o == q.tail) {
						t.Fatal("bad link")
					}
					got = append(got, o)
					bytes += o.bytes
				}
				if !slices.Equal(got, model) || q.n != len(model) || q.bytes != bytes {
					t.Fatalf("%d messages of %d bytes, counted %d and %d", len(got), bytes, q.n, q.bytes)
				}
			},
		})
	})
}

func testPoller(t *testing.T) *poller {
	t.Helper()
	p, err := newPoller()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.close(); err != nil {
			t.Error(err)
		}
		p.wake() // after close it must touch nothing
	})
	return p
}

func TestPoller(t *testing.T) {
	p := testPoller(t)
	wait := func(until time.Time, want ...uint64) {
		t.Helper()
		ready, err := p.wait(until)
		if err != nil {
			t.Fatal(err)
		}
		var got []uint64
		for _, ev := range ready {
			got = append(got, token(ev))
		}
		slices.Sort(got)
		if !slices.Equal(got, want) {
			t.Fatalf("ready %v, want %v", got, want)
		}
	}
	past := time.Now().Add(-time.Hour)
	wait(past)
	wait(time.Now().Add(time.Millisecond))

	p.wake()
	p.wake()
	wait(time.Time{}, wakeToken)
	wait(past)

	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	const large = 1<<63 + 1<<31 + 5 // tokens use all 64 bits
	if err := p.watch(fd, large); err != nil {
		t.Fatal(err)
	}
	wait(past)
	if _, err := unix.Write(fd, []byte{1, 0, 0, 0, 0, 0, 0, 0}); err != nil {
		t.Fatal(err)
	}
	wait(past, large) // a passed deadline does not hide what is ready
	wait(time.Time{}, large)
	p.wake()
	wait(time.Time{}, wakeToken, large)
	if err := p.unwatch(fd); err != nil {
		t.Fatal(err)
	}
	wait(past)
	if err := p.unwatch(fd); err == nil {
		t.Fatal("unwatched twice")
	}
}

// No wake-up is lost, however it falls against the wait.
func TestPollerWakeups(t *testing.T) {
	p := testPoller(t)
	var mu sync.Mutex
	posted, asleep := 0, false
	const total = 20000
	go func() {
		for range total {
			mu.Lock()
			posted++
			wake := asleep
			asleep = false
			mu.Unlock()
			if wake {
				p.wake()
			}
		}
	}()
	for seen := 0; seen < total; {
		mu.Lock()
		news := posted > seen
		seen, asleep = posted, !news
		mu.Unlock()
		if news {
			continue
		}
		if ready, err := p.wait(time.Now().Add(patience)); err != nil || len(ready) == 0 {
			t.Fatalf("no wake-up after %d of %d, %v", seen, total, err)
		}
	}
}
