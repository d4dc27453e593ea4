package main

import (
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"

	"github.com/nixlkv/nixlkv"
)

// Streams of random numbers that one seed gives.
const (
	streamPrefill uint64 = iota + 1 // the prefill's pages
	streamDecode                    // the decode's pages
	streamRooms
)

// random gives one of a seed's streams.
func random(seed, stream uint64) *rand.Rand { return rand.New(rand.NewPCG(seed, stream)) }

// maxRun is the longest run of neighbouring pages in a worn free list.
const maxRun = 8

// pickPages gives each request its pages, as an allocator does whose free list has been
// worn by requests that came and went: scattered over the pool, with short runs of
// neighbours. No page is given twice, and page 0 never: SGLang keeps it for padding. The
// pool must have more than requests*pages pages.
func pickPages(r *rand.Rand, pool, requests, pages int) [][]int32 {
	type run struct{ first, n int }
	var runs []run
	for next := 1; next < pool; {
		n := min(1+r.IntN(maxRun), pool-next)
		runs = append(runs, run{next, n})
		next += n
	}
	r.Shuffle(len(runs), func(i, j int) { runs[i], runs[j] = runs[j], runs[i] })

	free := make([]int32, 0, pool)
	for _, run := range runs {
		for i := range run.n {
			free = append(free, int32(run.first+i))
		}
	}
	lists := make([][]int32, requests)
	for i := range lists {
		lists[i], free = free[:pages:pages], free[pages:]
	}
	return lists
}

// shiftPages gives other pages than the given ones, by numbers that are by places greater;
// behind the last page comes page 1. Neighbours mostly stay neighbours.
func shiftPages(lists [][]int32, pool, by int) [][]int32 {
	shifted := make([][]int32, len(lists))
	for i, list := range lists {
		shifted[i] = make([]int32, len(list))
		for k, p := range list {
			shifted[i][k] = int32((int(p)-1+by)%(pool-1)) + 1
		}
	}
	return shifted
}

// pickRooms draws the requests' rooms as SGLang does: from 63 bits, and not zero.
func pickRooms(r *rand.Rand, n int) []nixlkv.Room {
	rooms := make([]nixlkv.Room, 0, n)
	seen := map[nixlkv.Room]bool{0: true}
	for len(rooms) < n {
		if room := nixlkv.Room(r.Uint64() >> 1); !seen[room] {
			seen[room] = true
			rooms = append(rooms, room)
		}
	}
	return rooms
}

// golden is 2^64 divided by the golden ratio: its multiples spread over all 64 bits.
const golden = 0x9e3779b97f4a7c15

// pattern starts the contents of one page in one region. Different pages start far apart,
// so that a page in the wrong place, or shifted, shows.
func pattern(seed uint64, region int, page int32) uint64 {
	return mix(seed + golden*(uint64(region)<<32|uint64(uint32(page))+1))
}

// mix spreads every bit of x over all bits (the finalizer of SplitMix64).
func mix(x uint64) uint64 {
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// fillPage writes a page's contents, eight bytes at a time; its length is a multiple of 8.
func fillPage(b []byte, start uint64) {
	for ; len(b) >= 8; b = b[8:] {
		binary.LittleEndian.PutUint64(b, start)
		start += golden
	}
}

// checkPage gives the offset of the first byte that fillPage would have written otherwise,
// and what it would have written; -1 if there is none.
func checkPage(b []byte, start uint64) (off int, want byte) {
	for i := 0; i+8 <= len(b); i += 8 {
		if x := binary.LittleEndian.Uint64(b[i:]) ^ start; x != 0 {
			k := firstByte(x)
			return i + k, byte(start >> (8 * k))
		}
		start += golden
	}
	return -1, 0
}

// checkZero gives the offset of the first byte that is not zero; -1 if there is none.
func checkZero(b []byte) int {
	for i := 0; i+8 <= len(b); i += 8 {
		if x := binary.LittleEndian.Uint64(b[i:]); x != 0 {
			return i + firstByte(x)
		}
	}
	return -1
}

// firstByte is the position of the lowest byte of x that is not zero.
func firstByte(x uint64) int {
	k := 0
	for x&0xff == 0 {
		x >>= 8
		k++
	}
	return k
}

// origin says what a page of the decode should hold: a page of the prefill, sent for a room.
// Without a room it should have stayed zero.
type origin struct {
	room nixlkv.Room
	page int32
}

// arrive notes in want, which has an origin for each page of the decode, what a request
// brings.
func arrive(want []origin, r request) {
	for k, page := range r.targets {
		want[page] = origin{r.room, r.sources[k]}
	}
}

// mismatch is the first byte that is not what it should be.
type mismatch struct {
	room      nixlkv.Room // 0: the page belongs to no request
	region    int
	name      string // what the region holds
	page      int
	off       int // in the page
	got, want byte
}

func (m *mismatch) Error() string {
	owner := "no room"
	if m.room != 0 {
		owner = fmt.Sprintf("room %d", m.room)
	}
	return fmt.Sprintf("wrong bytes: %s, region %d (%s), page %d: byte %d is %#02x, want %#02x",
		owner, m.region, m.name, m.page, m.off, m.got, m.want)
}

// memory gives one page of one region.
type memory interface {
	page(region int, page int32) []byte
}

// verify looks at every byte of a pool. The error is a *mismatch, or the context's cause.
func verify(ctx context.Context, m memory, s shape, seed uint64, want []origin) error {
	for region := range s.regions() {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		for page, o := range want {
			b := m.page(region, int32(page))
			off, w := -1, byte(0)
			if o.room != 0 {
				off, w = checkPage(b, pattern(seed, region, o.page))
			} else {
				off = checkZero(b)
			}
			if off >= 0 {
				return &mismatch{o.room, region, s.regionName(region), page, off, b[off], w}
			}
		}
	}
	return nil
}
