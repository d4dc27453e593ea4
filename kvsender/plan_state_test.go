package kvsender

import (
	"errors"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/nixl"
	"github.com/nixlkv/nixlkv/registry"
)

// stateOf gives two sides with one component of n tensors of 8 slots of so many bytes; the
// decode tells everything but dims and layers.
func stateOf(kind registry.StateType, n int, item uint64) (*registry.Layout, *registry.Peer) {
	l, p := &registry.Layout{GPU: 1}, &registry.Peer{Agent: "peer", GPU: 3}
	addState(l, p, kind, n, item)
	return l, p
}

func addState(l *registry.Layout, p *registry.Peer, kind registry.StateType, n int, item uint64) {
	c, s := registry.StateComponent{Type: kind}, registry.PeerState{}
	for i := range n {
		at := uint64(len(l.State))<<30 + uint64(i)<<20
		c.Tensors = append(c.Tensors, registry.StateTensor{Base: 1<<40 + at, Len: 8 * item, ItemLen: item, LayerID: registry.NoLayer})
		s.Ptrs, s.ItemLens, s.DataLens = append(s.Ptrs, 2<<40+at), append(s.ItemLens, item), append(s.DataLens, 8*item)
	}
	l.State, p.State = append(l.State, c), append(p.State, s)
}

