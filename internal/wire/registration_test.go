package wire

import (
	"bytes"
	"encoding/binary"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/nixlkv/nixlkv"
)

// sample is a registration that uses every frame but the staging ones.
func sample() *Registration {
	return &Registration{
		From: Endpoint{"fd00::1", 31000}, Agent: "decode-0", AgentMetadata: []byte{1, 2, 3},
		KVPtrs: []uint64{1 << 63, 0x1000}, ItemLens: []uint64{512, 1024}, Kinds: []Kind{DRAM, VRAM},
		LayerIDs: []uint32{0, 7}, Slots: 100,
		AuxPtrs:   []uint64{0xfff0},
		StatePtrs: [][]uint64{{1, 2}, {3}}, StateItemLens: [][]uint32{{64, 32}, {0}},
		StateDims: [][]uint32{{8, 4}, nil}, StateLayerIDs: [][]uint32{nil, {5}}, StateDataLens: [][]uint64{{640, 320}, {0}},
		GPU: 3, TPSize: 4, EngineRank: 6, DCPSize: 2, DCPRank: 1,
		Frames: regFrames,
	}
}

func encoded(t *testing.T, g *Registration) [][]byte {
	t.Helper()
	frames, err := new(Encoder).Registration(g)
	if err != nil {
		t.Fatal(err)
	}
	return frames
}

func u32s(v ...uint32) []byte { return pack(nil, v) }
func u64s(v ...uint64) []byte { return pack(nil, v) }

func TestRegistrationFrameCounts(t *testing.T) {
	full := encoded(t, sample())
	for n := range len(full) + 4 {
		frames := slices.Clone(full)
		for len(frames) < n {
			frames = append(frames, []byte("later"))
		}
		m, err := ParseAtPrefill(frames[:n], Limits{})
		if n < regRequired {
			if n == 0 {
				refused(t, err, 0, ErrUnknown, "")
			} else {
				refused(t, err, -1, ErrTruncated, "")
			}
			continue
		}
		if err != nil {
			t.Fatalf("%d frames: %v", n, err)
		}
		got, want := m.(*Registration), sample()
		want.Frames = n
		for frame, forget := range map[int]func(){
			regStateItemLens: func() { want.StateItemLens = nil },
			regStateDims:     func() { want.StateDims = nil },
			regSlots:         func() { want.Slots = 0 },
			regKinds:         func() { want.Kinds = []Kind{VRAM, VRAM} },
			regItemLens:      func() { want.ItemLens = []uint64{512, 512} },
			regStateLayerIDs: func() { want.StateLayerIDs = nil },
			regLayerIDs:      func() { want.LayerIDs = nil },
			regDCPSize:       func() { want.DCPSize = 1 },
			regDCPRank:       func() { want.DCPRank = 0 },
			regStateDataLens: func() { want.StateDataLens = nil },
		} {
			if frame >= n {
				forget()
			}
		}
		if n == regDCPRank { // the size without the rank
			want.DCPSize = 2
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("%d frames:\n%+v\nwant\n%+v", n, got, want)
		}
		if dialect := got.Dialect(); (dialect == DialectStatus) != (n >= 25) {
			t.Errorf("%d frames: %v", n, dialect)
		}
		if got.Extra() != max(0, n-25) {
			t.Errorf("%d frames: %d extra", n, got.Extra())
		}
	}
}

func TestRegistrationEmptyFramesMeanAbsent(t *testing.T) {
	frames := encoded(t, sample())
	for i := regRequired; i < regFrames; i++ {
		frames[i] = nil
	}
	m, err := ParseAtPrefill(frames, Limits{})
	if err != nil {
		t.Fatal(err)
	}
	short, err := ParseAtPrefill(frames[:regRequired], Limits{})
	if err != nil {
		t.Fatal(err)
	}
	short.(*Registration).Frames = regFrames
	if !reflect.DeepEqual(m, short) {
		t.Errorf("empty %+v, absent %+v", m, short)
	}
}

