package bootstrap

import (
	"container/list"
	"fmt"
	"time"

	"github.com/nixlkv/nixlkv"
)

// roomTable remembers which DP rank serves a room, for a while. Not safe for concurrent use.
//
// All entries live equally long, so the list is ordered by expiry and dropping what has
// expired costs nothing but the entries dropped.
type roomTable struct {
	limit int
	ttl   time.Duration
	byID  map[nixlkv.Room]*list.Element
	order list.List // of roomEntry, the oldest first
}

type roomEntry struct {
	room    nixlkv.Room
	rank    int
	expires time.Time
}

// errRoomsFull: no more rooms until some expire.
var errRoomsFull = fmt.Errorf("%w: too many rooms with a DP rank", nixlkv.ErrLimit)

// set enters a room, or replaces its rank and starts its life anew. A full table refuses new
// rooms with errRoomsFull: dropping a live one would leave its decode asking in vain.
func (r *roomTable) set(room nixlkv.Room, rank int, now time.Time) error {
	r.expire(now)
	entry := roomEntry{room: room, rank: rank, expires: now.Add(r.ttl)}
	if e, ok := r.byID[room]; ok {
		e.Value = entry
		r.order.MoveToBack(e)
		return nil
	}
	if len(r.byID) >= r.limit {
		return errRoomsFull
	}
	if r.byID == nil {
		r.byID = make(map[nixlkv.Room]*list.Element)
	}
	r.byID[room] = r.order.PushBack(entry)
	return nil
}

// get gives the DP rank of a room that has not expired.
func (r *roomTable) get(room nixlkv.Room, now time.Time) (rank int, ok bool) {
	r.expire(now)
	e, ok := r.byID[room]
	if !ok {
		return 0, false
	}
	return e.Value.(roomEntry).rank, true
}

func (r *roomTable) expire(now time.Time) {
	for e := r.order.Front(); e != nil; e = r.order.Front() {
		entry := e.Value.(roomEntry)
		if now.Before(entry.expires) {
			return
		}
		r.order.Remove(e)
		delete(r.byID, entry.room)
	}
}
