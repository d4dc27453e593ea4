package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/nixlkv/nixlkv/nixl"
)

// The roles that a process can take.
const (
	roleBoth    = "both"
	rolePrefill = "prefill"
	roleDecode  = "decode"
)

// config is what the flags say.
type config struct {
	role      string
	listenAt  address   // of the prefill
	connectTo address   // of the decode
	kind      nixl.Kind // of the engine
	layers    int
	requests  int
	pages     int // of a request
	inFlight  int
	poolPages int // of each side
	rounds    int
	seed      uint64
	timeout   time.Duration
	nixlLog   string
	verbose   bool
}

// nixlLogLevels are those that NIXL knows.
var nixlLogLevels = []string{"TRACE", "DEBUG", "INFO", "WARN", "ERROR", "FATAL"}

// decodeFlags are the flags that the decode takes; the prefill tells it the rest.
var decodeFlags = []string{"role", "connect", "engine", "timeout", "nixl-log", "v"}

// helpError: -h was given. Its text is the help.
type helpError struct{ text string }

func (e *helpError) Error() string { return e.text }

// parseFlags reads and checks the command line.
func parseFlags(args []string) (config, error) {
	var c config
	var engine, listen, connect string
	fs := flag.NewFlagSet("demo", flag.ContinueOnError)
	fs.SetOutput(io.Discard)
	fs.StringVar(&c.role, "role", roleBoth, "`side` to run: prefill, decode, or both, which starts the decode as a second process")
	fs.StringVar(&listen, "listen", "", "`address` on which the prefill waits for the decode: a loopback HOST:PORT or unix:PATH")
	fs.StringVar(&connect, "connect", "", "`address` on which the decode finds the prefill")
	fs.StringVar(&engine, "engine", nixl.Auto.String(), "`kind` of engine: native (NVIDIA NIXL), embedded (pure Go), or auto, native where NIXL is found")
	fs.IntVar(&c.layers, "layers", llama3Layers, "`number` of layers of the model, each with 2 regions of memory")
	fs.IntVar(&c.requests, "requests", 8, "`number` of requests")
	fs.IntVar(&c.pages, "pages", 64, "`number` of pages of each request, 16 tokens and with 32 layers 2 MiB each")
	fs.IntVar(&c.inFlight, "in-flight", 4, "`number` of requests in flight at once")
	fs.IntVar(&c.poolPages, "pool", 0, "`number` of pages of each side's KV cache; 0 is a quarter more than the requests need")
	fs.IntVar(&c.rounds, "rounds", 3, "`number` of times that as many requests are sent; only in the first are pages new to the other process")
	fs.Uint64Var(&c.seed, "seed", 1, "`seed` of rooms, pages and contents")
	fs.DurationVar(&c.timeout, "timeout", 2*time.Minute, "`time` after which the run has failed")
	fs.StringVar(&c.nixlLog, "nixl-log", defaultNIXLLog(), "`level` of NIXL's own log on stderr: "+strings.Join(nixlLogLevels, ", "))
	fs.BoolVar(&c.verbose, "v", false, "log what happens, and details, on stderr")

	if err := fs.Parse(args); errors.Is(err, flag.ErrHelp) {
		return config{}, &helpError{usage(fs)}
	} else if err != nil {
		return config{}, err
	}
	if fs.NArg() > 0 {
		return config{}, fmt.Errorf("unexpected argument %q", fs.Arg(0))
	}
	if err := c.resolve(engine, listen, connect); err != nil {
		return config{}, err
	}
	if c.role != roleDecode {
		return c, c.checkSizes()
	}
	var surplus []string
	fs.Visit(func(f *flag.Flag) {
		if !slices.Contains(decodeFlags, f.Name) {
			surplus = append(surplus, "-"+f.Name)
		}
	})
	if surplus != nil {
		return config{}, fmt.Errorf("%s: the prefill tells the decode", strings.Join(surplus, ", "))
	}
	return c, nil
}

// resolve fills in and checks what both roles have.
func (c *config) resolve(engine, listen, connect string) (err error) {
	if c.kind, err = nixl.ParseKind(engine); err != nil {
		return fmt.Errorf("-engine: %w", err)
	}
	switch c.role {
	case roleBoth, rolePrefill, roleDecode:
	default:
		return fmt.Errorf("-role %q: want prefill, decode or both", c.role)
	}
	if (c.role == rolePrefill) != (listen != "") {
		return errors.New("-role prefill and -listen go together")
	}
	if (c.role == roleDecode) != (connect != "") {
		return errors.New("-role decode and -connect go together")
	}
	if listen != "" {
		if c.listenAt, err = parseAddress(listen); err != nil {
			return fmt.Errorf("-listen: %w", err)
		}
	}
	if connect != "" {
		if c.connectTo, err = parseAddress(connect); err != nil {
			return fmt.Errorf("-connect: %w", err)
		}
	}
	if c.timeout <= 0 {
		return fmt.Errorf("-timeout %v: want more than nothing", c.timeout)
	}
	if !slices.Contains(nixlLogLevels, c.nixlLog) {
		return fmt.Errorf("-nixl-log %q: want one of %s", c.nixlLog, strings.Join(nixlLogLevels, ", "))
	}
	return nil
}

// checkSizes checks what the prefill decides, and fills in the pool.
func (c *config) checkSizes() error {
	if c.inFlight < 1 || c.inFlight > maxInFlight {
		return fmt.Errorf("-in-flight: %d is not one of 1 to %d", c.inFlight, maxInFlight)
	}
	if c.poolPages == 0 {
		// Requests and pages that are out of range are refused below, whatever this gives.
		need := min(max(c.requests, 0), maxRequests) * min(max(c.pages, 0), maxPool)
		c.poolPages = min(need+need/4+1, maxPool)
	}
	if err := checkSizes(c.layers, c.requests, c.pages, c.poolPages, c.rounds); err != nil {
		return fmt.Errorf("-%w", err)
	}
	c.inFlight = min(c.inFlight, c.requests)
	return nil
}

// defaultNIXLLog is the level that the environment asks for, else one that hides NIXL's
// remarks on a machine without RDMA and GPU.
func defaultNIXLLog() string {
	if level := os.Getenv("NIXL_LOG_LEVEL"); slices.Contains(nixlLogLevels, level) {
		return level
	}
	return "ERROR"
}

func usage(fs *flag.FlagSet) string {
	var b strings.Builder
	b.WriteString("Moves the KV cache of some requests from a prefill to a decode process on this machine,\n" +
		"verifies every byte and says how fast it was.\n\n" +
		"  demo [-engine native] [flags]\n" +
		"  demo -role prefill -listen 127.0.0.1:7000 [flags]\n" +
		"  demo -role decode -connect 127.0.0.1:7000 [flags]\n\n" +
		"Exit code: 0 all bytes were verified, 1 the run failed, 2 wrong flags, 130 interrupted.\n\n")
	fs.SetOutput(&b)
	fs.PrintDefaults()
	return b.String()
}
