package bootstrap

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/internal/ratelog"
)

// How long a client may take. A decode keeps its connection between requests.
const (
	headerTimeout = 5 * time.Second
	readTimeout   = 10 * time.Second
	writeTimeout  = 10 * time.Second
	idleTimeout   = 3 * time.Minute
	maxHeader     = 16 << 10
)

// standalone is what a Server has when it is more than a handler.
type standalone struct {
	http http.Server
	tls  *tls.Config

	mu     sync.Mutex
	addr   net.Addr      // of the first listener
	served chan struct{} // closed when Listen's Serve has returned; nil without Listen
	err    error         // why it ended, if not on purpose
	closed bool
}

func (a *standalone) init(h http.Handler, c serverConfig) {
	a.tls = c.tls
	a.http.Handler = h
	a.http.ReadHeaderTimeout = headerTimeout
	a.http.ReadTimeout = readTimeout
	a.http.WriteTimeout = writeTimeout
	a.http.IdleTimeout = idleTimeout
	a.http.MaxHeaderBytes = maxHeader
	a.http.ErrorLog = zap.NewStdLog(ratelog.Sampled(c.log))
}

// Listen starts a server at host:port and returns once it accepts connections. The host may
// be a wildcard, which stands for its own family only (`0.0.0.0`, `[::]`), the port 0. The
// server runs until Shutdown or Close.
func Listen(addr string, opts ...ServerOption) (*Server, error) {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, fmt.Errorf("%w: address %q: %w", nixlkv.ErrMalformed, addr, err)
	}
	ln, err := net.Listen(Endpoint{Host: host}.network(), net.JoinHostPort(host, port))
	if err != nil {
		return nil, fmt.Errorf("bootstrap server: %w", err)
	}
	s := NewServer(opts...)
	s.alone.addr = ln.Addr()
	s.alone.served = make(chan struct{})
	go func() {
		defer close(s.alone.served)
		// Close may come before Serve has begun, and is no failure.
		if err := s.Serve(ln); err != nil && !errors.Is(err, nixlkv.ErrClosed) {
			s.log.Error("bootstrap server ended", zap.Error(err))
			s.alone.mu.Lock()
			s.alone.err = err
			s.alone.mu.Unlock()
		}
	}()
	return s, nil
}

// Serve answers requests from ln, which it closes, until Shutdown or Close; it returns nil
// then. After them it returns an error that wraps nixlkv.ErrClosed.
func (s *Server) Serve(ln net.Listener) error {
	a := &s.alone
	a.mu.Lock()
	closed := a.closed
	if !closed && a.addr == nil {
		a.addr = ln.Addr()
	}
	a.mu.Unlock()
	if closed {
		return errors.Join(fmt.Errorf("%w: bootstrap server", nixlkv.ErrClosed), ln.Close())
	}
	if a.tls != nil {
		ln = tls.NewListener(ln, a.tls)
	}
	err := a.http.Serve(ln)
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return fmt.Errorf("bootstrap server: %w", err)
}

func (a *standalone) shut() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.closed = true
}

// Addr gives where the server listens: of Listen, or of the first Serve; nil before.
func (s *Server) Addr() net.Addr {
	s.alone.mu.Lock()
	defer s.alone.mu.Unlock()
	return s.alone.addr
}

// Endpoint gives the address at which this machine reaches the server, a wildcard replaced by
// the loopback of its family. It is the zero Endpoint before Listen or Serve, and for a
// listener that is not TCP.
func (s *Server) Endpoint() Endpoint {
	tcp, ok := s.Addr().(*net.TCPAddr)
	if !ok {
		return Endpoint{}
	}
	ip := tcp.AddrPort().Addr().Unmap()
	return Endpoint{Host: ip.String(), Port: tcp.Port}.Reachable()
}

// Shutdown stops accepting connections and waits for requests in progress, at most until ctx
// is done; then it closes their connections and returns ctx's error. The server cannot be
// started again.
func (s *Server) Shutdown(ctx context.Context) error {
	s.alone.shut()
	err := s.alone.http.Shutdown(ctx)
	return errors.Join(err, s.Close())
}

// Close stops the server at once, requests in progress included. It is idempotent. An error
// tells that serving had ended before, and why.
func (s *Server) Close() error {
	a := &s.alone
	a.shut()
	closeErr := a.http.Close()
	if a.served != nil {
		<-a.served
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.err != nil {
		return a.err
	}
	return closeErr
}
