package embedded

// fifo is a queue that keeps its memory. Its bound is its users': each queues what is
// bounded elsewhere (requests by their handles, notifications by their bytes).
type fifo[T any] struct {
	items []T
	head  int
}

func (q *fifo[T]) len() int { return len(q.items) - q.head }

func (q *fifo[T]) push(v T) {
	if q.head > 0 && len(q.items) == cap(q.items) {
		n := copy(q.items, q.items[q.head:])
		clear(q.items[n:])
		q.items, q.head = q.items[:n], 0
	}
	q.items = append(q.items, v)
}

// peek gives the oldest; the queue is not empty.
func (q *fifo[T]) peek() *T { return &q.items[q.head] }

// pop takes the oldest; the queue is not empty.
func (q *fifo[T]) pop() T {
	var zero T
	v := q.items[q.head]
	q.items[q.head] = zero
	q.head++
	if q.head == len(q.items) {
		q.items, q.head = q.items[:0], 0
	}
	return v
}
