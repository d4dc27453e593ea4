package main

import (
	"errors"
	"fmt"
	"math"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/nixl"
)

// Bounds on what the flags ask for and on what the other side tells.
const (
	maxLayers   = 1024
	maxPool     = 1 << 20 // pages
	maxRequests = 1 << 16 // in all rounds
	maxRounds   = 1 << 10
	maxInFlight = 1 << 10
)

// message is one line on the link. Exactly one of its fields is set.
type message struct {
	Plan   *plan   `json:"plan,omitempty"`   // first, from the prefill
	Ready  *ready  `json:"ready,omitempty"`  // the decode's answer; then the writes go out
	Report *report `json:"report,omitempty"` // from the decode, when it has verified a round; then the next one goes out
	Bye    bool    `json:"bye,omitempty"`    // from the prefill, which holds nothing of the decode any more
	Failed string  `json:"failed,omitempty"` // from either, any time: why it gives up
}

// plan is what the prefill is going to send.
type plan struct {
	Engine string   `json:"engine"` // native or embedded: both sides need the same
	Agent  string   `json:"agent"`  // the prefill's, from which notifications come
	Layers int      `json:"layers"`
	Pool   int      `json:"pool"`  // pages of each side
	Pages  int      `json:"pages"` // of each request
	Rounds int      `json:"rounds"`
	Seed   uint64   `json:"seed"`
	Rooms  []uint64 `json:"rooms"` // one a request, round by round
	// Sources are the prefill's pages of each request in the first round. A decode needs
	// them only to verify.
	Sources [][]int32 `json:"sources"`
}

// makePlan draws rooms and pages.
func makePlan(c config, engine nixl.Kind, agent string) plan {
	return plan{
		Engine:  engine.String(),
		Agent:   agent,
		Layers:  c.layers,
		Pool:    c.poolPages,
		Pages:   c.pages,
		Rounds:  c.rounds,
		Seed:    c.seed,
		Rooms:   pickRooms(random(c.seed, streamRooms), c.rounds*c.requests),
		Sources: pickPages(random(c.seed, streamPrefill), c.poolPages, c.requests, c.pages),
	}
}

func (p *plan) shape() shape { return llama3(p.Layers) }

// requests is their number in each round.
func (p *plan) requests() int { return len(p.Sources) }

// rooms are those of a round.
func (p *plan) rooms(round int) []uint64 {
	n := p.requests()
	return p.Rooms[round*n:][:n]
}

// sources are the pages that a round sends. The next round sends others to the same pages
// of the decode, so that a write that never came shows there too.
func (p *plan) sources(round int) [][]int32 { return shiftPages(p.Sources, p.Pool, round) }

// bytes is what one round moves.
func (p *plan) bytes() int64 { return p.shape().bytes(p.requests() * p.Pages) }

// check says whether a plan that came over the link can be carried out.
func (p *plan) check() error {
	if kind, err := nixl.ParseKind(p.Engine); err != nil || kind == nixl.Auto {
		return fmt.Errorf("plan: no engine %.32q", p.Engine)
	}
	if err := checkSizes(p.Layers, p.requests(), p.Pages, p.Pool, p.Rounds); err != nil {
		return fmt.Errorf("plan: %w", err)
	}
	if len(p.Rooms) != p.Rounds*p.requests() {
		return fmt.Errorf("plan: %d rooms for %d rounds of %d requests", len(p.Rooms), p.Rounds, p.requests())
	}
	if err := checkPages(p.Sources, p.Pool, p.Pages); err != nil {
		return fmt.Errorf("plan: %w", err)
	}
	seen := map[uint64]bool{0: true}
	for _, room := range p.Rooms {
		if room > uint64(nixlkv.MaxRoom) || seen[room] {
			return fmt.Errorf("plan: room %d is zero, given twice or too large", room)
		}
		seen[room] = true
	}
	return nil
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

// ready is where the decode wants the requests.
type ready struct {
	Metadata []byte    `json:"metadata"` // its agent's
	Regions  []uint64  `json:"regions"`  // addresses
	Targets  [][]int32 `json:"targets"`  // its pages of each request
}

// check says whether an answer fits the plan. That its regions are registered is for NIXL
// to check, against the metadata.
func (r *ready) check(p *plan) error {
	switch {
	case len(r.Metadata) == 0:
		return errors.New("decode: no agent metadata")
	case len(r.Regions) != p.shape().regions():
		return fmt.Errorf("decode: %d regions, want %d", len(r.Regions), p.shape().regions())
	case len(r.Targets) != p.requests():
		return fmt.Errorf("decode: pages of %d requests, want %d", len(r.Targets), p.requests())
	}
	if err := checkPages(r.Targets, p.Pool, p.Pages); err != nil {
		return fmt.Errorf("decode: %w", err)
	}
	return nil
}

// report is what the decode has verified after a round, in bytes.
type report struct {
	Written int64 `json:"written"` // equal to what the prefill has
	Zero    int64 `json:"zero"`    // of no request, and still zero
}
