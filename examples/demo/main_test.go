package main

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"

	"go.uber.org/goleak"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/nixlkv/nixlkv/nixl"
)

// The test binary is also the program: the tests in this file run it, and it starts itself
// as the decode.
const (
	envProgram = "NIXLKV_DEMO_TEST_PROGRAM"
	// envStumble makes the decode do something when it first logs a message: MESSAGE:kill,
	// MESSAGE:stop, MESSAGE:spoil or MESSAGE:stray.
	envStumble = "NIXLKV_DEMO_TEST_STUMBLE"
)

// Where a decode can stumble, in this order.
const (
	atStart  = "making an empty cache"
	atAsking = "asking for requests"
	atFirst  = "request arrived" // others may be on their way
	atVerify = "round arrived, verifying it"
	atEnd    = "verified, parting"
)

func TestMain(m *testing.M) {
	switch at := os.Getenv(envStumble); {
	case os.Getenv(envProgram) == "":
		goleak.VerifyTestMain(m)
	case at != "" && slices.Contains(os.Args, roleDecode):
		os.Exit(stumble(os.Args[1:], at))
	default:
		os.Exit(run(os.Args[1:], os.Stdout, os.Stderr))
	}
}

// stumble runs a decode that fails on purpose.
func stumble(args []string, at string) int {
	message, what, _ := strings.Cut(at, ":")
	c, err := parseFlags(args)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return exitUsage
	}
	ctx, fail := context.WithCancelCause(context.Background())
	defer fail(nil)
	d := decode{program: &program{config: c, stdout: os.Stdout, stderr: os.Stderr, fail: fail}}
	// The core logs nothing, but its entries reach the hook.
	core := zapcore.NewCore(zapcore.NewJSONEncoder(zap.NewProductionEncoderConfig()), zapcore.AddSync(discard{}), zap.DebugLevel)
	d.log = zap.New(core, zap.Hooks(func(e zapcore.Entry) error {
		if e.Message == message {
			act(&d, what)
		}
		return nil
	}))
	if err := d.run(ctx); err != nil {
		d.complain(err)
		return exitCode(err)
	}
	return 0
}

type discard struct{}

func (discard) Write(b []byte) (int, error) { return len(b), nil }

func act(d *decode, what string) {
	fmt.Fprintln(os.Stderr, "stumbling")
	switch what {
	case "kill":
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	case "stop":
		_ = syscall.Kill(os.Getpid(), syscall.SIGSTOP)
	case "spoil":
		d.pool.page(spoilt.region, d.plan.targets[spoilt.request][0])[spoilt.off] ^= 0x40
	case "stray":
		d.pool.page(spoilt.region, 0)[spoilt.off] ^= 0x40
	}
}

// spoilt is what the decode changes behind NIXL's back.
var spoilt = struct{ region, request, off int }{region: 3, request: 1, off: 1001}

// small is a run of a few MiB; further flags win over these.
func small(kind nixl.Kind, more ...string) []string {
	return append([]string{"-engine", kind.String(), "-layers", "2", "-requests", "6", "-pages", "5", "-chunk", "2", "-in-flight", "2", "-timeout", "40s"}, more...)
}

// alone is the same for one side.
func alone(role, bootstrap string, kind nixl.Kind, more ...string) []string {
	return small(kind, append([]string{"-role", role, "-bootstrap", bootstrap}, more...)...)
}

// startPrefill starts a prefill alone, and gives its bootstrap server.
func startPrefill(t *testing.T, kind nixl.Kind, more ...string) (p *process, bootstrap string) {
	t.Helper()
	p = start(t, nil, alone(rolePrefill, "127.0.0.1:0", kind, more...)...)
	args := strings.Fields(p.until("waiting for a decode"))
	return p, args[slices.Index(args, "-bootstrap")+1]
}

// eachEngine runs a test over both engines.
func eachEngine(t *testing.T, f func(t *testing.T, kind nixl.Kind)) {
	for _, kind := range []nixl.Kind{nixl.Embedded, nixl.Native} {
		t.Run(kind.String(), func(t *testing.T) {
			t.Parallel()
			if kind == nixl.Native && os.Getenv("NIXLKV_NIXL_LIB") == "" {
				t.Skip("skip: no NIXL library in NIXLKV_NIXL_LIB; make test fetches one")
			}
			f(t, kind)
		})
	}
}

