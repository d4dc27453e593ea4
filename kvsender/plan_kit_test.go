package kvsender

import (
	"fmt"
	"hash/fnv"
	"testing"

	"github.com/nixlkv/nixlkv/nixl"
	"github.com/nixlkv/nixlkv/registry"
	"pgregory.net/rapid"
)

// memory is a model of one side's memory: blocks of bytes at addresses of any size, with the
// number of times that each byte was written.
type memory struct {
	blocks []memoryBlock
}

type memoryBlock struct {
	base   uint64
	data   []byte
	writes []uint8
}

func (m *memory) add(base uint64, n int) {
	m.blocks = append(m.blocks, memoryBlock{base, make([]byte, n), make([]uint8, n)})
}

// at gives the block and the offset of n bytes; ok is false if they lie in none.
func (m *memory) at(addr, n uint64) (b *memoryBlock, off uint64, ok bool) {
	for i := range m.blocks {
		b, off := &m.blocks[i], addr-m.blocks[i].base
		if size := uint64(len(b.data)); addr >= b.base && off < size && n <= size-off {
			return b, off, true
		}
	}
	return nil, 0, false
}

type failer interface {
	Helper()
	Fatalf(format string, args ...any)
}

// write copies n bytes from src's memory.
func (m *memory) write(t failer, to uint64, from *memory, addr, n uint64) {
	t.Helper()
	a, i, ok := from.at(addr, n)
	b, j, ok2 := m.at(to, n)
	if !ok || !ok2 || n == 0 {
		t.Fatalf("%d bytes from %#x (%t) to %#x (%t): not in the memory", n, addr, ok, to, ok2)
	}
	copy(b.data[j:j+n], a.data[i:i+n])
	for k := j; k < j+n; k++ {
		b.writes[k]++
	}
}

// copyDescs applies descriptors.
func copyDescs(t failer, dst, src *memory, to, from []nixl.Desc) {
	t.Helper()
	if len(from) != len(to) {
		t.Fatalf("%d source descriptors, %d destination descriptors", len(from), len(to))
	}
	for i := range from {
		if from[i].Len != to[i].Len {
			t.Fatalf("descriptor %d: %d bytes to %d bytes", i, from[i].Len, to[i].Len)
		}
		dst.write(t, to[i].Addr, src, from[i].Addr, from[i].Len)
	}
}

// expand gives the descriptors that runs stand for, as a prepared list holds them.
func expand(runs []nixl.Run) []nixl.Desc {
	var out []nixl.Desc
	for _, r := range runs {
		for i := range r.Count {
			out = append(out, nixl.Desc{Addr: r.Addr + i*r.Stride, Len: r.Len, Dev: r.Dev})
		}
	}
	return out
}

// pick gives the descriptors of a prepared list at indices.
func pick(t failer, list []nixl.Desc, indices []int32) []nixl.Desc {
	t.Helper()
	out := make([]nixl.Desc, len(indices))
	for i, x := range indices {
		if x < 0 || int(x) >= len(list) {
			t.Fatalf("index %d at position %d, the list has %d", x, i, len(list))
		}
		out[i] = list[x]
	}
	return out
}

// byDescs and byIndex apply one chunk in the two ways there are. What cannot be sent by index
// goes by descriptors both times.
func byDescs(t failer, plan *peerPlan, c chunkPages, dst, src *memory) {
	t.Helper()
	for i := range plan.segments {
		s := &plan.segments[i]
		runs := s.appendRuns(nil, c)
		from, to := s.appendDescs(nil, nil, runs)
		if n := s.descriptors(unitsIn(runs), len(runs)); n != len(from) {
			t.Fatalf("segment %d: %d descriptors announced, %d made", i, n, len(from))
		}
		checkDevices(t, s, from, to)
		copyDescs(t, dst, src, to, from)
	}
}