// What cannot be sent says why, with both sides' geometry.
func TestStateFaults(t *testing.T) {
	for _, tc := range []struct {
		name   string
		kind   registry.StateType
		change func(l *registry.Layout, p *registry.Peer)
		want   error
		text   string
	}{
		{"no such component", "swa", func(_ *registry.Layout, p *registry.Peer) { p.State = nil }, nixlkv.ErrRegions, "2 tensors at the prefill, 0 at the decode"},
		{"lists of other lengths", "swa", func(_ *registry.Layout, p *registry.Peer) { p.State[0].ItemLens = p.State[0].ItemLens[:1] }, nixlkv.ErrState, "1 item lengths for 2 tensors"},
		{"wider slots", "swa", func(_ *registry.Layout, p *registry.Peer) { p.State[0].ItemLens[1] = 96 }, nixlkv.ErrStride, "64 bytes in prefill tensor 1, 96 in decode tensor 1"},
		{"narrower slots", "swa", func(_ *registry.Layout, p *registry.Peer) { p.State[0].ItemLens[1] = 32 }, nixlkv.ErrStride, "32 in decode tensor 1"},
		{"less than a slot", "swa", func(_ *registry.Layout, p *registry.Peer) { p.State[0].DataLens[1] = 63 }, nixlkv.ErrRegions, "no slot"},
		{"past the address space", "swa", func(_ *registry.Layout, p *registry.Peer) {
			p.State[0].Ptrs[1], p.State[0].DataLens = math.MaxUint64-62, nil
		}, nixlkv.ErrRegions, "no slot"},
		{"wraps around", "swa", func(_ *registry.Layout, p *registry.Peer) {
			p.State[0].Ptrs[1], p.State[0].DataLens[1] = math.MaxUint64-100, 640
		}, nixlkv.ErrRegions, "lie in no region"},
		{"one tensor twice", "swa", func(_ *registry.Layout, p *registry.Peer) { p.State[0].Ptrs[1] = p.State[0].Ptrs[0] }, nixlkv.ErrRegions, "overlap"},
		{"one tensor twice, lengths not told", "swa", func(_ *registry.Layout, p *registry.Peer) {
			p.State[0].Ptrs[1], p.State[0].DataLens = p.State[0].Ptrs[0], nil
		}, nixlkv.ErrRegions, "overlap"},
		{"a type of another backend", "dsv4_c4_state", nil, nixlkv.ErrUnsupported, "dsv4_c4_state"},
		{"unequal TP", "block_scale", func(_ *registry.Layout, p *registry.Peer) { p.Ranks.TP = 2 }, nixlkv.ErrTopology, "state type not supported for this topology: TP 1 and 2"},
		{"minimax with unequal TP and MLA", "minimax_index_k", func(l *registry.Layout, p *registry.Peer) { l.MLA, p.Ranks.TP = true, 2 }, nixlkv.ErrTopology, "it needs PP 1 and equal TP"},
		{"minimax with stages", "minimax_dense_kv", func(l *registry.Layout, _ *registry.Peer) { l.Ranks.PP = 2 }, nixlkv.ErrTopology, "prefill PP 2"},
		{"swa of another layout", "swa", func(l *registry.Layout, p *registry.Peer) { p.Ranks.TP, l.SWALayout = 2, "hnd" }, nixlkv.ErrTopology, `needs the NHD KV cache layout, got "hnd"`},
		{"swa with stages", "swa", func(l *registry.Layout, p *registry.Peer) { p.Ranks.TP, l.SWALayout, l.Ranks.PP = 2, "nhd", 2 }, nixlkv.ErrTopology, "prefill PP 2"},
		{"swa of unknown heads", "swa", func(l *registry.Layout, p *registry.Peer) { p.Ranks.TP, l.SWALayout = 2, "nhd" }, nixlkv.ErrTopology, "0 KV heads"},
		{"swa of heads that do not divide", "swa", func(l *registry.Layout, p *registry.Peer) { p.Ranks.TP, l.SWALayout, l.TotalKVHeads = 2, "nhd", 3 }, nixlkv.ErrTopology, "3 KV heads"},
		{"TP sizes that do not divide", "mamba", func(l *registry.Layout, p *registry.Peer) {
			l.Ranks.TP, p.Ranks.TP = 2, 3
			l.State[0].Tensors[0].Dim, l.State[0].Tensors[1].Dim, p.State[0].Dims = 1, 1, []int{1, 1}
		}, nixlkv.ErrTopology, "they keep different shards"},
		{"a decode of another rank", "mamba", func(l *registry.Layout, p *registry.Peer) { l.Ranks.TP, p.Ranks.TP, p.Ranks.EngineRank = 2, 2, 1 }, nixlkv.ErrTopology, "decode TP rank 1 of 2"},
		{"replicated at unequal TP", "mamba", func(l *registry.Layout, p *registry.Peer) {
			l.Ranks.TP, p.State[0].Dims = 2, []int{8, 0}
			l.State[0].Tensors[0].Dim = 4
		}, nixlkv.ErrTopology, "Replicated Mamba PD state transfer"},
		{"replicated at the decode alone", "mamba", func(l *registry.Layout, p *registry.Peer) {
			l.Ranks.TP, p.State[0].Dims = 2, []int{8, 0}
			l.State[0].Tensors[0].Dim, l.State[0].Tensors[1].Dim = 4, 4
		}, nixlkv.ErrStride, "4 in 64 bytes at the prefill, of 8 in 64 bytes"},
		{"dimensions that do not add up", "mamba", func(l *registry.Layout, p *registry.Peer) {
			l.Ranks.TP, p.State[0].Dims, p.State[0].ItemLens = 2, []int{12, 12}, []uint64{96, 96}
			l.State[0].Tensors[0].Dim, l.State[0].Tensors[1].Dim = 8, 8
		}, nixlkv.ErrRegions, "dimension 8 of TP 2 at the prefill, 12 of TP 1"},
		{"a group that does not divide", "mamba", func(l *registry.Layout, p *registry.Peer) {
			l.Ranks.TP, p.State[0].Dims, p.State[0].ItemLens = 2, []int{16, 16}, []uint64{128, 128}
			l.State[0].Tensors[0].Dim, l.State[0].Tensors[1].Dim, l.State[0].Tensors[0].ConvGroups = 8, 8, []int{5, 11}
		}, nixlkv.ErrRegions, "a convolution group of 5 does not divide by TP 2"},
		{"layer ids of some", "qsa_pending", func(l *registry.Layout, _ *registry.Peer) { l.State[0].Tensors[0].LayerID = 1 }, nixlkv.ErrRegions, "layer ids for 1 of 2 tensors"},
		{"a layer that the decode has not", "qsa_pending", func(l *registry.Layout, p *registry.Peer) {
			l.State[0].Tensors[0].LayerID, l.State[0].Tensors[1].LayerID, p.State[0].LayerIDs = 1, 2, []int{1, 3}
		}, nixlkv.ErrRegions, "model layer 2"},
		{"layers told by one side, with stages", "mamba", func(l *registry.Layout, p *registry.Peer) { l.Ranks.PP, p.State[0].LayerIDs = 2, []int{1, 2} }, nixlkv.ErrRegions, "layer metadata from one peer only"},
		{"rings of one side", "dsa_tail", func(_ *registry.Layout, p *registry.Peer) { p.State[0].Ptrs[1] = 0 }, nixlkv.ErrRegions, "decode tensor 1"},
		{"a stage that is not there", "dsa", func(l *registry.Layout, p *registry.Peer) {
			l.Ranks.PP, l.StartLayer = 2, 2
			p.State[0].Ptrs, p.State[0].ItemLens, p.State[0].DataLens = []uint64{1 << 41, 1<<41 + 1<<20, 1<<41 + 2<<20}, []uint64{64, 64, 64}, nil
		}, nixlkv.ErrRegions, "tensors 2 to 4 are not all among the decode's 3"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			l, p := stateOf(tc.kind, 2, 64)
			if tc.change != nil {
				tc.change(l, p)
			}
			plan := planState(l, p)
			faults := plan.faults()
			if len(faults) != 1 {
				t.Fatalf("%d faults", len(faults))
			}
			err := faults[0]
			for _, text := range []string{tc.text, "component 0, " + string(tc.kind), "(prefill: 2 tensors, ", "; decode: "} {
				if !strings.Contains(err.Error(), text) {
					t.Errorf("%v: expected %q", err, text)
				}
			}
			if !errors.Is(err, tc.want) || !errors.Is(err, nixlkv.ErrState) {
				t.Errorf("%v, expected %v", err, tc.want)
			}
			// A room without this state is served all the same.
			for _, none := range [][][]int32{nil, {nil}, {{}}} {
				_, err := plan.checkDestination(none, nil)
				if err = errors.Join(err, plan.check(none, none)); err != nil {
					t.Errorf("%v: %v", none, err)
				}
			}
			if _, got := plan.checkDestination([][]int32{{1}}, nil); got != err {
				t.Errorf("%v, expected %v", got, err)
			}
			if got := plan.check([][]int32{{1}}, nil); got != err {
				t.Errorf("%v, expected %v", got, err)
			}
		})
	}
}

