package main

import (
	"fmt"
	"hash/fnv"
	"math"

	"github.com/nixlkv/nixlkv"
)

// Bounds on what the flags ask for.
const (
	maxLayers   = 1024
	maxPool     = 1 << 20 // pages
	maxRequests = 1 << 16 // in all rounds
	maxRounds   = 1 << 10
	maxInFlight = 1 << 10
	maxChunks   = 1 << 12 // of a request: what a sender lets wait
)

// plan is what a router would tell both sides: which requests there are. Here both work it out
// from the same flags.
type plan struct {
	shape  shape
	pool   int // pages of each side
	pages  int // of each request
	rounds int
	seed   uint64

	rooms   []nixlkv.Room // one a request, round by round
	sources [][]int32     // the prefill's pages of each request in the first round
	targets [][]int32     // the decode's, in every round
}

// request is one request of a round.
type request struct {
	room    nixlkv.Room
	sources []int32 // pages of the prefill
	targets []int32 // and of the decode
	source  int     // metadata slot of the prefill
	target  int     // and of the decode
	token   int32   // the first token, which the prefill has sampled
}

// newPlan draws rooms and pages. Flags that are not the same give other rooms: workers that
// do not fit together never meet in one.
func newPlan(c *config) *plan {
	h := fnv.New64a()
	fmt.Fprintln(h, c.layers, c.requests, c.pages, c.poolPages, c.rounds, c.seed)
	return &plan{
		shape: llama3(c.layers), pool: c.poolPages, pages: c.pages, rounds: c.rounds, seed: c.seed,
		rooms:   pickRooms(random(h.Sum64(), streamRooms), c.rounds*c.requests),
		sources: pickPages(random(c.seed, streamPrefill), c.poolPages, c.requests, c.pages),
		targets: pickPages(random(c.seed, streamDecode), c.poolPages, c.requests, c.pages),
	}
}

// requests is their number in each round.
func (p *plan) requests() int { return len(p.sources) }

// round gives the requests of a round. The next one sends other pages to the same pages of
// the decode, so that a write that never came shows there too.
func (p *plan) round(n int) []request {
	sources := shiftPages(p.sources, p.pool, n)
	rs := make([]request, p.requests())
	for i := range rs {
		room := p.rooms[n*len(rs)+i]
		rs[i] = request{
			room: room, sources: sources[i], targets: p.targets[i],
			source: i, target: len(rs) - 1 - i, token: firstToken(p.seed, room),
		}
	}
	return rs
}

// batches are the requests of a round that go out together: the very first request goes
// alone, because it finds the two sides unacquainted.
func (p *plan) batches(round int) [][]request {
	rs := p.round(round)
	if round > 0 || len(rs) == 1 {
		return [][]request{rs}
	}
	return [][]request{rs[:1], rs[1:]}
}

// bytes is what one round moves.
func (p *plan) bytes() int64 { return p.shape.bytes(p.requests() * p.pages) }

// untouched is how much of the decode's cache belongs to no request.
func (p *plan) untouched() int64 { return p.shape.bytes(p.pool) - p.bytes() }

// vocabulary is Llama 3's.
const vocabulary = 128256

// firstToken stands where a model would be.
func firstToken(seed uint64, room nixlkv.Room) int32 {
	return int32(mix(seed+uint64(room)) % vocabulary)
}

// checkSizes says whether numbers of layers, requests, pages a request, pages of the pool
// and rounds go together. Page 0 goes to no request.
func checkSizes(layers, requests, pages, pool, rounds int) error {
	switch {
	case layers < 1 || layers > maxLayers:
		return fmt.Errorf("layers: %d is not one of 1 to %d", layers, maxLayers)
	case requests < 1 || requests > maxRequests:
		return fmt.Errorf("requests: %d is not one of 1 to %d", requests, maxRequests)
	case pages < 1 || pages > maxPool:
		return fmt.Errorf("pages: %d is not one of 1 to %d", pages, maxPool)
	case pool < 1 || pool > maxPool:
		return fmt.Errorf("pool: %d pages is not one of 1 to %d", pool, maxPool)
	case rounds < 1 || rounds > maxRounds:
		return fmt.Errorf("rounds: %d is not one of 1 to %d", rounds, maxRounds)
	case rounds*requests > maxRequests:
		return fmt.Errorf("rounds: %d of %d requests are more than %d", rounds, requests, maxRequests)
	case requests*pages >= pool:
		return fmt.Errorf("pool: %d pages are too few for %d requests of %d, and one for padding", pool, requests, pages)
	case llama3(layers).regions()*pool > math.MaxInt32:
		return fmt.Errorf("pool: %d pages in %d layers are more descriptors than a list holds", pool, layers)
	}
	return nil
}