func byIndex(t failer, plan *peerPlan, c chunkPages, dst, src *memory) {
	t.Helper()
	for i := range plan.segments {
		s := &plan.segments[i]
		if !s.preparable() {
			byDescs(t, &peerPlan{segments: plan.segments[i : i+1]}, c, dst, src)
			continue
		}
		from, to := expand(s.appendSourceRuns(nil)), expand(s.appendDestinationRuns(nil))
		for _, d := range to {
			if _, _, ok := dst.at(d.Addr, d.Len); !ok {
				t.Fatalf("%+v of the prepared list is not in the memory", d)
			}
		}
		a, b := s.appendIndices(nil, nil, c)
		from, to = pick(t, from, a), pick(t, to, b)
		checkDevices(t, s, from, to)
		copyDescs(t, dst, src, to, from)
	}
}

func checkDevices(t failer, s *segment, from, to []nixl.Desc) {
	t.Helper()
	for i := range from {
		if from[i].Dev != s.srcDev || to[i].Dev != s.dstDev {
			t.Fatalf("descriptor %d: devices %d and %d, expected %d and %d", i, from[i].Dev, to[i].Dev, s.srcDev, s.dstDev)
		}
	}
}

// buffer is a region with what it holds: "K3" is the K of layer 3, "dV0" the V of layer 0 of
// a draft model. Two regions belong together if they hold the same.
type buffer struct {
	holds  string
	region registry.Region
}

// world is a prefill rank and a decode rank of one model, with their memories.
type world struct {
	layout   registry.Layout
	peer     registry.Peer
	src, dst []buffer
	from, to memory
	chunks   []chunkPages
}

// worldShape is what differs between worlds.
type worldShape struct {
	layers, pp, stage  int
	mla, hybrid        bool
	wholeDecode        bool // the decode has all layers, else those of the same stage
	srcIDs, dstIDs     bool
	draft, decodeDraft int // draft layers of the prefill, and those that only the decode has
	srcKind, dstKind   registry.Kind
}

// holdings lists what a side's pool holds, in SGLang's order, and the layer id of each: the
// main model's, then the draft's, whose ids follow those of all layers.
func (w worldShape) holdings(first, end, draft int) (names []string, ids []int) {
	groups := []string{"K", "V"}
	if w.mla || w.hybrid {
		groups = []string{"C"}
	}
	for _, g := range groups {
		for l := first; l < end; l++ {
			names, ids = append(names, fmt.Sprint(g, l)), append(ids, l)
		}
	}
	for _, g := range groups {
		for l := range draft {
			names, ids = append(names, fmt.Sprint("d", g, l)), append(ids, w.layers+l)
		}
	}
	return names, ids
}

// bounds gives the layers of a stage; the first ones have one more.
func (w worldShape) bounds(stage int) (first, end int) {
	each, longer := w.layers/w.pp, w.layers%w.pp
	first = stage*each + min(stage, longer)
	end = first + each
	if stage < longer {
		end++
	}
	return first, end
}

var anyShape = rapid.Custom(func(t *rapid.T) worldShape {
	pp := rapid.IntRange(1, 4).Draw(t, "pp")
	w := worldShape{
		layers: rapid.IntRange(2*pp, 10).Draw(t, "layers"), pp: pp,
		stage:       rapid.IntRange(0, pp-1).Draw(t, "stage"),
		mla:         rapid.Bool().Draw(t, "mla"),
		wholeDecode: rapid.Bool().Draw(t, "decode without pp"),
		srcIDs:      rapid.Bool().Draw(t, "prefill ids"),
		dstIDs:      rapid.Bool().Draw(t, "decode ids"),
		draft:       rapid.SampledFrom([]int{0, 0, 1, 2}).Draw(t, "draft layers"),
		decodeDraft: rapid.SampledFrom([]int{0, 0, 1}).Draw(t, "more draft layers at the decode"),
		srcKind:     rapid.SampledFrom([]registry.Kind{registry.VRAM, registry.DRAM}).Draw(t, "source kind"),
		dstKind:     rapid.SampledFrom([]registry.Kind{registry.VRAM, registry.VRAM, registry.DRAM}).Draw(t, "destination kind"),
	}
	w.hybrid = !w.mla && rapid.Bool().Draw(t, "hybrid")
	if w.draft > 0 && w.pp > 1 {
		w.decodeDraft = 0 // drafts of different depth on the two sides are nothing that a stage can know of
	}
	return w
})

