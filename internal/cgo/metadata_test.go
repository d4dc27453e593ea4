package cgo

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"os"
	"testing"
	"time"

	"github.com/nixlkv/nixlkv/hostmem"
	"github.com/nixlkv/nixlkv/internal/engine"
)

// realMetadata is that of an agent with two registrations.
func realMetadata(t testing.TB) (md []byte, name string) {
	l, err := Open(Options{})
	if err != nil {
		if os.Getenv(EnvLibrary) != "" {
			t.Fatal(err)
		}
		t.Skip("skip: no NIXL library on this machine; make test fetches one")
	}
	name = fmt.Sprintf("md-%d-%d", os.Getpid(), time.Now().UnixNano())
	a, err := l.NewAgent(name, engine.AgentConfig{ProgressThread: true, Sync: engine.SyncRW})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := a.CreateBackend("UCX", nil); err != nil {
		t.Fatal(err)
	}
	buf, err := hostmem.Alloc(1 << 16)
	if err != nil {
		t.Fatal(err)
	}
	regs := []engine.Region{{Addr: uint64(buf.Addr()), Len: 4096, FD: -1}, {Addr: uint64(buf.Addr()) + 8192, Len: 4096, FD: -1}}
	if err := a.Register(engine.DRAM, regs); err != nil {
		t.Fatal(err)
	}
	if md, err = a.LocalMetadata(); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(a.Deregister(engine.DRAM, regs), a.Destroy(), buf.Free()); err != nil {
		t.Fatal(err)
	}
	return md, name
}

func TestCheckMetadata(t *testing.T) {
	md, name := realMetadata(t)
	if got, err := checkMetadata(md); err != nil || got != name {
		t.Fatalf("real metadata: %q, %v", got, err)
	}
	for n := range md {
		if _, err := checkMetadata(md[:n]); !errors.Is(err, engine.ErrInvalidParam) {
			t.Errorf("the first %d of %d bytes pass: %v", n, len(md), err)
		}
	}
}

// What NIXL or UCX would use without looking is refused.
func TestCheckMetadataContents(t *testing.T) {
	md, name := realMetadata(t)
	replaced := func(from, to string) []byte {
		t.Helper()
		out := bytes.Replace(md, []byte(from), []byte(to), 1)
		if bytes.Equal(out, md) {
			t.Fatalf("real metadata have no %q", from)
		}
		return out
	}
	length := "\x04\x00\x00\x00\x00\x00\x00\x00"
	for _, mem := range []string{"\x05\x00\x00\x00", "\xff\xff\xff\xff", "\x00\x00\x00\x80"} {
		if _, err := checkMetadata(replaced("t"+length+"\x00\x00\x00\x00|", "t"+length+mem+"|")); !errors.Is(err, engine.ErrInvalidParam) {
			t.Errorf("kind of memory %q: %v", mem, err)
		}
	}
	// The keys of real metadata with more domains than they have bytes for.
	at := bytes.Index(md, []byte("nixlSDList|")) + len("nixlSDList|t") + 8 + len("\x00\x00\x00\x00|n") + 8 + 8 + 1
	size := binary.LittleEndian.Uint64(md[at:])
	desc := md[at+8:][:size]
	if err := checkDesc("UCX", desc); err != nil {
		t.Fatalf("real registration: %v", err)
	}
	for n := range desc {
		// What follows the domains is not looked at.
		if err := checkDesc("UCX", desc[:n]); err == nil && n < descSize+9 {
			t.Errorf("%d bytes pass", n)
		}
	}
	for i := range 8 {
		desc[descSize+i] = 0xff
	}
	if _, err := checkMetadata(md); !errors.Is(err, engine.ErrInvalidParam) {
		t.Errorf("key of 64 domains: %v", err)
	}
	if name == "" {
		t.Error("no name")
	}
}

func TestCheckDesc(t *testing.T) {
	desc := func(addr, size uint64, key ...byte) []byte {
		b := binary.LittleEndian.AppendUint64(nil, addr)
		b = binary.LittleEndian.AppendUint64(b, size)
		return append(binary.LittleEndian.AppendUint64(b, 0), key...)
	}
	none, two := make([]byte, 9), []byte{5, 0, 0, 0, 0, 0, 0, 0, 0}
	for name, c := range map[string]struct {
		backend string
		desc    []byte
		ok      bool
	}{
		"no domain":          {"UCX", desc(4096, 4096, none...), true},
		"two domains":        {"UCX", desc(4096, 4096, append(two, 1, 'a', 0)...), true},
		"and what follows":   {"UCX", desc(4096, 4096, append(two, 1, 'a', 0, 7, 7)...), true},
		"second one missing": {"UCX", desc(4096, 4096, append(two, 1, 'a')...), false},
		"second one short":   {"UCX", desc(4096, 4096, append(two, 1, 'a', 2, 'b')...), false},
		"first one missing":  {"UCX", desc(4096, 4096, two...), false},
		"no key":             {"UCX", desc(4096, 4096), false},
		"another backend":    {"POSIX", desc(4096, 4096), true},
		"short":              {"POSIX", desc(4096, 4096)[:23], false},
		"to the end":         {"POSIX", desc(1<<64-4096, 4095), true},
		"beyond the end":     {"POSIX", desc(1<<64-4096, 4097), false},
	} {
		if err := checkDesc(c.backend, c.desc); (err == nil) != c.ok || err != nil && !errors.Is(err, engine.ErrInvalidParam) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// FuzzCheckKey: a key that passes is walked within its bytes.
func FuzzCheckKey(f *testing.F) {
	f.Add([]byte{5, 0, 0, 0, 0, 0, 0, 0, 0, 1, 'a', 0})
	f.Add(bytes.Repeat([]byte{0xff}, 100))
	f.Fuzz(func(t *testing.T, key []byte) {
		if checkKey(key) != nil {
			return
		}
		need := 9
		for range bits.OnesCount64(binary.LittleEndian.Uint64(key)) {
			need += 1 + int(key[need])
		}
		if need > len(key) {
			t.Fatalf("%x is read to %d", key, need)
		}
	})
}

func FuzzCheckMetadata(f *testing.F) {
	f.Add([]byte(serdesHeader + "Agent\x01\x00\x00\x00\x00\x00\x00\x00a|Conns\x08\x00\x00\x00\x00\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00\x00|t"))
	f.Add([]byte(serdesHeader + "Agent\xff\xff\xff\xff\xff\xff\xff\xffa|"))
	f.Add([]byte("nixlSerDes"))
	f.Fuzz(func(t *testing.T, md []byte) {
		name, err := checkMetadata(md)
		if err == nil && name == "" {
			t.Error("no name and no error")
		}
	})
}