func TestStateChecks(t *testing.T) {
	l, p := stateOf(registry.StateMamba, 2, 64)
	addState(l, p, registry.StateSWA, 2, 32)
	addState(l, p, registry.StateDSATail, 1, 80)
	l.State[1].Tensors[1].Len = 6 * 32 // slots 6 and 7 are not in all
	p.State[1].DataLens[0] = 5 * 32
	plan := planState(l, p)
	if faults := plan.faults(); len(faults) > 0 {
		t.Fatal(faults)
	}
	type lists = [][]int32
	ring := []int32{1, 8, 2, 0, 1, 10}
	for _, tc := range []struct {
		name         string
		src, dst     lists
		source, dest string // what checkStateSource and checkDestination say
		both         string // what check says
	}{
		{"nothing", nil, nil, "", "", ""},
		{"empty lists", lists{{}, nil, {}}, lists{{}, {}}, "", "", ""},
		{"everything", lists{{7}, {5, 0, 5}, ring}, lists{{0}, {4, 0, 2}, {3, 0, 3, 0, 0, 10}}, "", "", ""},
		{"slot 0 twice", lists{nil, {1, 2, 3}}, lists{nil, {0, 4, 0}}, "", "", ""},
		{"more components at the decode", lists{{7}}, lists{{0}, nil, nil, {3, 4}}, "", "", ""},
		{"more components at the prefill", lists{nil, nil, nil, {1}}, nil, "component 3, this rank has 3", "", ""},
		{"more empty lists at the prefill", lists{nil, nil, nil, nil}, nil, "", "", ""},
		{"two mamba slots", lists{{1, 2}}, lists{{1, 2}}, "single state index, the prefill gives 2", "single state index, the decode gives 2", "single state index"},
		{"a list that only the prefill gives", lists{{1}}, nil, "", "", "state index length mismatch: prefill=1, decode=0"},
		{"a list that only the decode gives", nil, lists{nil, {1, 2}}, "", "", "state index length mismatch: prefill=0, decode=2"},
		{"lists of other lengths", lists{nil, {1}}, lists{nil, {1, 2}}, "", "", "prefill=1, decode=2"},
		{"prefill slot out of range", lists{nil, {1, 6}}, lists{nil, {1, 2}}, "prefill slot 6 at position 1, there are 6", "", "prefill slot 6"},
		{"negative prefill slot", lists{{-1}}, lists{{1}}, "prefill slot -1", "", "prefill slot -1"},
		{"decode slot out of range", lists{nil, {1, 2}}, lists{nil, {1, 5}}, "", "decode slot 5 at position 1, there are 5", "decode slot 5"},
		{"negative decode slot", lists{{1}}, lists{{math.MinInt32}}, "", "decode slot -2147483648", "decode slot"},
		{"decode slot twice", lists{nil, {1, 2, 3}}, lists{nil, {3, 1, 3}}, "", "decode slot 3 is given twice", ""},
		{"ring of five numbers", lists{nil, nil, ring[:5]}, lists{nil, nil, ring}, "6-tuples, got 5", "", "prefill=5, decode=6"},
		{"ring of a negative number", lists{nil, nil, {1, -1, 2, 0, 1, 10}}, lists{nil, nil, ring}, "negative", "", "negative"},
		{"ring past its end", lists{nil, nil, ring}, lists{nil, nil, {1, 8, 3, 0, 0, 10}}, "", "3 tokens from 8 on, of 10", "3 tokens from 8 on"},
		{"pieces that overlap", lists{nil, nil, ring}, lists{nil, nil, {1, 0, 2, 1, 1, 10}}, "", "overlap", "overlap"},
		{"ring of no tokens", lists{nil, nil, {1, 0, 0, 0, 0, 0}}, lists{nil, nil, ring}, "ring of no tokens", "", "no tokens"},
		{"ring that does not divide its row", lists{nil, nil, {1, 0, 3, 0, 0, 10}}, lists{nil, nil, {1, 0, 3, 0, 0, 9}}, "", "do not divide into 9 tokens", "for 10 tokens at the prefill"},
		{"tokens of other lengths", lists{nil, nil, {1, 0, 3, 0, 0, 10}}, lists{nil, nil, {1, 0, 3, 0, 0, 8}}, "", "", "for 10 tokens"},
		{"other numbers of tokens", lists{nil, nil, ring}, lists{nil, nil, {1, 0, 2, 0, 0, 10}}, "", "", "live-token count mismatch: prefill 3, decode 2"},
		{"row out of range", lists{nil, nil, {8, 8, 2, 0, 1, 10}}, lists{nil, nil, {9, 8, 2, 0, 1, 10}}, "prefill row 8, there are 8", "decode row 9, there are 8", "row 8"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, dest := plan.checkDestination(tc.dst, nil)
			for _, c := range []struct {
				name string
				err  error
				want string
			}{{"source", checkStateSource(l, tc.src), tc.source}, {"destination", dest, tc.dest}, {"both", plan.check(tc.src, tc.dst), tc.both}} {
				switch {
				case c.want == "":
					if c.err != nil && !(c.name == "both" && (tc.source != "" || tc.dest != "")) {
						t.Errorf("%s: %v", c.name, c.err)
					}
				case c.err == nil || !errors.Is(c.err, nixlkv.ErrState) || !strings.Contains(c.err.Error(), c.want):
					t.Errorf("%s: %v, expected %q", c.name, c.err, c.want)
				}
			}
		})
	}
}