// build lays the shape out in memory.
func (w worldShape) build(t *rapid.T) *world {
	first, end := w.bounds(w.stage)
	o := &world{}
	o.layout = registry.Layout{
		GPU: rapid.Uint64Range(0, 7).Draw(t, "prefill gpu"), MLA: w.mla, HybridMLA: w.hybrid,
		StartLayer: first, DraftRegions: w.draft * w.groups(),
		Ranks: registry.Ranks{PP: w.pp, PPRank: w.stage},
	}
	if rapid.Bool().Draw(t, "end layer told") {
		o.layout.EndLayer = end
	}
	o.peer = registry.Peer{Agent: "decode", GPU: rapid.Uint64Range(0, 7).Draw(t, "decode gpu")}
	lens := map[string]uint64{} // of a page of what a buffer holds, on both sides
	itemLen := func(name string) uint64 {
		if lens[name] == 0 {
			lens[name] = rapid.Uint64Range(1, 24).Draw(t, "page bytes")
		}
		return lens[name]
	}
	equal := rapid.Bool().Draw(t, "equal pages")
	if equal {
		n := rapid.Uint64Range(1, 24).Draw(t, "page bytes")
		itemLen = func(string) uint64 { return n }
	}
	names, ids := w.holdings(first, end, w.draft)
	for i, name := range names {
		id := registry.NoLayer
		if w.srcIDs {
			id = ids[i]
		}
		pages := rapid.Uint64Range(3, 12).Draw(t, "source pages")
		o.src = append(o.src, buffer{name, registry.Region{Len: itemLen(name) * pages, ItemLen: itemLen(name), LayerID: id, Kind: w.srcKind}})
	}
	if w.wholeDecode {
		first, end = 0, w.layers
	}
	names, ids = w.holdings(first, end, w.draft+w.decodeDraft)
	wider := rapid.Uint64Range(0, 5).Draw(t, "wider pages")
	for i, name := range names {
		id := registry.NoLayer
		if w.dstIDs {
			id = ids[i]
		}
		pages := rapid.Uint64Range(3, 12).Draw(t, "destination pages")
		stride := itemLen(name) + wider
		o.dst = append(o.dst, buffer{name, registry.Region{Len: stride * pages, ItemLen: stride, LayerID: id, Kind: w.dstKind}})
	}
	base := rapid.SampledFrom([]uint64{4096, 0x7f00_0000_0000, 0xffff_81ab_54e0_1000}).Draw(t, "base")
	placeBuffers(o.src, &o.from, base, false, rapid.IntRange(0, 3).Draw(t, "gap"))
	placeBuffers(o.dst, &o.to, base, rapid.Bool().Draw(t, "interleaved"), rapid.IntRange(0, 3).Draw(t, "gap"))
	for _, b := range o.src {
		o.layout.KV = append(o.layout.KV, b.region)
	}
	for _, b := range o.dst {
		o.peer.KV = append(o.peer.KV, b.region)
	}
	o.fill()
	o.drawChunks(t)
	return o
}

func (w worldShape) groups() int {
	if w.mla || w.hybrid {
		return 1
	}
	return 2
}

// placeBuffers gives the buffers addresses: one behind the other, gap bytes apart, or page by page
// interleaved, so that the stride of each is a page of all.
func placeBuffers(buffers []buffer, m *memory, base uint64, interleaved bool, gap int) {
	if !interleaved {
		for i := range buffers {
			r := &buffers[i].region
			r.Base = base
			m.add(base, int(r.Len))
			base += r.Len + uint64(gap)
		}
		return
	}
	var stride, pages uint64
	for i := range buffers {
		r := &buffers[i].region
		pages = max(pages, r.Pages())
		r.Base = base + stride
		stride += r.ItemLen
	}
	for i := range buffers {
		r := &buffers[i].region
		n := r.Pages()
		r.ItemLen, r.Len = stride, stride*n
	}
	m.add(base, int(stride*(pages+1)))
}

// fill writes into every source page what no other page has.
func (o *world) fill() {
	for _, b := range o.src {
		for p := range b.region.Pages() {
			block, off, _ := o.from.at(b.region.Base+p*b.region.ItemLen, b.region.ItemLen)
			for i := range b.region.ItemLen {
				h := fnv.New32a()
				fmt.Fprint(h, b.holds, p, i)
				block.data[off+i] = byte(h.Sum32()) | 1
			}
		}
	}
}

