package nixl

import (
	"math/bits"
	"sync"
	"sync/atomic"
	"testing"

	"pgregory.net/rapid"
)

func TestGate(t *testing.T) {
	for range 200 {
		g := gate{drained: make(chan struct{})}
		var inside atomic.Int64
		var wg sync.WaitGroup
		for range 8 {
			wg.Add(1)
			go func() {
				defer wg.Done()
				for g.enter() {
					inside.Add(1)
					inside.Add(-1)
					g.leave()
				}
			}()
		}
		g.close()
		g.close()
		<-g.drained
		if n := inside.Load(); n != 0 {
			t.Fatalf("drained with %d inside", n)
		}
		wg.Wait()
		if g.inside() != 0 || !g.closing() || g.enter() {
			t.Fatal("a closed gate let somebody in")
		}
	}
}

func TestPins(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var p pins
		uses, released := 0, false
		t.Repeat(map[string]func(*rapid.T){
			"pin": func(t *rapid.T) {
				if got := p.pin(); got == released {
					t.Fatalf("pin %v, released %v", got, released)
				} else if got {
					uses++
				}
			},
			"unpin": func(t *rapid.T) {
				if uses > 0 {
					p.unpin()
					uses--
				}
			},
			"release": func(t *rapid.T) {
				err := p.release()
				switch {
				case released && err != ErrReleased, !released && uses > 0 && err != ErrInUse, !released && uses == 0 && err != nil:
					t.Fatalf("release: %v with %d uses, released %v", err, uses, released)
				}
				released = released || err == nil
			},
			"revive": func(t *rapid.T) {
				if released {
					p.revive()
					released = false
				}
			},
		})
	})
}

// Runs cover what the descriptors that they stand for cover, and are refused where one of
// those cannot be.
func TestSpanOfRuns(t *testing.T) {
	edge := rapid.OneOf(rapid.Uint64Range(0, 1<<20), rapid.Uint64Range(^uint64(0)-1<<20, ^uint64(0)), rapid.Uint64())
	rapid.Check(t, func(t *rapid.T) {
		r := Run{Addr: edge.Draw(t, "addr"), Len: edge.Draw(t, "len"), Stride: edge.Draw(t, "stride"), Count: rapid.Uint64Range(0, 50).Draw(t, "count")}
		var descs []Desc
		fits := true
		for i := range r.Count {
			hi, lo := bits.Mul64(i, r.Stride)
			a, c := bits.Add64(r.Addr, lo, 0)
			fits = fits && hi == 0 && c == 0
			descs = append(descs, Desc{Addr: a, Len: r.Len})
		}
		want, err := spanOf(descs, span{})
		fits = fits && err == nil
		got, n, err := spanOfRuns([]Run{r}, span{})
		if fits != (err == nil) || fits && (got != want || n != r.Count) {
			t.Fatalf("%+v: got %+v, %d, %v; want %+v, fits %v", r, got, n, err, want, fits)
		}
	})
}

func TestTransferList(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var l transferList
		in := map[*Transfer]bool{}
		t.Repeat(map[string]func(*rapid.T){
			"add": func(t *rapid.T) {
				x := &Transfer{}
				l.add(x)
				in[x] = true
			},
			"remove": func(t *rapid.T) {
				for x := range in {
					l.remove(x)
					delete(in, x)
					break
				}
			},
			"": func(t *rapid.T) {
				n := 0
				for x := l.head; x != nil; x = x.next {
					if !in[x] {
						t.Fatal("a removed transfer is in the list")
					}
					n++
				}
				if n != len(in) || n != l.n {
					t.Fatalf("%d in the list, counted %d, want %d", n, l.n, len(in))
				}
			},
		})
	})
}
