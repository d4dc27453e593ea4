//go:build linux && cgo

package control

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	zmq "github.com/pebbe/zmq4"
)

// pyzmq gives a command that runs testdata/peer.py, if there is a Python with pyzmq.
func pyzmq(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	python := os.Getenv("PEER_PYTHON")
	if python == "" {
		t.Skip("skip: PEER_PYTHON names no Python with pyzmq")
	}
	return exec.Command(python, append([]string{"testdata/peer.py"}, args...)...)
}

func encodeFrames(t *testing.T, f [][]byte) string {
	t.Helper()
	texts := make([]string, len(f))
	for i := range f {
		texts[i] = hex.EncodeToString(f[i])
	}
	b, err := json.Marshal(texts)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func decodeFrames(t *testing.T, s string) [][]byte {
	t.Helper()
	var texts []string
	if err := json.Unmarshal([]byte(s), &texts); err != nil {
		t.Fatal(err)
	}
	f := make([][]byte, len(texts))
	for i := range f {
		var err error
		if f[i], err = hex.DecodeString(texts[i]); err != nil {
			t.Fatal(err)
		}
	}
	return f
}

// conversation has the shapes of SGLang's messages, and more of them than any queue on the way.
func conversation() [][][]byte {
	all := [][][]byte{
		slices.Repeat(frames("NixlMsgGuard"), 25),
		frames("KV_STATUS", "9223372036854775807", "4", "0", ""),
		frames("NixlMsgGuard", "12", "127.0.0.1", "5000", "agent", "", "3", "1", "", "0", "0"),
		frames("", "", ""),
		{{0, 255, 128}, bytes.Repeat([]byte{0xa5}, 8<<10)},
	}
	return slices.Concat(slices.Repeat(all, 300), [][][]byte{frames("end")})
}

func curveKeys(t *testing.T) *Curve {
	t.Helper()
	if !zmq.HasCurve() {
		t.Skip("skip: libzmq was built without CURVE")
	}
	public, secret, err := zmq.NewCurveKeypair()
	if err != nil {
		t.Fatal(err)
	}
	return &Curve{PublicKey: public, SecretKey: secret}
}

func TestInteropSendToPyzmq(t *testing.T) {
	for name, secure := range map[string]bool{"plain": false, "curve": true} {
		t.Run(name, func(t *testing.T) {
			var cfg Config
			args := []string{"pull"}
			if secure {
				cfg.Curve = curveKeys(t)
				args = append(args, cfg.Curve.PublicKey, cfg.Curve.SecretKey)
			}
			peer := startReceiver(t, pyzmq(t, args...))
			c := start(t, cfg)
			sent := conversation()
			for _, f := range sent {
				if _, err := c.Send(within(t, patience), Message{To: loopback(t, peer.port), Frames: f}); err != nil {
					t.Fatal(err)
				}
			}
			for i, want := range sent {
				if got := decodeFrames(t, receive(t, peer.lines, "a message")); !slices.EqualFunc(got, want, bytes.Equal) {
					t.Fatalf("message %d is %q, want %q", i, got, want)
				}
			}
		})
	}
}

func TestInteropReceiveFromPyzmq(t *testing.T) {
	for _, name := range []string{"plain", "curve", "gated"} {
		t.Run(name, func(t *testing.T) {
			in := newInbox()
			cfg := Config{Handler: in.handle}
			secure := name == "curve"
			switch {
			case secure:
				cfg.Curve = curveKeys(t)
			case name == "gated":
				// As far as SGLang's workers go: from an allowed network, their address known.
				cfg = Config{Allowed: allowed(t, "127.0.0.0/8"), HandlerFrom: func(source netip.Addr, f [][]byte) {
					if !source.IsLoopback() {
						t.Errorf("a message from %v", source)
					}
					in.handle(f)
				}}
			}
			args := []string{"push", endpoint(t, start(t, cfg)).String()}
			if k := cfg.Curve; secure {
				args = append(args, k.PublicKey, k.PublicKey, k.SecretKey)
			}
			sent := conversation()
			var lines strings.Builder
			for _, f := range sent {
				lines.WriteString(encodeFrames(t, f) + "\n")
			}
			cmd := pyzmq(t, args...)
			cmd.Stdin = strings.NewReader(lines.String())
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			for i, want := range sent {
				if got := in.next(t); !slices.EqualFunc(got, want, bytes.Equal) {
					t.Fatalf("message %d is %q, want %q", i, got, want)
				}
			}
		})
	}
}
