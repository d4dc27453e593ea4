package kvsender

import (
	"errors"
	"slices"
	"testing"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/registry"
	"pgregory.net/rapid"
)

// refusal says why a world cannot be served, from what its two sides know of each other; nil
// if it can.
func (w worldShape) refusal(o *world) error {
	n, m := len(o.src), len(o.dst)
	plainMLA := w.mla && !w.hybrid
	switch {
	case m > n && w.dstKind != registry.VRAM:
		return nixlkv.ErrUnsupported
	case w.srcIDs && w.dstIDs:
		return nil
	case w.pp > 1 && w.srcIDs != w.dstIDs:
		return nixlkv.ErrRegions
	case n == m:
		return nil
	case w.pp == 1 && w.draft > 0 && !w.mla && !w.hybrid:
		return nixlkv.ErrRegions
	case w.pp == 1:
		return nil
	case !plainMLA:
		return nixlkv.ErrRegions
	case !w.wholeDecode && w.stage > 0:
		return nixlkv.ErrRegions
	}
	for _, s := range o.src {
		for _, d := range o.dst {
			if s.holds == d.holds && s.region.ItemLen != d.region.ItemLen {
				return nixlkv.ErrRegions
			}
		}
	}
	return nil
}

// What is planned and sent, by index and by descriptors, is what a slow copy does that knows
// only what each buffer holds: the pages asked for, all of them, each byte once, and nothing
// else.
func TestPlanCopiesPages(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := anyShape.Draw(t, "shape")
		o := w.build(t)
		plan, err := planPeer(&o.layout, &o.peer)
		if want := w.refusal(o); !errors.Is(err, want) || (err == nil) != (want == nil) {
			t.Fatalf("planPeer: %v, expected %v", err, want)
		}
		if err != nil {
			return
		}
		want, indexed, described := o.slowCopy(t), o.blank(), o.blank()
		for _, c := range o.chunks {
			if err := checkPages(plan, c); err != nil {
				t.Fatal(err)
			}
			byIndex(t, plan, c, indexed, &o.from)
			byDescs(t, plan, c, described, &o.from)
		}
		sameBytes(t, indexed, want)
		sameBytes(t, described, want)
	})
}

// anySegment is a plan of pieces smaller than pages, as head slices and state have them: any
// number of rows, and several pairs in the same regions.
func anySegment(t *rapid.T) (*peerPlan, *registry.Layout, *registry.Peer) {
	l, p := &registry.Layout{GPU: 1}, &registry.Peer{GPU: 2}
	s := segment{srcKind: registry.VRAM, srcDev: 1, dstKind: registry.VRAM, dstDev: 2,
		srcPages: rapid.Uint64Range(1, 8).Draw(t, "source pages"), dstPages: rapid.Uint64Range(1, 8).Draw(t, "destination pages")}
	src, dst := uint64(4096), uint64(1<<40)
	for range rapid.IntRange(1, 3).Draw(t, "regions") {
		rows := rapid.Uint64Range(1, 4).Draw(t, "rows")
		srcRow := rapid.Uint64Range(4, 12).Draw(t, "source row")
		dstRow := rapid.Uint64Range(4, 12).Draw(t, "destination row")
		var srcAt, dstAt uint64 // within a row
		for range rapid.IntRange(1, 3).Draw(t, "pieces") {
			room := min(srcRow-srcAt, dstRow-dstAt)
			if room == 0 {
				break
			}
			n := rapid.Uint64Range(1, room).Draw(t, "bytes")
			q := pair{src: src + srcAt, srcStride: rows * srcRow, dst: dst + dstAt, dstStride: rows * dstRow, len: n, rows: rows}
			if rows > 1 {
				q.srcRow, q.dstRow = srcRow, dstRow
			}
			s.pairs = append(s.pairs, q)
			srcAt, dstAt = srcAt+n, dstAt+n
		}
		l.KV = append(l.KV, registry.Region{Base: src, Len: s.srcPages * rows * srcRow, ItemLen: rows * srcRow, Kind: registry.VRAM, LayerID: registry.NoLayer})
		p.KV = append(p.KV, registry.Region{Base: dst, Len: s.dstPages * rows * dstRow, ItemLen: rows * dstRow, Kind: registry.VRAM, LayerID: registry.NoLayer})
		src, dst = src+s.srcPages*rows*srcRow, dst+s.dstPages*rows*dstRow
	}
	return &peerPlan{segments: []segment{s}}, l, p
}

