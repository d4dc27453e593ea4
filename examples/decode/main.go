// Command decode is a small decode worker: what a Go inference server does to be served by
// prefill workers, SGLang's or examples/prefill, without a model in it.
//
//	go run ./examples/prefill -addr 127.0.0.1:8000 -bootstrap 127.0.0.1:8998
//	go run ./examples/decode -addr 127.0.0.1:8001 -check
//
// A router gives the same request to both, the decode with the address of the prefill's
// bootstrap server:
//
//	curl -d '{"room": 7, "tokens": [1, 2, 3]}' http://127.0.0.1:8000/prefill &
//	curl -d '{"room": 7, "tokens": [1, 2, 3], "bootstrap": "127.0.0.1:8998"}' http://127.0.0.1:8001/decode
//
// The answer comes when the KV cache is here: a server would go on with the first token. Start
// the prefill with the same page size, KV dtype and layers.
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
	"github.com/nixlkv/nixlkv/kvreceiver"
	"github.com/nixlkv/nixlkv/nixl"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "decode:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	flags := flag.NewFlagSet("decode", flag.ContinueOnError)
	addr := flags.String("addr", "127.0.0.1:8001", "where to serve requests")
	host := flags.String("host", "127.0.0.1", "IP address at which prefills reach this machine")
	engineName := flags.String("engine", "auto", "auto, native or embedded")
	check := flags.Bool("check", false, "the prefills are examples/prefill: check what they send")
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

	engine, err := nixl.Open(kind, nixl.WithLogger(log))
	if err != nil {
		return err
	}
	defer engine.Close()
	// What operators have set for SGLang counts here too.
	opts, err := kvreceiver.FromEnv()
	if err != nil {
		return err
	}
	opts = append(opts, kvreceiver.WithEngine(engine), kvreceiver.WithListen(*host, 0), kvreceiver.WithLogger(log))
	if engine.Info().Kind == nixl.Embedded {
		log.Warn("without NIXL only prefills of this library, on this host, can serve this decode")
	}
	w, err := newWorker(ctx, shape, log, opts...)
	if err != nil {
		return err
	}
	w.check = *check
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
	log.Info("serving", zap.Stringer("requests", ln.Addr()))
	if err := server.Serve(ln); !errors.Is(err, http.ErrServerClosed) {
		return errors.Join(err, w.Close())
	}
	return w.Close()
}

// request is what a router sends.
type request struct {
	Room      nixlkv.Room `json:"room"`
	Bootstrap string      `json:"bootstrap"` // host:port of the prefill's bootstrap server
	Tokens    []int32     `json:"tokens"`
}

// answer says that the KV cache of a request is here.
type answer struct {
	Room       nixlkv.Room `json:"room"`
	FirstToken int32       `json:"first_token"`
	Pages      int         `json:"pages"`
	Checked    bool        `json:"checked"` // every byte of the pages
	Millis     float64     `json:"ms"`      // since the prefill was told where they go
}

// maxRequest bounds the body of a request.
const maxRequest = 16 << 20

// ServeHTTP serves POST /decode.
func (w *worker) ServeHTTP(rw http.ResponseWriter, r *http.Request) {
	if r.URL.Path != "/decode" || r.Method != http.MethodPost {
		http.Error(rw, "POST /decode", http.StatusNotFound)
		return
	}
	var q request
	if err := json.NewDecoder(http.MaxBytesReader(rw, r.Body, maxRequest)).Decode(&q); err != nil {
		http.Error(rw, err.Error(), http.StatusBadRequest)
		return
	}
	a, err := w.decode(r.Context(), q)
	if err != nil {
		http.Error(rw, err.Error(), status(err))
		return
	}
	rw.Header().Set("Content-Type", "application/json")
	if err := json.NewEncoder(rw).Encode(a); err != nil {
		return // the router is gone
	}
}

// status says whose fault an error is.
func status(err error) int {
	switch {
	case errors.As(err, new(*nixlkv.KVTransferError)):
		return http.StatusBadGateway // the prefill's, or the way's to it
	case errors.Is(err, nixlkv.ErrMalformed):
		return http.StatusBadRequest
	case errors.Is(err, nixlkv.ErrRoomInUse):
		return http.StatusConflict
	case errors.Is(err, errFull), errors.Is(err, nixlkv.ErrLimit), errors.Is(err, nixlkv.ErrClosed):
		return http.StatusServiceUnavailable
	}
	return http.StatusInternalServerError
}