func TestRegistrationRefused(t *testing.T) {
	lists := func(l ...[]uint32) []byte { return packLists(nil, l) }
	for _, c := range []struct {
		name   string
		frame  int
		to     []byte
		target error
		text   string
	}{
		{"no address", regIP, nil, nixlkv.ErrMalformed, "no address"},
		{"brackets", regIP, []byte("[::1]"), nixlkv.ErrMalformed, `"[::1]" is not an address`},
		{"long address", regIP, bytes.Repeat([]byte{'a'}, 256), nixlkv.ErrLimit, "256 bytes"},
		{"port 0", regPort, []byte("0"), nixlkv.ErrMalformed, "port 0, expected 1 to 65535"},
		{"port 65536", regPort, []byte("65536"), nixlkv.ErrMalformed, "port 65536"},
		{"port with sign", regPort, []byte("+1"), nixlkv.ErrMalformed, `"+1" is not a decimal number`},
		{"port with zeros", regPort, []byte("01"), nixlkv.ErrMalformed, `"01"`},
		{"no agent", regAgent, nil, nixlkv.ErrMalformed, "no agent name"},
		{"agent with newline", regAgent, []byte("a\nb"), nixlkv.ErrMalformed, `"a\nb"`},
		{"long agent", regAgent, bytes.Repeat([]byte{'a'}, 257), nixlkv.ErrLimit, "257 bytes of agent name, at most 256"},
		{"no agent metadata", regAgentMetadata, nil, nixlkv.ErrMalformed, "empty"},
		{"half a pointer", regKVPtrs, make([]byte, 12), ErrTruncated, "12 bytes, not a multiple of 8"},
		{"half an aux pointer", regAuxPtrs, make([]byte, 7), ErrTruncated, "7 bytes"},
		{"state without a count", regStatePtrs, []byte{1, 0, 0}, ErrTruncated, "no room for a count"},
		{"GPU", regGPU, []byte("-1"), nixlkv.ErrMalformed, `"-1"`},
		{"GPU too large", regGPU, []byte("2147483648"), nixlkv.ErrMalformed, "above 2147483647"},
		{"TP 0", regTPSize, []byte("0"), nixlkv.ErrTopology, "expected 1 to 2147483647, got 0"},
		{"rank", regEngineRank, []byte("x"), nixlkv.ErrMalformed, `"x"`},
		{"first item length", regItemLen, []byte("513"), nixlkv.ErrRegions, "expected 512 as in frame 19, got 513"},
		{"item length overflow", regItemLen, []byte("18446744073709551616"), nixlkv.ErrMalformed, "above"},
		{"state item lengths of one component", regStateItemLens, lists([]uint32{64, 32}), nixlkv.ErrState, "expected 2 lists, one a component, or none, got 1"},
		{"state item lengths of one tensor", regStateItemLens, lists([]uint32{64}, []uint32{0}), nixlkv.ErrState, "component 0: expected 2, one a tensor, got 1"},
		{"no state item lengths in a component", regStateItemLens, lists(nil, []uint32{0}), nixlkv.ErrState, "component 0: expected 2"},
		{"state dims", regStateDims, lists([]uint32{1, 2, 3}, nil), nixlkv.ErrState, "component 0: expected 2, one a tensor, got 3"},
		{"list of half a word", regStateDims, []byte{1, 0, 0, 0, 2, 0, 0, 0, 9, 9}, ErrTruncated, "list 0 of 2 bytes, not a multiple of 4"},
		{"staging base", regStagingBase, []byte("1"), ErrTruncated, "1 bytes, expected 8 or none"},
		{"staging size", regStagingSize, []byte("a"), nixlkv.ErrMalformed, `"a"`},
		{"slots", regSlots, []byte("1e3"), nixlkv.ErrMalformed, `"1e3"`},
		{"slots beyond the address space", regSlots, []byte("18446744073709551615"), nixlkv.ErrRegions, "exceed the address space"},
		{"unknown kind", regKinds, []byte("VRAM,BLK"), nixlkv.ErrMemoryKinds, `unsupported kind "BLK" of region 1`},
		{"kind in lower case", regKinds, []byte("vram,VRAM"), nixlkv.ErrMemoryKinds, `"vram"`},
		{"empty kind", regKinds, []byte("VRAM,"), nixlkv.ErrMemoryKinds, `unsupported kind ""`},
		{"too few kinds", regKinds, []byte("VRAM"), nixlkv.ErrMemoryKinds, "expected one for each of 2 regions, got 1"},
		{"too many kinds", regKinds, bytes.Repeat([]byte{','}, 1<<20), nixlkv.ErrMemoryKinds, "got 1048577"},
		{"too few item lengths", regItemLens, u64s(512), nixlkv.ErrRegions, "expected 2, one a region, got 1"},
		{"item length 0", regItemLens, u64s(512, 0), nixlkv.ErrRegions, "region 1: expected an item length, got 0"},
		{"state layer ids", regStateLayerIDs, lists(nil, []uint32{1, 2}), nixlkv.ErrState, "component 1: expected 1, one a tensor, got 2"},
		{"layer ids of one region", regLayerIDs, u32s(1), nixlkv.ErrRegions, "expected 2, one a region, or none, got 1"},
		{"half a layer id", regLayerIDs, make([]byte, 6), ErrTruncated, "6 bytes"},
		{"DCP size", regDCPSize, []byte("0"), nixlkv.ErrTopology, "got 0"},
		{"DCP rank", regDCPRank, []byte("2"), nixlkv.ErrTopology, "expected 0 to 1, got 2"},
		{"state data lengths", regStateDataLens, packLists(nil, [][]uint64{{1, 2}, {3, 4}}), nixlkv.ErrState, "component 1: expected 1, one a tensor, got 2"},
		{"bytes after lists", regStateDataLens, append(packLists(nil, [][]uint64{{1, 2}, {3}}), 0), nixlkv.ErrMalformed, "1 bytes after the last of 2 lists"},
	} {
		t.Run(c.name, func(t *testing.T) {
			frames := clone(encoded(t, sample()))
			frames[c.frame] = c.to
			m, err := ParseAtPrefill(frames, Limits{})
			if m != nil {
				t.Fatalf("accepted: %+v", m)
			}
			fe := refused(t, err, c.frame, c.target, c.text)
			if fe.Field != registrationFields[c.frame] || fe.Message != "registration" || fe.HasRoom {
				t.Errorf("%+v", fe)
			}
			if c.frame > regAgent && (fe.Agent != "decode-0" || fe.From != sample().From) {
				t.Errorf("sender %q at %v", fe.Agent, fe.From)
			}
			if len(err.Error()) > 300 {
				t.Errorf("%d bytes of error", len(err.Error()))
			}
		})
	}
}

