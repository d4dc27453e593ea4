package main

import (
	"math"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// A time lies within its bucket, whose end is at most a sixteenth and a microsecond above it.
func TestBuckets(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		d := time.Duration(rapid.Int64().Draw(t, "time"))
		i := bucketOf(d)
		if i < 0 || i >= histBuckets {
			t.Fatalf("bucket %d", i)
		}
		d = max(d, 0)
		if end := upperBound(i); end <= d && end != math.MaxInt64 || end-d > d/subBuckets+time.Microsecond {
			t.Fatalf("%v is in the bucket that ends at %v", d, end)
		}
		if i > 0 && upperBound(i-1) > d {
			t.Fatalf("%v is in the bucket behind %v", d, upperBound(i-1))
		}
	})
	if i := bucketOf(math.MaxInt64); i >= histBuckets {
		t.Errorf("the longest time is in bucket %d", i)
	}
}

// A quantile is that of the sorted times, but for the width of a bucket.
func TestQuantiles(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var h, other histogram
		list := rapid.SliceOfN(rapid.Int64Range(0, int64(time.Hour)), 1, 200).Draw(t, "times")
		for i, d := range list {
			if i%2 == 0 {
				h.add(time.Duration(d))
			} else {
				other.add(time.Duration(d))
			}
		}
		all := h.take()
		all.merge(other.take())
		if all.count() != uint64(len(list)) || h.take().count() != 0 {
			t.Fatalf("%d times, want %d", all.count(), len(list))
		}
		slices.Sort(list)
		q := rapid.Float64Range(0, 1).Draw(t, "quantile")
		exact := time.Duration(list[max(int(q*float64(len(list)))-1, 0)])
		if got := all.quantile(q); got != upperBound(bucketOf(exact)) {
			t.Fatalf("%v, want that of %v", got, exact)
		}
	})
	if d := (times{}).quantile(0.5); d != 0 {
		t.Errorf("of nothing: %v", d)
	}
}

// 99 short rooms and one that takes as long as all of them: whoever comes meets it half the
// time.
func TestByTime(t *testing.T) {
	var h histogram
	for range 99 {
		h.add(time.Millisecond)
	}
	h.add(100 * time.Millisecond)
	all := h.take()
	if d := all.quantile(0.9); d > 2*time.Millisecond {
		t.Errorf("p90 %v", d)
	}
	if d := all.byTime().quantile(0.9); d < 100*time.Millisecond {
		t.Errorf("p90 by time %v", d)
	}
}
