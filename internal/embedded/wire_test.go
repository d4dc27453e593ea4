package embedded

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math"
	"reflect"
	"strings"
	"testing"

	"github.com/nixlkv/nixlkv/internal/engine"
)

func sampleMetadata() *metadata {
	return &metadata{
		id: agentID{1, 2}, epoch: 7, host: hostID{boot: [16]byte{3}, netDev: 4, netInode: 5},
		name: "decode", address: "@nixlkv-embedded-00",
		regions: []regionInfo{
			{id: 1, addr: 4096, n: 10},
			{id: 9, addr: 1 << 40, n: 1 << 40, shared: true},
		},
	}
}

func TestMetadata(t *testing.T) {
	m := sampleMetadata()
	b := m.encode()
	got, err := parseMetadata(b)
	if err != nil || !reflect.DeepEqual(got, m) {
		t.Fatalf("%+v, %v", got, err)
	}
	for n := range b {
		if _, err := parseMetadata(b[:n]); err == nil {
			t.Fatalf("%d of %d bytes were enough", n, len(b))
		}
	}
	if _, err := parseMetadata(append(b, 0)); !errors.Is(err, errBadMetadata) {
		t.Fatalf("with a byte behind: %v", err)
	}
	changes := map[string]func(*metadata){
		"no name":          func(m *metadata) { m.name = "" },
		"long name":        func(m *metadata) { m.name = strings.Repeat("x", MaxName+1) },
		"a path":           func(m *metadata) { m.address = "/tmp/socket" },
		"long address":     func(m *metadata) { m.address = "@" + strings.Repeat("x", maxAddress) },
		"no address":       func(m *metadata) { m.address = "@" },
		"epoch":            func(m *metadata) { m.epoch = 0 },
		"null region":      func(m *metadata) { m.regions[0].addr = 0 },
		"empty region":     func(m *metadata) { m.regions[0].n = 0 },
		"region that ends": func(m *metadata) { m.regions[1].n = math.MaxUint64 },
		"region too far":   func(m *metadata) { m.regions[1].addr = math.MaxInt64 },
		"region twice":     func(m *metadata) { m.regions[1].id = 1 },
		"region zero":      func(m *metadata) { m.regions[0].id = 0 },
		"kind":             func(m *metadata) { m.regions[0].mem = engine.VRAM },
		"device":           func(m *metadata) { m.regions[0].dev = 1 },
	}
	for name, change := range changes {
		m := sampleMetadata()
		change(m)
		if _, err := parseMetadata(m.encode()); !errors.Is(err, errBadMetadata) {
			t.Errorf("%s: %v", name, err)
		}
	}
	flags := bytes.Clone(b)
	flags[len(flags)-4] = 2
	if _, err := parseMetadata(flags); !errors.Is(err, errBadMetadata) {
		t.Errorf("flags: %v", err)
	}
	version := bytes.Clone(b)
	version[len(metadataMagic)]++
	if _, err := parseMetadata(version); !errors.Is(err, errForeignMetadata) {
		t.Errorf("version: %v", err)
	}
	// A count alone allocates nothing.
	count := bytes.Clone(b[:len(b)-2*regionSize])
	binary.LittleEndian.PutUint32(count[len(count)-4:], math.MaxUint32)
	if _, err := parseMetadata(count); !errors.Is(err, errBadMetadata) {
		t.Errorf("count: %v", err)
	}
}

func FuzzMetadata(f *testing.F) {
	f.Add(sampleMetadata().encode())
	f.Add([]byte(metadataMagic))
	f.Add((&metadata{epoch: 1, name: "a", address: "@b"}).encode())
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := parseMetadata(b)
		if err != nil {
			return
		}
		if !bytes.Equal(m.encode(), b) {
			t.Fatalf("%+v encodes to other bytes", m)
		}
		for _, r := range m.regions {
			if r.addr+r.n <= r.addr {
				t.Fatalf("region %+v wraps", r)
			}
		}
	})
}

// parseBody parses a frame's body as the ends do, and encodes it again.
func parseBody(h header, body []byte) (again []byte, err error) {
	switch h.typ {
	case frameHello:
		m, err := parseHello(body)
		return m.append(nil), err
	case frameWelcome:
		id, err := parseWelcome(body)
		return appendWelcome(nil, id), err
	case frameRegion:
		m, err := parseRegion(body)
		return m.append(nil, h.number), err
	case frameDone, frameReadDone:
		m, err := parseResult(body)
		return appendResult(nil, h.typ, h.number, m), err
	case frameWrite, frameRead:
		var table parts
		var rest []byte
		if h.typ == frameWrite {
			table, rest, err = parseWrite(body)
		} else {
			table, err = parseRead(body)
		}
		if err != nil {
			return nil, err
		}
		again = appendHeader(nil, h.typ, 0, h.number, len(body))
		again = binary.LittleEndian.AppendUint32(again, uint32(table.len()))
		for i := range table.len() {
			again = appendPart(again, table.at(i))
		}
		return append(again, rest...), nil
	}
	return append(appendHeader(nil, h.typ, h.flags, h.number, len(body)), body...), nil
}