func TestBoth(t *testing.T) {
	t.Parallel()
	eachEngine(t, func(t *testing.T, kind nixl.Kind) {
		p := start(t, nil, small(kind)...)
		p.ends(0)
		for _, part := range []string{"engine       " + kind.String(), "in chunks of 2", "first request", "others, round 1", "later rounds", "memcpy",
			"transfers    72: 360 pieces of 32 KiB, and 18 metadata slots\n",
			"decode       p50 ", "1 registration and 18 rooms",
			"verified     11.25 MiB written (11,796,480 bytes), 1 MiB untouched and zero, 18 first tokens\n"} {
			if !strings.Contains(p.stdout.String(), part) {
				t.Errorf("no %q in:\n%s", part, p.stdout.String())
			}
		}
		if e := p.errors(); strings.Contains(e, "\r") || strings.Contains(e, "demo") {
			t.Errorf("stderr:\n%s", e)
		}
	})
}

// One request, one page, one round: nothing to be left out of the table, nothing to divide
// by zero.
func TestSmallest(t *testing.T) {
	t.Parallel()
	p := start(t, nil, small(nixl.Embedded, "-layers", "1", "-requests", "1", "-pages", "1", "-pool", "2", "-rounds", "1")...)
	p.ends(0)
	if out := p.stdout.String(); strings.Contains(out, "NaN") || strings.Contains(out, "others") || !strings.Contains(out, "first request, against") {
		t.Errorf("stdout:\n%s", out)
	}
}

// The command that the prefill prints starts the decode that belongs to it.
func TestTwoTerminals(t *testing.T) {
	t.Parallel()
	eachEngine(t, func(t *testing.T, kind nixl.Kind) {
		prefill := start(t, nil, alone(rolePrefill, "127.0.0.1:0", kind)...)
		_, command, _ := strings.Cut(prefill.until("waiting for a decode"), ": demo ")
		decode := start(t, nil, strings.Fields(command)...)
		prefill.ends(0)
		decode.ends(0)
		if out := prefill.stdout.String(); !strings.Contains(out, "later rounds") || strings.Contains(out, "verified") {
			t.Errorf("the prefill says:\n%s", out)
		}
		if out := decode.stdout.String(); !strings.Contains(out, "verified     11.25 MiB written") {
			t.Errorf("the decode says:\n%s", out)
		}
	})
}

// The decode may be started first.
func TestDecodeFirst(t *testing.T) {
	t.Parallel()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := ln.Addr().String()
	ln.Close()
	decode := start(t, nil, alone(roleDecode, addr, nixl.Embedded, "-v")...)
	decode.until(atAsking)
	prefill := start(t, nil, alone(rolePrefill, addr, nixl.Embedded)...)
	prefill.ends(0)
	decode.ends(0)
}

// Both sides say why they do not fit together.
func TestEnginesDiffer(t *testing.T) {
	t.Parallel()
	if os.Getenv("NIXLKV_NIXL_LIB") == "" {
		t.Skip("skip: no NIXL library in NIXLKV_NIXL_LIB; make test fetches one")
	}
	prefill, addr := startPrefill(t, nixl.Embedded)
	decode := start(t, nil, alone(roleDecode, addr, nixl.Native)...)
	decode.ends(exitFailed, "demo: decode: KVTransferError", "not metadata of this engine")
	prefill.ends(exitFailed, "demo: prefill: KVTransferError", "not metadata of this engine")
}

// Workers with different flags never meet in a room.
func TestFlagsDiffer(t *testing.T) {
	t.Parallel()
	prefill, addr := startPrefill(t, nixl.Embedded, "-timeout", "10s")
	decode := start(t, nil, alone(roleDecode, addr, nixl.Embedded, "-seed", "2")...)
	prefill.ends(exitFailed, "demo: prefill: timed out after 10s (-timeout)", "waiting for its decode")
	decode.ends(exitFailed, "demo: decode: ", addr)
}

