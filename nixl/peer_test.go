package nixl

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/nixlkv/nixlkv/hostmem"
	"github.com/nixlkv/nixlkv/internal/testkit/spawn"
)

// envPeer holds the peer's configuration as JSON.
const envPeer = "NIXLKV_TEST_PEER"

// peerConfig says what a peer process offers.
type peerConfig struct {
	Engine  string // native or embedded
	Calls   string
	TCP     bool
	Name    string
	Size    int               // bytes of DRAM to register
	Foreign bool              // register them by address instead of as a hostmem buffer
	Params  map[string]string // of the backend
}

// peerRequest is one line to the peer, peerReply one line back.
type peerRequest struct {
	Cmd      string // drain, hash, fill, clear, verify, forget, where, deregister, register, fault, exit
	Off, Len int
	Seed     uint64
	Block    int
}

type peerReply struct {
	Err      string
	Metadata []byte
	Hash     string
	Notifs   [][2][]byte
	Bad      int // blocks that are wrong

	Addr, Size uint64 // of its memory
}

func peerMain(in io.Reader, out io.Writer) int {
	var c peerConfig
	if err := json.Unmarshal([]byte(os.Getenv(envPeer)), &c); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 2
	}
	if err := peerServe(c, in, out); err != nil {
		fmt.Fprintln(os.Stderr, "peer:", err)
		return 1
	}
	return 0
}

func peerServe(c peerConfig, in io.Reader, out io.Writer) error {
	kind, err := ParseKind(c.Engine)
	if err != nil {
		return err
	}
	eng, err := Open(kind, WithCalls(c.Calls))
	if err != nil {
		return err
	}
	defer eng.Close()
	opts := []AgentOption{WithBackend(DefaultBackend, c.Params)}
	if c.TCP {
		opts = append(opts, WithTCP(loopbackTCP))
	}
	a, err := eng.NewAgent(c.Name, opts...)
	if err != nil {
		return err
	}
	buf, err := hostmem.Alloc(c.Size)
	if err != nil {
		return err
	}
	region := Host(buf)
	if c.Foreign {
		region = Foreign(DRAM, buf.Addr(), uint64(buf.Len()), 0)
	}
	var reg *Registration
	register := func() ([]byte, error) {
		if reg, err = a.Register(region); err != nil {
			return nil, err
		}
		return a.LocalMetadata()
	}
	enc := json.NewEncoder(out)
	md, err := register()
	if err != nil {
		return err
	}
	if err := enc.Encode(peerReply{Metadata: md}); err != nil {
		return err
	}
	mem := buf.Bytes()
	var notifs Notifications
	var expect []byte
	for dec := json.NewDecoder(in); ; {
		var q peerRequest
		if err := dec.Decode(&q); err == io.EOF || q.Cmd == "exit" {
			return nil
		} else if err != nil {
			return err
		}
		var r peerReply
		var err error
		switch q.Cmd {
		case "drain":
			if err = a.Notifications(&notifs); err == nil {
				for from, msg := range notifs.All() {
					r.Notifs = append(r.Notifs, [2][]byte{bytes.Clone(from), append([]byte{}, msg...)})
				}
			}
		case "hash":
			h := sha256.Sum256(mem[q.Off : q.Off+q.Len])
			r.Hash = hex.EncodeToString(h[:])
		case "fill":
			fillPattern(mem[q.Off:q.Off+q.Len], q.Seed)
		case "clear":
			clear(mem[q.Off : q.Off+q.Len])
		case "verify":
			if expect == nil {
				expect = make([]byte, len(mem))
				fillPattern(expect, basePattern)
			}
			stampBlocks(expect, q.Block, q.Seed)
			r.Bad = differing(mem, expect, q.Block)
		case "forget":
			expect = nil
		case "where":
			r.Addr, r.Size = uint64(buf.Addr()), uint64(buf.Len())
		case "fault":
			err = recoverFault()
		case "deregister":
			err = reg.Deregister()
		case "register":
			r.Metadata, err = register()
		default:
			err = fmt.Errorf("no command %q", q.Cmd)
		}
		if err != nil {
			r.Err = err.Error()
		}
		if err := enc.Encode(r); err != nil {
			return err
		}
	}
}

// peer is a running peer process.
type peer struct {
	*spawn.Process
	t   testing.TB
	in  *json.Encoder
	out *json.Decoder
	md  []byte
}

// startPeer runs a peer process and waits until it has registered its memory. env adds
// variables, NAME=value.
func startPeer(t testing.TB, c peerConfig, env ...string) *peer {
	t.Helper()
	cfg, err := json.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe)
	cmd.Env = append(append(os.Environ(), env...), envPeer+"="+string(cfg))
	p := &peer{Process: spawn.Start(t, cmd), t: t}
	p.in, p.out = json.NewEncoder(p.Stdin), json.NewDecoder(p.Stdout)
	var hello peerReply
	if err := p.out.Decode(&hello); err != nil {
		t.Fatalf("peer did not start: %v", err)
	}
	p.md = hello.Metadata
	return p
}

// do sends one request and fails the test if the peer cannot do it.
func (p *peer) do(q peerRequest) peerReply {
	p.t.Helper()
	r, err := p.try(q)
	if err != nil {
		p.t.Fatalf("peer: %s: %v", q.Cmd, err)
	}
	return r
}

func (p *peer) try(q peerRequest) (r peerReply, err error) {
	if err := p.in.Encode(q); err != nil {
		return r, err
	}
	if err := p.out.Decode(&r); err != nil {
		return r, err
	}
	if r.Err != "" {
		err = fmt.Errorf("%s", r.Err)
	}
	return r, err
}

// notifs drains until n notifications are there.
func (p *peer) notifs(n int) [][2][]byte {
	p.t.Helper()
	var got [][2][]byte
	for end := time.Now().Add(20 * time.Second); len(got) < n; {
		if time.Now().After(end) {
			p.t.Fatalf("got %d of %d notifications", len(got), n)
		}
		got = append(got, p.do(peerRequest{Cmd: "drain"}).Notifs...)
	}
	return got
}

// fillPattern writes bytes that depend on position and seed: a stretch of its own for each
// seed, repeated.
func fillPattern(b []byte, seed uint64) {
	x := seed*0x9e3779b97f4a7c15 + 1
	stretch := b[:min(len(b), 1<<18)]
	for i := range stretch {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		stretch[i] = byte(x >> 32)
	}
	for n := len(stretch); n < len(b); n *= 2 {
		copy(b[n:], b[:n])
	}
}

// stampBlocks marks every block with its number and a seed, at both ends.
func stampBlocks(b []byte, block int, seed uint64) {
	for i := 0; (i+1)*block <= len(b); i++ {
		mark := uint64(i)<<32 | seed
		binary.LittleEndian.PutUint64(b[i*block:], mark)
		binary.LittleEndian.PutUint64(b[(i+1)*block-8:], mark)
	}
}

// differing counts the blocks in which two memories differ.
func differing(a, b []byte, block int) int {
	if bytes.Equal(a, b) {
		return 0
	}
	n := 0
	for i := 0; i < len(a); i += block {
		if !bytes.Equal(a[i:i+block], b[i:i+block]) {
			n++
		}
	}
	return n
}

// basePattern is the seed of what a source holds before its blocks are stamped.
const basePattern = 77

// recoverFault dereferences a nil pointer. Go turns the signal into a panic that can be
// recovered, unless somebody took its signal handler.
func recoverFault() (err error) {
	defer func() {
		if recover() == nil {
			err = fmt.Errorf("no panic")
		}
	}()
	var p *peerConfig
	p.Size++
	return nil
}