// A decode that waits for state must not be told that it is there.
func TestStateOfAModelWithout(t *testing.T) {
	plan := planState(&registry.Layout{}, &registry.Peer{})
	if _, err := plan.checkDestination([][]int32{nil, {1}}, nil); !errors.Is(err, nixlkv.ErrState) {
		t.Errorf("%v, expected %v", err, nixlkv.ErrState)
	}
	if _, err := plan.checkDestination([][]int32{{}, {}}, nil); err != nil {
		t.Error(err)
	}
}

// What one decode cannot take does not keep it from the rest.
func TestStateFaultIsTheComponents(t *testing.T) {
	l, p := stateOf(registry.StateMamba, 2, 64)
	addState(l, p, registry.StateSWA, 2, 32)
	p.State[1].ItemLens[0] = 48
	plan := planState(l, p)
	if faults := plan.faults(); len(faults) != 1 || plan.components[0].fault != nil {
		t.Fatal(faults)
	}
	if err := plan.check([][]int32{{3}}, [][]int32{{4}, {}}); err != nil {
		t.Error(err)
	}
	from, to, _ := plan.appendDescs(nil, nil, nil, 0, []int32{3}, []int32{4})
	wantFrom := []nixl.Desc{{Addr: 1<<40 + 192, Len: 64, Dev: 1}, {Addr: 1<<40 + 1<<20 + 192, Len: 64, Dev: 1}}
	wantTo := []nixl.Desc{{Addr: 2<<40 + 256, Len: 64, Dev: 3}, {Addr: 2<<40 + 1<<20 + 256, Len: 64, Dev: 3}}
	if !slices.Equal(from, wantFrom) || !slices.Equal(to, wantTo) {
		t.Errorf("%+v to %+v", from, to)
	}
}