// A decode that dies ends the run within seconds, wherever it was.
func TestDecodeKilled(t *testing.T) {
	t.Parallel()
	eachEngine(t, func(t *testing.T, kind nixl.Kind) {
		for _, at := range []string{atStart, atAsking, atFirst, atVerify, atEnd} {
			t.Run(at, func(t *testing.T) {
				p := start(t, []string{envStumble + "=" + at + ":kill"}, small(kind, "-requests", "40", "-in-flight", "4", "-rounds", "1")...)
				p.ends(exitFailed, "demo: ", "the decode has failed: signal: killed")
				if out := p.stdout.String(); strings.Contains(out, "verified") {
					t.Errorf("stdout:\n%s", out)
				}
			})
		}
	})
}

// The same without a parent that would know: what is on its way fails.
func TestDecodeKilledInAnotherTerminal(t *testing.T) {
	t.Parallel()
	eachEngine(t, func(t *testing.T, kind nixl.Kind) {
		large := []string{"-requests", "40", "-pages", "20", "-in-flight", "4"}
		prefill, addr := startPrefill(t, kind, large...)
		decode := start(t, []string{envStumble + "=" + atFirst + ":kill"}, alone(roleDecode, addr, kind, large...)...)
		decode.ends(-int(syscall.SIGKILL))
		prefill.ends(exitFailed, "demo: prefill: ")
		if out := prefill.stdout.String(); out != "" {
			t.Errorf("stdout:\n%s", out)
		}
	})
}

func TestPrefillKilled(t *testing.T) {
	t.Parallel()
	eachEngine(t, func(t *testing.T, kind nixl.Kind) {
		t.Run("another terminal", func(t *testing.T) {
			prefill, addr := startPrefill(t, kind, "-rounds", "1000", "-v")
			decode := start(t, nil, alone(roleDecode, addr, kind, "-rounds", "1000")...)
			prefill.until("round sent")
			prefill.signal(syscall.SIGKILL)
			prefill.ends(-int(syscall.SIGKILL))
			decode.ends(exitFailed, "demo: decode: KVTransferError", addr)
		})
		t.Run("parent", func(t *testing.T) {
			// wait sees that the decode is gone too.
			p := start(t, nil, small(kind, "-rounds", "1000", "-v")...)
			p.until("round sent")
			p.signal(syscall.SIGKILL)
			p.ends(-int(syscall.SIGKILL))
		})
	})
}

// A wrong byte fails the run and is named.
func TestWrongBytes(t *testing.T) {
	t.Parallel()
	c, err := parseFlags(small(nixl.Embedded))
	if err != nil {
		t.Fatal(err)
	}
	plan := newPlan(&c)
	for what, owner := range map[string]string{
		"spoil": fmt.Sprintf("room %d, region %d (V of layer 1), page %d: byte %d is ", plan.rooms[spoilt.request], spoilt.region, plan.targets[spoilt.request][0], spoilt.off),
		"stray": fmt.Sprintf("no room, region %d (V of layer 1), page 0: byte %d is 0x40, want 0x00", spoilt.region, spoilt.off),
	} {
		t.Run(what, func(t *testing.T) {
			p := start(t, []string{envStumble + "=" + atVerify + ":" + what}, small(nixl.Embedded)...)
			p.ends(exitFailed, "demo: decode: wrong bytes: "+owner, "demo: the decode has failed: exit status 1")
		})
	}
}

// A signal ends both processes, whatever they are doing.
func TestSignals(t *testing.T) {
	t.Parallel()
	for _, s := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM} {
		t.Run(s.String(), func(t *testing.T) {
			eachEngine(t, func(t *testing.T, kind nixl.Kind) {
				t.Run("busy", func(t *testing.T) {
					p := start(t, nil, small(kind, "-rounds", "1000", "-v")...)
					p.until("round sent")
					p.signal(s)
					p.ends(exitSignal+int(s), "demo: ", "ended by a signal: "+s.String())
				})
				for _, at := range []string{atStart, atAsking} {
					t.Run(at, func(t *testing.T) {
						p := start(t, []string{envStumble + "=" + at + ":stop"}, small(kind)...)
						p.until("stumbling")
						p.signal(s)
						p.ends(exitSignal+int(s), "demo: ", "ended by a signal: "+s.String())
					})
				}
			})
		})
	}
	t.Run("decode", func(t *testing.T) {
		prefill, addr := startPrefill(t, nixl.Embedded, "-rounds", "1000", "-v", "-timeout", "15s")
		decode := start(t, nil, alone(roleDecode, addr, nixl.Embedded, "-rounds", "1000")...)
		prefill.until("round sent")
		decode.signal(syscall.SIGINT)
		decode.ends(exitSignal+int(syscall.SIGINT), "demo: decode: ", "ended by a signal: interrupt")
		prefill.ends(exitFailed, "demo: prefill: ") // a room was aborted, or no further one comes
	})
}