// drawChunks draws the pages of a room, in up to three chunks.
func (o *world) drawChunks(t *rapid.T) {
	limit := func(bs []buffer) int32 {
		n := bs[0].region.Pages()
		for _, b := range bs {
			n = min(n, b.region.Pages())
		}
		return int32(n)
	}
	srcPages, dstPages := limit(o.src), limit(o.dst)
	dst := rapid.SliceOfNDistinct(rapid.Int32Range(0, dstPages-1), 0, int(dstPages), rapid.ID[int32]).Draw(t, "destination list")
	if rapid.Bool().Draw(t, "contiguous") {
		for i := range dst {
			dst[i] = int32(i)
		}
	}
	src := make([]int32, len(dst))
	for i := range src {
		if i > 0 && src[i-1]+1 < srcPages && rapid.Bool().Draw(t, "next page") {
			src[i] = src[i-1] + 1
			continue
		}
		src[i] = rapid.Int32Range(0, srcPages-1).Draw(t, "source page")
	}
	for at := 0; ; {
		n := rapid.IntRange(0, len(src)-at).Draw(t, "chunk")
		if len(o.chunks) == 2 {
			n = len(src) - at
		}
		o.chunks = append(o.chunks, chunkPages{src: src[at : at+n], dst: dst[at : at+n]})
		at += n
		if len(o.chunks) == 3 {
			return
		}
	}
}

// slowCopy is what the transfer ought to do: buffer by buffer, page by page, what holds the
// same is copied. It knows nothing of plans.
func (o *world) slowCopy(t failer) *memory {
	var want memory
	for _, b := range o.to.blocks {
		want.add(b.base, len(b.data))
	}
	for _, s := range o.src {
		for _, d := range o.dst {
			if s.holds != d.holds {
				continue
			}
			for _, c := range o.chunks {
				for i := range c.src {
					want.write(t, d.region.Base+uint64(c.dst[i])*d.region.ItemLen, &o.from,
						s.region.Base+uint64(c.src[i])*s.region.ItemLen, s.region.ItemLen)
				}
			}
		}
	}
	return &want
}

// blank gives memory like the destination's, with nothing written.
func (o *world) blank() *memory {
	var m memory
	for _, b := range o.to.blocks {
		m.add(b.base, len(b.data))
	}
	return &m
}

// sameBytes fails where two memories differ, in bytes or in how often they were written.
func sameBytes(t failer, got, want *memory) {
	t.Helper()
	for i := range want.blocks {
		g, w := &got.blocks[i], &want.blocks[i]
		for k := range w.data {
			if g.data[k] != w.data[k] || g.writes[k] != w.writes[k] {
				t.Fatalf("byte %#x: %#x written %d times, expected %#x written %d times",
					w.base+uint64(k), g.data[k], g.writes[k], w.data[k], w.writes[k])
			}
		}
	}
}

// region is a region for tables: pages of n bytes, 64 of them.
func region(base, n uint64, layer int, k registry.Kind) registry.Region {
	return registry.Region{Base: base, Len: 64 * n, ItemLen: n, LayerID: layer, Kind: k}
}

// regions gives n regions of pages of 256 bytes, in VRAM and without layer ids, far apart.
func regions(n int, base uint64) []registry.Region {
	out := make([]registry.Region, n)
	for i := range out {
		out[i] = region(base+uint64(i)<<20, 256, registry.NoLayer, registry.VRAM)
	}
	return out
}

// mustPlan plans what has to be possible.
func mustPlan(t testing.TB, l *registry.Layout, p *registry.Peer) *peerPlan {
	t.Helper()
	plan, err := planPeer(l, p)
	if err != nil {
		t.Fatal(err)
	}
	return plan
}

// planOf plans n regions of 64 pages of 256 bytes on either side.
func planOf(t testing.TB, n int) *peerPlan {
	t.Helper()
	l, p := sides(n, n)
	return mustPlan(t, l, p)
}
