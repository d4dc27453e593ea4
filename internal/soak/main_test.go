package main

import (
	"bytes"
	"errors"
	"flag"
	"os"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/nixlkv/nixlkv/nixl"
)

// The test binary is also the program, as which it starts itself.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == childFlag {
		main()
		return
	}
	// The race detector would sleep for a second before each child exits.
	if err := os.Setenv("GORACE", strings.TrimSpace(os.Getenv("GORACE")+" atexit_sleep_ms=0")); err != nil {
		panic(err)
	}
	goleak.VerifyTestMain(m)
}

func TestFlags(t *testing.T) {
	var out bytes.Buffer
	o, err := parseFlags([]string{"-rooms", "700", "-in-flight", "100", "-engine", "embedded"}, &out)
	if err != nil || o.plan.Rooms != 700 || o.kills >= 0 || o.plan.InFlight != 100 || o.plan.Processes != 8 || o.plan.Managers != 8 || o.growth != 5 {
		t.Errorf("%+v, %v", o, err)
	}
	if _, err := parseFlags([]string{"-h"}, &out); !errors.Is(err, flag.ErrHelp) || !strings.Contains(out.String(), "-in-flight") {
		t.Errorf("%v: %s", err, out.String())
	}
	for _, args := range []string{"more", "-in-flight 63", "-engine other", "-duration -1s", "-guests -rooms 1", "-page-bytes 4", "-aborts 1001",
		"-rooms 0", "-rooms -5", "-rooms 999", "-rooms 99 -in-flight 100", "-kills -2", "-kills 1001", "-guests -kills 1"} {
		if _, err := parseFlags(strings.Fields(args), &out); !errors.Is(err, errPlan) {
			t.Errorf("%s: %v", args, err)
		}
	}
	if code := runProgram([]string{"-regions", "0"}, nil, &out, &out); code != 2 {
		t.Errorf("exit code %d", code)
	}
	if code := runProgram([]string{childFlag, "{"}, nil, &out, &out); code != 1 {
		t.Errorf("exit code %d", code)
	}
}

// engines are those that this machine has.
func engines(t *testing.T) []string {
	names := []string{nixl.Embedded.String()}
	if e, err := nixl.Open(nixl.Native); err == nil {
		if err := e.Close(); err != nil {
			t.Error(err)
		}
		names = append(names, nixl.Native.String())
	}
	return names
}

// Some thousand rooms, a thousand in flight, between 64 decode managers in 8 processes and one
// prefill. On the embedded engine one of the processes is killed and replaced meanwhile. Memory is
// judged by longer runs (make soak): here it is not warm yet.
func TestManyRooms(t *testing.T) {
	rooms := map[string]string{nixl.Embedded.String(): "8000", nixl.Native.String(): "4000"}
	for _, engine := range engines(t) {
		t.Run(engine, func(t *testing.T) {
			var out, log bytes.Buffer
			args := []string{"-engine", engine, "-rooms", rooms[engine], "-aborts", "20"}
			if engine == nixl.Embedded.String() {
				args = append(args, "-kills", "1", "-growth", "0")
			}
			if testing.Short() {
				args = append(args, "-decodes", "2", "-managers", "2", "-in-flight", "100")
			}
			if code := runProgram(args, nil, &out, &log); code != 0 {
				t.Errorf("exit code %d", code)
			}
			t.Logf("\n%s%s", out.String(), log.String())
			if !strings.Contains(out.String(), rooms[engine]+" rooms: ") {
				t.Error("not all rooms have ended")
			}
			if engine == nixl.Embedded.String() && !strings.Contains(out.String(), "decode process 0 was killed") {
				t.Error("no process was killed")
			}
		})
	}
}

func TestGuests(t *testing.T) {
	var out, log bytes.Buffer
	args := []string{"-engine", "embedded", "-guests", "-duration", "2s", "-decodes", "1", "-managers", "2", "-in-flight", "4"}
	if code := runProgram(args, nil, &out, &log); code != 0 {
		t.Errorf("exit code %d: %s", code, log.String())
	}
	for _, want := range []string{"nobody comes", "decodes made, not met", "decodes met, another agent", "decodes met, this agent", "met by this agent, of met by another: p50 "} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in\n%s", want, out.String())
		}
	}
}

// A run fails with a process of it, and leaves none behind.
func TestChildDies(t *testing.T) {
	o, err := parseFlags(strings.Fields("-engine embedded -decodes 2 -managers 1 -in-flight 4 -duration 1m"), nil)
	if err != nil {
		t.Fatal(err)
	}
	var out, log bytes.Buffer
	r := run{options: o, out: &out, log: &shared{w: &log}}
	defer r.kill()
	if err := r.open(); err != nil {
		t.Fatal(err)
	}
	if err := r.each(cmdStart, r.both(), nil); err != nil {
		t.Fatal(err)
	}
	if err := r.decodes[1].cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(r.warmUp(t.Context()), r.each(cmdGo, r.decodes, nil)); !errors.Is(err, errChild) || !strings.Contains(err.Error(), "decode 1 has ended") {
		t.Errorf("got %v", err)
	}
	r.kill()
	for _, p := range r.both() {
		select {
		case <-p.exited:
		case <-time.After(closeTimeout):
			t.Errorf("%s is still there", p.name)
		}
	}
}