// A decode that hangs ends the run when the time is up.
func TestTimeout(t *testing.T) {
	t.Parallel()
	eachEngine(t, func(t *testing.T, kind nixl.Kind) {
		p := start(t, []string{envStumble + "=" + atAsking + ":stop"}, small(kind, "-timeout", "3s")...)
		p.ends(exitFailed, "demo: ", "timed out after 3s (-timeout)")
	})
	t.Run("no decode", func(t *testing.T) {
		p := start(t, nil, alone(rolePrefill, "127.0.0.1:0", nixl.Embedded, "-timeout", "500ms")...)
		p.ends(exitFailed, "demo: prefill: timed out after 500ms (-timeout)")
	})
	t.Run("no prefill", func(t *testing.T) {
		p := start(t, nil, alone(roleDecode, "127.0.0.1:1", nixl.Embedded, "-timeout", "3s")...)
		p.ends(exitFailed, "demo: decode: timed out after 3s (-timeout)", "connection refused")
	})
}

// Whatever answers where the bootstrap server should be, the decode fails with a message.
func TestStrangers(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		status     int
		body, want string
	}{
		"another server":  {http.StatusOK, "<html>hello</html>", "bootstrap"},
		"not there":       {http.StatusNotFound, "404 page not found", "404 Not Found"},
		"wrong page size": {http.StatusOK, `{"attn_tp_size":1,"attn_cp_size":1,"dp_size":1,"pp_size":1,"page_size":64,"kv_cache_dtype":"bfloat16","follow_bootstrap_room":true}`, "age size"},
	} {
		t.Run(name, func(t *testing.T) {
			s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				w.WriteHeader(c.status)
				fmt.Fprint(w, c.body)
			}))
			defer s.Close()
			p := start(t, nil, alone(roleDecode, s.Listener.Addr().String(), nixl.Embedded, "-timeout", "5s")...)
			p.ends(exitFailed, "demo: decode: KVTransferError", c.want)
		})
	}
}

func TestMissingLibrary(t *testing.T) {
	t.Parallel()
	missing := []string{"NIXLKV_NIXL_LIB=/nonexistent/libnixl_capi.so"}
	t.Run("native", func(t *testing.T) {
		p := start(t, missing, small(nixl.Native)...)
		p.ends(exitFailed, "demo: nixl: open: NIXL library not found", "/nonexistent/libnixl_capi.so: no such file or directory", "make demo fetches NIXL")
	})
	t.Run("auto", func(t *testing.T) {
		p := start(t, missing, small(nixl.Auto)...)
		p.ends(0, "demo: running on the embedded engine, in pure Go. NIXL could not be loaded: NIXL library not found")
		if n := strings.Count(p.errors(), "\n"); n != 1 {
			t.Errorf("%d lines on stderr", n)
		}
		if out := p.stdout.String(); !strings.Contains(out, "by -engine auto: NIXL could not be loaded") {
			t.Errorf("stdout:\n%s", out)
		}
	})
}

func TestOutOfMemory(t *testing.T) {
	p := start(t, nil, small(nixl.Embedded, "-layers", "1000", "-pool", "1000000")...)
	p.ends(exitFailed, "demo: out of memory: this run needs 119.21 TiB and the machine has ")
}

func TestWrongFlags(t *testing.T) {
	p := start(t, nil, "-pages", "many")
	p.ends(exitUsage, `demo: invalid value "many" for flag -pages`, "-h lists the flags")
	if p.stdout.Len() > 0 {
		t.Errorf("stdout:\n%s", p.stdout.String())
	}
}

func TestHelp(t *testing.T) {
	p := start(t, nil, "-h")
	p.ends(0)
	if out := p.stdout.String(); !strings.Contains(out, "-in-flight") || p.errors() != "" {
		t.Errorf("stdout:\n%s\nstderr:\n%s", out, p.errors())
	}
}
