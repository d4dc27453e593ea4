package nixlkv_test

import (
	"errors"
	"testing"

	"github.com/nixlkv/nixlkv"
)

func TestNewRoom(t *testing.T) {
	seen := map[nixlkv.Room]bool{}
	for range 10_000 {
		r := nixlkv.NewRoom()
		if r == 0 || r > nixlkv.MaxRoom || seen[r] {
			t.Fatalf("room %d: zero, too large, or drawn before", r)
		}
		seen[r] = true
	}
}

func TestNewRoomAt(t *testing.T) {
	for _, size := range []int{1, 2, 3, 7, 8, 1 << 16} {
		for _, rank := range []int{0, size / 2, size - 1} {
			for range 100 {
				r, err := nixlkv.NewRoomAt(rank, size)
				if err != nil || r == 0 || r > nixlkv.MaxRoom || r%nixlkv.Room(size) != nixlkv.Room(rank) {
					t.Fatalf("room %d at rank %d of %d: %v", r, rank, size, err)
				}
			}
		}
	}
	for _, bad := range [][2]int{{0, 0}, {-1, 2}, {2, 2}, {0, -1}} {
		if r, err := nixlkv.NewRoomAt(bad[0], bad[1]); !errors.Is(err, nixlkv.ErrTopology) {
			t.Errorf("room %d at rank %d of %d: %v", r, bad[0], bad[1], err)
		}
	}
}
