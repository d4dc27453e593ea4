package kvsender

import (
	"testing"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/internal/changes"
	"github.com/nixlkv/nixlkv/nixl"
)

// A manager that nobody polls keeps few of the rooms that have ended.
func TestNobodyPolls(t *testing.T) {
	e, err := nixl.Open(nixl.Embedded)
	ok(t, err)
	p := newPair(t, e, 25)
	const n = changes.Unpolled + 10
	for id := range nixlkv.Room(n) {
		ok(t, open(t, p.m, id).Close())
	}
	if events, complete := p.m.Poll(nil); len(events) != changes.Unpolled || complete {
		t.Errorf("%d events, complete %v", len(events), complete)
	}
	for id := range nixlkv.Room(n) {
		ok(t, open(t, p.m, id).Close())
	}
	if events, complete := p.m.Poll(nil); len(events) != n || !complete {
		t.Errorf("%d events after the first call, complete %v", len(events), complete)
	}
}