func TestRegistrationWithoutKV(t *testing.T) {
	g := sample()
	g.KVPtrs, g.ItemLens, g.Kinds, g.LayerIDs, g.Slots = nil, nil, nil, nil, 0
	frames := encoded(t, g)
	if string(frames[regItemLen]) != "0" || string(frames[regSlots]) != "0" || len(frames[regKinds]) != 0 {
		t.Errorf("%q %q %q", frames[regItemLen], frames[regSlots], frames[regKinds])
	}
	if m, err := ParseAtPrefill(frames, Limits{}); err != nil || !reflect.DeepEqual(m, Message(g)) {
		t.Errorf("%+v, %v", m, err)
	}
	frames[regItemLen] = []byte("64")
	_, err := ParseAtPrefill(frames, Limits{})
	refused(t, err, regItemLen, nixlkv.ErrRegions, "expected 0 without KV, got 64")
}

func TestRegistrationStaging(t *testing.T) {
	g := sample()
	g.StagingBase, g.StagingSize = 1<<63, 1<<40
	frames := encoded(t, g)
	if binary.LittleEndian.Uint64(frames[regStagingBase]) != 1<<63 || string(frames[regStagingSize]) != "1099511627776" {
		t.Errorf("%q %q", frames[regStagingBase], frames[regStagingSize])
	}
	if m, err := ParseAtPrefill(frames, Limits{}); err != nil || !reflect.DeepEqual(m, Message(g)) {
		t.Errorf("%+v, %v", m, err)
	}
}

