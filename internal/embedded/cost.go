package embedded

import (
	"fmt"
	"math"
	"math/bits"
	"sync"
	"time"

	"github.com/nixlkv/nixlkv/internal/engine"
)

// costModel remembers how long transfers took, by size class (powers of two), as moving
// means of the time and of its deviation.
type costModel struct {
	mu      sync.Mutex
	classes [65]costClass
}

type costClass struct {
	seen  bool
	bytes float64 // mean size
	took  float64 // mean nanoseconds
	off   float64 // mean deviation of the time
}

// observe adds a transfer that succeeded.
func (m *costModel) observe(n uint64, took time.Duration) {
	const weight = 1.0 / 8
	size, t := float64(n), float64(took)
	m.mu.Lock()
	defer m.mu.Unlock()
	c := &m.classes[bits.Len64(n)]
	if !c.seen {
		// One measurement says nothing of how much the next differs: assume half.
		*c = costClass{seen: true, bytes: size, took: t, off: t / 2}
		return
	}
	c.off += weight * (math.Abs(t-c.took) - c.off)
	c.bytes += weight * (size - c.bytes)
	c.took += weight * (t - c.took)
}

// estimate scales the nearest class that was measured. Far from it the margin grows: a
// small transfer is all latency, a large one all bandwidth.
func (m *costModel) estimate(n uint64) (engine.Cost, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	want := bits.Len64(n)
	for d := range len(m.classes) {
		for _, k := range [2]int{want - d, want + d} {
			if k < 0 || k >= len(m.classes) || !m.classes[k].seen {
				continue
			}
			c := m.classes[k]
			scale := (float64(n) + 1) / (c.bytes + 1)
			took := c.took * scale
			if scale < 1 {
				// Latency does not shrink with the size.
				took = c.took * math.Sqrt(scale)
			}
			margin := (c.off + c.took*float64(d)/2) * took / max(c.took, 1)
			return engine.Cost{Duration: duration(took), Margin: duration(margin)}, nil
		}
	}
	return engine.Cost{}, fmt.Errorf("embedded: no transfer was measured yet: %w", engine.ErrUnsupported)
}

func duration(ns float64) time.Duration {
	return time.Duration(min(ns, math.MaxInt64/2))
}
