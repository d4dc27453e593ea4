// Soak keeps rooms in flight between one prefill process and decode managers in processes of
// their own, for hours if need be, and says whether what it takes stays the same: rooms per
// second, latency, resident memory, goroutines, open files, and what the managers hold. Rooms
// carry their number in every page, some are aborted by either side, and in the end everything
// is closed and nothing may be left over.
//
//	go run ./internal/soak -duration 10m
//
// Decode processes are killed in the middle of their rooms, one after another, and others started
// in their place (-kills): their rooms fail and are counted apart, everybody else's arrive.
//
// The exit code is 1 if a room failed that should not, arrived with other bytes, memory grew by
// more than -growth percent from the first tenth to the end, or something was left over.
// Throughput is printed and not judged: other programs may run. A run that is too short for its
// processes to be warm says so, and its memory is not judged.
//
// With -guests it measures what the peers that are there notice while new ones come: at their
// prefill, and at another one in its process, which shares no agent with it.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"syscall"
	"time"

	"github.com/nixlkv/nixlkv/nixl"
)

// childFlag is the first argument of a child; the second is its configuration.
const childFlag = "-child"

func main() { os.Exit(runProgram(os.Args[1:], os.Stdin, os.Stdout, os.Stderr)) }

// options are what the flags say.
type options struct {
	plan     plan
	duration time.Duration
	growth   float64 // percent
	kills    int     // of decode processes, one after another; negative: defaultKills
}

const (
	// defaultKills is for the embedded engine; with NIXL no decode is killed unless that is asked for.
	// UCX keeps the sockets of peers that were killed, so open files would grow, and it can abort the
	// prefill when it loads a decode that ends at that very moment (SECURITY.md).
	defaultKills = 5
	maxKills     = 1000
)

// runProgram is the program; it gives the exit code.
func runProgram(args []string, in io.Reader, out, log io.Writer) int {
	if len(args) == 2 && args[0] == childFlag {
		var c childConfig
		err := json.Unmarshal([]byte(args[1]), &c)
		if err == nil {
			err = runChild(c, in, out)
		}
		return complain(log, err)
	}
	o, err := parseFlags(args, out)
	switch {
	case errors.Is(err, flag.ErrHelp):
		return 0
	case err != nil:
		complain(log, err)
		return 2
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	r := run{options: o, out: out, log: &shared{w: log}}
	return complain(log, r.do(ctx))
}

func complain(log io.Writer, err error) int {
	if err == nil {
		return 0
	}
	fmt.Fprintf(log, "soak: %v\n", err)
	return 1
}

func parseFlags(args []string, out io.Writer) (o options, err error) {
	f := flag.NewFlagSet("soak", flag.ContinueOnError)
	f.SetOutput(out)
	f.StringVar(&o.plan.Engine, "engine", "auto", "auto, native or embedded")
	f.IntVar(&o.plan.Rooms, "rooms", 0, "`rooms` in all, at least as many as are in flight; not given: as many as there is time for")
	f.DurationVar(&o.duration, "duration", 30*time.Second, "how long; -rooms comes before it")
	f.IntVar(&o.plan.InFlight, "in-flight", 1000, "`rooms` in flight")
	f.IntVar(&o.plan.Processes, "decodes", 8, "decode `processes`")
	f.IntVar(&o.plan.Managers, "managers", 8, "decode `managers` in each of them")
	f.IntVar(&o.plan.Aborts, "aborts", 10, "`rooms` of a thousand that one side gives up")
	f.IntVar(&o.kills, "kills", -1, "how many decode `processes` are killed, and others started in their place; -1: 5 on the embedded engine, else 0")
	f.IntVar(&o.plan.Regions, "regions", 4, "KV `regions`")
	f.IntVar(&o.plan.Pages, "pages", 2, "`pages` of a room")
	f.IntVar(&o.plan.PageBytes, "page-bytes", 1024, "`bytes` of a page of a region")
	f.IntVar(&o.plan.Pool, "pool", 0, "more `pages` of each region, which no room uses")
	f.Float64Var(&o.growth, "growth", 5, "`percent` by which resident memory may grow; 0: it is not judged")
	f.BoolVar(&o.plan.Guests, "guests", false, "measure while other decodes come and go")
	if err := f.Parse(args); err != nil {
		return o, err
	}
	given := map[string]bool{}
	f.Visit(func(f *flag.Flag) { given[f.Name] = true })
	switch {
	case f.NArg() > 0:
		return o, fmt.Errorf("%w: %q", errPlan, f.Args())
	case given["rooms"] && o.plan.Rooms < o.plan.InFlight:
		return o, fmt.Errorf("%w: -rooms %d with %d in flight: want at least as many (-in-flight may be less, -duration bounds the time instead)",
			errPlan, o.plan.Rooms, o.plan.InFlight)
	case o.plan.Rooms == 0 && o.duration <= 0:
		return o, fmt.Errorf("%w: -duration %v", errPlan, o.duration)
	case o.plan.Guests && (o.plan.Rooms != 0 || o.kills > 0):
		return o, fmt.Errorf("%w: -guests takes a -duration, no -rooms and no -kills", errPlan)
	case o.kills < -1 || o.kills > maxKills:
		return o, fmt.Errorf("%w: -kills %d, want at most %d", errPlan, o.kills, maxKills)
	}
	if _, err := parseKind(o.plan.Engine); err != nil {
		return o, err
	}
	return o, o.plan.validate()
}

func parseKind(name string) (nixl.Kind, error) {
	kinds := []nixl.Kind{nixl.Auto, nixl.Native, nixl.Embedded}
	i := slices.IndexFunc(kinds, func(k nixl.Kind) bool { return k.String() == name })
	if i < 0 {
		return 0, fmt.Errorf("%w: engine %q", errPlan, name)
	}
	return kinds[i], nil
}
