//go:build gpu && linux

package gputest

import (
	"bytes"
	"encoding/gob"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"testing"
	"time"

	"github.com/nixlkv/nixlkv/internal/testkit/spawn"
	"github.com/nixlkv/nixlkv/nixl"
)

// envPeer holds a peer's configuration as JSON. It turns the test binary into that peer.
const envPeer = "NIXLKV_TEST_GPU_PEER"

// peerLimit ends a peer, and with it whatever waits for its answer.
const peerLimit = 90 * time.Second

type peerConfig struct {
	Name    string
	Ordinal int // of CUDA, in the peer's process
}

// peerRequest goes to the peer, peerReply comes back, both as gob. The first reply comes
// unasked: metadata and where the memory is.
type peerRequest struct {
	Cmd  string // fill, contents, drain
	Mem  nixl.Mem
	Seed uint64
}

type peerReply struct {
	Err        string
	Metadata   []byte
	VRAM, DRAM nixl.Desc
	Contents   []byte
	Notifs     []notification
}

type notification struct{ From, Message string }

func peerMain(config string, in io.Reader, out io.Writer) int {
	var c peerConfig
	if err := json.Unmarshal([]byte(config), &c); err != nil {
		fmt.Fprintln(os.Stderr, "peer:", err)
		return 2
	}
	if err := peerServe(c, gob.NewDecoder(in), gob.NewEncoder(out)); err != nil {
		fmt.Fprintln(os.Stderr, "peer:", err)
		return 1
	}
	return 0
}

// peerServe answers requests until there are no more.
func peerServe(c peerConfig, in *gob.Decoder, out *gob.Encoder) (err error) {
	runtime.LockOSThread()
	w, err := newWorker(c.Name, c.Ordinal)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.close()) }()
	md, err := w.agent.LocalMetadata()
	if err != nil {
		return err
	}
	if err := out.Encode(peerReply{Metadata: md, VRAM: w.start(nixl.VRAM), DRAM: w.start(nixl.DRAM)}); err != nil {
		return err
	}
	for {
		var q peerRequest
		if err := in.Decode(&q); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		r, err := w.answer(q)
		if err != nil {
			r.Err = err.Error()
		}
		if err := out.Encode(r); err != nil {
			return err
		}
	}
}

func (w *worker) answer(q peerRequest) (r peerReply, err error) {
	switch q.Cmd {
	case "fill":
		err = w.fill(q.Mem, pattern(q.Seed))
	case "contents":
		r.Contents, err = w.contents(q.Mem)
	case "drain":
		var buf nixl.Notifications
		err = w.agent.Notifications(&buf)
		for from, msg := range buf.All() {
			r.Notifs = append(r.Notifs, notification{string(from), string(msg)})
		}
	default:
		err = fmt.Errorf("no command %q", q.Cmd)
	}
	return r, err
}

// peer is a running peer process.
type peer struct {
	in    *gob.Encoder
	out   *gob.Decoder
	hello peerReply
}

// startPeer runs a peer process until the test ends, and waits until its memory is
// registered. env adds variables, NAME=value.
func startPeer(t testing.TB, c peerConfig, env ...string) *peer {
	t.Helper()
	config := must(json.Marshal(c))(t)
	exe := must(os.Executable())(t)
	cmd := exec.Command(exe)
	cmd.Env = append(append(os.Environ(), env...), envPeer+"="+string(config))
	proc := spawn.Start(t, cmd)
	proc.Limit(t, peerLimit)
	t.Cleanup(func() { proc.Finish(t, peerLimit) }) // it reads to the end and exits
	p := &peer{in: gob.NewEncoder(proc.Stdin), out: gob.NewDecoder(proc.Stdout)}
	if err := p.out.Decode(&p.hello); err != nil {
		t.Fatalf("peer %s did not start: %v", c.Name, err)
	}
	return p
}

// do sends a request and fails the test if the peer cannot do it.
func (p *peer) do(t testing.TB, q peerRequest) (r peerReply) {
	t.Helper()
	check(t, p.in.Encode(q))
	check(t, p.out.Decode(&r))
	if r.Err != "" {
		t.Fatalf("peer: %s: %s", q.Cmd, r.Err)
	}
	return r
}

// start gives the descriptor of a memory's first byte, Len left out.
func (p *peer) start(m nixl.Mem) nixl.Desc {
	if m == nixl.DRAM {
		return p.hello.DRAM
	}
	return p.hello.VRAM
}

// notifications drains the peer until it has n of them.
func (p *peer) notifications(t testing.TB, n int) []notification {
	t.Helper()
	var got []notification
	for end := time.Now().Add(20 * time.Second); len(got) < n; {
		if time.Now().After(end) {
			t.Fatalf("the peer has %d of %d notifications", len(got), n)
		}
		got = append(got, p.do(t, peerRequest{Cmd: "drain"}).Notifs...)
	}
	return got
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// must ends the test on an error.
func must[T any](v T, err error) func(testing.TB) T {
	return func(t testing.TB) T {
		t.Helper()
		check(t, err)
		return v
	}
}

// same compares a memory with what it should hold, and says how much differs.
func same(t testing.TB, what string, got, want []byte) {
	t.Helper()
	if bytes.Equal(got, want) {
		return
	}
	if len(got) != len(want) {
		t.Errorf("%s: %d bytes, want %d", what, len(got), len(want))
		return
	}
	first, wrong := -1, 0
	for i := range got {
		if got[i] != want[i] {
			if first < 0 {
				first = i
			}
			wrong++
		}
	}
	t.Errorf("%s: %d of %d bytes are wrong, the first at %d: %#x, want %#x", what, wrong, len(want), first, got[first], want[first])
}
