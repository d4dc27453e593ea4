package main

import (
	"errors"
	"fmt"
	"slices"
	"sync"
)

// errFull: there are not enough free pages, or no free slot.
var errFull = errors.New("full")

// pool hands out numbers 0 to n-1: pages, or slots.
type pool struct {
	mu   sync.Mutex
	free []int32
}

func newPool(n int) *pool {
	free := make([]int32, max(n, 0))
	for i := range free {
		free[i] = int32(len(free) - 1 - i)
	}
	return &pool{free: free}
}

// take gives n numbers, or an error that wraps errFull if there are fewer.
func (p *pool) take(n int) ([]int32, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	left := len(p.free) - n
	if left < 0 {
		return nil, fmt.Errorf("%w: %d free, want %d", errFull, len(p.free), n)
	}
	taken := slices.Clone(p.free[left:])
	p.free = p.free[:left]
	return taken, nil
}

func (p *pool) put(numbers ...int32) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.free = append(p.free, numbers...)
}
