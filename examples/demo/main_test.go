package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"

	"go.uber.org/goleak"
	"go.uber.org/zap"

	"github.com/nixlkv/nixlkv/nixl"
)

// The test binary is also the program: the tests in this file run it, and it starts itself
// as the decode.
const (
	envProgram = "NIXLKV_DEMO_TEST_PROGRAM"
	// envStumble makes the decode do something before one of its steps: STEP:kill, STEP:stop,
	// STEP:spoil or STEP:stray.
	envStumble = "NIXLKV_DEMO_TEST_STUMBLE"
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
	name, what, _ := strings.Cut(at, ":")
	c, err := parseFlags(args)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return exitUsage
	}
	ctx, fail := context.WithCancelCause(context.Background())
	defer fail(nil)
	d := decode{program: &program{config: c, stdout: os.Stdout, stderr: os.Stderr, log: zap.NewNop(), fail: fail}}
	for step := range d.steps() {
		if step.name == "await" && name == "first" {
			err = firstArrival(ctx, d.agent)
		}
		if err == nil && (step.name == name || step.name == "await" && name == "first") {
			err = act(&d, what)
		}
		if err == nil {
			err = step.do(ctx)
		}
		if err != nil {
			err = d.close(ctx, err)
			d.complain(err)
			return exitCode(err)
		}
	}
	return 0
}

// firstArrival waits until some request has arrived; the others are on their way.
func firstArrival(ctx context.Context, a *nixl.Agent) error {
	var n nixl.Notifications
	for pace := (backoff{}); n.Len() == 0; {
		if err := a.Notifications(&n); err != nil {
			return err
		}
		if err := pace.wait(ctx); err != nil {
			return err
		}
	}
	return nil
}

func act(d *decode, what string) error {
	fmt.Fprintln(os.Stderr, "stumbling")
	switch what {
	case "kill":
		return syscall.Kill(os.Getpid(), syscall.SIGKILL)
	case "stop":
		return syscall.Kill(os.Getpid(), syscall.SIGSTOP)
	case "spoil":
		d.pool.page(spoilt.region, d.targets[spoilt.request][0])[spoilt.off] ^= 0x40
	case "stray":
		d.pool.page(spoilt.region, 0)[spoilt.off] ^= 0x40
	default:
		return fmt.Errorf("no way to stumble: %q", what)
	}
	return nil
}

// spoilt is what the decode changes behind NIXL's back.
var spoilt = struct{ region, request, off int }{region: 3, request: 1, off: 1001}

