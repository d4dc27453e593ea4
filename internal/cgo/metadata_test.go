package cgo

import (
	"errors"
	"fmt"
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