// Rows, and pairs that share regions, are described alike by index and by descriptors, and
// both do what the definition of a pair says.
func TestPlanCopiesRows(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		plan, l, p := anySegment(t)
		if err := validatePlan(plan, l, p); err != nil {
			t.Fatal(err)
		}
		s := &plan.segments[0]
		var from, want, indexed, described memory
		for i := range l.KV {
			from.add(l.KV[i].Base, int(l.KV[i].Len))
			for k := range from.blocks[i].data {
				from.blocks[i].data[k] = byte(i*101 + k*7 + 1)
			}
			for _, m := range []*memory{&want, &indexed, &described} {
				m.add(p.KV[i].Base, int(p.KV[i].Len))
			}
		}
		c := chunkPages{dst: rapid.SliceOfDistinct(rapid.Int32Range(0, int32(s.dstPages)-1), rapid.ID[int32]).Draw(t, "destinations")}
		for range c.dst {
			c.src = append(c.src, rapid.Int32Range(0, int32(s.srcPages)-1).Draw(t, "source"))
		}
		for _, q := range s.pairs {
			for i := range c.src {
				for r := range q.rows {
					want.write(t, q.dst+uint64(c.dst[i])*q.dstStride+r*q.dstRow, &from, q.src+uint64(c.src[i])*q.srcStride+r*q.srcRow, q.len)
				}
			}
		}
		byIndex(t, plan, c, &indexed, &from)
		byDescs(t, plan, c, &described, &from)
		sameBytes(t, &indexed, &want)
		sameBytes(t, &described, &want)
	})
}

// checkDisjoint agrees with writing every byte down, except that it may refuse stripes of
// different steps whose ranges cross without meeting, and chains of those.
func TestDisjointProperty(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		oneStep := rapid.Bool().Draw(t, "one step")
		step := rapid.Uint64Range(2, 12).Draw(t, "step")
		var w []stripe
		written := map[uint64]bool{}
		twice := false
		for range rapid.IntRange(1, 4).Draw(t, "stripes") {
			if !oneStep {
				step = rapid.Uint64Range(2, 12).Draw(t, "step")
			}
			n := rapid.Uint64Range(1, step).Draw(t, "bytes")
			count := rapid.Uint64Range(1, 5).Draw(t, "pieces")
			first := rapid.Uint64Range(1, 40).Draw(t, "first")
			last, ok := lastByte(first, step, count, n)
			if !ok {
				t.Fatalf("%d pieces of %d bytes, %d apart, from %d: no last byte", count, n, step, first)
			}
			w = append(w, stripe{first, last, step, n})
			for i := range count {
				for k := range n {
					at := first + i*step + k
					twice = twice || written[at]
					written[at] = true
				}
			}
		}
		apart := oneStep && len(w) <= 2 && spaced(w)
		err := checkDisjoint(slices.Clone(w))
		if twice && !errors.Is(err, nixlkv.ErrRegions) {
			t.Fatalf("%v: bytes are written twice, checkDisjoint: %v", w, err)
		}
		if apart && err != nil {
			t.Fatalf("%v: no byte is written twice, checkDisjoint: %v", w, err)
		}
	})
}

// spaced says whether stripes of one step keep apart in every step, not only in those that
// they have.
func spaced(w []stripe) bool {
	if len(w) < 2 {
		return true
	}
	d := w[1].first % w[1].step
	e := w[0].first % w[0].step
	if d < e {
		return d+w[1].n <= e && e+w[0].n <= w[0].step+d
	}
	return e+w[0].n <= d && d+w[1].n <= w[1].step+e
}
