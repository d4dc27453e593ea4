package main

import (
	"errors"
	"fmt"

	"github.com/nixlkv/nixlkv"
)

// plan says which rooms there are, whose they are and what becomes of them. Every process
// works that out by itself, so the two sides need not talk about it.
//
// The rooms in flight are streams: stream s has the rooms firstRoom+s, firstRoom+s+InFlight
// and so on, one after the other, each as soon as the one before has ended on its side. A
// stream is one decode manager's, and has pages and an aux slot of its own on both sides.
type plan struct {
	Engine    string
	Rooms     int // in all; 0: as many as there is time for
	InFlight  int
	Processes int // of decodes
	Managers  int // of each of them
	Aborts    int // rooms of a thousand that one side gives up
	Regions   int
	Pages     int // of a room
	PageBytes int
	Pool      int // pages that no room uses: they make the lists longer that are prepared for a peer
	Guests    bool
}

const (
	firstRoom = nixlkv.Room(1 << 20)
	// Rooms of decodes that come and go while the others work.
	firstGuestRoom = nixlkv.Room(1 << 50)
)

var errPlan = errors.New("such a run cannot be")

func (p *plan) validate() error {
	for _, f := range []struct {
		name      string
		n, lo, hi int
	}{
		{"rooms", p.Rooms, 0, 1 << 40}, {"in flight", p.InFlight, 1, 1 << 16}, {"decode processes", p.Processes, 1, 256},
		{"managers a process", p.Managers, 1, 256}, {"rooms of a thousand to abort", p.Aborts, 0, 1000},
		{"regions", p.Regions, 1, 1024}, {"pages a room", p.Pages, 1, 1 << 16}, {"bytes a page", p.PageBytes, stampBytes, 1 << 24},
		{"pages in the pool", p.Pool, 0, 1 << 24},
	} {
		if f.n < f.lo || f.n > f.hi {
			return fmt.Errorf("%w: %s: %d, want %d to %d", errPlan, f.name, f.n, f.lo, f.hi)
		}
	}
	if n := p.Processes * p.Managers; p.InFlight < n {
		return fmt.Errorf("%w: %d rooms in flight for %d decode managers: each needs one", errPlan, p.InFlight, n)
	}
	return nil
}

// streams lists the streams of a decode manager, counted over all processes.
func (p *plan) streams(manager int) (streams []int) {
	for s := manager; s < p.InFlight; s += p.Processes * p.Managers {
		streams = append(streams, s)
	}
	return streams
}

// streamsOf lists the streams of a decode process, manager by manager.
func (p *plan) streamsOf(process int) (streams []int) {
	for m := range p.Managers {
		streams = append(streams, p.streams(process*p.Managers+m)...)
	}
	return streams
}

// room gives room i of a stream, and whether there is one.
func (p *plan) room(stream, i int) (nixlkv.Room, bool) {
	n := i*p.InFlight + stream
	return firstRoom + nixlkv.Room(n), p.Rooms == 0 || n < p.Rooms
}

// fate is what becomes of a room.
type fate int

const (
	arrives      fate = iota
	refused           // the prefill aborts it when it knows where the pages go
	interrupted       // the prefill aborts it when it has given all pages
	givenUp           // the decode aborts it when its first page is there, and the prefill goes no further
	abortedFates = iota - 1
)

// fate decides by the room's number alone.
func (p *plan) fate(room nixlkv.Room) fate {
	// splitmix64, by Sebastiano Vigna: neighbours get unrelated numbers.
	x := uint64(room) + 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	x ^= x >> 31
	if x%1000 >= uint64(p.Aborts) {
		return arrives
	}
	return refused + fate(x/1000%uint64(abortedFates))
}
