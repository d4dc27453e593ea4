package kvsender

import (
	"errors"
	"math"
	"testing"

	"github.com/nixlkv/nixlkv"
)

// Tokens fill all pages of a plan but the last one.
func TestPlanTokens(t *testing.T) {
	p := newPair(t, embeddedEngine(t), 25) // pages of 16 tokens
	p.d.register(p.d.registration())
	p.transfer(t, 1)
	for i, tc := range []struct {
		pages, tokens int
		fits          bool
	}{
		{0, 0, true}, {3, 0, true}, {1, 1, true}, {1, 16, true}, {2, 17, true}, {3, 33, true}, {3, 48, true},
		{0, 1, false}, {1, 17, false}, {2, 16, false}, {3, 1, false}, {3, 32, false}, {3, 49, false}, {math.MaxInt, 1, false}, {1, math.MaxInt, false},
	} {
		id := nixlkv.Room(100 + i)
		s := open(t, p.m, id)
		p.d.tell(id, []int32{1, 2, 3}, 1)
		_, err := s.WaitBootstrapped(within(t))
		ok(t, err)
		if err := s.Begin(Plan{Pages: tc.pages, Tokens: tc.tokens, Aux: Aux(0)}); (err == nil) != tc.fits || err != nil && !errors.Is(err, nixlkv.ErrPageCount) {
			t.Errorf("%d tokens in %d pages: %v", tc.tokens, tc.pages, err)
		}
		if !tc.fits {
			wantFailure(t, s, p.d, nixlkv.ErrPageCount, "all pages but the last are full")
		}
		ok(t, s.Close())
	}
}
