package embedded

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/nixlkv/nixlkv/internal/engine"
)

func sampleMetadata() *metadata {
	return &metadata{
		id: agentID{1, 2}, epoch: 7, host: hostID{boot: [16]byte{3}, netDev: 4, netInode: 5},
		name: "decode", address: "@nixlkv-embedded-00", tcp: []string{"10.0.0.1:7000", "[2001:db8::1]:1", "host.example:65535"},
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
		"TCP without port": func(m *metadata) { m.tcp[0] = "10.0.0.1" },
		"TCP port 0":       func(m *metadata) { m.tcp[1] = "[2001:db8::1]:0" },
		"TCP port name":    func(m *metadata) { m.tcp[1] = "a:http" },
		"TCP port":         func(m *metadata) { m.tcp[1] = "a:65536" },
		"TCP no host":      func(m *metadata) { m.tcp[2] = ":7000" },
		"TCP wildcard":     func(m *metadata) { m.tcp[2] = "0.0.0.0:7000" },
		"TCP wildcard v6":  func(m *metadata) { m.tcp[2] = "[::]:7000" },
		"TCP space":        func(m *metadata) { m.tcp[2] = "a b:7000" },
		"TCP path":         func(m *metadata) { m.tcp[2] = "a/b:7000" },
		"TCP long":         func(m *metadata) { m.tcp[2] = strings.Repeat("x", 256) + ":65535" },
		"TCP empty":        func(m *metadata) { m.tcp[2] = "" },
		"TCP many":         func(m *metadata) { m.tcp = slices.Repeat(m.tcp, 3) },
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
	f.Add((&metadata{epoch: 1, name: "a", address: "@b", tcp: []string{"[::1%lo]:80", "x:1"}}).encode())
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

// parseBody parses a frame's body as the ends do, and encodes it again with the data that
// follows.
func parseBody(h header, body, data []byte) (again []byte, err error) {
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
		if h.typ == frameWrite {
			table, err = parseWrite(body, uint64(len(data)))
		} else {
			table, err = parseRead(body)
		}
		if err != nil {
			return nil, err
		}
		again = appendHeader(nil, h.typ, 0, h.number, len(body)+len(data))
		again = binary.LittleEndian.AppendUint32(again, uint32(table.len()))
		for i := range table.len() {
			again = appendPart(again, table.at(i))
		}
		return append(again, data...), nil
	case frameRefused:
		r, err := parseRefusal(body)
		if errors.Is(err, errProtocol) {
			return nil, err
		}
		return r.append(nil), nil
	}
	again = appendHeader(nil, h.typ, h.flags, h.number, len(body)+len(data))
	return append(append(again, body...), data...), nil
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
		refusal{version: 9, reason: refusedVersion}.append(nil),
		refusal{version: protocolVersion, reason: refusedAgent}.append(nil),
		appendResult(nil, frameDone, 6, result{codeFault, part{1, 2, 3}}),
		appendResult(nil, frameReadDone, 6, result{}),
	}
}

func TestFrames(t *testing.T) {
	var stream []byte
	for _, b := range sampleFrames() {
		stream = append(stream, b...)
	}
	r := newFrameReader(bytes.NewReader(stream), nil)
	for _, want := range sampleFrames() {
		h, body, err := r.next()
		if err != nil {
			t.Fatal(err)
		}
		data, err := payload(r)
		if err != nil {
			t.Fatal(err)
		}
		again, err := parseBody(h, body, data)
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
		r := newFrameReader(bytes.NewReader(b), nil)
		for rest := b; ; {
			h, body, err := r.next()
			if err != nil {
				return
			}
			data, err := payload(r)
			if err != nil {
				return
			}
			n := len(body) + len(data)
			if limit, ok := maxBody(h.typ); !ok || n > int(limit) || n != int(h.length) {
				t.Fatalf("frame %+v with %d bytes", h, n)
			}
			n += headerSize
			if again, err := parseBody(h, body, data); err == nil && !bytes.Equal(again, rest[:n]) {
				t.Fatalf("% x became % x", rest[:n], again)
			}
			rest = rest[n:]
		}
	})
}
