package main

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func TestChunksCoverPages(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		pages := make([]int32, rapid.IntRange(1, 200).Draw(t, "pages"))
		for i := range pages {
			pages[i] = int32(i)
		}
		n := rapid.IntRange(1, 20).Draw(t, "chunks")
		var all []int32
		for i := range n {
			c := chunk(pages, i, n)
			if d := len(c) - len(pages)/n; d < 0 || d > 1 {
				t.Fatalf("chunk %d of %d has %d of %d pages", i, n, len(c), len(pages))
			}
			all = append(all, c...)
		}
		if !slices.Equal(all, pages) {
			t.Fatalf("the chunks together are %v", all)
		}
	})
}

func TestPickedPages(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		slots := rapid.IntRange(1, 100).Draw(t, "slots")
		n := rapid.IntRange(1, slots).Draw(t, "pages")
		pattern := rapid.SampledFrom([]string{"", "scattered", "contiguous"}).Draw(t, "pattern")
		p := newPicker(pattern, slots, n, 0)
		for i := range rapid.IntRange(1, 30).Draw(t, "rooms") {
			pages := slices.Clone(p.pages(i))
			if len(pages) != n {
				t.Fatalf("%d pages, want %d", len(pages), n)
			}
			if pattern == "contiguous" && int(pages[n-1]-pages[0]) != n-1 {
				t.Fatalf("%v is not a run", pages)
			}
			slices.Sort(pages)
			if len(slices.Compact(pages)) != n || pages[0] < 0 || int(pages[n-1]) >= slots {
				t.Fatalf("pages %v of %d slots", pages, slots)
			}
		}
	})
}

func TestTally(t *testing.T) {
	var y tally
	if e := y.report("prefill", time.Second, time.Second, 10); e.OK != 0 || e.P50S != nil || e.RoomsPS != 0 {
		t.Errorf("without rooms: %+v", e)
	}
	for i := range 200 {
		y.add(time.Duration(200-i)*time.Millisecond, nil)
	}
	y.add(0, errors.New("first"))
	y.add(0, errors.New("second"))
	e := y.report("prefill", 2*time.Second, 500*time.Millisecond, 1e9)
	got := fmt.Sprintln(e.OK, e.Failed, e.WallS, e.RoomsPS, e.GBPS, *e.P50S, *e.P99S, e.CPUS, e.FirstErr)
	if want := "200 2 2 100 100 0.101 0.199 0.5 first\n"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

func TestBenchArgs(t *testing.T) {
	for line, ok := range map[string]bool{
		`{"count":1,"pages":8,"concurrency":1}`:                                        true,
		`{"count":1,"pages":1,"concurrency":9,"chunks":3,"pattern":"contiguous"}`:      true,
		`{"count":0,"pages":1,"concurrency":1}`:                                        false,
		`{"count":1,"pages":9,"concurrency":1}`:                                        false,
		`{"count":1,"pages":0,"concurrency":1}`:                                        false,
		`{"count":1,"pages":1,"concurrency":0}`:                                        false,
		`{"count":1,"pages":1,"concurrency":1,"chunks":0}`:                             false,
		`{"count":1,"pages":1,"concurrency":1,"pattern":"spiral"}`:                     false,
		`{"count":1,"pages":1,"concurrency":1,"timeout":-1}`:                           false,
		`{"count":2,"pages":1,"concurrency":1,"first_room":9223372036854775806}`:       false,
		`{"count":1,"pages":1,"concurrency":1,"first_room":18446744073709551615}`:      false,
		`{"count":1,"pages":1,"concurrency":1,"first_room":9223372036854775806}`:       true,
		`{"count":1,"pages":1,"concurrency":1,"timeout":1e300}`:                        false,
		`{"count":9223372036854775807,"pages":1,"concurrency":1,"first_room":1000000}`: false,
	} {
		var a benchArgs
		if err := parse([]byte(line), &a); err != nil {
			t.Fatal(err)
		}
		if err := a.validate(8, 4); (err == nil) != ok || err != nil && !errors.Is(err, errCommand) {
			t.Errorf("%s: %v", line, err)
		}
	}
}
