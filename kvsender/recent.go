package kvsender

import (
	"sync"

	"github.com/nixlkv/nixlkv"
)

// maxRecent bounds the rooms that a recent remembers something of.
const maxRecent = 4096

// recent remembers something of the last rooms that it was told of.
type recent[V any] struct {
	mu     sync.Mutex
	rooms  map[nixlkv.Room]V
	oldest []nixlkv.Room // a ring, once it is full
	next   int
}

// note remembers something of a room, unless there is something already.
func (c *recent[V]) note(id nixlkv.Room, v V) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, known := c.rooms[id]; known {
		return
	}
	if c.rooms == nil {
		c.rooms = map[nixlkv.Room]V{}
	}
	if len(c.oldest) < maxRecent {
		c.oldest = append(c.oldest, id)
	} else {
		delete(c.rooms, c.oldest[c.next])
		c.oldest[c.next] = id
		c.next = (c.next + 1) % maxRecent
	}
	c.rooms[id] = v
}

// take gives what is remembered of a room, once; the zero value if nothing is.
func (c *recent[V]) take(id nixlkv.Room) V {
	c.mu.Lock()
	defer c.mu.Unlock()
	v := c.rooms[id]
	delete(c.rooms, id) // its place in the ring ages
	return v
}
