package main

import (
	"math"
	"math/bits"
	"sync/atomic"
	"time"
)

// A histogram of times has 16 buckets for each doubling, from a microsecond on: quantiles are
// exact to 6 %, and it takes the same memory however much is counted.
const (
	subBits     = 4
	subBuckets  = 1 << subBits
	histBuckets = (64 - subBits + 1) * subBuckets
)

// bucketOf gives the bucket of a time.
func bucketOf(d time.Duration) int {
	us := uint64(max(d.Microseconds(), 0))
	if us < subBuckets {
		return int(us)
	}
	shift := bits.Len64(us) - subBits - 1
	return shift<<subBits + int(us>>shift)
}

// upperBound gives the end of a bucket, as far as a Duration can.
func upperBound(bucket int) time.Duration {
	if bucket < subBuckets {
		return time.Duration(bucket+1) * time.Microsecond
	}
	shift := bucket>>subBits - 1
	us := (uint64(bucket&(subBuckets-1)|subBuckets) + 1) << shift
	if us > math.MaxInt64/uint64(time.Microsecond) {
		return math.MaxInt64
	}
	return time.Duration(us) * time.Microsecond
}

// histogram counts times. Many goroutines may add.
type histogram struct{ n [histBuckets]atomic.Uint64 }

func (h *histogram) add(d time.Duration) { h.n[bucketOf(d)].Add(1) }

// take gives what was counted since the last take, by bucket.
func (h *histogram) take() times {
	t := times{}
	for i := range h.n {
		if n := h.n[i].Swap(0); n > 0 {
			t[i] = n
		}
	}
	return t
}

// times are counts by bucket.
type times map[int]uint64

func (t times) merge(o times) {
	for i, n := range o {
		t[i] += n
	}
}

func (t times) count() (n uint64) {
	for _, c := range t {
		n += c
	}
	return n
}

// quantile gives a time that a part q of all does not exceed; 0 if there are none.
func (t times) quantile(q float64) time.Duration {
	want := uint64(q * float64(t.count()))
	var seen uint64
	for i := range histBuckets {
		if seen += t[i]; t[i] > 0 && seen >= want {
			return upperBound(i)
		}
	}
	return 0
}

// byTime counts a room as often as it lasted: its quantiles are what somebody notices who comes
// at any moment, and streams that are all held up at once do not hide in the few rooms that they
// then have.
func (t times) byTime() times {
	w := times{}
	for i, n := range t {
		w[i] = n * uint64(upperBound(i).Microseconds())
	}
	return w
}