func sampleFrames() [][]byte {
	return [][]byte{
		hello{from: agentID{1}, to: agentID{2}, name: "a"}.append(nil),
		appendWelcome(nil, agentID{3}),
		appendHeader(nil, frameMap, 0, 5, 0),
		appendHeader(nil, frameUnmapped, 0, 5, 0),
		appendHeader(nil, frameUnmap, 0, 5, 0),
		frame(frameWrite, 0, 6, partsBody(2, 3, part{1, 2, 3}, part{4, 5, 0})),
		frame(frameRead, 0, 6, partsBody(1, 0, part{1, 2, 3})),
		frame(frameCommit, flagNotification, 6, []byte("hi")),
		frame(frameData, 0, 6, []byte("bytes")),
		regionAnswer{code: codeOK, grant: 1, off: 4096, dev: 2, inode: 3}.append(nil, 5),
		regionAnswer{code: codeNotRegistered}.append(nil, 5),
		appendResult(nil, frameDone, 6, result{codeFault, part{1, 2, 3}}),
		appendResult(nil, frameReadDone, 6, result{}),
	}
}

func TestFrames(t *testing.T) {
	var stream []byte
	for _, b := range sampleFrames() {
		stream = append(stream, b...)
	}
	r := newFrameReader(bytes.NewReader(stream))
	for _, want := range sampleFrames() {
		h, body, err := r.next()
		if err != nil {
			t.Fatal(err)
		}
		again, err := parseBody(h, body)
		if err != nil || !bytes.Equal(again, want) {
			t.Fatalf("% x became % x, %v", want, again, err)
		}
	}
	if _, _, err := r.next(); err == nil {
		t.Fatal("a frame behind the last")
	}
}

// FuzzFrames reads frames from any bytes: no panic, no frame above its bound, and what is
// accepted is what would be sent.
func FuzzFrames(f *testing.F) {
	for _, b := range sampleFrames() {
		f.Add(b)
	}
	f.Add(bytes.Join(sampleFrames(), nil))
	f.Fuzz(func(t *testing.T, b []byte) {
		r := newFrameReader(bytes.NewReader(b))
		for rest := b; ; {
			h, body, err := r.next()
			if err != nil {
				return
			}
			if limit, ok := maxBody(h.typ); !ok || len(body) > int(limit) {
				t.Fatalf("frame %+v with %d bytes", h, len(body))
			}
			n := headerSize + len(body)
			if again, err := parseBody(h, body); err == nil && !bytes.Equal(again, rest[:n]) {
				t.Fatalf("% x became % x", rest[:n], again)
			}
			rest = rest[n:]
		}
	})
}

// FuzzTarget feeds any bytes to an agent, behind a greeting. Whatever they are, memory
// that is not registered stays as it is, and the agent goes on.
func FuzzTarget(f *testing.F) {
	const third = 4096
	mem := foreign(f, 3*third)
	b := newTestAgent(f, "b", engine.AgentConfig{})
	if err := b.Register(engine.DRAM, []engine.Region{{Addr: mem.addr() + third, Len: third, FD: -1}}); err != nil {
		f.Fatal(err)
	}
	for _, s := range sampleFrames() {
		f.Add(s)
	}
	f.Add(frame(frameWrite, 0, 1, partsBody(1, 8, part{1, third - 8, 8})))
	f.Add(frame(frameWrite, 0, 1, partsBody(1, 8, part{1, third - 7, 8})))
	f.Fuzz(func(t *testing.T, input []byte) {
		raw := greet(t, b)
		raw.send(input)
		if err := raw.conn.CloseWrite(); err != nil {
			t.Fatal(err)
		}
		raw.wantClosed()
		for i, v := range mem.data {
			if v != 0 && (i < third || i >= 2*third) {
				t.Fatalf("byte %d was written", i)
			}
		}
		var buf engine.Notifications
		if err := b.Notifications(&buf); err != nil || buf.Validate() != nil {
			t.Fatal(err)
		}
	})
}
