package main

import (
	"fmt"
	"strings"

	"github.com/nixlkv/nixlkv"
)

// tagEnd goes behind the room in a notification, as in SGLang: room_kv_chunk_last_rank.
// The demo sends each request as one chunk, number 0 and the last, from prefill rank 0.
const tagEnd = "_kv_0_1_0"

// tag names the write of a request.
func tag(room uint64) []byte { return []byte(nixlkv.Room(room).String() + tagEnd) }

// parseTag gives the room that a notification names.
func parseTag(msg []byte) (uint64, error) {
	digits, ok := strings.CutSuffix(string(msg), tagEnd)
	if !ok {
		return 0, fmt.Errorf("notification %.64q: want ROOM%s", msg, tagEnd)
	}
	room, err := nixlkv.ParseRoom(digits)
	if err != nil {
		return 0, fmt.Errorf("notification %.64q: %w", msg, err)
	}
	return uint64(room), nil
}
