package main

import (
	"testing"

	"pgregory.net/rapid"

	"github.com/nixlkv/nixlkv"
)

// Every room is one stream's, every stream one manager's.
func TestRoomsAreDealtOut(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := plan{
			Rooms:     rapid.IntRange(1, 500).Draw(t, "rooms"),
			Processes: rapid.IntRange(1, 5).Draw(t, "processes"),
			Managers:  rapid.IntRange(1, 5).Draw(t, "managers"),
		}
		p.InFlight = p.Processes*p.Managers + rapid.IntRange(0, 30).Draw(t, "more streams")
		seen := map[nixlkv.Room]int{}
		for m := range p.Processes * p.Managers {
			streams := p.streams(m)
			if len(streams) == 0 {
				t.Fatalf("manager %d has no stream", m)
			}
			for _, s := range streams {
				for i := 0; ; i++ {
					room, there := p.room(s, i)
					if !there {
						break
					}
					seen[room]++
				}
			}
		}
		for i := range p.Rooms {
			if n := seen[firstRoom+nixlkv.Room(i)]; n != 1 {
				t.Fatalf("room %d is dealt out %d times", i, n)
			}
		}
		if len(seen) != p.Rooms {
			t.Fatalf("%d rooms, want %d", len(seen), p.Rooms)
		}
	})
}

func TestFates(t *testing.T) {
	const n = 100_000
	for _, aborts := range []int{0, 10, 1000} {
		p := plan{Aborts: aborts}
		count := map[fate]int{}
		for room := range nixlkv.Room(n) {
			count[p.fate(firstRoom+room)]++
		}
		want := n * aborts / 1000
		if got := n - count[arrives]; got < want*9/10 || got > want*11/10 {
			t.Errorf("%d of %d rooms are aborted, want about %d", got, n, want)
		}
		for _, f := range []fate{refused, interrupted, givenUp} {
			if got := count[f] * abortedFates; got < want*8/10 || got > want*12/10 {
				t.Errorf("fate %d: %d rooms of %d", f, count[f], want)
			}
		}
		if len(count) > 1+abortedFates {
			t.Errorf("other fates: %v", count)
		}
	}
}
