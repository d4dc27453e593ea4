package bootstrap

import (
	"errors"
	"testing"
	"time"

	"github.com/nixlkv/nixlkv"
	"pgregory.net/rapid"
)

// TestRoomTable compares the table with a plain map that is searched as a whole.
func TestRoomTable(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const ttl, limit = 10 * time.Second, 5
		now := time.Unix(1000, 0)
		table := roomTable{limit: limit, ttl: ttl}
		model := make(map[nixlkv.Room]roomEntry)
		expire := func() {
			for room, e := range model {
				if !now.Before(e.expires) {
					delete(model, room)
				}
			}
		}
		anyRoom := rapid.Map(rapid.IntRange(0, 9), func(n int) nixlkv.Room { return nixlkv.Room(n) })
		t.Repeat(map[string]func(*rapid.T){
			"wait": func(t *rapid.T) {
				now = now.Add(time.Duration(rapid.IntRange(0, 12).Draw(t, "seconds")) * time.Second)
			},
			"set": func(t *rapid.T) {
				room, rank := anyRoom.Draw(t, "room"), rapid.IntRange(0, 7).Draw(t, "rank")
				expire()
				_, known := model[room]
				err := table.set(room, rank, now)
				if full := !known && len(model) == limit; full != errors.Is(err, nixlkv.ErrLimit) {
					t.Fatalf("%v with %d rooms", err, len(model))
				}
				if err == nil {
					model[room] = roomEntry{room, rank, now.Add(ttl)}
				}
			},
			"get": func(t *rapid.T) {
				room := anyRoom.Draw(t, "room")
				expire()
				want, wantOK := model[room]
				if rank, ok := table.get(room, now); ok != wantOK || rank != want.rank {
					t.Fatalf("room %d: %d, %v, want %d, %v", room, rank, ok, want.rank, wantOK)
				}
			},
			"": func(t *rapid.T) {
				if len(table.byID) != table.order.Len() || len(table.byID) > limit {
					t.Fatalf("%d rooms, %d in order", len(table.byID), table.order.Len())
				}
			},
		})
	})
}
