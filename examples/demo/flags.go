package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/netip"
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
	bootstrap string    // host:port of the prefill's bootstrap server
	host      string    // at which the other side reaches this process
	kind      nixl.Kind // of the engine
	layers    int
	requests  int
	pages     int // of a request
	chunk     int // pages
	inFlight  int
	poolPages int // of each side
	rounds    int
	seed      uint64
	timeout   time.Duration
	nixlLog   string
	verbose   bool
	shared    []string // the flags given that the other side gets too
}

// nixlLogLevels are those that NIXL knows.
var nixlLogLevels = []string{"TRACE", "DEBUG", "INFO", "WARN", "ERROR", "FATAL"}

// ownFlags are those of one side alone; the others both sides are given alike.
var ownFlags = []string{"role", "bootstrap", "host", "engine"}

// helpError: -h was given. Its text is the help.
type helpError struct{ text string }

func (e *helpError) Error() string { return e.text }

// parseFlags reads and checks the command line.
func parseFlags(args []string) (config, error) {
	var c config
	var engine string
	fs := flag.NewFlagSet("demo", flag.ContinueOnError)
	fs.SetOutput(io.Discard)
	fs.StringVar(&c.role, "role", roleBoth, "`side` to run: prefill, decode, or both, which starts the decode as a second process")
	fs.StringVar(&c.bootstrap, "bootstrap", "", "`address`, HOST:PORT, where the prefill serves the bootstrap server and the decode finds it")
	fs.StringVar(&c.host, "host", "127.0.0.1", "`IP address` of this machine at which the other side reaches it")
	fs.StringVar(&engine, "engine", nixl.Auto.String(), "`kind` of engine: native (NVIDIA NIXL), embedded (pure Go), or auto, native where NIXL is found")
	fs.IntVar(&c.layers, "layers", llama3Layers, "`number` of layers of the model, each with 2 regions of memory")
	fs.IntVar(&c.requests, "requests", 8, "`number` of requests")
	fs.IntVar(&c.pages, "pages", 64, "`number` of pages of each request, 16 tokens and with 32 layers 2 MiB each")
	fs.IntVar(&c.chunk, "chunk", 16, "`number` of pages that are sent at a time, as a chunked prefill computes them")
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
	if err := c.resolve(engine); err != nil {
		return config{}, err
	}
	fs.Visit(func(f *flag.Flag) {
		if !slices.Contains(ownFlags, f.Name) {
			c.shared = append(c.shared, fmt.Sprintf("-%s=%s", f.Name, f.Value))
		}
	})
	return c, c.checkSizes()
}

// resolve fills in and checks what has nothing to do with sizes.
func (c *config) resolve(engine string) (err error) {
	if c.kind, err = nixl.ParseKind(engine); err != nil {
		return fmt.Errorf("-engine: %w", err)
	}
	switch c.role {
	case roleBoth, rolePrefill, roleDecode:
	default:
		return fmt.Errorf("-role %q: want prefill, decode or both", c.role)
	}
	switch {
	case (c.role != roleBoth) != (c.bootstrap != ""):
		return errors.New("-bootstrap goes with -role prefill and -role decode")
	case c.role == roleBoth:
		c.bootstrap = "127.0.0.1:0"
	default:
		if _, _, err := net.SplitHostPort(c.bootstrap); err != nil {
			return fmt.Errorf("-bootstrap: %w", err)
		}
	}
	if ip, err := netip.ParseAddr(c.host); err != nil || ip.IsUnspecified() {
		return fmt.Errorf("-host %q: want an IP address at which the other side reaches this machine", c.host)
	}
	if c.timeout <= 0 {
		return fmt.Errorf("-timeout %v: want more than nothing", c.timeout)
	}
	if !slices.Contains(nixlLogLevels, c.nixlLog) {
		return fmt.Errorf("-nixl-log %q: want one of %s", c.nixlLog, strings.Join(nixlLogLevels, ", "))
	}
	return nil
}

// checkSizes checks what is to be sent, and fills in the pool.
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
	if c.chunk < 1 || (c.pages-1)/c.chunk >= maxChunks {
		return fmt.Errorf("-chunk: %d pages at a time: want at least 1, and at most %d chunks", c.chunk, maxChunks)
	}
	c.inFlight = min(c.inFlight, c.requests)
	return nil
}

// decodeArgs gives the command line of the decode that belongs to this prefill.
func (c *config) decodeArgs(bootstrap string, kind nixl.Kind) []string {
	return append([]string{"-role", roleDecode, "-bootstrap", bootstrap, "-engine", kind.String()}, c.shared...)
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
	b.WriteString("Moves the KV cache of some requests from a prefill to a decode process,\n" +
		"verifies every byte and says how fast it was.\n\n" +
		"  demo [-engine native] [flags]\n" +
		"  demo -role prefill -bootstrap 127.0.0.1:7000 [flags]\n" +
		"  demo -role decode -bootstrap 127.0.0.1:7000 [the same flags]\n\n" +
		"On two hosts, both with NIXL, -bootstrap is an address of the prefill's and -host each one's own.\n" +
		"Exit code: 0 all bytes were verified, 1 the run failed, 2 wrong flags, 130 interrupted.\n\n")
	fs.SetOutput(&b)
	fs.PrintDefaults()
	return b.String()
}