// Absurd lengths are refused before anything is made for them.
func TestRegistrationLimits(t *testing.T) {
	frames := clone(encoded(t, sample()))
	huge := []byte{0xff, 0xff, 0xff, 0xff}
	for _, c := range []struct {
		name   string
		frame  int
		to     []byte
		limits Limits
		target error
		text   string
	}{
		{"count of lists", regStatePtrs, huge, Limits{}, nixlkv.ErrLimit, "4294967295 lists, at most 64"},
		{"count of lists in later frame", regStateDataLens, append(huge, make([]byte, 1000)...), Limits{}, nixlkv.ErrLimit, "4294967295 lists"},
		{"allowed count of lists", regStatePtrs, huge, Limits{StateComponents: math.MaxInt}, ErrTruncated, "have a header of 17179869184"},
		{"length of a list", regStateDims, []byte{1, 0, 0, 0, 0xfc, 0xff, 0xff, 0xff}, Limits{}, nixlkv.ErrLimit, "list 0: nixlkv: limit reached: 1073741823 entries, at most 4096"},
		{"allowed length of a list", regStateDims, []byte{1, 0, 0, 0, 0xfc, 0xff, 0xff, 0xff}, Limits{StateTensors: math.MaxInt}, ErrTruncated, "list 0 of 4294967292 bytes, 0 left"},
		{"regions", regKVPtrs, make([]byte, 8*4097), Limits{}, nixlkv.ErrLimit, "4097 entries, at most 4096"},
		{"aux buffers", regAuxPtrs, make([]byte, 8*3), Limits{AuxBuffers: 2}, nixlkv.ErrLimit, "3 entries, at most 2"},
		{"item lengths", regItemLens, make([]byte, 8*3), Limits{Regions: 2}, nixlkv.ErrLimit, "3 entries, at most 2"},
		{"agent metadata", regAgentMetadata, make([]byte, 11), Limits{AgentMetadata: 10}, nixlkv.ErrLimit, "11 bytes, at most 10"},
		{"frame size", regAgentMetadata, make([]byte, 1001), Limits{FrameSize: 1000}, nixlkv.ErrLimit, "1001 bytes, at most 1000"},
	} {
		t.Run(c.name, func(t *testing.T) {
			bad := slices.Clone(frames)
			bad[c.frame] = c.to
			_, err := ParseAtPrefill(bad, c.limits)
			refused(t, err, c.frame, c.target, c.text)
		})
	}
	_, err := ParseAtPrefill(slices.Concat(frames, make([][]byte, 40)), Limits{})
	fe := refused(t, err, -1, nixlkv.ErrLimit, "65 frames, at most 64")
	if fe.Agent != "decode-0" {
		t.Errorf("sender %q", fe.Agent)
	}
	// The work done for a refused message does not grow with what it claims.
	bad := slices.Clone(frames)
	bad[regStatePtrs] = huge
	if n := testing.AllocsPerRun(10, func() { _, err = ParseAtPrefill(bad, Limits{}) }); n > 40 {
		t.Errorf("%v allocations", n)
	}
}

func TestRegistrationHoldsNoFrames(t *testing.T) {
	frames := clone(encoded(t, sample()))
	m, err := ParseAtPrefill(frames, Limits{})
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range frames {
		for i := range f {
			f[i] = 0xee
		}
	}
	if !reflect.DeepEqual(m, Message(sample())) {
		t.Errorf("changed with its frames: %+v", m)
	}
}

// What cannot be parsed is not encoded either.
func TestRegistrationNotEncoded(t *testing.T) {
	for frame, spoil := range map[int]func(*Registration){
		regIP:            func(g *Registration) { g.From.IP = "a b" },
		regPort:          func(g *Registration) { g.From.Port = -1 },
		regAgent:         func(g *Registration) { g.Agent = "" },
		regAgentMetadata: func(g *Registration) { g.AgentMetadata = nil },
		regGPU:           func(g *Registration) { g.GPU = -1 },
		regTPSize:        func(g *Registration) { g.TPSize = 0 },
		regEngineRank:    func(g *Registration) { g.EngineRank = -1 },
		regDCPSize:       func(g *Registration) { g.DCPSize = 0 },
		regDCPRank:       func(g *Registration) { g.DCPRank = 2 },
		regItemLens:      func(g *Registration) { g.ItemLens = g.ItemLens[:1] },
		regKinds:         func(g *Registration) { g.Kinds[1] = KindUnset },
		regLayerIDs:      func(g *Registration) { g.LayerIDs = g.LayerIDs[:1] },
		regSlots:         func(g *Registration) { g.Slots = math.MaxUint64 },
		regStateItemLens: func(g *Registration) { g.StateItemLens = g.StateItemLens[:1] },
		regStateDims:     func(g *Registration) { g.StateDims[0] = g.StateDims[0][:1] },
		regStateLayerIDs: func(g *Registration) { g.StateLayerIDs[1] = []uint32{1, 2} },
		regStateDataLens: func(g *Registration) { g.StateDataLens[1] = nil },
	} {
		g := sample()
		spoil(g)
		frames, err := new(Encoder).Registration(g)
		if frames != nil {
			t.Errorf("frame %d: encoded", frame)
		}
		fe := refused(t, err, frame, nil, registrationFields[frame])
		if !strings.HasPrefix(err.Error(), "registration frame ") || fe.Agent != g.Agent {
			t.Errorf("%v", err)
		}
	}
	g := sample()
	g.KVPtrs[0] = math.MaxUint64 - 512*100 + 1 // ends with the address space, which is fine
	encoded(t, g)
	g.KVPtrs[0]++
	refused(t, g.Validate(), regSlots, nixlkv.ErrRegions, "region 0 at 0xffffffffffff3801")
}