// A decode before 0.5.23 does not tell how long its tensors are; one that does bounds slots.
// Nothing that it tells may lead past the end of the address space.
func TestStateLengthsNotTold(t *testing.T) {
	l, p := stateOf(registry.StateSWA, 2, 64)
	p.State[0].DataLens = nil
	p.State[0].Ptrs[1] = math.MaxUint64 - 64*9 // ten slots, to the last byte but one
	plan := planState(l, p)
	if _, err := plan.checkDestination([][]int32{{8}}, nil); err != nil {
		t.Error(err)
	}
	if _, err := plan.checkDestination([][]int32{{9}}, nil); !errors.Is(err, nixlkv.ErrState) {
		t.Errorf("%v, expected %v", err, nixlkv.ErrState)
	}
	p.State[0].ItemLens = nil // as long as the prefill's
	if faults := planState(l, p).faults(); len(faults) > 0 {
		t.Error(faults)
	}
}

// Neighbours on both sides are one descriptor; a head slice of all heads is a whole page.
func TestStateNeighboursMerge(t *testing.T) {
	l, p := stateOf(registry.StateSWA, 2, 64)
	for _, replicated := range []bool{false, true} {
		if replicated {
			l.Ranks.TP, l.PageSize, l.TotalKVHeads, l.SWALayout = 4, 4, 1, "nhd"
			p.Ranks.TP = 2
		}
		plan := planState(l, p)
		if faults := plan.faults(); len(faults) > 0 {
			t.Fatal(faults)
		}
		from, to, _ := plan.appendDescs(nil, nil, nil, 0, []int32{2, 3, 4, 7}, []int32{0, 1, 2, 3})
		lens := func(d []nixl.Desc) (n []uint64) {
			for _, x := range d {
				n = append(n, x.Len)
			}
			return n
		}
		if want := []uint64{192, 64, 192, 64}; !slices.Equal(lens(from), want) || !slices.Equal(lens(to), want) {
			t.Errorf("%v to %v, expected %v", lens(from), lens(to), want)
		}
	}
}

// With memory to build lists in, checking and describing a room's state allocates nothing.
func TestStateAllocatesNothing(t *testing.T) {
	l, p := stateOf(registry.StateMamba, 40, 64)
	addState(l, p, registry.StateSWA, 40, 32)
	addState(l, p, registry.StateDSATail, 4, 80)
	plan := planState(l, p)
	src, dst := [][]int32{{7}, {5, 6, 1, 2}, {1, 8, 2, 0, 1, 10}}, [][]int32{{0}, {4, 0, 2, 1}, {3, 0, 1, 1, 2, 10}}
	var from, to []nixl.Desc
	var runs []run
	var scratch []int32
	send := func() {
		var err error
		if scratch, err = plan.checkDestination(dst, scratch); err != nil {
			t.Fatal(err)
		}
		if err := plan.check(src, dst); err != nil {
			t.Fatal(err)
		}
		from, to = from[:0], to[:0]
		for i := range src {
			from, to, runs = plan.appendDescs(from, to, runs[:0], i, src[i], dst[i])
		}
	}
	send()
	if n := testing.AllocsPerRun(50, send); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
