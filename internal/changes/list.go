// Package changes keeps the list of what has changed since somebody looked last: of a manager's
// rooms, for its Poll.
package changes

import "sync"

// Unpolled bounds a list until it is drained for the first time: a server that never polls
// keeps no more rooms for it.
const Unpolled = 256

// List is a bounded list. Its methods may be called from many goroutines.
type List[T any] struct {
	limit int

	mu      sync.Mutex
	items   []T
	spare   []T // the array of a list that was drained
	full    bool
	drained bool
}

// New makes a list of at most so many items.
func New[T any](limit int) *List[T] { return &List[T]{limit: limit} }

// Add puts an item behind the others, and says whether there was room. The list does not look
// whether it holds the item already.
func (l *List[T]) Add(item T) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	limit := l.limit
	if !l.drained {
		limit = min(limit, Unpolled)
	}
	if len(l.items) >= limit {
		l.full = true
		return false
	}
	l.items = append(l.items, item)
	return true
}

// Drain empties the list and calls visit for each item that was in it, in order. visit may Add.
// complete says whether no item was left out, for want of room, since the last call.
func (l *List[T]) Drain(visit func(item T)) (complete bool) {
	l.mu.Lock()
	items := l.items
	l.items, l.spare = l.spare[:0], nil
	complete = !l.full
	l.full, l.drained = false, true
	l.mu.Unlock()
	for _, item := range items {
		visit(item)
	}
	clear(items)
	l.mu.Lock()
	l.spare = items[:0]
	l.mu.Unlock()
	return complete
}
