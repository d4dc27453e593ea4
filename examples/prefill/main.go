// Command prefill is a small prefill worker: what a Go inference server does to serve decode
// workers, SGLang's or examples/decode, without a model in it.
//
//	go run ./examples/prefill -addr 127.0.0.1:8000 -bootstrap 127.0.0.1:8998
//
// A router sends it prompts, as JSON, and gives the room and the bootstrap address to a
// decode worker:
//
//	curl -d '{"room": 7, "tokens": [1, 2, 3]}' http://127.0.0.1:8000/prefill
//
// The answer comes when the decode has the KV cache. Where a server would run its model,
// this one fills the pages with numbers (see compute). Start the decode with the same page
// size, KV dtype and layers.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"

	"go.uber.org/zap"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/bootstrap"
	"github.com/nixlkv/nixlkv/kvsender"
	"github.com/nixlkv/nixlkv/nixl"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "prefill:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	flags := flag.NewFlagSet("prefill", flag.ContinueOnError)
	addr := flags.String("addr", "127.0.0.1:8000", "where to serve prompts")
	rendezvous := flags.String("bootstrap", "127.0.0.1:8998", "where to serve the bootstrap server")
	host := flags.String("host", "127.0.0.1", "IP address at which decodes reach this machine")
	engineName := flags.String("engine", "auto", "auto, native or embedded")
	var shape shape
	flags.IntVar(&shape.layers, "layers", 4, "layers of the model")
	flags.IntVar(&shape.pages, "pages", 256, "pages of the KV cache")
	flags.IntVar(&shape.pageSize, "page-size", 16, "tokens of a page")
	flags.IntVar(&shape.tokenBytes, "token-bytes", 2048, "bytes of K, or V, of a token in one layer")
	if err := flags.Parse(args); err != nil {
		return err
	}
	kind, err := nixl.ParseKind(*engineName)
	if err != nil {
		return err
	}
	log, err := zap.NewDevelopment()
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()

	// Rank 0 of a prefill serves the rendezvous; the others register at it.
	boot, err := bootstrap.Listen(*rendezvous, bootstrap.WithLogger(log))
	if err != nil {
		return err
	}
	defer boot.Close()
	engine, err := nixl.Open(kind, nixl.WithLogger(log))
	if err != nil {
		return err
	}
	defer engine.Close()
	// What operators have set for SGLang counts here too.
	opts, err := kvsender.FromEnv()
	if err != nil {
		return err
	}
	opts = append(opts, kvsender.WithEngine(engine), kvsender.WithBootstrap(boot.Endpoint().String()),
		kvsender.WithListen(*host, 0), kvsender.WithLogger(log))
	if engine.Info().Kind == nixl.Embedded {
		log.Warn("without NIXL only decodes of this library, on this host, can be served")
	}
	w, err := newWorker(ctx, shape, opts...)
	if err != nil {
		return err
	}
	ln, err := net.Listen("tcp", *addr)
	if err != nil {
		return errors.Join(err, w.Close())
	}
	server := &http.Server{Handler: w, ReadHeaderTimeout: 5 * time.Second}
	stopped := context.AfterFunc(ctx, func() {
		wait, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if err := server.Shutdown(wait); err != nil {
			log.Warn("closing the server", zap.Error(err))
		}
	})
	defer stopped()
	log.Info("serving", zap.Stringer("prompts", ln.Addr()), zap.Stringer("bootstrap", boot.Endpoint()))
	if err := server.Serve(ln); !errors.Is(err, http.ErrServerClosed) {
		return errors.Join(err, w.Close())
	}
	return w.Close()
}

// prompt is a request as a router sends it.
type prompt struct {
	Room   nixlkv.Room `json:"room"`
	Tokens []int32     `json:"tokens"`
}

// maxPrompt bounds the body of a request.
const maxPrompt = 16 << 20

// ServeHTTP serves POST /prefill.
func (w *worker) ServeHTTP(rw http.ResponseWriter, r *http.Request) {
	if r.URL.Path != "/prefill" || r.Method != http.MethodPost {
		http.Error(rw, "POST /prefill", http.StatusNotFound)
		return
	}
	var p prompt
	if err := json.NewDecoder(http.MaxBytesReader(rw, r.Body, maxPrompt)).Decode(&p); err != nil {
		http.Error(rw, err.Error(), http.StatusBadRequest)
		return
	}
	m, err := w.prefill(r.Context(), p)
	if err != nil {
		http.Error(rw, err.Error(), http.StatusBadGateway)
		return
	}
	rw.Header().Set("Content-Type", "application/json")
	if err := json.NewEncoder(rw).Encode(m); err != nil {
		return // the router is gone
	}
}