// small is a run of a few MiB; further flags win over these.
func small(kind nixl.Kind, more ...string) []string {
	return append([]string{"-engine", kind.String(), "-layers", "2", "-requests", "6", "-pages", "5", "-in-flight", "2", "-timeout", "40s"}, more...)
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
		for _, part := range []string{"engine    " + kind.String(), "first request", "others, round 1", "later rounds", "memcpy",
			"verified     11.25 MiB written (11,796,480 bytes), 1 MiB untouched and zero"} {
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

func TestTwoTerminals(t *testing.T) {
	t.Parallel()
	for name, listen := range map[string]string{"tcp": "127.0.0.1:0", "unix": "unix:@nixlkv-demo-test-" + fmt.Sprint(os.Getpid())} {
		t.Run(name, func(t *testing.T) {
			prefill := start(t, nil, small(nixl.Embedded, "-role", "prefill", "-listen", listen)...)
			line := prefill.until("waiting for a decode")
			decode := start(t, nil, "-role", "decode", "-connect", line[strings.LastIndexByte(line, ' ')+1:])
			prefill.ends(0)
			decode.ends(0)
			if want := "18 requests arrived: 11.25 MiB verified, the other 1 MiB of the KV cache are zero\n"; decode.stdout.String() != want {
				t.Errorf("the decode says %q, want %q", decode.stdout.String(), want)
			}
		})
	}
}

// The decode may be started first.
func TestDecodeFirst(t *testing.T) {
	t.Parallel()
	path := t.TempDir() + "/s"
	decode := start(t, nil, "-role", "decode", "-connect", "unix:"+path, "-v")
	decode.until("no prefill yet")
	prefill := start(t, nil, small(nixl.Embedded, "-role", "prefill", "-listen", "unix:"+path)...)
	prefill.ends(0)
	decode.ends(0)
}

func TestEnginesDiffer(t *testing.T) {
	t.Parallel()
	prefill := start(t, nil, small(nixl.Embedded, "-role", "prefill", "-listen", "127.0.0.1:0")...)
	line := prefill.until("waiting for a decode")
	decode := start(t, nil, "-role", "decode", "-engine", "native", "-connect", line[strings.LastIndexByte(line, ' ')+1:])
	const why = "the prefill runs on the embedded engine, this decode was started with -engine native"
	decode.ends(exitFailed, "demo: decode: "+why)
	prefill.ends(exitFailed, "demo: prefill: the decode failed: "+why)
}

// A decode that dies ends the run within seconds, wherever it was.
func TestDecodeKilled(t *testing.T) {
	t.Parallel()
	eachEngine(t, func(t *testing.T, kind nixl.Kind) {
		for _, at := range []string{"meet", "prepare", "await", "first", "verify", "part"} {
			t.Run(at, func(t *testing.T) {
				p := start(t, []string{envStumble + "=" + at + ":kill"}, small(kind, "-requests", "40", "-in-flight", "4", "-rounds", "1")...)
				p.ends(exitFailed, "demo: ", "the decode is gone (signal: killed")
				if out := p.stdout.String(); strings.Contains(out, "verified") {
					t.Errorf("stdout:\n%s", out)
				}
			})
		}
	})
}

// The same without a parent that would know: the end of the connection has to do.
func TestDecodeKilledInAnotherTerminal(t *testing.T) {
	t.Parallel()
	eachEngine(t, func(t *testing.T, kind nixl.Kind) {
		for _, at := range []string{"prepare", "await", "first", "verify"} {
			t.Run(at, func(t *testing.T) {
				prefill := start(t, nil, small(kind, "-role", "prefill", "-listen", "127.0.0.1:0", "-requests", "40", "-in-flight", "4")...)
				line := prefill.until("waiting for a decode")
				decode := start(t, []string{envStumble + "=" + at + ":kill"}, "-role", "decode", "-connect", line[strings.LastIndexByte(line, ' ')+1:])
				decode.ends(-int(syscall.SIGKILL))
				prefill.ends(exitFailed, "demo: prefill: ", "the decode is gone")
			})
		}
	})
}

func TestPrefillKilled(t *testing.T) {
	t.Parallel()
	eachEngine(t, func(t *testing.T, kind nixl.Kind) {
		t.Run("another terminal", func(t *testing.T) {
			prefill := start(t, nil, small(kind, "-role", "prefill", "-listen", "127.0.0.1:0", "-rounds", "1000", "-v")...)
			line := prefill.until("waiting for a decode")
			decode := start(t, nil, "-role", "decode", "-connect", line[strings.LastIndexByte(line, ' ')+1:])
			prefill.until("round sent")
			prefill.signal(syscall.SIGKILL)
			prefill.ends(-int(syscall.SIGKILL))
			decode.ends(exitFailed, "demo: decode: ", "the prefill is gone")
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

// A wrong byte fails the run and is named by both sides.
func TestWrongBytes(t *testing.T) {
	t.Parallel()
	c, err := parseFlags(small(nixl.Embedded))
	if err != nil {
		t.Fatal(err)
	}
	plan := makePlan(c, nixl.Embedded, "any")
	target := pickPages(random(c.seed, streamDecode), c.poolPages, c.requests, c.pages)[spoilt.request][0]
	for what, owner := range map[string]string{
		"spoil": fmt.Sprintf("room %d, region %d (V of layer 1), page %d: byte %d is ", plan.Rooms[spoilt.request], spoilt.region, target, spoilt.off),
		"stray": fmt.Sprintf("no room, region %d (V of layer 1), page 0: byte %d is 0x40, want 0x00", spoilt.region, spoilt.off),
	} {
		t.Run(what, func(t *testing.T) {
			p := start(t, []string{envStumble + "=verify:" + what}, small(nixl.Embedded)...)
			p.ends(exitFailed, "demo: decode: wrong bytes: "+owner, "the decode failed: wrong bytes: "+owner)
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
				for _, at := range []string{"meet", "await"} {
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
		prefill := start(t, nil, small(nixl.Embedded, "-role", "prefill", "-listen", "127.0.0.1:0", "-rounds", "1000", "-v")...)
		line := prefill.until("waiting for a decode")
		decode := start(t, nil, "-role", "decode", "-connect", line[strings.LastIndexByte(line, ' ')+1:])
		prefill.until("round sent")
		decode.signal(syscall.SIGINT)
		decode.ends(exitSignal+int(syscall.SIGINT), "demo: decode: ", "ended by a signal: interrupt")
		prefill.ends(exitFailed, "demo: prefill: ", "the decode failed: ", "ended by a signal: interrupt")
	})
}

// A decode that hangs ends the run when the time is up.
func TestTimeout(t *testing.T) {
	t.Parallel()
	eachEngine(t, func(t *testing.T, kind nixl.Kind) {
		p := start(t, []string{envStumble + "=await:stop"}, small(kind, "-timeout", "3s")...)
		p.ends(exitFailed, "demo: ", "timed out after 3s (-timeout)")
	})
	t.Run("no decode", func(t *testing.T) {
		p := start(t, nil, small(nixl.Embedded, "-role", "prefill", "-listen", "127.0.0.1:0", "-timeout", "100ms")...)
		p.ends(exitFailed, "demo: prefill: waiting for the decode to connect: timed out after 100ms (-timeout)")
	})
	t.Run("no prefill", func(t *testing.T) {
		p := start(t, nil, "-role", "decode", "-connect", "unix:"+t.TempDir()+"/s", "-timeout", "100ms")
		p.ends(exitFailed, "demo: decode: waiting for a prefill at unix:", "timed out after 100ms (-timeout)")
	})
}

// Whatever connects to a decode or a prefill, it fails with a message.
func TestStrangers(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ says, want string }{
		"nothing":    {"", "the prefill is gone (it closed the link)"},
		"garbage":    {"GET / HTTP/1.1\r\n", "from the prefill: message: "},
		"wrong turn": {`{"bye":true}` + "\n", "the prefill did not begin with a plan"},
		"empty plan": {`{"plan":{}}` + "\n", `plan: no engine ""`},
		"failure":    {`{"failed":"on fire"}` + "\n", "the prefill failed: on fire"},
	} {
		t.Run(name, func(t *testing.T) {
			ln, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			defer ln.Close()
			p := start(t, nil, "-role", "decode", "-connect", ln.Addr().String(), "-timeout", "40s")
			conn, err := ln.Accept()
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			if _, err := conn.Write([]byte(c.says)); err != nil {
				t.Fatal(err)
			}
			if c.says == "" {
				conn.Close()
			}
			p.ends(exitFailed, "demo: decode: ", c.want)
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
