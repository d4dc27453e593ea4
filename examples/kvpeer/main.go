// Kvpeer is one rank of a prefill or decode server without a model: a program that moves KV
// cache as it is told, so that this library can be tried against SGLang's own transfer code
// and against itself. Package interop does so.
//
//	kvpeer [-engine auto|native|embedded] CONFIG.json
//
// It reads commands as JSON lines on standard input, and writes events as JSON lines on
// standard output; logs go to standard error, at the level that LOGLEVEL names. The KV cache
// is host memory. What the configuration calls VRAM is VRAM on the wire, and DRAM for NIXL.
//
// Read config.go for what a configuration says, commands.go, send.go and receive.go for the
// commands,
// and events.go for the answers. The exit code is 0 after the command exit and at the end of
// standard input, 1 if the rank could not start or close, and 2 if it was started wrongly.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/nixlkv/nixlkv/nixl"
)

const (
	exitFailed = 1
	exitUsage  = 2

	// startTimeout bounds opening a rank; registering it at the bootstrap server takes longest.
	startTimeout = 60 * time.Second
	// closeTimeout bounds closing it.
	closeTimeout = 5 * time.Second
)

// The environment may choose the engine, for whoever starts kvpeer without flags.
const envEngine = "KVPEER_ENGINE"

func main() {
	out, err := claimStdout()
	if err != nil {
		fmt.Fprintln(os.Stderr, "kvpeer:", err)
		os.Exit(exitFailed)
	}
	os.Exit(run(os.Args[1:], os.Stdin, out, os.Stderr))
}

// run is the program; it gives the exit code.
func run(args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	flags := flag.NewFlagSet("kvpeer", flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.Usage = func() {
		fmt.Fprintln(stderr, "usage: kvpeer [-engine auto|native|embedded] CONFIG.json")
		flags.PrintDefaults()
	}
	engine := flags.String("engine", "", "NIXL engine: auto, native or embedded (default $"+envEngine+", or auto)")
	if err := flags.Parse(args); errors.Is(err, flag.ErrHelp) {
		return 0
	} else if err != nil {
		return exitUsage
	}
	if flags.NArg() != 1 {
		flags.Usage()
		return exitUsage
	}

	events := newEvents(stdout)
	if err := drive(flags.Arg(0), *engine, stdin, stderr, events); err != nil {
		fmt.Fprintln(stderr, "kvpeer:", err)
		events.exception(nil, err)
		return exitFailed
	}
	events.emit(byeEvent{Event: "bye"})
	return 0
}

// drive opens the rank that the configuration describes, carries out commands, and closes it.
func drive(path, engineName string, stdin io.Reader, stderr io.Writer, events *events) (err error) {
	cfg, err := readConfig(path)
	if err != nil {
		return err
	}
	// The libraries below read their variables when they are loaded.
	if err := cfg.setEnvironment(); err != nil {
		return err
	}
	log, err := newLogger(stderr, os.Getenv("LOGLEVEL"))
	if err != nil {
		return err
	}
	for _, key := range cfg.unknown {
		log.Warn("the configuration has a key that means nothing here", zap.String("key", key))
	}
	engine, err := openEngine(engineName, log)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, engine.Close()) }()
	mem, err := newMemory(cfg)
	if err != nil {
		return err
	}
	// Memory that could not be let go stays mapped, which is what freeing it would say.
	defer func() { err = errors.Join(err, mem.free()) }()

	mem.fill(cfg)
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	r, err := openRole(ctx, cfg, mem, engine, log, events)
	if err != nil {
		return err
	}
	d := newDriver(cfg, mem, r, events)
	events.emit(r.ready())
	err = d.serve(stdin)
	return errors.Join(err, d.close())
}

// role is what a rank does that the other kind of rank does not.
type role interface {
	// ready describes the rank, once it is there.
	ready() readyEvent
	// commands are the commands of the role, by name.
	commands() map[string]command
	// rooms tells of the rooms that are not cleared.
	rooms() roomsEvent
	// close ends the rank within ctx. The work of commands has ended by then.
	close(ctx context.Context) error
}

func openRole(ctx context.Context, cfg *config, mem *memory, engine *nixl.Engine, log *zap.Logger, ev *events) (role, error) {
	if cfg.Role == roleDecode {
		return openDecode(ctx, cfg, mem, engine, log, ev)
	}
	return openPrefill(ctx, cfg, mem, engine, log, ev)
}

func openEngine(name string, log *zap.Logger) (*nixl.Engine, error) {
	if name == "" {
		name = os.Getenv(envEngine)
	}
	if name == "" {
		name = nixl.Auto.String()
	}
	kind, err := nixl.ParseKind(name)
	if err != nil {
		return nil, err
	}
	return nixl.Open(kind, nixl.WithLogger(log))
}

// newLogger logs to w from a level on, in zap's words or in those of Python's logging.
func newLogger(w io.Writer, level string) (*zap.Logger, error) {
	var l zapcore.Level
	switch name := strings.ToLower(level); name {
	case "", "warning":
		l = zap.WarnLevel
	case "critical":
		l = zap.ErrorLevel
	default:
		var err error
		if l, err = zapcore.ParseLevel(name); err != nil {
			return nil, fmt.Errorf("LOGLEVEL: %w", err)
		}
	}
	e := zap.NewDevelopmentEncoderConfig()
	e.EncodeTime = zapcore.TimeEncoderOfLayout("15:04:05.000000")
	return zap.New(zapcore.NewCore(zapcore.NewConsoleEncoder(e), zapcore.Lock(zapcore.AddSync(w)), l)), nil
}
